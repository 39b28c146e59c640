"""Reading and showing a comparison: curves at equal cost against numbers worked out by hand."""

import csv
import math
import re
import tracemalloc
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import yaml
from datasets import Dataset, Features, Image, List, Value

from trl_explore.cli.compare import TASK_NAMES
from trl_explore.compare.costs import interval, mean_curve, other_starts, t_95
from trl_explore.compare.folder import ComparisonFolder, differences
from trl_explore.compare.report import markdown_table, rich_table, summarize, write_report
from trl_explore.compare.settings import METRICS, read_comparison
from trl_explore.errors import UsageError
from trl_explore.methods import METHODS
from trl_explore.runs.embedded import ALL_TASKS
from trl_explore.saving import fingerprints
from trl_explore.saving.fingerprints import rows_fingerprint

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = {
    "task": "chain",
    "budget": {"tokens": 100},
    "seeds": [0, 1],
    "metrics": ["greedy_accuracy", "reward"],
    "arms": [{"method": "grpo"}, {"name": "deep | <b>", "method": "deep_grpo"}],
}


def point(tokens, seconds, step, accuracy):
    seconds_of = {"seconds": seconds, "cpu_seconds": seconds / 2}
    costs = {"tokens": tokens, "trained_tokens": tokens / 2, **seconds_of, "step": step}
    training = {"train/entropy": 0.5, "train/frac_reward_zero_std": 0.25} if step else {}
    return {**costs, **training, "eval/greedy_accuracy": accuracy, "eval/reward": 2 * accuracy}


def run(arm, seed, *points):
    return {"arm": arm, "seed": seed, "points": [point(*values) for values in points], "steps": []}


# Read at 100 tokens: GRPO has 0.5 and 0.7, the other 0.7 (halfway between 0.6 and 0.8) and 0.5.
RUNS = [
    run("GRPO", 0, (0, 0, 0, 0.1), (50, 2, 5, 0.3), (150, 6, 15, 0.7)),
    run("GRPO", 1, (0, 0, 0, 0.1), (100, 4, 10, 0.7)),
    run("deep | <b>", 0, (0, 0, 0, 0.1), (80, 8, 4, 0.6), (120, 12, 6, 0.8)),
    run("deep | <b>", 1, (0, 0, 0, 0.1), (100, 10, 5, 0.5)),
]
THREE_RUNS = [
    *RUNS,
    run("GRPO", 2, (0, 0, 0, 0.1), (100, 4, 10, 0.6)),
    run("deep | <b>", 2, (0, 0, 0, 0.1), (100, 10, 5, 0.6)),
]


def test_an_interval_is_students_for_any_number_of_seeds_but_one_and_two():
    mean, half = interval([0.4, 0.5, 0.6])
    assert mean == pytest.approx(0.5) and half == pytest.approx(4.303 * 0.1 / 3**0.5)  # standard deviation 0.1
    for count, quantile in ((3, 4.303), (11, 2.228), (16, 2.131), (31, 2.042), (1001, 1.962)):
        assert t_95(count) == pytest.approx(quantile, abs=5e-4)
    for few in ([0.5], [0.4, 0.6]):
        assert interval(few) == (pytest.approx(0.5), None)


def test_the_mean_curve_is_read_wherever_a_seed_was_measured_and_all_have_been():
    curves = [[{"t": 0, "m": 0.0}, {"t": 10, "m": 1.0}], [{"t": 0, "m": 0.0}, {"t": 4, "m": 0.8}, {"t": 8, "m": 0.8}]]
    mean = mean_curve(curves, "t", "m")
    assert [row[0] for row in mean] == [0, 4, 8]  # at 10 the second has nothing to say
    assert mean[1] == pytest.approx((4, 0.6, 0.4, 0.8)) and mean[2] == pytest.approx((8, 0.8, 0.8, 0.8))
    assert mean_curve(curves[:1], "t", "m") == [(0, 0.0, 0.0, 0.0), (10, 1.0, 1.0, 1.0)]


