"""
Publishing with the real client over a real socket: python hub_runs.py RESULTS SCENARIO ...

Writes what happened as JSON; `test_hub.py` says what it should be.
"""

import io
import json
import logging
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent.parent))  # for `examples.benchmarks.tasks`

from hub_standin import TOKEN, Repository, StandIn

hub = StandIn()
# Read by huggingface_hub when it is imported.
os.environ |= {
    "HF_ENDPOINT": hub.url,
    "HF_TOKEN": TOKEN,
    "HF_HOME": tempfile.mkdtemp(),
    "HF_HUB_OFFLINE": "0",
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}

import torch
from datasets import load_dataset
from huggingface_hub import ModelCard, close_session, snapshot_download
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load
from transformers import AutoModelForCausalLM, TrainerCallback
from world import make_dataset, make_model, make_trainer, parameters, saved_model

from trl_explore.cli import main
from trl_explore.saving.checkpoints import load_state
from trl_explore.trainers import (
    BranPOConfig,
    BranPOTrainer,
    DeepGRPOConfig,
    DeepGRPOTrainer,
    G2RLConfig,
    G2RLTrainer,
    SESAConfig,
    SESATrainer,
    TreeGRPOConfig,
    TreeGRPOTrainer,
)

torch.set_num_threads(1)
root = Path(tempfile.mkdtemp())
warned = io.StringIO()
logging.getLogger("trl_explore").addHandler(logging.StreamHandler(warned))
LORA = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


def deep(name, **options):
    settings = dict(push_to_hub=True, hub_model_id=f"me/{name}", num_branches=2, max_steps=2)
    return make_trainer(DeepGRPOTrainer, DeepGRPOConfig, root / name, **{**settings, **options})


def files(name, branch="main"):
    return sorted(path for path in hub.files(f"me/{name}", branch) if path != ".gitattributes")


def card(name, branch="main"):
    return hub.files(f"me/{name}", branch)["README.md"].decode()


def weights(source):
    return dict(AutoModelForCausalLM.from_pretrained(source).named_parameters())


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())


def error_of(function, *args, **options):
    try:
        function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def whole():
    """A whole model; the push of the first checkpoint fails while training goes on."""
    hub.failures.append(["models/me/whole/commit", 500, 1])
    trainer = deep("whole", save_strategy="steps", save_steps=1, hub_always_push=True, hub_token=TOKEN)
    trainer.train()
    messages = list(hub.repositories["models/me/whole"].messages)
    sent, kept = load(hub.files("me/whole")["model.safetensors"]), weights(root / "whole" / "checkpoint-2")
    trainer.push_to_hub(dataset_name="data/questions.jsonl")
    ModelCard.load("me/whole").validate()
    secrets = [TOKEN.encode(), str(root).encode(), saved_model().encode()]
    pickles = (root / "whole").rglob("training_args.bin")
    return {
        "warning": warned.getvalue(),
        "messages": messages,
        "sent while training": all(torch.equal(sent[name], kept[name]) for name in sent),
        "files": files("whole"),
        "equal": equal(parameters(trainer), weights("me/whole")),
        "card": card("whole"),
        "left": sorted(path.name for path in (root / "whole").glob("_hub*")),
        "leaks": [path for path, data in hub.files("me/whole").items() if any(secret in data for secret in secrets)],
        "token in pickles": [str(path) for path in pickles if TOKEN.encode() in path.read_bytes()],
    }


def adapter():
    """An adapter of a local model, in a private repository, on a branch."""
    trainer = deep("adapter", peft_config=LORA, hub_private_repo=True, hub_revision="dev")
    trainer.train()
    trainer.push_to_hub()
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(saved_model()), "me/adapter", revision="dev"
    )
    published = hub.files("me/adapter", "dev")
    return {
        "equal": equal(parameters(trainer), dict(loaded.named_parameters())),
        "files": files("adapter", "dev"),
        "files on main": files("adapter"),
        "base": json.loads(published["adapter_config.json"])["base_model_name_or_path"],
        "leaks": [path for path, data in published.items() if saved_model().encode() in data],
        "card": card("adapter", "dev"),
        "private": hub.repositories["models/me/adapter"].private,
    }


