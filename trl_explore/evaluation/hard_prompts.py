"""Which prompts a model rarely solves: the filter between the rounds of DeepSearch, which train on prompts whose share
of correct samples among K (Pass1@K) is below a threshold (https://huggingface.co/papers/2509.25454)."""

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
    Keep the prompts of which a model solves less than a share `threshold` of `k` samples.

    A sample without a reward counts as a failure; a prompt none of whose samples has one is left out, with a warning.
    Completions come from `generate` of transformers. With several processes, each samples its part of the batches, and
    all return the same.

    The samples of a batch depend on the seed and on the position of the batch only: a continued call returns what an
    uninterrupted one does. With another `batch_size` it continues too, with other samples.

    Args:
        model ([`~transformers.PreTrainedModel`], `PeftModel` or [`~trl.GRPOTrainer`]):
            The model, which is moved to the accelerator; or a trainer (or one of a subclass), whose model, tokenizer,
            reward functions and sampling options are used, and which is left as it was.
        dataset ([`~datasets.Dataset`]):
            Prompts in a column `prompt`, plain or conversational, and the columns that the reward functions read.
        reward_funcs (`Callable`, `str`, `nn.Module` or a list of them, *optional*):
            What [`~trl.GRPOTrainer`] takes. With a trainer, synchronous functions only, or `None` for the trainer's.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The tokenizer. `None` for the one saved with the model; a trainer brings its own.
        k (`int`, *optional*, defaults to `4`):
            Samples per prompt.
        threshold (`float`, *optional*, defaults to `0.25`):
            Pass rate below which a prompt is hard. In `(0, 1]`.
        max_completion_length (`int`, *optional*):
            Most tokens per completion. `None` for the trainer's, with a model for TRL's default.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature, positive.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest weighted sum of rewards that counts as success.
        success_reward (`str`, *optional*):
            Name of the reward function that decides success, as it returns it, in the place of that sum.
        reward_weights (`list[float]`, *optional*):
            Weight of each reward function. `None` for the trainer's, or 1 each.
        batch_size (`int`, *optional*, defaults to `64`):
            Completions per `generate` call and process; at least one prompt's are sampled together.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the samples.
        scores_file (`str` or `Path`, *optional*):
            JSON lines with the pass rates, written batch by batch. A call with the same settings continues it (with
            any `threshold`); changed code of a reward function goes unnoticed. All processes must see the file.
        progress (`bool`, *optional*, defaults to `True`):
            Whether the main process shows a progress bar.

    Returns:
        [`~datasets.Dataset`]: The hard prompts in their order, with the column `pass_rate` (replaced if there is one);
        empty if there are none.

    Raises:
        `ValueError`: If an argument is outside its range or does not fit the model.
        `FileRefusedError`: If `scores_file` is of other settings or no such file: a `ValueError`.
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
        samples = PolicySamples(
            trainer,
            dataset,
            reward_funcs=reward_funcs if trainer is model else None,  # else the trainer was built with them
            reward_weights=reward_weights,
            success_reward=success_reward,
            temperature=temperature,
            max_completion_length=max_completion_length,
            batch_size=batch_size,
        )
        settings = {"k": k, "seed": seed, "success_threshold": success_threshold, "success_reward": success_reward}
        rates = _measure(samples, settings, None if scores_file is None else Path(scores_file), progress=progress)
    unscored = sum(rate is None for rate in rates)
    if unscored:
        warnings.warn(
            f"{unscored} of {len(dataset)} prompts are left out, because no reward function gave their samples a "
            "reward; check the column of the gold answers.",
            stacklevel=2,
        )
    kept = [index for index, rate in enumerate(rates) if rate is not None and rate < threshold]
    columns = [name for name in dataset.column_names if name != PASS_RATE]
    return dataset.select_columns(columns).add_column(PASS_RATE, rates, feature=Value("float64")).select(kept)


def check_settings(
    dataset: Dataset,
    *,
    k: int,
    threshold: float,
    max_completion_length: int | None,
    temperature: float,
    batch_size: int,
) -> None:
    """Check arguments of [`filter_hard_prompts`] before a model is loaded for it."""
    if k < 1 or batch_size < 1 or (max_completion_length is not None and max_completion_length < 1):
        raise ValueError(
            f"k, batch_size and max_completion_length must be at least 1, got k={k}, batch_size={batch_size}, "
            f"max_completion_length={max_completion_length}."
        )
    if not 0 < threshold <= 1:
        raise ValueError(
            f"threshold must be in (0, 1], got {threshold}: prompts below it are kept; 1 keeps all that ever fail."
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}: greedy samples would all be the same.")
    if not isinstance(dataset, Dataset):
        raise ValueError(f"dataset must be a `datasets.Dataset`, got {type(dataset).__name__}; load it un-streamed.")
    check_prompts(dataset)