def test_the_mean_curve_can_have_its_interval():
    curves = [[{"t": 0, "m": 0.0}, {"t": 1, "m": value}] for value in (0.2, 0.4, 0.6)]
    start, end = mean_curve(curves, "t", "m", t_interval=True)
    assert start == (0, 0.0, 0.0, 0.0)
    half = 4.303 * 0.2 / 3**0.5  # standard deviation 0.2, three values
    assert end == pytest.approx((1, 0.4, 0.4 - half, 0.4 + half))


def test_the_table_has_means_intervals_paired_differences_and_costs_at_the_budget():
    grpo, deep = summarize(RUNS, read_comparison(DOCUMENT))
    assert grpo.cells[0].difference is None
    assert grpo.cells[0].value[0] == pytest.approx(0.6) and deep.cells[0].value[0] == pytest.approx(0.6)
    assert deep.cells[0].difference == (pytest.approx(0.0), None)  # 0.2 and -0.2
    assert deep.cells[1].value[0] == pytest.approx(1.2)
    grpo_of_three, deep_of_three = summarize(THREE_RUNS, read_comparison(DOCUMENT))
    assert grpo_of_three.cells[0].value == pytest.approx((0.6, 4.303 * 0.1 / 3**0.5))  # 0.5, 0.7 and 0.6
    assert deep_of_three.cells[0].difference == pytest.approx((0.0, 4.303 * 0.2 / 3**0.5))  # 0.2, -0.2 and 0
    # GRPO: 4 seconds and 10 steps on either seed; the other 10 seconds and 5 steps.
    assert (grpo.tokens, grpo.seconds, grpo.steps) == pytest.approx((100, 4, 10))
    assert grpo.texts() == ["100", "4.0", "2.0", "0.40"] and deep.texts() == ["100", "10.0", "5.0", "2.00"]


def test_arms_that_began_with_another_model_are_named():
    sentence = "Began at other values than GRPO"
    assert sentence not in markdown_table(RUNS, read_comparison(DOCUMENT))
    moved = [*RUNS[:3], run("deep | <b>", 1, (0, 0, 0, 0.2), (100, 10, 5, 0.5))]
    assert other_starts(moved, "GRPO", ["eval/reward"]) == {"deep | <b>": [1]}
    lines = markdown_table(moved, read_comparison(DOCUMENT)).splitlines()
    assert lines[7].startswith(f"- {sentence}: deep | <b> (seed 1). ")
    for reason in ("an option of the arm also changes the evaluation", "different machines", "as with vLLM"):
        assert reason in lines[7]


def test_seeds_without_many_samples_before_training_are_named():
    comparison = read_comparison({**DOCUMENT, "samples_at_ends": 8, "num_eval": 100})
    runs = []
    for found in RUNS:
        first, *later = found["points"]
        runs.append({**found, "points": [first, *({**point, "end_correct": [0, 4, 8]} for point in later)]})
    assert "No run took 8 samples per problem before training" in markdown_table(runs, comparison)
    runs[0]["points"][0] = {**runs[0]["points"][0], "end_correct": [0, 0, 0]}
    text = markdown_table(runs, comparison)
    assert "Seeds without such samples before training do not count: 1." in text and "| before training |" in text
    assert "Mean numbers over seeds, of 3 problems." in text  # the rows may be fewer than `num_eval`


def steps_with(fraction, low, high):
    success = {"success/fraction": fraction, "success/min_reward": low, "success/max_reward": high}
    return [{"reward": (low + high) / 2, "reward_std": high - low, **success}] * 3


def test_a_threshold_that_tells_no_completions_apart_is_named_under_the_table():
    plain, other = RUNS[:2], RUNS[2:]
    missed = [*plain, *(dict(one, steps=steps_with(0.0, 0.1, 0.6)) for one in other)]
    lines = markdown_table(missed, read_comparison(DOCUMENT)).splitlines()
    told = "- deep | <b>: No completion reached `success_threshold`: rewards were between 0.1 and 0.6"
    assert lines[7].startswith(told)
    reached = [*plain, *(dict(one, steps=steps_with(0.2, 0.1, 1.0)) for one in other)]
    assert "success_threshold" not in markdown_table(reached, read_comparison(DOCUMENT))


