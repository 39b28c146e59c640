"""The pages of the methods against the code: knobs and their defaults, metrics, and the cost formulas against runs."""

import ast
import inspect
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest
from commands import ROOT
from test_branpo import Voice, agent
from trl import GRPOTrainer
from world import make_trainer, says

from trl_explore.methods import METHODS
from trl_explore.trainers import ExplorationConfig, sesa_config
from trl_explore.trainers.explorer_configs import HintConfig, ReplayConfig

MACROS = runpy.run_path(str(ROOT / "docs" / "macros.py"))
DIAGRAMS = runpy.run_path(str(ROOT / "docs" / "make_diagrams.py"))
PAGES = ROOT / "docs" / "methods"
OURS = [name for name, row in METHODS.items() if not row.plain]
TABLES = [*OURS, "exploration"]
HEADINGS = [
    "Set these three fields first",
    "The reward",
    "Cost",
    "When it helps",
    "How it works",
    "Paper, authors' code, here",
    "Metrics",
    "Knobs",
]


def table_rows(text):
    """The cells of a table, without its head and the heading of rarely needed fields."""
    return [row[2:-2].split(" | ") for row in text.splitlines()[2:] if row != MACROS["RARE_HEADING"]]


def value_of(text):
    return vars(sesa_config)[text] if text.isupper() else ast.literal_eval(text)


def own_defaults(config_class):
    config = config_class("out", use_cpu=True)
    return {name: vars(config)[name] for name in config_class.__annotations__}


@pytest.mark.parametrize("method", TABLES)
def test_the_table_of_knobs_has_every_field_with_its_default_and_its_help(method):
    config = METHODS[method].config_class
    rows = table_rows(MACROS["knobs"](method))
    assert {name[1:-1]: value_of(default[1:-1]) for name, default, _ in rows} == own_defaults(config)
    rare = MACROS["RARELY_NEEDED"].get(method, ())
    usual = [name for name in config.__annotations__ if name not in rare]
    assert [name[1:-1] for name, _, _ in rows] == [*usual, *rare]
    assert (MACROS["RARE_HEADING"] in MACROS["knobs"](method)) == bool(rare)
    helps = {f.name: f.metadata["help"].replace("%%", "%") for f in fields(config)}
    assert all(text.replace("`", "") == helps[name[1:-1]] for name, _, text in rows)


def test_the_table_of_metrics_has_all_or_those_with_a_beginning():
    own = METHODS["tree_grpo"].metrics
    assert table_rows(MACROS["metrics"]("tree_grpo")) == [[f"`{name}`", meaning] for name, meaning in own.items()]
    replay = [f"`{name}`" for name in own if name.startswith("replay/")]
    assert [name for name, _ in table_rows(MACROS["metrics"]("tree_grpo", "replay/"))] == replay


@pytest.mark.parametrize("method", OURS)
def test_every_method_has_a_page_with_the_same_headings_and_its_own_tables_and_picture(method):
    page = (PAGES / f"{method}.md").read_text()
    headings = [heading for heading in re.findall("^## (.+)$", page, re.MULTILINE) if heading in HEADINGS]
    assert headings == HEADINGS
    assert re.findall(r"^{{ (.+) }}$", page, re.MULTILINE) == [f'metrics("{method}")', f'knobs("{method}")']
    assert set(re.findall(r"images/(\S+)#only-(\w+)", page)) == {(f"{method}-{t}.svg", t) for t in ("light", "dark")}
    row = METHODS[method]
    assert row.paper["id"] in page and row.trainer in page and row.config in page
    index = (ROOT / "trainers" / "README.md").read_text()
    assert f"(../docs/methods/{method}.md)**" in index and f"`{row.trainer}`" in index


@pytest.mark.parametrize("config", [HintConfig, ReplayConfig])
def test_the_page_of_auto_has_every_option_of_hints_and_replay_with_its_default(config):
    page = (PAGES / "auto.md").read_text()
    options = dict(re.findall(r"^\| `((?:hint|replay)_\w+)` \| `(.*?)` \| ", page, re.MULTILINE))
    defaults = own_defaults(config)
    assert {name: ast.literal_eval(options[name]) for name in options.keys() & defaults.keys()} == defaults


def test_the_pictures_are_what_the_script_draws():
    drawn = DIAGRAMS["draw"]()
    folder = ROOT / "docs" / "images"
    assert {f"{name}-{theme}.svg" for name in OURS for theme in ("light", "dark")} == drawn.keys()
    assert [name for name, text in drawn.items() if (folder / name).read_text() != text] == []


