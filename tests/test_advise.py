"""`trl-explore advise`: what it reads off a run's logs, what it finds alike, and what it says to wrong input."""

import json
import math
import sys
from pathlib import Path

import pandas
import pytest
import yaml
from commands import EXAMPLES
from trl import GRPOConfig, GRPOTrainer
from world import make_trainer, never

from trl_explore.advice.advise import advise, change
from trl_explore.advice.measured import nearest, read_measured
from trl_explore.advice.signs import Pair, Signs, read_signs, shares_of_groups, signs_of
from trl_explore.cli import main
from trl_explore.errors import UsageError
from trl_explore.methods import METHODS
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer, ExplorationConfig, ExplorationTrainer

ROOT = Path(__file__).resolve().parent.parent


def history(steps=16, **ends):
    """Logs of steps whose values go in a straight line from the first of two ends to the second."""
    usual = {"reward": (0.2, 0.6), "frac_reward_zero_std": (0.3, 0.3), "entropy": (1.0, 0.8)}
    names = {"completions/mean_length": (8, 8), "completions/clipped_ratio": (0, 0), **usual, **ends}

    def at(pair, step):
        return pair[0] + (pair[1] - pair[0]) * (step - 1) / (steps - 1)

    return [{"step": step, **{name: at(pair, step) for name, pair in names.items()}} for step in range(1, steps + 1)]


def texts(*extra, **ends):
    return [finding.text for finding in advise(signs_of([*history(**ends), *extra])).findings]


def test_beginning_and_end_are_an_eighth_of_the_steps_each():
    signs = signs_of(history(steps=16, reward=(0, 15)))
    assert signs.steps == 16 and signs.values["reward"] == Pair(0.5, 14.5)
    assert signs.place is None  # rewards beyond 1 are like those of no regime
    assert signs_of(history()).place == pytest.approx((0.2133, 0.5867, 0.3, 0.3, 0.812), abs=1e-3)


def test_a_run_that_learns_is_left_alone():
    assert texts() == [
        "Groups have contrast (70% at the start, 70% at the end), and the reward rises from 0.21 to 0.59: GRPO "
        "learns from what it samples."
    ]


@pytest.mark.parametrize(
    ("ends", "sentence"),
    [
        ({"frac_reward_zero_std": (0.96, 0.3)}, "At the start, 94% of the groups have no contrast"),
        ({"frac_reward_zero_std": (0.3, 0.96)}, "At the end, 94% of the groups have no contrast"),
        ({"entropy": (1.0, 0.1)}, "13% of the entropy that the run began with is left (0.97 nats, now 0.13)"),
        ({"completions/clipped_ratio": (0, 0.4)}, "39% of the completions at the end are cut off"),
        ({"tree/uniform_fraction": (0.99, 0.99)}, "99% of the search trees end all right or all wrong: lower"),
        (
            {"sketch/success": (0.1, 0.1), "sketch/plain_success": (0.6, 0.6)},
            "Completions with a sketch are right in 10%, plain ones of the same groups in 60%",
        ),
    ],
)
def test_what_stands_out_is_said_with_its_number(ends, sentence):
    assert any(text.startswith(sentence) for text in texts(**ends))


NOTHING_SUCCEEDED = "No sample ever succeeded: use easier data or a warm start first."
EQUAL = {"reward_std": (0, 0), "frac_reward_zero_std": (1, 1)}


@pytest.mark.parametrize("more", [EQUAL, {"frac_reward_zero_std": (1, 1)}, {"completions/clipped_ratio": (1, 1)}])
@pytest.mark.parametrize("entropy", [(1.0, 0.8), (1.0, 0.02)])
@pytest.mark.parametrize("of_a_method", [{}, {"method/changed_hooks": (2, 2)}])
def test_a_run_without_any_success_is_told_that_alone(more, entropy, of_a_method):
    found = advise(signs_of(history(reward=(0, 0), entropy=entropy, **more, **of_a_method)))
    assert found.verdict == NOTHING_SUCCEEDED
    assert (found.regime, found.distance, found.arms) == (None, None, [])
    assert [finding.text for finding in found.findings] == ["All completions of all logged steps got the reward 0."]