def test_evaluations_without_any_success_are_named_if_rewards_differ():
    unsolved = []
    for one in RUNS:
        points = [{**found, "eval/greedy_accuracy": 0.0} for found in one["points"]]
        unsolved.append(dict(one, points=points, steps=[{"reward": 0.3, "reward_std": 0.1}]))
    text = markdown_table(unsolved, read_comparison(DOCUMENT))
    assert "- No sample of any evaluation succeeded, although rewards differ." in text
    flat = [dict(one, steps=[{"reward": 0.0, "reward_std": 0.0}]) for one in unsolved]
    assert "No sample of any evaluation" not in markdown_table(flat, read_comparison(DOCUMENT))


def test_shares_are_shown_in_percent_and_rewards_as_they_are():
    lines = markdown_table(RUNS, read_comparison(DOCUMENT)).splitlines()
    title = "| arm | greedy accuracy (%) | reward | tokens | wall seconds | CPU seconds | wall s/step |"
    assert lines[0] == title
    assert lines[2] == "| GRPO | 60.0 | 1.200 | 100 | 4.0 | 2.0 | 0.40 |"
    assert lines[3] == "| deep \\| &lt;b> | 60.0 (+0.0) | 1.200 (+0.000) | 100 | 10.0 | 5.0 | 2.00 |"
    assert lines[5].startswith("At 100 generated tokens,") and "Two seeds: there is no interval" in lines[5]
    lines = markdown_table(THREE_RUNS, read_comparison(DOCUMENT)).splitlines()
    assert lines[2] == "| GRPO | 60.0 ± 24.8 | 1.200 ± 0.497 | 100 | 4.0 | 2.0 | 0.40 |"
    assert lines[3].startswith("| deep \\| &lt;b> | 60.0 ± 24.8 (+0.0 ± 49.7) | 1.200 ± 0.497 (")
    assert "t-interval over 3 seeds" in lines[5]


def test_means_along_the_curves_are_shown_for_every_cost():
    lines = markdown_table(RUNS, read_comparison(DOCUMENT)).splitlines()
    assert lines[7].startswith("Mean along the curve of greedy accuracy (%),")
    assert lines[9] == (
        "| arm | up to 5 optimiser steps | up to 100 generated tokens | up to 50 tokens in the loss "
        "| up to 4 wall seconds of training | up to 2 CPU seconds of training |"
    )
    # Up to 100 tokens GRPO's curves are 0.2, then 0.4 high on average, and 0.4 all along; the other's 0.35 up to 80
    # tokens and then 0.65, and 0.3.
    columns = [line.split(" | ")[2] for line in lines[11:13]]
    assert columns == ["35.0", "35.5 (+0.5)"]


def test_a_run_without_a_token_in_the_loss_is_shown_without_that_cost():
    none = {**RUNS[0], "points": [{**values, "trained_tokens": 0} for values in RUNS[0]["points"]]}
    table = markdown_table([none, *RUNS[1:]], read_comparison(DOCUMENT))
    assert "up to 100 generated tokens" in table and "in the loss" not in table


def test_one_seed_has_no_interval_and_the_table_says_so():
    comparison = read_comparison({**DOCUMENT, "seeds": [0]})
    table = markdown_table([run for run in RUNS if run["seed"] == 0], comparison)
    assert "| 50.0 | 1.000 |" in table and "| 70.0 (+20.0) |" in table and "One seed: there is no interval" in table
    assert "±" not in table and "needs 3 seeds" in table


def test_runs_that_end_early_are_read_where_the_first_ended():
    comparison = read_comparison({**DOCUMENT, "budget": {"tokens": 1e6}})
    grpo, _ = summarize(RUNS, comparison)
    assert grpo.tokens == 100
    assert markdown_table(RUNS, comparison).splitlines()[5].startswith("At 100 generated tokens")