@pytest.mark.parametrize(
    "config", [ExplorationConfig, HintConfig, ReplayConfig, *(METHODS[name].config_class for name in OURS)]
)
def test_the_docstring_says_type_and_default_of_every_field_and_is_its_help(config):
    entry = r"^    (\w+) \(`(.*?)`, \*optional\*(?:, defaults to `(.*)`)?\):$"
    entries = re.findall(entry, inspect.cleandoc(config.__doc__), re.MULTILINE)
    types = {}
    for name, kind in config.__annotations__.items():
        types[name] = re.sub(r"typing\.|collections\.abc\.", "", inspect.formatannotation(kind))
    assert [(name, kind) for name, kind, _ in entries] == [(n, t.removesuffix(" | None")) for n, t in types.items()]
    defaults = own_defaults(config)
    assert {n: value_of(d) for n, _, d in entries if d} == {n: defaults[n] for n, _, d in entries if d}
    assert all(d or defaults[n] is None for n, _, d in entries)
    assert all(f.metadata["help"] for f in fields(config))


def make(method, folder, **options):
    row = METHODS[method]
    return make_trainer(row.trainer_class, row.config_class, folder, **options)


def first_step(trainer):
    trainer.train()
    return trainer.state.log_history[0]


def sampled(monkeypatch):
    """Counts every token that comes out of the sampler."""
    total = []
    generate = GRPOTrainer._generate_single_turn

    def counting(*args, **kwargs):
        ids, logprobs = generate(*args, **kwargs)
        total.append(sum(map(len, ids)))
        return ids, logprobs

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", counting)
    return total


def test_deep_grpo_generates_what_the_formula_says(tmp_path, monkeypatch):
    total = sampled(monkeypatch)
    # One row per call: rows of one call are sampled up to the longest budget among them, and cut.
    options = dict(num_branches=3, segmentation="fixed", segment_length=2, max_steps=1, sampling_batch_size=1)
    options["path_cache_tokens"] = 0  # all rows come through TRL's generation, where they are counted
    log = first_step(make("deep_grpo", tmp_path, **options))
    formula = 8 * log["completions/mean_length"]
    formula += 8 * log["pivots/failure_fraction"] * 1 * 3 * log["pivots/mean_suffix_length"]
    assert formula == pytest.approx(sum(total)) and log["pivots/failure_fraction"] > 0


def test_a_tree_generates_at_most_what_the_formula_says(tmp_path):
    options = dict(expansion_width=3, node_length=2, max_search_iterations=6, skip_uniform_trees=False, max_steps=1)
    log = first_step(make("tree_grpo", tmp_path, **options))
    per_tree = log["tree/iterations"] * 3 * 2 + 4 * log["tree/direct_fraction"] * 8
    assert log["tree/direct_fraction"] > 0
    assert 0 < log["tree/sampled_tokens"] <= 2 * per_tree
    assert log["tree/trained_tokens"] == pytest.approx(8 * log["completions/mean_length"])


def test_sketches_cost_what_the_formula_says(tmp_path, monkeypatch):
    total = sampled(monkeypatch)
    options = dict(num_sketches=3, max_sketch_length=2, max_steps=1, path_cache_tokens=0)
    log = first_step(make("sesa", tmp_path, **options))
    assert log["sketch/tokens"] <= 2 * 3 * 2
    formula = 8 * log["completions/mean_length"] + log["sketch/tokens"]
    assert formula == log["sketch/sampled_tokens"] == sum(total)


def test_branpo_generates_and_trains_what_the_formula_says(tmp_path, monkeypatch):
    speaker = Voice(0.3)
    says(speaker, monkeypatch.setattr)
    total = sampled(monkeypatch)
    trainer = agent(tmp_path, max_steps=1, num_branches=1, branch_depth=1, branch_depth_hard=1, redundancy_tries=0)
    log = first_step(trainer)
    main = sum(sum(trajectory.loss_mask) for trajectory in trainer.trajectories)
    assert main + log["branch/sampled_tokens"] == sum(total)
    kept = trainer.branching.results[0].scored
    assert kept.real.sum() == 8 * (log["branch/contrastive_fraction"] + log["branch/redundant_fraction"])
    masks = kept.rows["completion_mask"] * kept.rows["tool_mask"]
    assert 0 < masks.sum() <= log["branch/sampled_tokens"]


@pytest.mark.parametrize(
    "method, numbers",
    {
        "deep_grpo": [8 * 256, 8 * 0.5 * 1 * 8 * 80, 8 * 256 + 8 * 0.5 * 8 * 80],
        "tree_grpo": [8 * 256 * 8, 8 * 8, 64 * 8 * 256, 8 * 2048, 16 * 8 * 256],
        "sesa": [8 * 256 + 8 * 64],
        "branpo": [4 * 1000, 4 * 1 * (2 + 6) // 2 * 200, int(4 * 0.5 * 200)],
    }.items(),
)
def test_the_worked_lines_are_the_formulas(method, numbers):
    text = (PAGES / f"{method}.md").read_text().split("\n## Cost\n")[1].split("\n## ")[0]
    found = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\b(?!\.)", text) if number.strip(",")]
    assert {int(number) for number in numbers} <= set(found)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), reason="no browser")
def test_the_screenshots_can_be_made_anew(tmp_path):
    script = [sys.executable, str(ROOT / "docs" / "make_screenshots.py"), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True)
    assert {file.name for file in tmp_path.glob("*.png")} == {"search_tree.png", "completions_table.png"}, done.stderr