@pytest.mark.parametrize(
    ("reward", "verdict"),
    [
        (-1, NOTHING_SUCCEEDED),
        (1, "Every sample succeeded: there is nothing to learn from these data; use harder data."),
        (10, "Every sample succeeded: there is nothing to learn from these data; use harder data."),
        (0.2, "Every sample got the reward 0.2: see what the reward function gives a right and a wrong answer."),
    ],
)
def test_a_reward_that_never_changes_is_all_that_is_said(reward, verdict):
    found = advise(signs_of(history(reward=(reward, reward), **EQUAL)))
    assert found.verdict == verdict and len(found.findings) == 1 and found.regime is None


def test_a_reward_that_is_never_there_is_all_that_is_said():
    found = advise(signs_of(history(reward=(math.nan, math.nan))))
    assert found.verdict.startswith("No completion has a reward") and len(found.findings) == 1


def test_steps_without_a_reward_are_left_out_of_the_means():
    logs = history(steps=16, reward=(0.5, 0.5))
    logs[0]["reward"] = math.nan
    assert signs_of(logs).values["reward"] == Pair(0.5, 0.5)


GRADED = {"reward": (0.3, 0.6), "reward_std": (0.2, 0.2), "frac_reward_zero_std": (0, 0)}


@pytest.mark.parametrize(
    "ends",
    [
        GRADED,
        {"reward": (3.0, 6.0), "reward_std": (2.0, 2.0)},
        {"reward": (0.2, 0.9), "reward_std": (1.5, 2.0)},  # from 0 to 10, and mostly low
        {"reward": (-0.4, -0.1), "reward_std": (0.3, 0.3)},
        {"reward": (-0.2, 0.5), "reward_std": (0.5, 0.5)},  # a penalty
    ],
    ids=["graded", "0 to 10", "0 to 10, low", "negative", "penalty"],
)
def test_rewards_other_than_0_and_1_resemble_no_measured_run(ends):
    found = advise(signs_of(history(**ends)))
    assert found.signs.place is None and found.regime is None and found.arms == []
    assert found.verdict.startswith("All measured runs had rewards of 0 and 1 only.")


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.5, 0.97])
def test_rewards_of_0_and_1_are_recognised_as_such(rate):
    deviation = (rate * (1 - rate) * 16 / 15) ** 0.5
    assert signs_of(history(reward=(rate, rate), reward_std=(deviation, deviation))).place is not None


@pytest.mark.parametrize("ends", [GRADED, {}])
def test_completions_that_are_cut_off_are_not_called_wrong(ends):
    found = texts(**{"completions/clipped_ratio": (0.4, 0.4), **ends})
    assert any(text.startswith("40% of the completions at the end are cut off") for text in found)
    assert not any("wrong" in text for text in found)


def test_a_threshold_that_no_completion_reached_is_named():
    success = {"success/fraction": 0.0, "success/min_reward": 0.0, "success/max_reward": 0.6}
    entries = [{**entry, **success} for entry in history(reward=(0.2, 0.3))]
    found = advise(signs_of(entries)).findings[0]
    assert found.text.startswith("No completion reached `success_threshold`: rewards were between 0 and 0.6.")


def test_a_reward_function_that_gave_nothing_is_named():
    functions = {"rewards/right/mean": (0, 0), "rewards/right/std": (0, 0), "rewards/form/mean": (0.2, 0.6)}
    found = texts(**functions)
    assert any(text.startswith("The reward function `right` gave 0 to every completion") for text in found)
    assert not any("gave 0" in text for text in texts(**{"rewards/right/mean": (0, 0), "rewards/right/std": (0, 0)}))