@pytest.mark.parametrize("arm", ["deep", "an arm with a name of many words, which alone is longer than a terminal is"])
@pytest.mark.parametrize("metrics", [METRICS[:1], METRICS, [*METRICS, "pass_at_16", "pass_at_32", "pass_at_64"]])
def test_no_cell_wraps_at_80_columns(arm, metrics, capsys):
    from rich.console import Console

    document = {**DOCUMENT, "metrics": [*metrics], "arms": [{"method": "grpo"}, {"method": "deep_grpo", "name": arm}]}
    comparison, runs = read_comparison(document), []
    for found in THREE_RUNS:
        points = [{**point, **{f"eval/{name}": point["eval/reward"] for name in metrics}} for point in found["points"]]
        costs = {"tokens": 1e7, "seconds": 1e4, "cpu_seconds": 1e4}
        points = [{**point, **{name: point[name] * factor for name, factor in costs.items()}} for point in points]
        runs.append({**found, "arm": found["arm"] if found["arm"] == "GRPO" else arm, "points": points})
    Console(width=80).print(rich_table(runs, comparison))
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= 80 and "…" not in shown
    for row in summarize(runs, comparison):
        texts = [*row.texts(), *(text for cell in row.cells for text in cell.texts())]
        assert all(text in shown for text in texts)
    assert all(word in shown for word in arm.split())


def test_the_files_are_a_table_a_long_csv_and_two_pictures(tmp_path):
    files = write_report(RUNS, read_comparison(DOCUMENT), tmp_path)
    assert [path.name for path in files] == ["table.md", "curves.csv", "curves.png", "curves.svg"]
    rows = list(csv.DictReader(open(tmp_path / "curves.csv", encoding="utf-8")))
    costs = ["step", "tokens", "trained_tokens", "seconds", "cpu_seconds"]
    assert list(rows[0]) == ["arm", "seed", *costs, "greedy_accuracy", "reward", "entropy", "frac_reward_zero_std"]
    assert len(rows) == 10 and rows[2]["arm"] == "GRPO" and float(rows[2]["greedy_accuracy"]) == 0.7
    assert rows[0]["entropy"] == "" and float(rows[2]["frac_reward_zero_std"]) == 0.25
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    picture = (tmp_path / "curves.svg").read_text()
    assert "<svg" in picture and "<b>" not in picture


@pytest.mark.parametrize(
    ("budget", "use_cpu", "cost"),
    [
        ({"tokens": 100}, True, "CPU seconds of training"),
        ({"seconds": 100}, True, "wall seconds of training"),
        ({"tokens": 100}, False, "wall seconds of training"),
    ],
)
def test_on_a_cpu_the_picture_shows_cpu_seconds(budget, use_cpu, cost, tmp_path):
    import matplotlib

    common = {"use_cpu": use_cpu, "bf16": False}
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        write_report(RUNS, read_comparison({**DOCUMENT, "budget": budget, "common": common}), tmp_path)
    assert f">{cost}<" in (tmp_path / "curves.svg").read_text()


def test_a_comparison_reads_its_own_document_back():
    comparison = read_comparison(DOCUMENT)
    again = read_comparison(yaml.safe_load(yaml.safe_dump(comparison.document())))
    assert again == comparison
    assert comparison.arms[1].options["segment_delimiters"] == [";"]  # filled in for the task
    assert comparison.common["learning_rate"] == 3e-4


def test_what_the_user_gives_goes_before_what_suits_the_task():
    arms = [{"method": "branpo", "options": {"num_branches": 3}}]
    document = {"task": "multi_hop", "budget": {"tokens": 1}, "arms": arms}
    comparison = read_comparison(document)
    assert comparison.arms[0].options == {"num_generations": 4, "per_device_train_batch_size": 32, "num_branches": 3}
    document["common"] = {"num_generations": 2}
    comparison = read_comparison(document)
    assert comparison.common["num_generations"] == 2 and "num_generations" not in comparison.arms[0].options


