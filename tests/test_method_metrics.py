"""What the rows of `METHODS` say of metrics, against what tiny runs log."""

import pytest
import test_branpo
import test_sesa_agent
from commands import ROOT
from trl import GRPOConfig, GRPOTrainer
from world import TINY, always, make_dataset, make_trainer, says

from trl_explore.methods import EXPLORERS, METHODS

SHARED = METHODS["exploration"].metrics
DATA = make_dataset()
TARGETS = dict(train_dataset=DATA.add_column("targets", [["1", "2"]] * len(DATA)), coverage_column="targets")
UNSOLVED = dict(explore_prompts="unsolved", explore_into="add")
HINTED = DATA.add_column("hint", DATA["answer"])
TINY_SKETCHES = dict(max_sketch_length=4)
# Runs of a method after which all its metrics were logged; those of the fields that all share need methods, too.
RUNS = {
    "tree_grpo": [("tree_grpo", {}), ("tree_grpo", dict(replay_buffer=True, replay_threshold=0.9))],
    "sesa": [
        ("sesa", dict(max_trajectories=2, off_policy_correction=True, **TARGETS)),
        ("sesa", dict(mode="sequential")),
    ],
    "evol_rl": [("evol_rl", dict(reward_funcs=always))],
    "attn_rl": [("attn_rl", dict(fork_selection="uncertain")), ("attn_rl", {})],
    "auto": [
        *(("auto", dict(explorers=[name], explore_min_share=1.0)) for name in ("tree", "pivots", "resample")),
        ("auto", dict(explorers=["sketches"], explore_min_share=1.0, explorer_options={"sketches": TINY_SKETCHES})),
        ("auto", dict(explore="hints", train_dataset=HINTED, explorer_options={"hints": {"hint_samples": 8}})),
        # With a limit, so that the credit is logged.
        ("auto", dict(explorers=["resample"])),
        # Two prompts, so that a prompt comes back after it was solved.
        ("auto", dict(explore="replay", train_dataset=make_dataset().select([0, 7]), max_steps=12)),
    ],
    "exploration": [
        ("exploration", dict(dynamic_sampling="refill")),
        ("exploration", dict(budget="knapsack")),
        ("exploration", dict(count_bonus=0.5, clip_cov=0.1, clip_cov_low=-5.0)),
        ("exploration", dict(kl_cov=0.1, num_iterations=2)),
        ("exploration", dict(advantage=["grpo", "maxrl"], trained_generations=2)),
        ("exploration", dict(shared_prefix_training="on")),
        ("tree_grpo", UNSOLVED),
        ("deep_grpo", UNSOLVED),
    ],
}
AGENTS = {
    "branpo": dict(branch_depth_hard=1, max_steps=3),
    "agent_tree_grpo": {},
    "gigpo": {},
    # Small groups often have no success.
    "auto": dict(
        explorers=["tail_branches", "turn_trees", "resample"],
        explore_min_share=1.0,
        num_generations=2,
        per_device_train_batch_size=4,
        max_steps=16,
    ),
}
# Those that need a GPU or a vLLM server, and where they are logged.
ELSEWHERE = {"packing/compilations": "packing/forward.py", "sampling/masked_fraction": "serving/session.py"}


def logged(trainer):
    """Names in the log of a run, those of one's own reward functions aside."""
    trainer.train()
    return {name for entry in trainer.state.log_history for name in entry if "rewards/" not in name}


def run_agent(row, folder, monkeypatch, **options):
    says(test_branpo.Voice(0.3), monkeypatch.setattr)
    return logged(test_branpo.make(row.trainer_class, row.config_class, folder, **options))


def run_all(method, folder, monkeypatch):
    names = set()
    for name, options in RUNS.get(method, [(method, {})]):
        row, tiny = METHODS[name], TINY[name].options if name in TINY else {}
        names |= logged(make_trainer(row.trainer_class, row.config_class, folder, **{**tiny, **options}))
    if method in AGENTS:
        names |= run_agent(METHODS[method], folder, monkeypatch, **AGENTS[method])
    if method == "sesa":
        says(test_sesa_agent.Voice(), monkeypatch.setattr)
        names |= logged(test_sesa_agent.agent(folder))
    return names


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.name != "grpo"])
def test_what_a_method_logs_is_described_and_what_is_described_is_logged(method, tmp_path, monkeypatch):
    own, of_rows = METHODS[method].metrics, {"computed_fraction"}
    names = run_all(method, tmp_path, monkeypatch)
    of_rows |= logged(make_trainer(GRPOTrainer, GRPOConfig, tmp_path))
    trls = of_rows | run_agent(METHODS["grpo"], tmp_path, monkeypatch)
    known = {name for row in METHODS.values() for name in row.metrics} if method == "exploration" else {*own, *SHARED}
    streams = {name.removesuffix("...") for name in known if name.endswith("/...")}
    known |= {stream + name for stream in streams for name in of_rows}
    known |= {f"credit/advantage_size/{name}" for name in ("grpo", "maxrl")}
    if method == "auto":
        # `explore/share/...` stands for each source, and `tree/...` for the metrics of the method with this explorer.
        known |= {stream + source for stream in streams for source in ("plain", *EXPLORERS)}
        described = {name for row in METHODS.values() for name in row.metrics}
        known |= {name for name in described if name.startswith(tuple(streams))}
    assert names - trls - known == set()
    beginnings = tuple(name.removesuffix("...") for name in own if name.endswith("..."))
    assert {name for name in own if not name.endswith("...")} - names - ELSEWHERE.keys() == set()
    assert all(any(name.startswith(beginning) for name in names) for beginning in beginnings)


@pytest.mark.parametrize("metric", ELSEWHERE)
def test_metrics_that_no_run_here_has_are_described_and_logged_by_a_part(metric):
    assert metric in SHARED and f'"{metric}"' in (ROOT / "trl_explore" / ELSEWHERE[metric]).read_text()
