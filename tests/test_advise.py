"""`trl-explore advise`: the rules on a run's logs, runs of `auto`, and messages on wrong input."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
import yaml
from trl import GRPOConfig, GRPOTrainer
from world import make_trainer, never

from trl_explore.advice.advise import AUTO, advise
from trl_explore.advice.signs import Pair, Signs, read_signs, shares_of_groups, signs_of
from trl_explore.cli import main
from trl_explore.cli.train import parse_train_arguments
from trl_explore.errors import UsageError
from trl_explore.methods import METHODS
from trl_explore.trainers import (
    AutoExploreConfig,
    AutoExploreTrainer,
    DeepGRPOConfig,
    DeepGRPOTrainer,
    ExplorationConfig,
    ExplorationTrainer,
)

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


def test_beginning_and_end_are_an_eighth_of_the_steps_each_without_those_that_have_no_reward():
    signs = signs_of(history(steps=16, reward=(0, 15)))
    assert signs.steps == 16 and signs.values["reward"] == Pair(0.5, 14.5)
    logs = history(steps=16, reward=(0.5, 0.5))
    logs[0]["reward"] = math.nan
    assert signs_of(logs).values["reward"] == Pair(0.5, 0.5)


def test_a_run_that_learns_is_left_alone():
    assert texts() == [
        "Groups have contrast (70% at the start, 70% at the end), and the reward rises from 0.21 to 0.59: GRPO "
        "learns from what it samples.",
        "A completion in a group with contrast cost 11 generated tokens at the start and 11 at the end.",
    ]


@pytest.mark.parametrize(
    ("ends", "sentence"),
    [
        ({"frac_reward_zero_std": (0.3, 0.96)}, "94% of the groups have no contrast at the end (mean reward 0.59)."),
        ({"entropy": (1.0, 0.1)}, "13% of the entropy that the run began with is left (0.97 nats, now 0.13)"),
        ({"completions/clipped_ratio": (0, 0.4)}, "39% of the completions at the end are cut off"),
        ({"tree/uniform_fraction": (0.99, 0.99)}, "99% of the search trees end with all completions right or"),
        (
            {"sketch/success": (0.1, 0.1), "sketch/plain_success": (0.6, 0.6)},
            "10% of the completions with a sketch are right, but 60% of the plain completions of the same groups",
        ),
    ],
)
def test_what_stands_out_is_said_with_its_number(ends, sentence):
    assert any(text.startswith(sentence) for text in texts(**ends))


NOTHING_SUCCEEDED = "No sample ever succeeded: use easier data or a warm start first."
EQUAL = {"reward_std": (0, 0), "frac_reward_zero_std": (1, 1)}


@pytest.mark.parametrize("more", [EQUAL, {"frac_reward_zero_std": (1, 1)}, {"completions/clipped_ratio": (1, 1)}])
@pytest.mark.parametrize("others", [{}, {"entropy": (1.0, 0.02), "method/changed_hooks": (2, 2)}])
def test_a_run_without_any_success_is_told_that_alone(more, others):
    found = advise(signs_of(history(reward=(0, 0), **more, **others)))
    assert found.verdict == NOTHING_SUCCEEDED
    assert found.changes == []
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
    assert found.verdict == verdict and len(found.findings) == 1 and found.changes == []


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
def test_rewards_other_than_0_and_1_are_recognised_as_such(ends):
    assert not signs_of(history(**ends)).zero_or_one
    assert any(text.startswith("Rewards are not only 0 and 1.") for text in texts(**ends))


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.5, 0.97])
def test_rewards_of_0_and_1_are_recognised_as_such(rate):
    deviation = (rate * (1 - rate) * 16 / 15) ** 0.5
    assert signs_of(history(reward=(rate, rate), reward_std=(deviation, deviation))).zero_or_one


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


SAVED = dict(max_steps=8, save_steps=8, save_strategy="steps")


def shown_advice(folder, capsys):
    """What the command prints about a run."""
    capsys.readouterr()
    assert main(["advise", str(folder)]) == 0
    return capsys.readouterr().out


def write_logs(folder, logs):
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": logs}))


@pytest.mark.slow
@pytest.mark.parametrize("trainer_class, config_class", [(GRPOTrainer, GRPOConfig), (DeepGRPOTrainer, DeepGRPOConfig)])
def test_a_trained_run_without_any_success_is_told_that_alone(tmp_path, capsys, trainer_class, config_class):
    make_trainer(trainer_class, config_class, tmp_path, reward_funcs=never, **SAVED).train()
    shown = shown_advice(tmp_path, capsys)
    assert NOTHING_SUCCEEDED in shown and "method:" not in shown


@pytest.mark.slow
def test_a_trained_graded_run_has_nothing_called_wrong(tmp_path, capsys):
    def graded(completions, **columns):
        return [0.9 * text.count("a") / max(len(text), 1) for text in completions]

    options = dict(SAVED, reward_funcs=graded, log_completions=True, num_completions_to_print=0)
    make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, **options).train()
    shown = shown_advice(tmp_path, capsys)
    assert "cut off" in shown and "wrong" not in shown and "Rewards are not only 0 and 1" in " ".join(shown.split())


@pytest.mark.slow
def test_a_run_of_a_trainer_of_your_own_is_no_run_of_grpo(tmp_path):
    class Own(ExplorationTrainer):
        def assign_advantages(self, output):
            return output["advantages"].clamp(max=0.1)

    for cls in (Own, ExplorationTrainer):
        trainer = make_trainer(cls, ExplorationConfig, tmp_path, max_steps=8)
        trainer.train()
        assert signs_of(trainer.state.log_history).plain == (cls is ExplorationTrainer)


def test_logs_of_earlier_versions_are_known_by_what_only_a_method_logs():
    names = [name for row in METHODS.values() if not row.plain for name in row.metrics if "/" in name]
    assert len(names) > 20
    for name in names:
        assert not signs_of(history(**{name.replace("...", "reward"): (1, 1)})).plain, name


def test_a_falling_pass_at_k_is_seen():
    falling, rising = evaluated((0.2, 0.5), (0.7, 0.6)), evaluated((0.2, 0.5), (0.7, 0.8))
    assert "pass@16 falls from 70.0% to 60.0% while pass@1 goes from 20.0% to 50.0%" in texts(*falling)[-1]
    assert len(texts(*rising)) == 2


def evaluated(small, large):
    """Logs of two evaluations with pass@1 and pass@16."""
    pairs = zip((0, 16), small, large, strict=True)
    return [{"step": step, "eval/pass_at_1": first, "eval/pass_at_16": last} for step, first, last in pairs]


def wrong_and_right(logs, wrong, right):
    """Signs of a run whose completions tables tell wrong from right."""
    return replace(signs_of(logs), all_wrong=Pair(*wrong), all_right=Pair(*right))


KEEP = "Nearly all groups have contrast, and the reward rises: keep GRPO, and tune its learning rate."
EXPLORE = ": try `explore: auto`, which explores unsolved prompts if it pays."
FILTER = ": filter the solved prompts and use harder data, or let `dynamic_sampling` replace them"
PASSK = "Pass@k falls while pass@1 rises: if pass@k matters to you, try the advantage `maxrl` (or `passk`)"
UNSURE = ": if their completions are wrong, try `explore: auto`; if right, filter these prompts."
FALLING = evaluated((0.2, 0.5), (0.7, 0.6))
MANY_AT_START, MANY_AT_END = {"frac_reward_zero_std": (0.9, 0.3)}, {"frac_reward_zero_std": (0.3, 0.9)}
HALF = {"frac_reward_zero_std": (0.5, 0.5)}


@pytest.mark.parametrize(
    ("rule", "triggers", "does_not"),
    [
        ("No completion has a reward", history(reward=(math.nan, math.nan)), history()),
        (NOTHING_SUCCEEDED, history(reward=(0, 0), **EQUAL), history(reward=(0, 0.1))),
        ("Every sample succeeded", history(reward=(1, 1), **EQUAL), history(reward=(0.9, 1))),
        (
            "raise `max_completion_length` first",
            history(**{"completions/clipped_ratio": (0, 0.5)}),
            history(**{"completions/clipped_ratio": (0.5, 0.2)}),
        ),
        (KEEP, history(), history(reward=(0.6, 0.2))),
        (KEEP, [*history(), *FALLING], [*history(**HALF), *FALLING]),
        (EXPLORE, history(reward=(0.05, 0.5), **MANY_AT_START), history(reward=(0.05, 0.5), **HALF)),
        (EXPLORE, history(reward=(0.3, 0.6), **MANY_AT_END), history(reward=(0.3, 0.95), **MANY_AT_END)),
        (FILTER, history(reward=(0.5, 0.95), **MANY_AT_END), history(reward=(0.5, 0.95))),
        (UNSURE, history(reward=(2, 5), **MANY_AT_END), history(reward=(0.2, 0.5), **MANY_AT_END)),
        (PASSK, [*history(**HALF), *FALLING], [*history(**HALF), *evaluated((0.2, 0.5), (0.7, 0.8))]),
        (PASSK, [*history(**HALF), *FALLING], [*history(**HALF), *evaluated((0.5, 0.2), (0.7, 0.6))]),
        ("nothing here calls for another method: keep GRPO", history(**HALF), history()),
        ("The reward does not rise, although groups have contrast", history(reward=(0.6, 0.2)), history()),
        ("This run used another method than plain GRPO", history(**{"tree/nodes": (3, 3)}), history()),
    ],
)
def test_each_rule_of_the_verdict_has_its_runs(rule, triggers, does_not):
    assert rule in advise(signs_of(triggers)).verdict
    assert rule not in advise(signs_of(does_not)).verdict


def test_the_first_rule_that_fits_is_the_verdict():
    cut = {"completions/clipped_ratio": (0.5, 0.5)}
    assert "max_completion_length" in advise(signs_of(history(reward=(0.05, 0.5), **MANY_AT_START, **cut))).verdict
    solved = [*history(reward=(0.5, 0.95), **MANY_AT_END), *FALLING]
    assert FILTER in advise(signs_of(solved)).verdict
    both = history(reward=(0.05, 0.97), frac_reward_zero_std=(0.9, 0.9))
    assert advise(signs_of(both)).verdict.startswith("90% of the groups have no contrast at the start")
    assert advise(signs_of(both)).changes == [AUTO]


def test_the_completions_tables_say_whether_groups_are_wrong_or_right():
    logs = history(reward=(0.3, 0.6), **MANY_AT_END)
    assert EXPLORE in advise(signs_of(logs)).verdict
    wrong = advise(wrong_and_right(logs, (0.2, 0.5), (0.1, 0.3)))
    assert EXPLORE in wrong.verdict and "(50% all wrong, 30% all right)" in wrong.verdict
    right = advise(wrong_and_right(logs, (0.2, 0.1), (0.1, 0.7)))
    assert FILTER in right.verdict and "(10% all wrong, 70% all right)" in right.verdict


def test_groups_are_counted_if_the_rewards_were_scaled_by_batch(tmp_path):
    """TRL then logs that all groups have contrast if one has."""
    logs = history(reward=(0.1, 0.2), frac_reward_zero_std=(0, 0), **{"rewards/right/mean": (0.1, 0.2)})
    assert "Nearly all groups have contrast" in advise(signs_of(logs)).verdict
    write_logs(tmp_path, logs)
    (tmp_path / "completions").mkdir()
    for step in range(1, 9):
        rows = {"step": [step] * 8, "prompt": list("aabbccdd"), "right": [1.0] + [0.0] * 7}
        pandas.DataFrame(rows).to_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")
    found = read_signs(tmp_path)
    assert found.values["frac_reward_zero_std"] == Pair(0.75, 0.75)
    assert EXPLORE in advise(found).verdict
    # The tables have raw rewards, so they do not tell wrong from right if the rewards have weights.
    weighted = history(reward=(0.05, 0.1), frac_reward_zero_std=(0, 0), **{"rewards/right/mean": (0.1, 0.2)})
    write_logs(tmp_path, weighted)
    assert read_signs(tmp_path).all_wrong is None


def test_the_share_of_wrong_groups_is_estimated_from_the_mean_reward():
    def share(reward, equal):
        values = {"reward": Pair(reward, reward), "frac_reward_zero_std": Pair(equal, equal)}
        return Signs(steps=9, values=values, pass_at={}).wrong_share("end")

    assert share(0.0, 1.0) == share(0.05, 0.9) == share(-0.5, 0.9) == 1
    assert share(1.0, 1.0) == 0 and share(0.95, 0.9) == pytest.approx(0, abs=1e-9)
    assert share(0.5, 0.8) == pytest.approx(0.5)
    assert share(1.2, 0.9) is None and share(0.5, 0.0) is None


def test_tokens_per_completion_with_contrast():
    cost = signs_of(history(**{"completions/mean_length": (50, 50)}, frac_reward_zero_std=(0.5, 0.5))).contrast_cost
    assert cost == Pair(100, 100)
    found = texts(**{"completions/mean_length": (50, 50)}, frac_reward_zero_std=(0.5, 0.5))
    assert "A completion in a group with contrast cost 100 generated tokens at the start and 100 at the end." in found
    assert signs_of(history(frac_reward_zero_std=(1, 1))).contrast_cost is None  # no group has contrast
    assert signs_of(history(**{"tree/nodes": (3, 3)})).contrast_cost is None  # a tree generates more
    assert signs_of(history(**{"selection/discarded_tokens": (3, 3)})).contrast_cost is None


def explored(plain=(1e-3, 2e-3), tree=(4e-3, 1e-3), share=(0.5, 0.1), **more):
    """Logs of a run of `auto` with one explorer."""
    rates = {"explore/contrast_per_token/plain": plain, "explore/contrast_per_token/tree": tree}
    return history(**rates, **{"explore/share/tree": share, "explore/solved/tree": (0.2, 0.3)}, **more)


NOTHING_WORTH = "No explorer found more contrast per token than fresh prompts: keep GRPO"
NOTHING_EXPLORED = "This run explored 0.0% of the prompts, too few to show whether exploring helps: keep GRPO"


def test_a_run_of_auto_is_told_which_source_was_worth_most():
    found = advise(signs_of(explored()))
    assert any(
        finding.text
        == "At the start, `tree` gave most contrast per token (3.9 groups per 1,000 tokens, fresh prompts "
        "1.03); at the end, fresh prompts gave most contrast per token (1.97 groups per 1,000 tokens). The run "
        "explored 30% of the prompts: 49% at the start, 11% at the end."
        for finding in found.findings
    )
    assert found.verdict.startswith("Exploration found more contrast per token than fresh prompts")
    assert not any("groups per 1,000 tokens" in text for text in texts())


@pytest.mark.parametrize(
    ("logs", "verdict"),
    [
        (explored(tree=(5e-4, 5e-4)), NOTHING_WORTH),
        (explored(share=(0, 0)), NOTHING_EXPLORED),
        (explored(tree=(0, 0), plain=(0, 1e-3)), NOTHING_WORTH),
        (history(**{"explore/contrast_per_token/plain": (1e-3, 1e-3), "explore/share/tree": (0, 0)}), NOTHING_WORTH),
    ],
    ids=["plain is worth more", "nothing explored", "no contrast", "no explorer was used"],
)
def test_a_run_of_auto_without_anything_worth_exploring(logs, verdict):
    assert advise(signs_of(logs)).verdict.startswith(verdict)


def test_what_was_explored_in_the_middle_of_a_run_counts():
    logs = explored(tree=(4e-3, 4e-3), share=(0, 0))
    for entry in logs[len(logs) // 2 :][:3]:
        entry["explore/share/tree"] = 1.0
    assert advise(signs_of(logs)).verdict.startswith("Exploration found more contrast per token than fresh prompts")
    # A source starts with its first use.
    logs = explored()
    for entry in logs[:8]:
        del entry["explore/contrast_per_token/tree"]
    assert signs_of(logs).sources["tree"].start == pytest.approx(2.3e-3)


def test_a_trained_run_of_auto_is_read(tmp_path, capsys):
    def some(completions, **columns):
        return [float(text.startswith("a")) for text in completions]

    options = dict(SAVED, explorers=["resample"], explore_min_share=1.0, reward_funcs=some)
    make_trainer(AutoExploreTrainer, AutoExploreConfig, tmp_path, **options).train()
    signs = read_signs(tmp_path)
    assert set(signs.sources) == {"plain", "resample"} and signs.explored is not None
    shown = shown_advice(tmp_path, capsys)
    assert "prompts explored" in shown and "explored prompts solved: resample" in shown


def test_the_newest_checkpoint_of_a_run_is_read(tmp_path, capsys):
    options = dict(SAVED, save_steps=4, log_completions=True)
    make_trainer(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, **options).train()
    signs = read_signs(tmp_path)
    assert signs.steps == 8 and not signs.plain and signs.all_wrong is not None
    assert read_signs(tmp_path / "checkpoint-8") == signs
    capsys.readouterr()
    assert main(["advise", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["signs"]["steps"] == 8 and told["verdict"] == advise(signs).verdict and told["changes"] == []
    assert "groups without contrast" in shown_advice(tmp_path, capsys)


def test_groups_are_counted_in_the_completions_tables(tmp_path):
    (tmp_path / "completions").mkdir()
    for step, rewards in ((1, [0, 0, 0, 1, None, None]), (2, [1, 1, 1, 0, None, None])):
        table = {"step": [step] * 6, "prompt": [*"ppqqrr"], "completion": ["x"] * 6, "parity": rewards}
        pandas.DataFrame({**table, "advantage": [0.0] * 6}).to_parquet(
            tmp_path / "completions" / f"completions_{step:05d}.parquet"
        )
    logs = history(reward=(0.2, 0.8), **{"rewards/parity/mean": (0.2, 0.8)})
    logs[8] |= {"reward": None, "rewards/parity/mean": None}  # a batch whose completions have no reward
    write_logs(tmp_path, logs)
    signs = read_signs(tmp_path)
    assert (signs.all_wrong, signs.all_right) == (Pair(0.5, 0.0), Pair(0.0, 0.5))


@pytest.mark.parametrize("rewards", [[0, 0, 0.5, 1], [-1, 0, 0, 0], [0, 1, 2, 0], [0.2, 0.2, 0.2, 0.2]])
def test_groups_of_graded_rewards_are_neither_wrong_nor_right(tmp_path, rewards):
    for step in (1, 2):
        table = {"step": [step] * 4, "prompt": ["p", "p", "q", "q"], "parity": [float(value) for value in rewards]}
        pandas.DataFrame(table).to_parquet(tmp_path / f"completions_{step:05d}.parquet")
    assert shares_of_groups(tmp_path, ["parity"]) is None


SHOWN = {
    "auto": (history(reward=(0.05, 0.5), **MANY_AT_START), AUTO),
    "filter": (history(reward=(0.5, 0.95), **MANY_AT_END), {"method": "exploration", "dynamic_sampling": "refill"}),
    "pass@k": ([*history(**HALF), *FALLING], {**AUTO, "advantage": "maxrl"}),
}


@pytest.mark.parametrize(("logs", "change"), SHOWN.values(), ids=SHOWN)
def test_the_change_is_printed_as_a_file_for_train(tmp_path, capsys, logs, change):
    write_logs(tmp_path, logs)
    shown = shown_advice(tmp_path, capsys)
    cells = [line for line in shown.splitlines() if line.startswith(("│", "┃"))]
    assert max(map(len, cells)) <= 80 and "groups without contrast" in shown
    assert yaml.safe_load(shown[shown.index("method: ") :]) == change
    assert main(["advise", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"] == [change]
    config = tmp_path / "run.yaml"
    flags = ["--use_cpu", "--bf16", "false", "--output_dir", str(tmp_path / "out")]
    config.write_text(yaml.safe_dump({**change, "model_name_or_path": "model", "dataset_name": "data.jsonl"}))
    parse_train_arguments(["--config", str(config), "--reward_funcs", "accuracy_reward", *flags])


def test_a_run_that_needs_no_change_gets_none(tmp_path, capsys):
    write_logs(tmp_path, history())
    shown = shown_advice(tmp_path, capsys)
    assert "keep GRPO" in shown and "method:" not in shown


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no trainer_state.json, nor do its checkpoints"),
        ("{", "is no state that a trainer wrote"),
        ("[]", "is no state that a trainer wrote"),
        (json.dumps({"log_history": history(steps=5)}), "holds 5 logged training steps, too few"),
        (json.dumps({"log_history": [{"loss": 1.0}] * 20}), "holds 0 logged training steps"),
    ],
)
def test_what_is_no_run_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "trainer_state.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        read_signs(tmp_path)


@pytest.mark.parametrize("inner", ["grpo-seed0", "grpo-seed0/checkpoint-8"])
def test_a_folder_of_runs_names_one_of_them(tmp_path, inner):
    (tmp_path / inner).mkdir(parents=True)
    write_logs(tmp_path / inner, history())
    with pytest.raises(UsageError, match=f"is no run; pass a run in it, for example '{tmp_path}/grpo-seed0'"):
        read_signs(tmp_path)


def test_checkpoints_of_a_replaced_run_are_not_offered(tmp_path):
    (tmp_path / "_earlier-1" / "checkpoint-8").mkdir(parents=True)
    write_logs(tmp_path / "_earlier-1" / "checkpoint-8", [])
    with pytest.raises(UsageError, match="holds no trainer_state.json, nor do its checkpoints"):
        read_signs(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["advise", str(tmp_path / "nothing")]) == 2
    assert "nothing' does not exist; pass a run's output_dir" in capsys.readouterr().err


def slug(heading):
    """The anchor of a heading on a page."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


RUNS = [history(), *(logs for logs, _ in SHOWN.values()), explored(), history(entropy=(1.0, 0.05), **GRADED)]
RUNS += [history(reward=(0, 0), **EQUAL), history(reward=(2, 5), **MANY_AT_END), history(**{"tree/nodes": (3, 3)})]


def test_the_links_of_advice_lead_to_pages_and_headings():
    for logs in RUNS:
        found = advise(signs_of(logs))
        for link in [found.link, *(finding.link for finding in found.findings)]:
            page, _, anchor = link.partition("#")
            headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
            assert not anchor or anchor in [slug(heading) for heading in headings], link