def test_without_arms_every_method_that_suits_is_compared_with_grpo():
    def methods(task):
        comparison = read_comparison({"task": task, "budget": {"seconds": 9}})
        return [arm.method for arm in comparison.arms]

    single = ["evol_rl", "tree_rl", "attn_rl", "auto"]
    assert methods("doors") == ["grpo", "deep_grpo", "tree_grpo", "sesa", "g2rl", *single]
    assert methods("chain") == ["grpo", "deep_grpo", "tree_grpo", "g2rl", *single]
    agents = ["branpo", "gigpo", "agent_tree_grpo", "auto"]
    assert methods("examples.benchmarks.tasks:LAKE_AGENT") == ["grpo", "deep_grpo", "sesa", "g2rl", *agents]
    # Each method, on the task that it suits: none is left out everywhere.
    for row in METHODS.values():
        assert any(row.options(task) is not None for task in ALL_TASKS.values()), row.name


@pytest.mark.parametrize("name", ALL_TASKS)
def test_every_embedded_task_has_a_comparison_whose_configurations_can_be_built(name):
    comparison = read_comparison({"task": name, "budget": {"tokens": 1e3}})
    assert comparison.task.task is ALL_TASKS[name] and len(comparison.arms) >= 3


def test_differences_name_the_field_and_both_values():
    old = read_comparison(DOCUMENT).document()
    more = {**DOCUMENT, "seeds": [1, 0, 2], "arms": [*DOCUMENT["arms"], {"method": "g2rl"}]}
    assert differences(old, read_comparison(more).document()) == []
    changed = {
        **DOCUMENT,
        "seeds": [0],
        "budget": {"seconds": 5},
        "common": {"learning_rate": 1e-3},
        "arms": [{"method": "grpo", "options": {"beta": 0.1}}],
    }
    assert differences(old, read_comparison(changed).document()) == [
        "budget.tokens: 100.0 in the folder, not set now",
        "budget.seconds: not set in the folder, 5.0 now",
        "common.learning_rate: 0.0003 in the folder, 0.001 now",
        "seeds: 1 in the folder, not in this comparison",
        "arms.GRPO.options.beta: not set in the folder, 0.1 now",
        "arms: deep | <b> in the folder, not in this comparison",
    ]


def test_a_folder_of_another_comparison_is_refused(tmp_path):
    ComparisonFolder(read_comparison(DOCUMENT), tmp_path).write_settings()
    ComparisonFolder(read_comparison({**DOCUMENT, "seeds": [0, 1, 7]}), tmp_path)
    message = r"holds another comparison: num_eval: 128 in the folder, 64 now.*--output_dir"
    with pytest.raises(UsageError, match=message):
        ComparisonFolder(read_comparison({**DOCUMENT, "num_eval": 64}), tmp_path)
    with pytest.raises(UsageError, match=r"comparison.yaml' is a file; name a folder"):
        ComparisonFolder(read_comparison(DOCUMENT), tmp_path / "comparison.yaml")


def test_changed_inputs_are_refused_and_folders_without_fingerprints_are_not(tmp_path):
    comparison, known = read_comparison(DOCUMENT), {"training_rows": "1a", "model": "2b"}
    folder = ComparisonFolder(comparison, tmp_path)
    folder.write_settings()
    assert "fingerprints" not in (tmp_path / "comparison.yaml").read_text()
    folder = ComparisonFolder(comparison, tmp_path)  # as folders were before they had fingerprints
    folder.check_fingerprints(known)
    folder.write_settings()
    ComparisonFolder(comparison, tmp_path).write_settings()  # with nothing to train, they stay
    again = ComparisonFolder(read_comparison({**DOCUMENT, "seeds": [0, 1, 7]}), tmp_path)
    again.check_fingerprints(known)
    with pytest.raises(UsageError, match="Changed under the same name: training rows, model.*--output_dir"):
        again.check_fingerprints({"training_rows": "other", "model": "another", "held_out_rows": "3c"})
    written = yaml.safe_load((tmp_path / "comparison.yaml").read_text())
    assert written.pop("fingerprints") == known
    assert read_comparison({**written, "fingerprints": known}).document() == written  # they are no setting


def numbered(size, other=None):
    """A data set whose rows are numbered, but for one that says something else."""
    return Dataset.from_dict({"prompt": ["other" if number == other else str(number) for number in range(size)]})


