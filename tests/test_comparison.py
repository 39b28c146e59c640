"""Budgets, costs and curves of a run; pictures."""

import io
import runpy
from collections import Counter

import pytest
from commands import EXAMPLES
from tqdm import tqdm
from transformers import TrainerCallback

from trl_explore.compare.plots import arm_styles, learning_curves
from trl_explore.compare.run import build_run
from trl_explore.compare.settings import Arm, Budget, read_comparison
from trl_explore.errors import UsageError
from trl_explore.methods import METHODS
from trl_explore.tasks import AGENTS, get_task
from trl_explore.tasks.warm_start import warm_start

TASK = get_task("chain")
SMALL = dict(per_device_train_batch_size=16, num_generations=4)
DEEP = Arm("DEEP-GRPO", "deep_grpo", dict(segment_delimiters=[";"], num_branches=2, max_pivots_per_batch=2))
GRPO = Arm("GRPO", "grpo")
train_arm = runpy.run_path(EXAMPLES / "benchmarks" / "arms.py")["train_arm"]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return warm_start(TASK, seed=0, steps=2, cache_dir=tmp_path_factory.mktemp("cache"), progress=False)


@pytest.fixture(scope="module")
def agents_start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    return str(warm_start(AGENTS["multi_hop"], seed=0, steps=2, cache_dir=folder, progress=False))


def built(document, folder, start):
    """The trainer and the evaluation of a comparison on `multi_hop` with one arm."""
    usual = {"task": "multi_hop", "budget": {"steps": 1}, "arms": [{"method": "grpo"}]}
    comparison = read_comparison({**usual, **document})
    return build_run(comparison, comparison.arms[0], seed=3, folder=folder / "run", start=start)


def train(arm, start, folder, *, options=None, **changes):
    usual = dict(seed=0, budget=Budget(steps=3), evaluate_every=2, num_eval=4, num_samples=2, k=(1, 2))
    settings = dict(usual, output_dir=folder, num_train=64, options={**SMALL, **(options or {})})
    return train_arm(arm, TASK, start, **{**settings, **changes})


@pytest.mark.parametrize("arm", [DEEP, GRPO], ids=lambda arm: arm.name)
def test_costs_are_those_of_training(arm, start, tmp_path):
    run = train(arm, start, tmp_path)
    assert [p["step"] for p in run.points] == [0, 2, 3]
    assert run.points[0]["tokens"] == run.points[0]["seconds"] == 0
    main = sum(step["completions/mean_length"] * 16 for step in run.steps)
    extra = sum(step.get("pivots/sampled_tokens", 0) for step in run.steps)
    assert run.points[-1]["tokens"] == pytest.approx(main + extra)
    assert (extra > 0) == (arm is DEEP)
    seconds = [p["seconds"] for p in run.points]
    assert seconds == sorted(seconds) and run.points[-1]["cpu_seconds"] > 0


@pytest.mark.parametrize(
    "size, own",
    [
        (1.0, {}),
        (0.5, {"success_threshold": 0.5}),
        (0.5, {"success_threshold": 0.5, "success_reward": "accuracy_reward"}),
    ],
    ids=["default", "threshold", "reward"],
)
def test_successes_of_an_agent_are_those_of_its_tasks(tmp_path, agents_start, size, own):
    document = {"num_eval": 6, "metrics": ["reward", "pass_at_2"], "samples_at_ends": 8, **own}
    common = {"max_completion_length": 32, "per_device_train_batch_size": 4, "num_generations": 2}
    trainer, evaluate = built({**document, "common": common}, tmp_path, agents_start)
    every = dict(
        zip(AGENTS["multi_hop"].evaluation_set(6)["question"], (1, 2, 5, 5, 5, 5), strict=True)
    )  # which tries succeed
    tries = Counter()

    def reward(question, **columns):
        given = []
        for asked in question:
            tries[asked] += 1
            given.append(size * (tries[asked] % every[asked] == 0))
        return given

    trainer.reward_funcs[0] = reward
    trainer.args.per_device_eval_batch_size = 20  # five tasks of four samples; the last batch has only one task
    found = evaluate("end")
    assert found["correct"] == [4, 2, 0, 0, 0, 0]
    assert found["end_correct"] == [8, 4, 2, 2, 2, 2]  # of tries 5 to 12
    assert found["eval/pass_at_2"] == pytest.approx((1 + 5 / 6) / 6)
    assert found["eval/reward"] == pytest.approx(size * 6 / 24)