def read_pass_rates(path: str | Path) -> tuple[dict[str, Any], dict[int, float | None]]:
    """Settings of a `scores_file`, and the pass rate of each prompt so far; `None` where no sample has a reward."""
    header, records = read_records(path, PASS_RATES, is_valid=_is_pass_rate)
    return header, {record["index"]: record[PASS_RATE] for record in records}


def _is_pass_rate(record: dict[str, Any]) -> bool:
    return type(record.get("index")) is int and isinstance(record.get(PASS_RATE, ""), (float, int, type(None)))


@contextmanager
def _trainer_for(
    model: Any, dataset: Dataset, reward_funcs: Any, processing_class: Any, *, seed: int
) -> Iterator[GRPOTrainer]:
    """The trainer given as `model`, or one around the model: prompts and rewards are treated as in training."""
    if isinstance(model, GRPOTrainer):
        if processing_class is not None:
            raise ValueError("processing_class belongs to a model, and a trainer brings its own; leave it out.")
        yield model
        return
    if reward_funcs is None:
        raise ValueError("reward_funcs is missing: with a model instead of a trainer, it decides what success is.")
    # TRL replaces the model's `forward` for its loss; a copy of the model would later run with this one's parameters.
    base: Any = model.get_base_model() if is_peft_model(model) else model
    forward = vars(base).get("forward")
    with separate_accelerate_state(), tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1,
            num_generations=2,
            use_cpu=not torch.accelerator.is_available(),  # else several processes would not find each other there
            bf16=False,
            gradient_checkpointing=False,
            use_cache=vars(model.config).get("use_cache", True),
            report_to=[],
            save_strategy="no",
        )
        try:
            with undisturbed(model, seed=seed):
                trainer = GRPOTrainer(
                    model=model,
                    reward_funcs=list(reward_funcs) if isinstance(reward_funcs, list) else reward_funcs,
                    args=args,
                    train_dataset=dataset,
                    processing_class=processing_class,
                )
            yield trainer
        finally:
            vars(base).pop("forward", None)
            if forward is not None:
                base.forward = forward


def _measure(
    samples: PolicySamples, settings: dict[str, Any], path: Path | None, *, progress: bool
) -> list[float | None]:
    """Pass rate of each row; those that the file has are not measured again."""
    accelerator, num_rows, k = samples.trainer.accelerator, len(samples.rows), settings["k"]
    rates = {} if path is None else _continue(samples, settings, path)
    size = max(1, samples.batch_size // k)
    batches = [range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
    # A batch of which only a part was written is sampled again as a whole, for the same samples.
    todo = [batch for batch in batches if any(index not in rates for index in batch)]
    hidden = not (progress and accelerator.is_main_process)
    with tqdm(total=num_rows, initial=len(rates), desc="Pass rates", unit="prompt", disable=hidden) as bar:
        for first in range(0, len(todo), accelerator.num_processes):
            # Sharded models wait for each other in every forward pass, so no process is without a batch at the end.
            batch = todo[(first + accelerator.process_index) % len(todo)]
            with undisturbed(samples.trainer.model_wrapped, seed=seed_at(settings["seed"], batch.start)):
                graded = samples.draw(batch, k)
            measured = [
                (index, _rate(of_prompt.rewards, settings["success_threshold"]))
                for index, of_prompt in zip(batch, graded, strict=True)
            ]
            new = {index: rate for index, rate in gather_object(measured) if index not in rates}
            rates |= new
            if path is not None and accelerator.is_main_process:
                append_lines(path, [{"index": index, PASS_RATE: rate} for index, rate in new.items()])
            bar.update(len(new))
    return [rates[index] for index in range(num_rows)]


def _rate(rewards: list[float | None], success_threshold: float) -> float | None:
    """Share of successes; a missing reward is a failure, but where all are missing there is no rate."""
    given = [reward for reward in rewards if reward is not None]
    return sum(is_success(reward, threshold=success_threshold) for reward in given) / len(rewards) if given else None


def _continue(samples: PolicySamples, settings: dict[str, Any], path: Path) -> dict[int, float | None]:
    """Pass rates that the file has; it is begun where there is none, and must be of the same settings where it is."""
    expected = json.loads(json.dumps(_depends_on(samples, settings)))
    if not path.is_file():
        if samples.trainer.accelerator.is_main_process:
            write_records(path, PASS_RATES, expected)
        return {}
    header, rates = read_pass_rates(path)
    check_same(path, "pass rates", header, expected, "Delete it, or name another file.")
    return rates


def _depends_on(samples: PolicySamples, settings: dict[str, Any]) -> dict[str, Any]:
    """What pass rates depend on; long things as digests."""
    trainer, args = samples.trainer, samples.trainer.args
    rows = [{name: value for name, value in row.items() if name != PASS_RATE} for row in samples.rows]
    tokenizer = trainer.processing_class
    template = [tokenizer.chat_template, trainer.chat_template, trainer.chat_template_kwargs]
    with generating_model(trainer) as model:
        weights = digest(weight_probes(model))
    return {
        "num_prompts": len(rows),
        "data": digest(json.dumps(row, sort_keys=True, default=repr).encode() for row in rows),
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
