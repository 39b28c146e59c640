"""Supervised warm start of a pretrained model: TRL's `SFTTrainer` on demonstrations that a task writes.

A small model rarely answers in the form that a task asks for. Then nearly all its rewards are 0, and it learns nothing
from them. The demonstrations teach the form and the rules. Only about half of them solve their problem, so that
reinforcement learning has something left to teach.
"""

import hashlib
import json
import os
import random
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_explore.environments.specs import TeachableSpec
from trl_explore.errors import UsageError
from trl_explore.evaluation.samplers import undisturbed
from trl_explore.machine.accelerate_state import separate_accelerate_state
from trl_explore.machine.devices import available_accelerator
from trl_explore.pretrained.smollm2 import find_pretrained
from trl_explore.pretrained.tools import with_tools
from trl_explore.saving.fingerprints import saved_model_fingerprint
from trl_explore.saving.model_cache import cache_root, check_cache, publish

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import SFTConfig

CACHE_VERSION = 1  # raise it when the training below changes
BATCH_SIZE = 24
LEARNING_RATE = 1e-4
WARMUP_SHARE = 0.1  # share of the steps in which the learning rate rises


def teach(
    model: str,
    spec: TeachableSpec,
    *,
    steps: int,
    seed: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    device: str | None = None,
) -> Path:
    """
    Train a pretrained model on a task's demonstrations, or find the result in the cache.

    A step has 24 demonstrations. The loss counts only the model's answers, not prompts or results of tools. The
    learning rate rises to 1e-4 and then falls to 0. Weights are float32, and the model computes in bfloat16.

    Args:
        model (`str`):
            Folder or Hub name of the model, or `smollm2` for the model of the installed package.
        spec ([`TeachableSpec`]):
            Task that writes demonstrations for the problems of its training rows.
        steps (`int`):
            Optimizer steps, at least 1.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the demonstrations and of their order in training.
        cache_dir (`str` or `os.PathLike`, *optional*):
            Folder of the cache. Defaults to `$TRL_EXPLORE_CACHE`, or else to `~/.cache/trl-explore`.
        progress (`bool`, *optional*, defaults to `True`):
            If `True`, show a progress bar and the loss.
        device (`str`, *optional*):
            `"cpu"` trains on the CPU even if the machine has a GPU. `None` trains on the GPU if there is one.

    Returns:
        `Path`: Folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load.

    Raises:
        UsageError: If `steps` is below 1, the task writes no demonstrations, the model cannot be found, or the cache
            is not writable. Also if the taught model is not in the cache and this is one of several processes.
    """
    if steps < 1:
        raise UsageError(f"warm_start_steps={steps}: give at least 1")
    source = find_pretrained(model)
    try:
        examples = demonstrations(spec, steps * BATCH_SIZE, seed=seed)
    except ValueError as error:
        raise UsageError(f"warm_start_steps={steps}: {error}") from error
    folder = cache_root(cache_dir) / f"{spec.name.replace(':', '-')}-{_key(source, examples, steps)}"
    if folder.is_dir():
        return folder
    check_cache(folder.parent)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            f"warm_start_steps={steps}: a model is taught in one process. Run the same command once without "
            "accelerate launch, with --max_steps 1 and another --output_dir. It keeps the taught model in the cache; "
            "then run this command again"
        )
    if progress:
        print(f"trl-explore: teaching {spec.name} to {model} in {steps} supervised steps, once", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch, separate_accelerate_state():
        is_agent = "tools" in examples[0]
        config = _config(scratch, is_agent=is_agent, steps=steps, seed=seed, progress=progress, device=device)
        taught, tokenizer = _train(source, _tokenizer(source, is_agent=is_agent), examples, config)
    publish(taught, tokenizer, folder)
    return folder


def demonstrations(spec: TeachableSpec, count: int, *, seed: int) -> list[dict[str, Any]]:
    """
    Write demonstrations for a task's training rows, in the order of the rows. After the last row, continue with the
    first.

    Args:
        spec ([`TeachableSpec`]):
            The task.
        count (`int`):
            Number of demonstrations.
        seed (`int`):
            Seed of the random choices in demonstrations.

    Returns:
        `list[dict]`: Rows of `SFTTrainer`: a conversational `prompt` and `completion`, and `tools` for an agent.
    """
    rng = random.Random(f"demonstrations/{seed}")
    rows = spec.train_dataset.to_list()
    return [spec.demonstration(rows[number % len(rows)], rng) for number in range(count)]


def _key(source: str, examples: list[dict[str, Any]], steps: int) -> str:
    """Return twelve hexadecimal digits that depend on the model, the demonstrations, the number of steps and the
    versions of libraries. The seed counts only through the demonstrations."""
    folder = Path(source)
    model = [source]  # the name on the Hub, or for a folder a hash of its files
    if folder.is_dir():
        model = [saved_model_fingerprint(folder)]
    parts = {
        "version": CACHE_VERSION,
        "model": model,
        "examples": examples,
        "steps": steps,
        "libraries": [".".join(version(name).split(".")[:2]) for name in ("torch", "transformers", "trl")],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _train(
    source: str, tokenizer: "PreTrainedTokenizerBase", examples: list[dict[str, Any]], config: "SFTConfig"
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Train a model on the demonstrations, and return it with the tokenizer of the trainer. The caller's random states
    are restored afterwards."""
    from datasets import Dataset
    from torch import nn
    from transformers import PrinterCallback
    from trl import SFTTrainer

    # `undisturbed` disables the dropout of its argument, and this training needs dropout. So pass another module.
    with undisturbed(nn.Identity(), seed=config.seed):
        trainer: Any = SFTTrainer(
            model=source, args=config, train_dataset=Dataset.from_list(examples), processing_class=tokenizer
        )
        if config.disable_tqdm:  # then transformers prints each log instead
            trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer.model, trainer.processing_class


def _tokenizer(source: str, *, is_agent: bool) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a model. For an agent, replace a chat template without tool calls."""
    from transformers import AutoTokenizer
    from trl.chat_template_utils import supports_tool_calling

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    if is_agent and not supports_tool_calling(tokenizer):
        return with_tools(tokenizer)
    return tokenizer


def _config(scratch: str, *, is_agent: bool, steps: int, seed: int, progress: bool, device: str | None) -> "SFTConfig":
    """Return the configuration of the supervised training."""
    from trl import SFTConfig

    use_cpu = device == "cpu" or available_accelerator() is None
    return SFTConfig(
        output_dir=scratch,
        max_steps=steps,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, round(WARMUP_SHARE * steps)),
        max_length=None,
        assistant_only_loss=is_agent,  # do not train the answers of tools
        model_init_kwargs={"dtype": "float32"},
        bf16=True,
        use_cpu=use_cpu,
        gradient_checkpointing=not use_cpu,
        seed=seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=not progress,
    )
