"""What is published, and what is said when it is not; `hub_runs.py` does it all against a stand-in of the Hub."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

SCRIPT = Path(__file__).with_name("hub_runs.py")
TOKENIZER = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
MODEL = ["config.json", "generation_config.json", "model.safetensors"]
CARD = ["README.md", "training_curve.png"]
ALL = sorted(MODEL + TOKENIZER + CARD)

pytestmark = [pytest.mark.xdist_group("hub"), pytest.mark.slow]


def run(folder, *scenarios):
    results = folder / "results.json"
    done = subprocess.run([sys.executable, str(SCRIPT), str(results), *scenarios], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(tmp_path_factory.mktemp("hub"), "whole", "adapter", "evaluation", "late", "draft", "refusals")


@pytest.fixture(scope="module")
def slow_results(tmp_path_factory):
    return run(tmp_path_factory.mktemp("hub"), "checkpoints", "methods", "command")


def metadata(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_a_published_model_is_read_back_bit_by_bit(results):
    assert results["whole"]["equal"] and results["whole"]["files"] == ALL
    assert results["whole"]["left"] == []


def test_neither_tokens_nor_paths_of_this_machine_are_published(results):
    assert results["whole"]["leaks"] == results["adapter"]["leaks"] == []
    assert results["whole"]["token in pickles"] == []


def test_local_models_and_data_are_called_local(results):
    for name in ("whole", "adapter"):
        card = results[name]["card"]
        assert "a local model, `small-world-" in card and "a local data set" in card and "[None]" not in card
        assert not {"base_model", "datasets", "base_model_relation"} & metadata(card).keys()


def test_a_push_that_fails_while_training_is_one_warning_and_the_next_sends_all(results):
    assert results["whole"]["warning"] == (
        "'Training in progress, step 1' was not sent to me/whole: the Hub answered 500 (out of order). Training goes "
        "on, and the next push sends everything again.\n"
    )
    assert results["whole"]["messages"] == ["Training in progress, step 2"]
    assert results["whole"]["sent while training"]


def test_an_adapter_is_published_alone_on_its_branch_in_a_private_repository(results):
    adapter = results["adapter"]
    assert adapter["equal"] and adapter["private"]
    assert adapter["files"] == sorted(["adapter_config.json", "adapter_model.safetensors", *TOKENIZER, *CARD])
    assert adapter["files on main"] == []
    assert adapter["base"].startswith("small-world-")
    assert metadata(adapter["card"])["library_name"] == "peft"
    assert 'PeftModel.from_pretrained(base, "me/adapter", revision="dev")' in adapter["card"]


def test_an_evaluation_with_an_adapter_of_the_hub_continues_unless_the_adapter_has_changed(results):
    evaluation = results["evaluation"]
    for name in ("first", "again", "revision of the base"):
        assert evaluation[name]["code"] == 0, evaluation[name]["told"]
    assert evaluation["changed"]["code"] == evaluation["missing"]["code"] == 2
    assert "results.json holds results of other weights" in evaluation["changed"]["told"]
    assert "adapter_name_or_path='me/nothing' cannot be loaded: " in evaluation["missing"]["told"]


def test_checkpoints_after_a_push_to_another_branch_go_to_their_own(results):
    draft = results["draft"]
    assert draft["equal"] and draft["files on draft"] == sorted(MODEL + TOKENIZER + ["README.md"])
    assert 'revision="draft"' in draft["card on draft"] and "revision=" not in draft["card on main"]


def test_a_push_that_fails_loses_nothing_and_is_repeated_by_its_command(results):
    late = results["late"]
    assert late["saved"] and late["files before"] == []
    assert late["error"] == (
        "HubError: cannot publish as 'me/late': the Hub answered 500 (out of order). Nothing is lost: the model is in "
        f"{late['folder']}/late. Send it with `trainer.push_to_hub()`, or with the command:\n"
        f"  hf upload me/late {late['folder']}/late/_hub . --private"
    )
    assert late["command"][0] == 0, late["command"][1]
    assert late["files after"] == ALL
    # The trainer's own second try finds everything sent.
    assert late["messages"] == ["Upload folder using huggingface_hub"]


def test_what_needs_no_hub_to_be_wrong_is_found_before_anything_is_sent(results):
    refusals = results["refusals"]
    assert refusals["requests"] == []
    assert refusals["forbidden name"] == (
        "ValueError: `hub_model_id='me/my model!'` cannot be the name of a repository: set `hub_model_id` to `name` "
        "or `owner/name`, of letters, digits, `_`, `-` and `.` (`-` and `.` not doubled and not at an end), at most "
        "96 characters."
    )
    assert refusals["forbidden folder"].startswith("ValueError: the name of the output folder, 'my model!', cannot be")
    assert refusals["no token"] == (
        "HubError: publishing as 'me/x' needs a token: log in with `hf auth login`, or set HF_TOKEN; or leave "
        "`push_to_hub` out."
    )


@pytest.mark.parametrize(
    "case, message",
    [
        ("wrong token", "HubError: cannot publish as 'me/x': the Hub does not accept the token: log in again with"),
        ("no rights", "HubError: cannot publish as 'me/x': the token has no write access there: log in with one that"),
        ("out of order", "HubError: cannot publish as 'me/x': the Hub answered 503 (out of order)."),
        ("nobody there", "HubError: cannot publish as 'me/x': ConnectError: "),
        (
            "model over adapter",
            "ValueError: the repository 'me/adapter' holds an adapter, and this is a whole model: ",
        ),
        ("adapter over model", "ValueError: the repository 'me/model' holds a whole model, and this is an adapter: "),
        ("other architecture", "ValueError: the repository 'me/llama' holds a LlamaForCausalLM, and this is a Qwen2"),
    ],
)
def test_what_the_hub_stands_against_is_refused_before_training(results, case, message):
    assert results["refusals"][case].startswith(message)


def test_a_clash_that_shows_late_leaves_the_name_to_the_user(results):
    error = results["refusals"]["model over adapter, late"]
    assert error.startswith("HubError: the repository 'me/adapter' holds an adapter")
    assert "\n  hf upload OWNER/OTHER-NAME " in error


def test_the_same_kind_of_model_may_be_published_again(results):
    assert results["refusals"]["same architecture"] is None


def test_published_checkpoints_are_whole_and_resume_bit_by_bit(slow_results):
    checkpoint = ["explore_state_0.pt", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"]
    whole = [*MODEL, *TOKENIZER, *checkpoint]
    checkpoints = slow_results["checkpoints"]
    assert checkpoints["last"] == sorted([*ALL, *(f"last-checkpoint/{name}" for name in whole)])
    # The first push failed; the second brought both.
    assert checkpoints["all"] == sorted([*ALL, *(f"checkpoint-{step}/{name}" for step in (1, 2) for name in whole)])
    assert checkpoints["resumed equal"]


def test_a_run_whose_pushes_all_failed_is_published_by_the_one_that_takes_it_up(slow_results):
    assert "the Hub answered 500" in slow_results["checkpoints"]["broken"]
    assert slow_results["checkpoints"]["taken up"]


def test_method_state_is_published_on_request_only(slow_results):
    assert slow_results["methods"]["bare"] == ALL
    assert slow_results["methods"]["trees"] == sorted([*ALL, "explore_state_0.pt", "trees/trees_0.jsonl"])
    assert slow_results["methods"]["state"] == ["solutions", "solutions_bytes", "trees_bytes"]


def test_models_and_data_of_the_hub_are_linked_and_in_the_metadata(slow_results):
    card, unnamed = slow_results["methods"]["tree_grpo"], slow_results["methods"]["unnamed"]
    assert "Trained from [me/start](https://huggingface.co/me/start), on [me/sums]" in card
    assert metadata(card)["base_model"] == "me/start" and metadata(card)["datasets"] == ["me/sums"]
    assert "on a data set that was not named" in unnamed and "datasets" not in metadata(unnamed)


@pytest.mark.parametrize("method, own", [("sesa", "sketch/"), ("g2rl", "geometry/"), ("branpo", "branch/")])
def test_cards_tell_the_metrics_of_their_method(slow_results, method, own):
    assert f"| `{own}" in slow_results["methods"][method]


def test_the_command_line_publishes_and_tells_failures_in_short(slow_results):
    command = slow_results["command"]
    well, fails, refused = command["well"], command["fails"], command["refused"]
    assert well["code"] == 0 and command["files"] == ALL and "a local data set" in command["card"]
    assert well["said"].endswith(f"model saved to {well['folder']}\nPushed to {command['url']}/me/cli\n")
    assert fails["code"] == 1 and command["saved"]
    assert (
        "trl-explore: error: cannot publish as 'me/fails': the Hub answered 500 (out of order). Nothing is"
        in (fails["told"])
    )
    assert fails["told"].endswith(f"\n  hf upload me/fails {fails['folder']}/_hub .\n")
    assert refused["code"] == 2
    assert (
        refused["told"].splitlines()[-1].startswith("trl-explore: error: cannot publish as 'me/refused': the Hub does")
    )
