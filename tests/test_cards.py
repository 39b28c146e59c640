import math
from dataclasses import dataclass, field, replace

import pytest
import yaml
from card_metadata import metadata_errors
from huggingface_hub import ModelCard
from trl import GRPOConfig

from trl_explore.methods import METHODS
from trl_explore.publishing.card_metrics import evaluation_results, format_duration, logged_metrics
from trl_explore.publishing.cards import (
    TrainingFacts,
    code_span,
    describe_datasets,
    describe_model,
    escape_markdown,
    model_card,
    shown_hyperparameters,
)
from trl_explore.publishing.curves import training_curves
from trl_explore.trainers import (
    BranPOConfig,
    DeepGRPOConfig,
    DeepGRPOTrainer,
    EvolRLTrainer,
    ExplorationTrainer,
    SESAConfig,
)

TRAINERS = [row.trainer_class for row in METHODS.values() if not row.plain]
HEADINGS = [
    "## Overview",
    "## Usage",
    "## What differs from GRPO",
    "## Hyper-parameters",
    "## Training metrics",
    "## Implementation notes",
    "## Citation",
]
HISTORY = [
    {"step": 0, "eval/pass_at_1": 0.25, "eval/pass_at_8": 0.5},
    {"step": 1, "reward": 0.125, "pivots/mean_depth": 0.5, "loss": 0.0},
    {"step": 9, "reward": 1 / 3, "pivots/mean_depth": math.nan},
    {"step": 9, "eval/pass_at_1": 0.5, "eval/pass_at_8": 0.75, "eval/greedy_accuracy": 0.625, "eval/reward": 0.1},
    {"step": 9, "eval_reward": 0.5, "eval_loss": 0.0},
    {"step": 10, "train_runtime": 3.0},
]


def facts(trainer=DeepGRPOTrainer, **changes):
    known = TrainingFacts(
        method=trainer.method,
        model_name="my-model",
        trainer=trainer.__name__,
        repo_id="me/my-model",
        base_model="Qwen/Qwen3-0.6B",
        datasets=["openai/gsm8k"],
        paper=trainer._paper,
        tags=trainer._tag_names,
        hyperparameters={"num_branches": 8, "learning_rate": 1e-6},
        history=HISTORY,
    )
    return replace(known, **changes)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_method_has_the_same_headings_and_its_own_paper(trainer):
    card = model_card(facts(trainer))
    assert [line for line in card.text.splitlines() if line.startswith("## ")] == HEADINGS
    paper = trainer._paper
    assert f"https://huggingface.co/papers/{paper['id']}" in card.text and paper["citation"] in card.text
    # "auto" alone would say nothing on the Hub, so its tag is "auto-explore".
    own_tag = {"auto": "auto-explore"}.get(trainer.method, trainer.method.replace("_", "-"))
    assert {"trl-explore", f"arxiv:{paper['id']}", own_tag} <= set(card.data.tags)
    assert metadata_errors(str(card)) == [] and "None" not in card.text


@pytest.mark.parametrize(
    ("fields", "shown", "not_shown"),
    [
        ({}, ["GRPO without labels", "most frequent answer", "from 0.5 to 1", "without an answer get -1"], []),
        (
            dict(correctness="reward", novelty_band=0.2),
            ["The reward functions decided", "`success_threshold`", "from 0.8 to 1, wrong ones from -1 to -0.8"],
            ["without labels", "majority", "frequent answer", "from 0.5"],
        ),
        (dict(novelty_band=0.0), ["Right completions get the reward 1, all others -1"], ["unusual", "novelty of a"]),
        (dict(correctness="reward", novelty_band=0.0), ["EVOL-RL trains as GRPO does"], ["unusual", "1. "]),
        (dict(novelty_scores="shuffled"), ["permuted at random"], ["unusual"]),
    ],
    ids=str,
)
def test_the_card_of_evol_rl_says_what_its_run_did(fields, shown, not_shown):
    text = model_card(facts(EvolRLTrainer, hyperparameters=fields)).text
    text = text[text.index("## Overview") : text.index("## Implementation notes")]
    assert [words for words in shown if words not in text] == []
    assert [words for words in not_shown if words in text] == []


def test_the_check_of_metadata_finds_what_the_hub_refuses():
    card = model_card(facts())
    for change in ({"base_model": "None"}, {"datasets": ["/home/me/data.jsonl"]}, {"tags": [1]}, {"license": None}):
        data = yaml.safe_load(card.data.to_yaml()) | change
        assert len(metadata_errors(f"---\n{yaml.safe_dump(data)}---\n")) == 1, change


