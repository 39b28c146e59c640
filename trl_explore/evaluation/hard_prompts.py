"""Prompts that a model rarely solves: the filter of DeepSearch (https://huggingface.co/papers/2509.25454).

Between rounds of training, DeepSearch keeps the prompts whose share of correct samples among K (Pass1@K) is below a
threshold.
"""

import json
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset, Value
from tqdm.auto import tqdm
from trl import GRPOConfig, GRPOTrainer

from trl_explore.evaluation.metrics import has_reward
from trl_explore.evaluation.policy import PolicySamples
from trl_explore.evaluation.samplers import seed_at, undisturbed
from trl_explore.machine.accelerate_state import separate_accelerate_state
from trl_explore.rewards.success import is_success
from trl_explore.rows.columns import check_prompts
from trl_explore.sampling.generation import generating_model
from trl_explore.saving.fingerprints import digest, tokenizer_fingerprint, weight_probes
from trl_explore.saving.records import check_same, read_records, write_records
from trl_explore.saving.whole_files import append_lines

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PASS_RATES = "trl-explore pass rates"
PASS_RATE = "pass_rate"


def filter_hard_prompts(
    model: "PreTrainedModel | PeftModel | GRPOTrainer",
    dataset: Dataset,
    *,
    reward_funcs: Any = None,
    processing_class: "PreTrainedTokenizerBase | None" = None,
    k: int = 4,
    threshold: float = 0.25,
    max_completion_length: int | None = None,
    temperature: float = 1.0,
    success_threshold: float = 1.0,
    success_reward: str | None = None,
    reward_weights: Sequence[float] | None = None,
    batch_size: int = 64,
    seed: int = 0,
    scores_file: str | Path | None = None,
    progress: bool = True,
) -> Dataset:
    """
    Keep the prompts for which less than a share `threshold` of `k` samples succeed.

    A sample without a reward is a failure. If no sample of a prompt has a reward, the prompt is left out, with a
    warning. Completions come from `generate` of transformers. With several processes, each process samples a part of
    the batches, and all return the same prompts.

    The samples of a batch depend only on the seed and the position of the batch, so that a continued call returns the
    same prompts as an uninterrupted call. A call with another `batch_size` continues too, with other samples.

    Args:
        model ([`~transformers.PreTrainedModel`], `PeftModel` or [`~trl.GRPOTrainer`]):
            A model, which is moved to the accelerator. Or a trainer, which provides model, tokenizer, reward functions
            and sampling options, and is not changed. Subclasses of the trainer are allowed.
        dataset ([`~datasets.Dataset`]):
            Prompts in a column `prompt`, plain or conversational, and the columns that the reward functions read.
        reward_funcs (`Callable`, `str`, `nn.Module` or a list of them, *optional*):
            Reward functions as [`~trl.GRPOTrainer`] takes them. With a trainer, only synchronous functions, or `None`
            for the trainer's.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The tokenizer. `None` loads the one saved with the model. Must be `None` with a trainer.
        k (`int`, *optional*, defaults to `4`):
            Number of samples per prompt.
        threshold (`float`, *optional*, defaults to `0.25`):
            Pass rate below which a prompt is hard. In `(0, 1]`.
        max_completion_length (`int`, *optional*):
            Maximum number of tokens per completion. `None` uses the trainer's, or TRL's default with a model.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature, positive.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest weighted sum of rewards that counts as success.
        success_reward (`str`, *optional*):
            Name of the reward function whose unweighted reward decides success. `None` uses the weighted sum.
        reward_weights (`list[float]`, *optional*):
            Weight of each reward function. `None` uses the trainer's weights, or 1 each.
        batch_size (`int`, *optional*, defaults to `64`):
            Number of completions per `generate` call on each process. A call samples all completions of at least one
            prompt.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the samples.
        scores_file (`str` or `Path`, *optional*):
            JSON lines with the pass rates, written batch by batch. A call with the same settings, except `threshold`,
            continues the file. It does not notice if the code of a reward function changes. All processes must be able
            to read the file.
        progress (`bool`, *optional*, defaults to `True`):
            If `True`, the main process shows a progress bar.

    Returns:
        [`~datasets.Dataset`]: The hard prompts in their original order, with the column `pass_rate` added or replaced.
        Empty if no prompt is hard.

    Raises:
        `ValueError`: If an argument is outside its range or does not fit the model.
        `FileRefusedError`: A `ValueError`: if `scores_file` was written with other settings or has another format.
    """
    check_settings(
        dataset,
        k=k,
        threshold=threshold,
        max_completion_length=max_completion_length,
        temperature=temperature,
        batch_size=batch_size,
    )
    with _trainer_for(model, dataset, reward_funcs, processing_class, seed=seed) as trainer:
        if trainer is not model:
            reward_funcs = None  # the trainer was built with these functions
        samples = PolicySamples(
            trainer,
            dataset,
            reward_funcs=reward_funcs,
            reward_weights=reward_weights,
            success_reward=success_reward,
            temperature=temperature,
            max_completion_length=max_completion_length,
            batch_size=batch_size,
        )
        settings = {"k": k, "seed": seed, "success_threshold": success_threshold, "success_reward": success_reward}
        rates = _measure(samples, settings, scores_file, progress=progress)
    unscored = sum(rate is None for rate in rates)
    if unscored:
        warnings.warn(
            f"{unscored} of {len(dataset)} prompts are left out, because no reward function gave their samples a "
            "reward; check the column of the gold answers.",
            stacklevel=2,
        )
    kept = []
    for index, rate in enumerate(rates):
        if rate is not None and rate < threshold:
            kept.append(index)
    columns = [name for name in dataset.column_names if name != PASS_RATE]
    with_rates = dataset.select_columns(columns).add_column(PASS_RATE, rates, feature=Value("float64"))
    return with_rates.select(kept)


