"""Supervised warm start of a pretrained model: TRL's `SFTTrainer` on demonstrations that a task writes.

A small model solves almost none of a task's problems in the form that the task asks for, so it would learn nothing
from rewards. The demonstrations teach the form and the rules. About half of them reach the goal: how to reach it more
often is left to reinforcement learning.
"""

import hashlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_explore.environments.specs import TeachableSpec
from trl_explore.errors import UsageError
from trl_explore.evaluation.samplers import undisturbed
from trl_explore.machine.devices import available_accelerator
from trl_explore.pretrained.smollm2 import find_pretrained
from trl_explore.pretrained.tools import with_tools
from trl_explore.saving.fingerprints import digest, folder_probes
from trl_explore.saving.model_cache import cache_root, check_cache, publish

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from trl import SFTTrainer

CACHE_VERSION = 1  # raise it when the recipe below changes
BATCH_SIZE = 24
LEARNING_RATE = 1e-4
WARMUP_SHARE = 0.1
TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja")  # which decide the tokens of a demonstration


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
    Trains a pretrained model on a task's demonstrations, or finds the result in the cache. Only the answers are
    trained, 24 demonstrations per step, with a learning rate that rises to 1e-4 and falls to 0.

    Args:
        model (`str`):
            Folder or Hub name of the model; `smollm2` is found by [`find_pretrained`].
        spec ([`TeachableSpec`]):
            Task that writes the demonstrations, for problems of its training rows.
        steps (`int`):
            Optimizer steps, at least 1.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the demonstrations and their order.
        cache_dir (`str` or `os.PathLike`, *optional*):
            Where the model is kept. Defaults to `$TRL_EXPLORE_CACHE`, or else to `~/.cache/trl-explore`.
        progress (`bool`, *optional*, defaults to `True`):
            Whether to show a progress bar and the loss.
        device (`str`, *optional*):
            `"cpu"` trains on the CPU even if the machine has a GPU. Weights are float32, computed in bfloat16.

    Returns:
        `Path`: Folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load.

    Raises:
        UsageError: If `steps` is below 1, the task writes no demonstrations, the model cannot be found, the cache
            cannot be written to, or the model is not in the cache and this is one of several processes.
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
    with tempfile.TemporaryDirectory() as scratch:
        trainer = _train(source, examples, steps=steps, seed=seed, progress=progress, device=device, scratch=scratch)
        publish(trainer.model, trainer.processing_class, folder)
    return folder


def demonstrations(spec: TeachableSpec, count: int, *, seed: int) -> list[dict[str, Any]]:
    """
    Writes demonstrations for a task's training rows, which it goes through in order, again and again.

    Args:
        spec ([`TeachableSpec`]):
            The task.
        count (`int`):
            How many to write.
        seed (`int`):
            Seed of the choices in them.

    Returns:
        `list[dict]`: Rows of `SFTTrainer`: conversational `prompt` and `completion`, and `tools` for an agent.
    """
    rng = random.Random(f"demonstrations/{seed}")
    rows = spec.train_dataset.to_list()
    return [spec.demonstration(rows[number % len(rows)], rng) for number in range(count)]


def _key(source: str, examples: list[dict[str, Any]], steps: int) -> str:
    """Twelve hexadecimal digits of the model, the demonstrations, the steps and the versions of libraries."""
    folder = Path(source)
    model = [source]
    if folder.is_dir():
        of_tokenizer = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
        contents = [*folder_probes(folder), *(path.read_bytes() for path in of_tokenizer)]
        model = [digest(contents)]
    parts = {
        "version": CACHE_VERSION,
        "model": model,
        "examples": examples,
        "steps": steps,
        "libraries": [".".join(version(name).split(".")[:2]) for name in ("torch", "transformers", "trl")],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _train(
    source: str,
    examples: list[dict[str, Any]],
    *,
    steps: int,
    seed: int,
    progress: bool,
    device: str | None,
    scratch: str,
) -> "SFTTrainer":
    """Trains on the demonstrations; the caller's random states are left alone."""
    from datasets import Dataset
    from torch import nn
    from transformers import AutoTokenizer, PrinterCallback
    from trl import SFTConfig, SFTTrainer
    from trl.chat_template_utils import supports_tool_calling

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    is_agent = "tools" in examples[0]
    if is_agent and not supports_tool_calling(tokenizer):
        tokenizer = with_tools(tokenizer)
    use_cpu = device == "cpu" or available_accelerator() is None
    config = SFTConfig(
        output_dir=scratch,
        max_steps=steps,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, round(WARMUP_SHARE * steps)),
        max_length=None,
        assistant_only_loss=is_agent,  # answers of tools are not trained
        model_init_kwargs={"dtype": "float32"},
        bf16=True,
        use_cpu=use_cpu,
        gradient_checkpointing=not use_cpu,
        seed=seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=not progress,
    )
    with undisturbed(nn.Identity(), seed=seed), _own_precision():
        trainer = SFTTrainer(
            model=source, args=config, train_dataset=Dataset.from_list(examples), processing_class=tokenizer
        )
        if not progress:
            trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer


@contextmanager
def _own_precision() -> Iterator[None]:
    """Compute in bfloat16, whatever the precision of the run is: accelerate keeps one precision per process."""
    from accelerate.state import AcceleratorState

    kept = dict(AcceleratorState._shared_state)
    AcceleratorState._shared_state.clear()
    try:
        yield
    finally:
        AcceleratorState._shared_state.clear()
        AcceleratorState._shared_state.update(kept)