def test_plain_grpo_has_a_card_too():
    text = model_card(facts(ExplorationTrainer, paper={}, tags=[])).text
    assert "`ExplorationTrainer` is plain GRPO. The table below lists the fields that were changed." in text
    assert "The method:" not in text and "a subclass of" not in text


def test_a_trainer_of_ones_own_has_its_parents_card_which_says_so():
    class Mine(DeepGRPOTrainer):
        pass

    text = model_card(facts(Mine)).text
    assert "with `Mine`, a subclass of `DeepGRPOTrainer` of trl-explore." in text
    assert "`Mine` may change more: its own code is not part" in text
    assert "`DeepGRPOTrainer` of trl-explore" in (own := model_card(facts()).text) and "its own code" not in own


def test_the_metadata_survive_being_written_and_read():
    card = model_card(facts())
    data = ModelCard(str(card)).data
    assert data.to_dict() == card.data.to_dict()
    assert data.base_model == "Qwen/Qwen3-0.6B" and data.datasets == ["openai/gsm8k"]
    assert data.library_name == "transformers" and data.pipeline_tag == "text-generation"
    assert data.to_dict()["base_model_relation"] == "finetune"
    assert {result.metric_name: result.metric_value for result in data.eval_results} == {
        "pass@1": 0.5,
        "pass@8": 0.75,
        "greedy accuracy": 0.625,
        "reward": 0.5,
    }
    assert "Evaluated at step 9" in card.text and "| pass@8 | 0.75 |" in card.text
    card = model_card(facts(history=[{"step": 1, "reward": 1.0}]))  # without an evaluation there are no results
    assert "model-index" not in card.data.to_dict() and "Evaluated" not in card.text


def test_a_card_names_the_rewards_with_their_weights_and_the_time_of_training():
    log = [
        {"step": 2, "reward": 0.5, "step_time": 600.0},
        {"step": 2, "eval_reward": 0.5},
        {"step": 5, "reward": 0.5, "step_time": 1200.0},
        {"step": 5, "train_runtime": 7.0},  # of the last part of a resumed run
    ]
    weighted = [("accuracy_reward", 0.65), ("<lambda>", 0.2)]
    text = model_card(facts(rewards=weighted, history=log)).text
    assert "rewarded by `accuracy_reward` (weight 0.65) and `'<lambda>'` (weight 0.2)." in text
    assert "Training took 1 h 20 min up to step 5, without evaluation and saving." in text
    text = model_card(facts(rewards=[("accuracy_reward", 1.0), ("form", 1.0)], history=[])).text
    assert "rewarded by `accuracy_reward` and `form`." in text
    assert "Training took" not in text and "No metrics were logged." in text
    durations = ["0.25 s", "59 s", "1 min 1 s", "1 h 0 min"]
    assert [format_duration(seconds) for seconds in (0.25, 59.4, 61, 3600)] == durations


def test_an_adapter_says_how_it_is_loaded():
    on_hub = model_card(facts(adapter="LORA"))
    assert 'AutoPeftModelForCausalLM.from_pretrained("me/my-model")' in on_hub.text
    assert on_hub.data.library_name == "peft" and on_hub.data.to_dict()["base_model_relation"] == "adapter"
    local = model_card(facts(adapter="LORA", base_model="", repo_id=None))
    assert 'PeftModel.from_pretrained(base, "path/to/this/folder")' in local.text


def test_a_card_shows_its_curves_or_why_there_are_none():
    assert "](training_curve.png)" in model_card(facts(curve="training_curve.png")).text
    without = model_card(facts(needs_plots=True)).text
    assert 'pip install "trl-explore[plots]"' in without and "![" not in without
    assert "| `reward` | mean reward, as the reward functions gave it | 0.125 | 0.3333 |" in without


def test_foreign_text_stays_text(tmp_path):
    name = "<script>alert(1)</script> [x](javascript:y) **b** `c` | d\n# e"
    card = model_card(facts(model_name=name, hyperparameters={"template": "`{a}` | <b>\n"}, datasets=["../a|b.jsonl"]))
    title = next(line for line in card.text.splitlines() if line.startswith("# "))
    assert title == (r"# &lt;script&gt;alert(1)&lt;/script&gt; \[x\](javascript\:y) \*\*b\*\* \`c\` \| d \# e")
    assert "| `template` | `` '`{a}` \\| <b>\\n' `` |" in card.text
    assert "../a" not in str(card)
    assert ModelCard(str(card)).data.eval_results[0].metric_value == 0.5


