"""Supervised warm start: training of the tiny model on a task's demonstrations, with a cache on disk."""

import dataclasses
import hashlib
import json
import math
import os
import random
from pathlib import Path

import torch
import transformers
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from trl_explore.machine.devices import available_accelerator
from trl_explore.machine.threads import few_threads
from trl_explore.saving.model_cache import cache_root, check_cache, publish
from trl_explore.tasks import TeachableTask
from trl_explore.tasks.tiny_model import ASSISTANT, CHARACTERS, EOS, USER, build_model, build_tokenizer

CACHE_VERSION = 2  # increase it when the training, the tokenizer or the sampling of problems from seeds changes
BATCH_SIZE = 32
LEARNING_RATE = 3e-3  # peak, for models up to the width `LEARNING_RATE_WIDTH`; in wider models, it falls with 1/width
LEARNING_RATE_WIDTH = 64
WARMUP_STEPS = 20
FINAL_LEARNING_RATE_SHARE = 0.05
IGNORED = -100  # label that the loss skips


def warm_start(
    task: TeachableTask,
    *,
    seed: int,
    steps: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    hidden_size: int = 64,
    num_layers: int = 2,
    device: str | torch.device | None = "cpu",
) -> Path:
    """
    Train a tiny model on demonstrations, unless the cache holds it, and return its folder.

    On one machine, the same arguments give the same weights. Another processor or another number of threads rounds
    differently, so that the weights differ after hundreds of steps. A tiny model on a CPU is trained with one thread,
    unless `OMP_NUM_THREADS` is set. The caller's random states and settings do not change.

    Args:
        task ([`TeachableTask`]):
            Task to learn.
        seed (`int`):
            Seed of the initial weights and of the demonstrations.
        steps (`int`, *optional*):
            Optimizer steps. Defaults to `task.warm_start_steps`.
        cache_dir (`str` or `os.PathLike`, *optional*):
            Folder of the cache. Defaults to `$TRL_EXPLORE_CACHE` if it is set, otherwise to `~/.cache/trl-explore`.
        progress (`bool`, *optional*, defaults to `True`):
            If `True`, show a progress bar with the loss.
        hidden_size (`int`, *optional*, defaults to `64`):
            Width of the model, a multiple of 16.
        num_layers (`int`, *optional*, defaults to `2`):
            Layers of the model.
        device (`str` or `torch.device`, *optional*, defaults to `"cpu"`):
            Device to train on. None for the machine's accelerator, or the CPU if it has none. An accelerator computes
            in bfloat16 with float32 weights.

    Returns:
        `Path`: Folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load.

    Raises:
        ValueError: If `steps` is below 1.
        UsageError: If the cache cannot be written to.
    """
    if steps is None:
        steps = task.warm_start_steps
    if steps < 1:
        raise ValueError(f"`steps` is {steps}; give at least 1.")
    model = build_model(seed=seed, hidden_size=hidden_size, num_layers=num_layers)
    device = torch.device(device or available_accelerator() or "cpu")
    key = cache_key(task, seed=seed, steps=steps, model_config=model.config.to_diff_dict(), device=device.type)
    folder = cache_root(cache_dir) / f"{task.name}-seed{seed}-{key}"
    if folder.is_dir():
        return folder
    check_cache(folder.parent)
    tokenizer = build_tokenizer(tools=getattr(task, "tools", False))
    model.to(device)  # type: ignore[arg-type]
    train(model, tokenizer, task, rng=random.Random(f"demonstrations/{seed}"), steps=steps, progress=progress)
    publish(model, tokenizer, folder)
    return folder


def cache_key(task: TeachableTask, *, seed: int, steps: int, model_config: dict, device: str = "cpu") -> str:
    """Return a hash (twelve hexadecimal digits) of the arguments and library versions that decide the weights."""
    # Patch releases of transformers must not change the key, so remove the full version from the configuration.
    model_config = {name: value for name, value in model_config.items() if name != "transformers_version"}
    parts = {
        "cache_version": CACHE_VERSION,
        "task": dataclasses.asdict(task),
        "seed": seed,
        "steps": steps,
        "model": model_config,
        "device": device,
        "libraries": [".".join(version.split(".")[:2]) for version in (torch.__version__, transformers.__version__)],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def train(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: TeachableTask,
    *,
    rng: random.Random,
    steps: int,
    progress: bool,
) -> None:
    """Train the model in place. Each of the `steps` has a batch of new demonstrations, sampled with `rng`."""
    device = model.device
    rate = LEARNING_RATE * min(1.0, LEARNING_RATE_WIDTH / model.config.hidden_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, steps))
    model.train()
    progress_bar = tqdm(total=steps, desc=f"warm start {task.name}", disable=not progress)
    with torch.enable_grad(), few_threads(model), progress_bar as bar:
        for _ in range(steps):
            prompts = [task.sample_problem(rng) for _ in range(BATCH_SIZE)]
            batch = encode(tokenizer, [(prompt, task.demonstration(prompt, rng)) for prompt in prompts])
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
                loss = model(**{name: part.to(device) for name, part in batch.items()}).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            bar.update()
    model.eval()


def encode(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """
    Tokenize demonstrations, padded on the left.

    Args:
        tokenizer (`PreTrainedTokenizerFast`):
            Tokenizer of the tiny model.
        pairs (`list[tuple[str, str]]`):
            Prompts and their completions. A completion may have several turns.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids`, `attention_mask` and `labels`, each of shape `(B, P+C)`. The loss skips
        all tokens except the assistant's.

    Raises:
        ValueError: If a text contains a character that the tokenizer does not know.
    """
    characters: set[str] = set()
    for prompt, completion in pairs:
        characters |= {*prompt, *completion}
    unknown = characters - set(CHARACTERS)
    if unknown:
        raise ValueError(f"`pairs` contain {sorted(unknown)}, which the tokenizer lacks; it knows {CHARACTERS!r}.")
    # The chat template would render the same texts. But rendering it for every demonstration would take longer than
    # the model's forward pass.
    texts = [f"{USER}{prompt}{ASSISTANT}{completion}{EOS}" for prompt, completion in pairs]
    encoded = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    input_ids, attention_mask = encoded["input_ids"], encoded["attention_mask"]  # (B, P+C)
    is_user_mark = input_ids == tokenizer.convert_tokens_to_ids(USER)
    is_assistant_mark = input_ids == tokenizer.convert_tokens_to_ids(ASSISTANT)
    # Turns alternate and the user begins. So the counts of both marks are equal in the assistant's turns, and the
    # user's count is larger in the user's turns. In the padding, both counts are 0. The attention mask excludes it.
    in_assistant_turn = is_assistant_mark.cumsum(1) >= is_user_mark.cumsum(1)
    by_assistant = in_assistant_turn & ~is_assistant_mark & attention_mask.bool()  # (B, P+C)
    labels = input_ids.masked_fill(~by_assistant, IGNORED)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def learning_rate_share(step: int, steps: int) -> float:
    """Return the learning rate at a step as a share of its peak, in (0, 1]: linear warm-up, then cosine decay."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return FINAL_LEARNING_RATE_SHARE + (1 - FINAL_LEARNING_RATE_SHARE) * cosine