@pytest.mark.slow
@pytest.mark.parametrize("trainer_class, config_class", [(GRPOTrainer, GRPOConfig), (DeepGRPOTrainer, DeepGRPOConfig)])
def test_a_trained_run_without_any_success_is_told_that_alone(tmp_path, capsys, trainer_class, config_class):
    options = dict(reward_funcs=never, max_steps=8, save_steps=8, save_strategy="steps")
    make_trainer(trainer_class, config_class, tmp_path, **options).train()
    capsys.readouterr()
    assert main(["advise", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert NOTHING_SUCCEEDED in shown and "resembles" not in shown and "method:" not in shown


@pytest.mark.slow
def test_a_trained_graded_run_has_nothing_called_wrong(tmp_path, capsys):
    def graded(completions, **columns):
        return [0.9 * text.count("a") / max(len(text), 1) for text in completions]

    options = dict(reward_funcs=graded, max_steps=8, save_steps=8, save_strategy="steps", log_completions=True)
    make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, num_completions_to_print=0, **options).train()
    capsys.readouterr()
    assert main(["advise", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "cut off" in shown and "wrong" not in shown and "Rewards are not only 0 and 1" in " ".join(shown.split())


@pytest.mark.slow
def test_a_run_of_a_trainer_of_your_own_is_no_run_of_grpo(tmp_path):
    class Own(ExplorationTrainer):
        def assign_advantages(self, output):
            return output["advantages"].clamp(max=0.1)

    trainer = make_trainer(Own, ExplorationConfig, tmp_path, max_steps=8)
    trainer.train()
    assert not signs_of(trainer.state.log_history).plain
    plain = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, max_steps=8)
    plain.train()
    assert signs_of(plain.state.log_history).plain


@pytest.mark.parametrize("name", [n for row in METHODS.values() if not row.plain for n in row.metrics if "/" in n])
def test_logs_of_earlier_versions_are_known_by_what_only_a_method_logs(name):
    assert not signs_of(history(**{name.replace("...", "reward"): (1, 1)})).plain


def test_a_falling_pass_at_k_is_seen():
    evaluations = [
        {"step": 0, "eval/pass_at_1": 0.2, "eval/pass_at_16": 0.7},
        {"step": 16, "eval/pass_at_1": 0.5, "eval/pass_at_16": 0.6},
    ]
    assert "pass@16 falls from 70.0% to 60.0% while pass@1 goes from 20.0% to 50.0%" in texts(*evaluations)[-1]
    evaluations[1]["eval/pass_at_16"] = 0.8
    assert len(texts(*evaluations)) == 1


def as_run(place, agent=False):
    start, end, equal, later, left = place
    more = {"tools/call_frequency": Pair(2, 2)} if agent else {}
    values = {"reward": Pair(start, end), "frac_reward_zero_std": Pair(equal, later), "entropy": Pair(1, left), **more}
    return Signs(steps=100, values=values, pass_at={})


@pytest.mark.parametrize("regime", read_measured(), ids=lambda regime: regime.name)
def test_a_measured_regime_is_recognised_and_what_paid_there_comes_first(regime):
    found = advise(as_run(regime.places[0], regime.agent))
    assert found.regime == regime and found.distance == 0
    assert [arm.tokens[0] for arm in found.arms] == sorted((arm.tokens[0] for arm in found.arms), reverse=True)
    assert all(arm.tokens[1] > 0 for arm in found.arms)
    assert found.verdict.startswith(f"It resembles {regime.name}, where ")
    for arm in found.arms:
        assert "learning_rate" not in change(arm) and change(arm)["method"] == arm.method


def test_what_resembles_nothing_is_told_to_keep_grpo():
    found = advise(as_run((0.9, 0.1, 0.0, 0.0, 1.0)))
    assert found.regime is None and found.arms == []
    assert found.verdict == "Nothing measured resembles this: keep GRPO, and tune its learning rate."
    ours = signs_of(history(**{"tree/nodes": (3, 3)}))
    assert not ours.plain and "no run of plain GRPO" in advise(ours).verdict


def test_most_runs_on_other_seeds_are_recognised():
    """GRPO's runs on the development seeds, at every setting that was tried, beside those of the fresh seeds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(EXAMPLES / "benchmarks"), *sys.path])
        from regimes_effects import looks
        from regimes_results import read_results, to_runs
    known, right, total = {regime.name: regime for regime in read_measured()}, 0, 0
    for name, regime in known.items():
        rows = read_results(EXAMPLES / "benchmarks" / "regimes" / "results" / f"{name}.csv")
        for run in [run for stage in ("rates", "knob") for run in to_runs(rows, stage)]:
            if run.arm.startswith("GRPO: "):
                right += nearest(as_run(looks(run.points), regime.agent))[0] == regime
                total += 1
    assert total >= 20 and right / total > 0.75  # five doors and eight look alike early


def test_the_newest_checkpoint_of_a_run_is_read(tmp_path, capsys):
    trainer = make_trainer(
        DeepGRPOTrainer,
        DeepGRPOConfig,
        tmp_path,
        max_steps=8,
        save_steps=4,
        save_strategy="steps",
        log_completions=True,
    )
    trainer.train()
    signs = read_signs(tmp_path)
    assert signs.steps == 8 and not signs.plain and signs.all_wrong is not None
    assert read_signs(tmp_path / "checkpoint-8") == signs
    capsys.readouterr()
    assert main(["advise", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["signs"]["steps"] == 8 and told["verdict"].startswith("This is no run of plain GRPO")
    assert main(["advise", str(tmp_path)]) == 0
    assert "groups without contrast" in capsys.readouterr().out


def test_groups_are_counted_in_the_completions_tables(tmp_path):
    (tmp_path / "completions").mkdir()
    for step, rewards in ((1, [0, 0, 0, 1]), (2, [1, 1, 1, 0])):
        table = {"step": [step] * 4, "prompt": ["p", "p", "q", "q"], "completion": ["x"] * 4, "parity": rewards}
        pandas.DataFrame({**table, "advantage": [0.0] * 4}).to_parquet(
            tmp_path / "completions" / f"completions_{step:05d}.parquet"
        )
    logs = history(**{"rewards/parity/mean": (0.2, 0.8)})
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": logs}))
    signs = read_signs(tmp_path)
    assert (signs.all_wrong, signs.all_right) == (Pair(0.5, 0.0), Pair(0.0, 0.5))


@pytest.mark.parametrize("rewards", [[0, 0, 0.5, 1], [-1, 0, 0, 0], [0, 1, 2, 0], [0.2, 0.2, 0.2, 0.2]])
def test_groups_of_graded_rewards_are_neither_wrong_nor_right(tmp_path, rewards):
    for step in (1, 2):
        table = {"step": [step] * 4, "prompt": ["p", "p", "q", "q"], "parity": [float(value) for value in rewards]}
        pandas.DataFrame(table).to_parquet(tmp_path / f"completions_{step:05d}.parquet")
    assert shares_of_groups(tmp_path, ["parity"]) is None


@pytest.mark.parametrize(("name", "goes_deep"), [("coverage", False), ("deep_ends", True)])
def test_the_change_is_printed_as_a_file_for_train(tmp_path, capsys, name, goes_deep):
    start, end, equal, later, left = next(r for r in read_measured() if r.name == name).places[0]
    logs = history(steps=400, reward=(start, end), frac_reward_zero_std=(equal, later), entropy=(1, left))
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": logs}))
    assert main(["advise", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    cells = [line for line in shown.splitlines() if line.startswith(("│", "┃"))]
    assert max(map(len, cells)) <= 80 and "equal CPU seconds" in " ".join(shown.split())
    best = advise(read_signs(tmp_path)).arms[0]
    assert f"It resembles {name}" in shown and yaml.safe_load(shown[shown.index("method: ") :]) == change(best)
    assert ("a-search-that-unlearns" in shown) == goes_deep  # it is for answers that a wrong choice ends


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no trainer_state.json, nor do its checkpoints"),
        ("{", "is no state that a trainer wrote"),
        ("[]", "is no state that a trainer wrote"),
        (json.dumps({"log_history": history(steps=5)}), "holds 5 logged training steps of GRPO, too few"),
        (json.dumps({"log_history": [{"loss": 1.0}] * 20}), "holds 0 logged training steps of GRPO"),
    ],
)
def test_what_is_no_run_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "trainer_state.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        read_signs(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["advise", str(tmp_path / "nothing")]) == 2
    assert "nothing' does not exist; pass a run's output_dir" in capsys.readouterr().err


def test_the_links_of_advice_lead_to_pages():
    pages = {link.partition("#")[0] for name in ("advise.py", "measured.py") for link in links(name)}
    assert pages and all((ROOT / page).is_file() for page in pages)


def links(name):
    text = (ROOT / "trl_explore" / "advice" / name).read_text()
    return [part.partition('"')[0] for part in text.split('"') if part.startswith("docs/")]