def evaluation():
    """`trl-explore eval` with an adapter of the Hub: its download, continued runs, a new commit, a missing adapter."""
    base = AutoModelForCausalLM.from_pretrained(saved_model())
    adapted = get_peft_model(base, LORA)
    adapted.save_pretrained(root / "lora")
    held = {path.name: path.read_bytes() for path in (root / "lora").iterdir()}
    hub.repositories["models/me/lora"] = Repository(private=False, branches={"main": held})
    make_dataset().select(range(4)).to_json(root / "rows.jsonl")

    def evaluate(adapter, **more):
        fields = {"model_name_or_path": saved_model(), "adapter_name_or_path": adapter, **more}
        fields |= {"dataset": root / "rows.jsonl", "reward_funcs": "world.contains_answer", "num_samples": 1}
        fields |= {"max_new_tokens": 4, "output_dir": root / "evaluation"}
        flags = [text for field, value in fields.items() for text in (f"--{field}", str(value))]
        with redirect_stderr(io.StringIO()) as told, redirect_stdout(io.StringIO()):
            code = main(["eval", *flags])
        return {"code": code, "told": told.getvalue()}

    results = {"first": evaluate("me/lora"), "again": evaluate("me/lora")}
    results["revision of the base"] = evaluate("me/lora", model_revision="dev")
    hub.repositories["models/me/lora"].messages.append("a new commit")
    results["changed"] = evaluate("me/lora")
    results["missing"] = evaluate("me/nothing")
    return results


def late():
    """A push that was not planned, fails halfway, and is repeated by its command and by the trainer."""
    trainer = deep("late", push_to_hub=False, hub_model_id=None, hub_private_repo=True)
    trainer.train()
    hub.failures.append(["models/me/late/commit", 500, 1])
    error = error_of(trainer.push_to_hub)
    before, saved = files("late"), equal(parameters(trainer), weights(root / "late"))
    command = error.splitlines()[-1].split()
    done = subprocess.run([Path(sys.executable).parent / "hf", *command[1:]], capture_output=True, text=True)
    after = files("late")
    trainer.push_to_hub(commit_message="once more")
    return {
        "error": error,
        "folder": str(root),
        "saved": saved,
        "files before": before,
        "command": [done.returncode, done.stderr],
        "files after": after,
        "messages": hub.repositories["models/me/late"].messages,
    }


def refusals():
    """What is refused before anything is trained."""
    for name, held in (
        ("adapter", {"adapter_config.json": b"{}"}),
        ("model", {"config.json": b'{"architectures": ["Qwen2ForCausalLM"]}'}),
        ("llama", {"config.json": b'{"architectures": ["LlamaForCausalLM"]}'}),
    ):
        hub.repositories[f"models/me/{name}"] = Repository(private=False, branches={"main": held})
    before = len(hub.requests)
    results = {
        "forbidden name": error_of(deep, "x", hub_model_id="me/my model!"),
        "forbidden folder": error_of(deep, "my model!", hub_model_id=None),
    }
    os.environ["HF_TOKEN"] = ""
    results["no token"] = error_of(deep, "x")
    results["requests"] = hub.requests[before:]
    for name, token in (("wrong token", "hf_wrong"), ("no rights", "hf_reader")):
        os.environ["HF_TOKEN"] = token
        results[name] = error_of(deep, "x")
    os.environ["HF_TOKEN"] = TOKEN
    results["model over adapter"] = error_of(deep, "adapter")
    results["adapter over model"] = error_of(deep, "model", peft_config=LORA)
    results["other architecture"] = error_of(deep, "llama")
    results["same architecture"] = error_of(deep, "model")
    results["model over adapter, late"] = error_of(deep("adapter", push_to_hub=False).push_to_hub)
    hub.failures.append(["api/repos/create", 503, 1])
    results["out of order"] = error_of(deep, "x")
    close_session()
    hub.server.shutdown()
    hub.server.server_close()
    results["nobody there"] = error_of(deep, "x")
    return results


def checkpoints():
    """Whole checkpoints, of which the first is not taken at once, and a run that resumes a published one."""
    straight = deep("straight", push_to_hub=False, max_steps=3)
    straight.train()
    hub.failures.append(["models/me/all/commit", 500, 1])
    saving = dict(save_strategy="steps", hub_always_push=True)
    deep("all", hub_strategy="all_checkpoints", save_steps=1, **saving).train()
    deep("last", hub_strategy="checkpoint", save_steps=2, max_steps=3, **saving).train()
    folder = snapshot_download("me/last", allow_patterns="last-checkpoint/*")
    resumed = deep("resumed", push_to_hub=False, max_steps=3)
    resumed.train(resume_from_checkpoint=f"{folder}/last-checkpoint")
    # A run that ended with a failed push, taken up by another process: nothing is left to train, all is sent.
    hub.failures.append(["models/me/broken/commit", 500, 9])
    broken = deep("broken", save_strategy="steps", save_steps=1)
    broken.train()
    error = error_of(broken.push_to_hub)
    hub.failures.clear()
    again = deep("broken", save_strategy="steps", save_steps=1)
    again.train(resume_from_checkpoint=True)
    again.push_to_hub()
    return {
        "all": files("all"),
        "last": files("last"),
        "resumed equal": equal(parameters(straight), parameters(resumed)),
        "broken": error,
        "taken up": equal(parameters(broken), weights("me/broken")),
    }