def test_no_escape_sequence_reaches_a_card():
    hostile = "m\x1b]0;title\x07\x9b\u202e"
    history = [{"step": 1, "reward": 0.5, f"{hostile}/pass_at_1": 0.5}]
    names = dict(model_name=hostile, repo_id=hostile, base_model=hostile, revision=hostile, datasets=[hostile])
    card = model_card(facts(**names, hyperparameters={"template": hostile}, tags=[hostile], history=history))
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(card.text)
    assert not {"\x1b", "\x07", "\x9b"} & set(str(card))
    assert r'model="m\x1b]0;title\x07\x9b\u202e"' in card.text


def test_code_keeps_its_fence_and_its_line():
    assert code_span("delimiter") == "`delimiter`"
    assert code_span("a b") == "`'a b'`"
    assert code_span(["a|b", "``"]) == "``` ['a\\|b', '``'] ```"
    assert code_span("x" * 300) == f"`{'x' * 200} ...`"
    assert escape_markdown("www.a.b a_b") == r"www\.a.b a\_b"


def test_models_are_named_without_the_paths_of_this_machine(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    assert describe_model(str(folder)) == (None, "a local model, `tiny`")
    assert describe_model("/gone/long ago") == (None, "a local model, `'long ago'`")
    assert describe_model("") == (None, "a model that was made in the training script")
    assert describe_model("a/b-c_d") == ("a/b-c_d", r"[a/b-c\_d](https://huggingface.co/a/b-c_d)")
    cached = "/home/x/hub/models--Qwen--Qwen3-0.6B/snapshots/0123"
    assert describe_model(cached)[0] == "Qwen/Qwen3-0.6B"


def test_data_are_named_where_they_are_on_the_hub(tmp_path):
    assert describe_datasets([]) == ([], "a local data set")
    assert describe_datasets([], local=False) == ([], "a data set that was not named")
    assert describe_datasets([str(tmp_path), "data.jsonl"]) == ([], "local data sets")
    ids, text = describe_datasets(["a/b", "a/b", "c", "./d"])
    assert ids == ["a/b", "c"]
    hub = "https://huggingface.co/datasets"
    assert text == f"[a/b]({hub}/a/b) and [c]({hub}/c) and a local data set"


def test_hyperparameters_are_the_methods_and_what_differs_but_no_secrets_or_paths(tmp_path):
    config = DeepGRPOConfig(
        output_dir=str(tmp_path),
        hub_token="hf_secret",
        run_name="private",
        hard_states_file="hard.jsonl",
        learning_rate=3e-5,
        model_init_kwargs={"cache_dir": "/home"},
        vllm_server_host="10.0.0.1",
        logging_steps=7,
        num_branches=4,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    told = shown_hyperparameters(config, GRPOConfig)
    assert told["num_branches"] == 4 and told["depth_bias"] == 2.0 and told["learning_rate"] == 3e-5
    assert list(told).index("depth_bias") < list(told).index("learning_rate")
    assert "beta" not in told and "epsilon" not in told
    text = repr(told)
    for untold in ("hf_secret", "private", "hard.jsonl", "/home", "10.0.0.1", "logging", str(tmp_path)):
        assert untold not in text


def test_knobs_are_told_whatever_their_names_begin_with_if_they_are_plain_values():
    told = shown_hyperparameters(BranPOConfig(eval_interaction_limit=4, use_cpu=True, bf16=False), GRPOConfig)
    assert told["eval_interaction_limit"] == 4 and "push_method_state" not in told
    told = shown_hyperparameters(SESAConfig(output_dir="x", use_cpu=True, bf16=False), GRPOConfig)
    assert told["sketch_template"].startswith("{problem}")

    @dataclass
    class Config(GRPOConfig):
        knob: object = field(default_factory=object)
        access_token: str = "secret"

    assert not {"knob", "access_token"} & shown_hyperparameters(Config(use_cpu=True, bf16=False), GRPOConfig).keys()


def test_results_are_those_of_the_newest_evaluation():
    assert evaluation_results(HISTORY[:2]) == ({"pass@1": 0.25, "pass@8": 0.5}, 0)
    assert evaluation_results([{"step": 3, "hard/maj_at_4": 0.5, "eval/coverage_at_2": 1.0}]) == (
        {"hard maj@4": 0.5, "coverage@2": 1.0},
        3,
    )
    assert evaluation_results([{"step": 3, "reward": 0.5, "eval_loss": 1.0, "eval_reward": math.nan}]) == ({}, 0)


def test_curves_are_drawn_of_what_was_logged(tmp_path):
    pytest.importorskip("matplotlib")
    metrics = logged_metrics("deep_grpo", HISTORY)
    assert metrics == ["reward", "pivots/mean_depth", "eval/pass_at_1", "eval/pass_at_8", *metrics[4:]]
    assert metrics[4:] == ["eval/greedy_accuracy", "eval_reward"]
    path = training_curves(HISTORY, tmp_path / "new" / "curve.png", metrics=metrics)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 300_000