def check_settings(
    dataset: Dataset,
    *,
    k: int,
    threshold: float,
    max_completion_length: int | None,
    temperature: float,
    batch_size: int,
) -> None:
    """
    Check arguments of [`filter_hard_prompts`], which documents them, before a model is loaded.

    Raises:
        `ValueError`: If an argument is outside its range.
    """
    if k < 1 or batch_size < 1 or (max_completion_length is not None and max_completion_length < 1):
        raise ValueError(
            f"k, batch_size and max_completion_length must be at least 1, got k={k}, batch_size={batch_size}, "
            f"max_completion_length={max_completion_length}."
        )
    if not 0 < threshold <= 1:
        raise ValueError(
            f"threshold must be in (0, 1], got {threshold}: it keeps prompts whose pass rate is lower. 1 keeps every "
            "prompt with a failed sample."
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}: greedy samples would all be equal.")
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"dataset must be a `datasets.Dataset`, got {type(dataset).__name__}; load it without streaming."
        )
    check_prompts(dataset)


def read_pass_rates(path: str | Path) -> tuple[dict[str, Any], dict[int, float | None]]:
    """
    Read a `scores_file` of [`filter_hard_prompts`].

    Args:
        path (`str` or `Path`):
            The file.

    Returns:
        `tuple[dict, dict[int, float | None]]`: The settings, and the pass rate in `[0, 1]` of each measured prompt by
        its index. `None` if no sample of the prompt has a reward.
    """
    header, records = read_records(path, PASS_RATES, is_valid=_is_pass_rate)
    return header, {record["index"]: record[PASS_RATE] for record in records}


def _is_pass_rate(record: dict[str, Any]) -> bool:
    if type(record.get("index")) is not int or PASS_RATE not in record:
        return False
    return isinstance(record[PASS_RATE], (float, int, type(None)))


@contextmanager
def _trainer_for(
    model: Any, dataset: Dataset, reward_funcs: Any, processing_class: Any, *, seed: int
) -> Iterator[GRPOTrainer]:
    """Yield `model` if it is a trainer, else a trainer of the model, which formats prompts and rewards as training."""
    if isinstance(model, GRPOTrainer):
        if processing_class is not None:
            raise ValueError("processing_class must be left out with a trainer, which has its own.")
        yield model
        return
    if reward_funcs is None:
        raise ValueError(
            "reward_funcs is missing: a model instead of a trainer has no reward functions to decide success."
        )
    # TRL sets `forward` as an attribute of the model. Remove it at the end, because a deep copy of the model would
    # keep the attribute and run with the parameters of this model.
    base: Any = model.get_base_model() if is_peft_model(model) else model
    forward = base.__dict__.get("forward")
    with separate_accelerate_state(), tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1,
            num_generations=2,
            use_cpu=not torch.accelerator.is_available(),  # otherwise several CPU processes would not find each other
            bf16=False,
            gradient_checkpointing=False,
            use_cache=getattr(model.config, "use_cache", True),
            report_to=[],
            save_strategy="no",
        )
        copied = list(reward_funcs) if isinstance(reward_funcs, list) else reward_funcs  # TRL changes the list
        try:
            with undisturbed(model, seed=seed):
                trainer = GRPOTrainer(
                    model=model,
                    reward_funcs=copied,
                    args=args,
                    train_dataset=dataset,
                    processing_class=processing_class,
                )
            yield trainer
        finally:
            base.__dict__.pop("forward", None)
            if forward is not None:
                base.forward = forward