def methods():
    """Data and a base model of the Hub; method state that goes along on request; cards of the other methods."""
    table = io.BytesIO()
    make_dataset().to_parquet(table)
    data = {"data/train-00000-of-00001.parquet": table.getvalue()}
    hub.repositories["datasets/me/sums"] = Repository(private=False, branches={"main": data})
    deep("start", push_to_hub=False).push_to_hub()
    results = {}
    for name, chosen in (("trees", True), ("bare", False)):
        trainer = make_trainer(
            TreeGRPOTrainer,
            TreeGRPOConfig,
            root / name,
            model="me/start",
            train_dataset=load_dataset("me/sums", split="train"),
            expansion_width=3,
            node_length=2,
            max_steps=1,
            hub_model_id=f"me/{name}",
            dump_trees="trees",
            push_method_state=chosen,
        )
        trainer.train()
        trainer.push_to_hub(dataset_name="me/sums" if chosen else None)
        results[name] = files(name)
    results["state"] = sorted(load_state(snapshot_download("me/trees"), rank=0, world_size=1)["method"])
    results["tree_grpo"], results["unnamed"] = card("trees"), card("bare")
    for name, cls, config, options in (
        ("sesa", SESATrainer, SESAConfig, dict(num_sketches=2, max_sketch_length=4)),
        ("g2rl", G2RLTrainer, G2RLConfig, {}),
        ("branpo", BranPOTrainer, BranPOConfig, {}),
    ):
        trainer = make_trainer(cls, config, root / name, max_steps=1, model=make_model(), **options)
        trainer.train()
        trainer.create_model_card()
        ModelCard.load(root / name / "README.md").validate()
        results[name] = (root / name / "README.md").read_text()
    return results


def draft():
    """A push to another branch in the middle of a run, whose checkpoints go to the branch of the configuration."""

    class PushesDraft(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                trainer.push_to_hub(revision="draft")

    trainer = deep("draft", save_strategy="steps", save_steps=2, hub_always_push=True, callbacks=[PushesDraft()])
    trainer.train()
    sent, kept = load(hub.files("me/draft")["model.safetensors"]), weights(root / "draft" / "checkpoint-2")
    return {
        "equal": all(torch.equal(sent[name], kept[name]) for name in sent),
        "files on draft": files("draft", "draft"),
        "card on draft": card("draft", "draft"),
        "card on main": card("draft"),
    }


def command():
    """`trl-explore train --push_to_hub`: as it should be, with a Hub that fails at the end, and without rights."""
    data = root / "sums.jsonl"
    make_dataset().to_json(data)
    fields = {"method": "deep_grpo", "model_name_or_path": saved_model(), "dataset_name": data, "max_steps": 1}
    fields |= {"reward_funcs": "world.contains_answer", "num_generations": 4, "per_device_train_batch_size": 8}
    fields |= {"max_completion_length": 8, "num_branches": 2, "use_cpu": "true", "bf16": "false", "report_to": "none"}

    def train(name):
        own = {"output_dir": root / name, "hub_model_id": f"me/{name}", "push_to_hub": "true"}
        flags = [text for field, value in (fields | own).items() for text in (f"--{field}", str(value))]
        with redirect_stderr(io.StringIO()) as told, redirect_stdout(io.StringIO()) as said:
            code = main(["train", *flags])
        return {"code": code, "said": said.getvalue(), "told": told.getvalue(), "folder": str(root / name)}

    results = {"well": train("cli"), "files": files("cli"), "card": card("cli"), "url": hub.url}
    hub.failures.append(["models/me/fails/commit", 500, 9])  # the push of the last checkpoint, and that of the end
    results["fails"] = train("fails")
    results["saved"] = (root / "fails" / "model.safetensors").is_file()
    os.environ["HF_TOKEN"] = "hf_wrong"
    results["refused"] = train("refused")
    os.environ["HF_TOKEN"] = TOKEN
    return results


if __name__ == "__main__":
    results = {name: globals()[name]() for name in sys.argv[2:]}
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1))