def test_a_fingerprint_of_rows_depends_on_all_of_them():
    rows = [numbered(0), numbered(2500), numbered(2501), *(numbered(2500, place) for place in (0, 1234, 2499))]
    assert len({rows_fingerprint(data) for data in rows}) == len(rows)
    transformed = numbered(2500).with_transform(lambda batch: {"prompt": ["another"] * len(batch["prompt"])})
    assert rows_fingerprint(transformed) == rows_fingerprint(numbered(2500))


def test_a_fingerprint_of_many_rows_takes_evenly_spaced_ones(monkeypatch):
    monkeypatch.setattr(fingerprints, "MOST_ROWS", 10)
    usual = rows_fingerprint(numbered(25))  # of every third row
    assert [rows_fingerprint(numbered(25, place)) == usual for place in (0, 1, 23, 24)] == [False, True, True, False]


def pictured(*pictures, prompt="same", size=100):
    """A data set with a picture of random colours per row, given by its seed, alone and in a list."""
    rows = []
    for seed in pictures:
        pixels = np.random.default_rng(seed).integers(0, 256, size=(size, size, 3), dtype=np.uint8)
        rows.append({"prompt": prompt, "image": PIL.Image.fromarray(pixels), "images": [PIL.Image.fromarray(pixels)]})
    features = Features({"prompt": Value("string"), "image": Image(), "images": List(Image())})
    return Dataset.from_list(rows, features=features)


def test_a_fingerprint_of_rows_with_images_depends_on_all_of_them():
    usual = rows_fingerprint(pictured(0, 1, 2))
    assert rows_fingerprint(pictured(0, 1, 2)) == usual
    others = [pictured(0, 1, 3), pictured(1, 0, 2), pictured(0, 1), pictured(0, 1, 2, prompt="other")]
    assert usual not in [rows_fingerprint(data) for data in others]


def test_a_fingerprint_of_rows_reads_a_small_part_of_images():
    data = pictured(0, 1, 2, 3, size=300)  # eight images of more than 200 kB
    tracemalloc.start()
    try:
        rows_fingerprint(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("fingerprints: 3\narms: []\nseeds: []", "holds no comparison"),
        ("arms: [", "is no YAML file"),
        ("", "holds no comparison"),
        ("- 1", "holds no comparison"),
        ("arms: [1]\nseeds: [0]", "holds no comparison"),
        ("arms: [{name: [1]}]\nseeds: [0]", "holds no comparison"),
        (b"\xff\xfe\x00abc", "is no YAML file"),
    ],
)
def test_damaged_settings_are_refused(tmp_path, text, error):
    (tmp_path / "comparison.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=f"comparison.yaml {error}.*restore it, or remove the folder"):
        ComparisonFolder(read_comparison(DOCUMENT), tmp_path)


def test_an_empty_budget_cannot_be_infinite():
    with pytest.raises(UsageError, match="budget.tokens=inf: it must be positive and finite"):
        read_comparison({**DOCUMENT, "budget": {"tokens": math.inf}})


def test_the_documented_files_are_comparisons():
    page = (ROOT / "docs" / "comparing.md").read_text()
    own, embedded = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    own["common"] |= {"use_cpu": True, "bf16": False}  # a configuration asks for a GPU that supports bfloat16
    comparison = read_comparison(own)
    assert (comparison.unit, comparison.amount, comparison.seeds) == ("tokens", 2e6, (0, 1, 2))
    assert [arm.name for arm in comparison.arms] == ["GRPO", "DEEP-GRPO"]
    assert read_comparison(embedded).arms[2].options["pivot_selection"] == "root"
    assert tuple(ALL_TASKS) == TASK_NAMES
    for name in ALL_TASKS:
        assert name in page


def test_agents_are_sampled_in_whole_evaluations():
    document = {"task": "multi_hop", "budget": {"tokens": 1}, "arms": [{"method": "grpo"}], "samples_at_ends": 12}
    assert read_comparison(document).samples_at_ends == 12
    with pytest.raises(UsageError, match="samples_at_ends=12: give a multiple of 8, which an evaluation of multi_hop"):
        read_comparison({**document, "metrics": ["reward", "pass_at_8"]})