def _measure(
    samples: PolicySamples, settings: dict[str, Any], scores_file: str | Path | None, *, progress: bool
) -> list[float | None]:
    """Return the pass rate of each row. Rows in the file are not measured again."""
    accelerator, num_rows, k = samples.trainer.accelerator, len(samples.rows), settings["k"]
    rates: dict[int, float | None] = {}
    if scores_file is not None:
        rates = _continue(samples, settings, Path(scores_file))
    size = max(1, samples.batch_size // k)
    # If the file has only a part of a batch, the whole batch is sampled again, so that the samples are the same.
    todo = []
    for start in range(0, num_rows, size):
        batch = range(start, min(start + size, num_rows))
        if any(index not in rates for index in batch):
            todo.append(batch)
    hidden = not (progress and accelerator.is_main_process)
    with tqdm(total=num_rows, initial=len(rates), desc="Pass rates", unit="prompt", disable=hidden) as bar:
        for first in range(0, len(todo), accelerator.num_processes):
            # Every forward pass of a sharded model waits for all processes, so each process takes a batch, even if the
            # remaining batches are fewer than the processes.
            batch = todo[(first + accelerator.process_index) % len(todo)]
            with undisturbed(samples.trainer.model_wrapped, seed=seed_at(settings["seed"], batch.start)):
                graded = samples.draw(batch, k)
            measured = []
            for index, grades in zip(batch, graded, strict=True):
                measured.append((index, _rate(grades.rewards, settings["success_threshold"])))
            # Leave out prompts that are in the file, and prompts of a batch that an earlier round measured.
            new = {index: rate for index, rate in gather_object(measured) if index not in rates}
            rates |= new
            if scores_file is not None and accelerator.is_main_process:
                append_lines(Path(scores_file), [{"index": index, PASS_RATE: rate} for index, rate in new.items()])
            bar.update(len(new))
    return [rates[index] for index in range(num_rows)]


def _rate(rewards: list[float | None], success_threshold: float) -> float | None:
    """Return the share of successful samples, or `None` if no sample has a reward."""
    if not has_reward(rewards):
        return None
    return sum(is_success(reward, threshold=success_threshold) for reward in rewards) / len(rewards)


def _continue(samples: PolicySamples, settings: dict[str, Any], path: Path) -> dict[int, float | None]:
    """Read the pass rates of the file at `path` and check its settings. If there is no file, begin one."""
    # The file has JSON, so compare it with what JSON makes of the settings, such as lists instead of tuples.
    expected = json.loads(json.dumps(_relevant_settings(samples, settings)))
    if not path.is_file():
        if samples.trainer.accelerator.is_main_process:
            write_records(path, PASS_RATES, expected)
        return {}
    header, rates = read_pass_rates(path)
    check_same(path, "pass rates", header, expected, "Delete it, or name another file.")
    return rates


def _relevant_settings(samples: PolicySamples, settings: dict[str, Any]) -> dict[str, Any]:
    """Return all settings that pass rates depend on. Data, weights and tokenizer are hashed."""
    trainer, args = samples.trainer, samples.trainer.args
    lines = []
    for row in samples.rows:
        columns = {name: value for name, value in row.items() if name != PASS_RATE}
        lines.append(json.dumps(columns, sort_keys=True, default=repr).encode())
    tokenizer = trainer.processing_class
    template = [tokenizer.chat_template, trainer.chat_template, trainer.chat_template_kwargs]
    with generating_model(trainer) as model:
        weights = digest(weight_probes(model))
    return {
        "num_prompts": len(lines),
        "data": digest(lines),
        "model": weights,
        "tokenizer": digest([tokenizer_fingerprint(tokenizer).encode(), json.dumps(template, default=repr).encode()]),
        "reward_funcs": samples.reward_names,
        "reward_weights": samples.reward_weights,
        "k": settings["k"],
        "seed": settings["seed"],
        "temperature": samples.temperature,
        "max_completion_length": samples.max_completion_length,
        "success_threshold": settings["success_threshold"],
        "success_reward": settings["success_reward"],
        "sampling": repr([args.top_p, args.top_k, args.min_p, args.repetition_penalty, args.generation_kwargs]),
    }