def test_an_unknown_success_reward_of_an_agent_is_refused_before_the_evaluation(tmp_path, agents_start):
    with pytest.raises(ValueError, match="success_reward='other'"):
        built({"success_reward": "other"}, tmp_path, agents_start)


@pytest.mark.parametrize("at_ends", [{}, {"samples_at_ends": 4}])
def test_an_evaluation_of_an_agent_without_any_reward_is_an_error(tmp_path, agents_start, at_ends):
    document = {"num_eval": 2, **at_ends, "common": {"max_completion_length": 16}}
    trainer, evaluate = built(document, tmp_path, agents_start)
    trainer.reward_funcs[0] = lambda question, **columns: [None] * len(question)
    with pytest.raises(UsageError, match="^task='multi_hop' returned no reward .* 2 held-out rows"):
        evaluate("start")


def test_a_resumed_arm_has_the_rate_of_its_own_tokens(start, tmp_path):
    options = dict(save_strategy="steps", save_steps=1)
    first = train(GRPO, start, tmp_path, budget=Budget(steps=2), options=options)
    begun = []

    class Began(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            begun.append((bar.initial, bar.n, bar.last_print_n))

    with tqdm(total=10_000, file=io.StringIO()) as bar:
        budget = Budget(steps=3, tokens=10_000)
        run = train(GRPO, start, tmp_path, budget=budget, progress=bar, callbacks=[Began()], resume=True)
    done, total = first.points[-1]["tokens"], run.points[-1]["tokens"]
    assert begun == [(done, done, done)]
    # tqdm divides what is between them by the time of this process.
    assert (bar.format_dict["initial"], bar.format_dict["n"]) == (done, total) and total > done


METRICS = ("eval/greedy_accuracy", "eval/pass_at_1", "eval/pass_at_8")


def fake_runs(seeds=(3,)):
    point = {"step": 0, "tokens": 0, "seconds": 0.0, **{key: 0.25 for key in METRICS}}
    later = {**point, "step": 9, "tokens": 1234567.0, "seconds": 8.0, "eval/greedy_accuracy": 0.875}
    return [{"arm": arm, "seed": seed, "points": [point, later]} for arm in ("DEEP-GRPO", "GRPO") for seed in seeds]


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ([3], "x (one seed)"),
        ([3, 4], "x (mean of 2 seeds, band: lowest to highest)"),
        ([3, 4, 5], "x (mean of 3 seeds, band: 95 % interval)"),
    ],
)
def test_the_picture_says_what_its_band_is(seeds, said, tmp_path):
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        path = learning_curves(fake_runs(seeds), tmp_path / "curves.svg", metrics=METRICS[:1], title="x")
    assert said in path.read_text()


def test_grpo_has_one_colour_whatever_stands_beside_it():
    black = METHODS["grpo"].style
    pictures = [
        ["GRPO", "DEEP-GRPO"],
        ["DEEP-GRPO", "GRPO"],
        ["TreeGRPO, random nodes", "root control", "GRPO"],
        ["GRPO, 4x samples", "no std", "GRPO"],
        ["SESA takes over", "GRPO goes on"],
    ]
    for arms in pictures:
        styles = arm_styles(arms)
        assert [name for name in arms if styles[name] == black] == [name for name in arms if name in GRPOS]
        assert len(set(styles.values())) == len(arms)
    assert black not in arm_styles(["a", "b", "c", "d", "e", "f", "g", "h", "i"]).values()


GRPOS = ("GRPO", "GRPO goes on")


def test_methods_keep_their_colours_too_and_their_variants_take_others():
    styles = arm_styles(["GRPO", "TreeGRPO, uct", "TreeGRPO", "DEEP-GRPO from the root"])
    assert styles["TreeGRPO"] == METHODS["tree_grpo"].style != styles["TreeGRPO, uct"]
    assert styles["DEEP-GRPO from the root"] == METHODS["deep_grpo"].style
