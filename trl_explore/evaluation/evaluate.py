"""pass@k and maj@k of a model on a data set, with bootstrap intervals over its prompts."""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from tqdm.auto import tqdm
from trl.trainer.utils import get_callable_name, is_async_callable

from trl_explore.evaluation.completions import (
    Record,
    collect_completions,
    completions_for_rewards,
    encode_prompts,
)
from trl_explore.evaluation.grading import Grader
from trl_explore.evaluation.intervals import bootstrap_interval
from trl_explore.evaluation.metrics import prompt_values
from trl_explore.evaluation.samplers import PromptSampler, Sampling, TransformersSampler
from trl_explore.names import unknown_name
from trl_explore.rewards.answers import answer_key
from trl_explore.rewards.checks import checked
from trl_explore.rewards.success import check_success_reward
from trl_explore.rows.columns import row_columns
from trl_explore.saving.fingerprints import digest, weight_probes
from trl_explore.saving.records import write_records

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

METRIC = re.compile(r"(pass|maj)@([1-9]\d*)")
SCORES = "trl-explore scores"


class NoRewardError(ValueError):
    """No completion got a reward."""


RewardFunction = Callable[..., Sequence[float | None]]


def default_metrics(num_samples: int) -> list[str]:
    """`pass@1`, and with several samples per prompt pass@k and maj@k of all of them."""
    return ["pass@1"] if num_samples == 1 else ["pass@1", f"pass@{num_samples}", f"maj@{num_samples}"]


def parse_metrics(names: Sequence[str], num_samples: int) -> dict[str, tuple[str, int]]:
    """Names such as `maj@8` to kind (`"pass"` or `"maj"`) and k."""
    parsed = {}
    for name in names:
        match = METRIC.fullmatch(name)
        if match is None:
            raise ValueError(unknown_name("metric", name, ["pass@1", *default_metrics(num_samples)]))
        kind, k = match.group(1), int(match.group(2))
        if k > num_samples:
            raise ValueError(f"{name} needs at least {k} samples per prompt, got num_samples={num_samples}; raise it.")
        parsed[name] = kind, k
    return parsed


def evaluate(
    model: "PreTrainedModel | PeftModel | PromptSampler",
    dataset: "Dataset",
    *,
    processing_class: "PreTrainedTokenizerBase",
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    sampling: Sampling | None = None,
    metrics: Sequence[str] | None = None,
    answer_fn: Callable[[str], Hashable | None] = answer_key,
    success_threshold: float = 1.0,
    success_reward: str | None = None,
    output_dir: str | Path | None = None,
    source: dict[str, Any] | None = None,
    batch_size: int = 64,
    progress: bool = True,
) -> dict[str, Any]:
    """
    Sample completions of a data set's prompts, grade them, and average over the prompts.

    With `output_dir`, a call with the same settings continues where an earlier one stopped, and grades what is there
    anew: other metrics and other rewards need no sampling. A prompt none of whose samples has a reward is left out of
    the metrics and counted; a single missing reward is a failure.

    Args:
        model ([`~transformers.PreTrainedModel`], `PeftModel` or [`~trl_explore.evaluation.samplers.PromptSampler`]):
            The model, which samples by `generate` on the device where it is, or another way to sample.
        dataset ([`~datasets.Dataset`]):
            Prompts in a column `prompt`, plain or conversational, and the columns that the reward functions read.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer.
        reward_funcs (`Callable` or a list of them):
            Synchronous reward functions as [`~trl.GRPOTrainer`] takes them, the rewards of which are added up.
        sampling ([`~trl_explore.evaluation.samplers.Sampling`], *optional*):
            How completions are drawn; one per prompt at temperature 1 by default.
        metrics (`Sequence[str]`, *optional*):
            Such as `pass@1` and `maj@8`. [`default_metrics`] by default.
        answer_fn (`Callable`, *optional*, defaults to [`~trl_explore.rewards.answers.answer_key`]):
            Text of a completion to its answer (hashable, `None` for none), for the majority vote.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest sum of rewards that counts as success.
        success_reward (`str`, *optional*):
            Name of the reward function that decides success in the place of that sum; only that one is then asked.
        output_dir (`str` or `Path`, *optional*):
            Folder of `completions.jsonl` and `scores.jsonl`.
        source (`dict`, *optional*):
            What tells this model from others, as JSON values. By default some of its weights; a sampler has none.
        batch_size (`int`, *optional*, defaults to `64`):
            Completions per `generate` call.
        progress (`bool`, *optional*, defaults to `True`):
            Whether to show progress bars.

    Returns:
        `dict`: `metrics` with the `value`, `low` and `high` (95 %) of each, in `[0, 1]`; `num_prompts`, those
        `unscored`; shares of samples that were `truncated` and that are `unanswered`; sampled `tokens` and `seconds`
        of sampling; `settings`.

    Raises:
        `ValueError`: If an argument is outside its range, no sample has a reward, or `output_dir` is of other settings
            (a `FileRefusedError`).

    Example:
    ```python
    >>> sampling = Sampling(num_samples=8, temperature=0.6, max_new_tokens=2048)
    >>> result = evaluate(
    ...     model, dataset, processing_class=tokenizer, reward_funcs=accuracy_reward, sampling=sampling
    ... )
    >>> result["metrics"]["maj@8"]
    {'value': 0.43, 'low': 0.38, 'high': 0.48}
    ```
    """
    sampling = sampling or Sampling()
    wanted = parse_metrics(default_metrics(sampling.num_samples) if metrics is None else metrics, sampling.num_samples)
    if not len(dataset) or "prompt" not in (row_columns(dataset) or []):
        raise ValueError(
            f"dataset must have rows and a column `prompt`, got {len(dataset)} rows with {dataset.column_names}."
        )
    funcs = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    if any(is_async_callable(func) for func in funcs):
        raise ValueError("reward_funcs must be synchronous functions; wrap an async one in `asyncio.run`.")
    names = [get_callable_name(func) for func in funcs]
    check_success_reward(success_reward, names)
    sampler: PromptSampler
    if isinstance(model, nn.Module):
        source = {"weights": digest(weight_probes(model))} if source is None else source
        sampler = TransformersSampler(model, processing_class, batch_size=batch_size)  # type: ignore[arg-type]
    else:
        sampler = model
    rows, folder = list(dataset), None if output_dir is None else Path(output_dir)
    records = collect_completions(
        sampler,
        [row["prompt"] for row in rows],
        processing_class,
        sampling,
        source=source or {},
        path=None if folder is None else folder / "completions.jsonl",
        progress=progress,
    )
    asked = funcs if success_reward is None else [funcs[names.index(success_reward)]]
    named = [(name, checked(func, name), 1.0) for func in asked for name in [get_callable_name(func)]]
    grade = Grader(named, answer_fn=answer_fn)
    pairs = tqdm(zip(records, rows, strict=True), "Scoring", len(rows), disable=not progress, leave=False)
    graded = []
    for record, row in pairs:
        completions = _as_completions(record, row["prompt"], processing_class)
        graded += grade([row], completions, record["completion_ids"])
    rewards, answers = [of_prompt.rewards for of_prompt in graded], [of_prompt.answers for of_prompt in graded]
    settings = {
        **asdict(sampling),
        "reward_funcs": names,
        "success_threshold": success_threshold,
        "success_reward": success_reward,
    }
    if folder is not None:
        _write_scores(folder / "scores.jsonl", settings, rewards, answers)
    scored = [i for i, given in enumerate(rewards) if any(reward is not None for reward in given)]
    if not scored:
        raise NoRewardError(
            f"no sample of any prompt has a reward: {success_reward or 'every reward function'} returned None; check "
            "the column of the gold answers."
        )
    by_kind: dict[str, list[int]] = {kind: [k for of, k in wanted.values() if of == kind] for kind in ("pass", "maj")}
    values = prompt_values(
        [rewards[i] for i in scored],
        [answers[i] for i in scored],
        threshold=success_threshold,
        k=by_kind["pass"],
        maj_k=by_kind["maj"],
    )
    return {
        "metrics": {name: _estimate(values[f"{kind}_at_{k}"]) for name, (kind, k) in wanted.items()},
        "num_prompts": len(rows),
        "unscored": len(rows) - len(scored),
        "truncated": _share(record["truncated"] for record in records),
        "unanswered": _share([answer is None for answer in of_prompt] for of_prompt in answers),
        "tokens": sum(len(ids) for record in records for ids in record["completion_ids"]),
        "seconds": round(sum(record["seconds"] for record in records), 3),
        "settings": settings,
    }


def _write_scores(path: Path, settings: dict[str, Any], rewards: list[list], answers: list[list]) -> None:
    scores = [
        {"index": index, "rewards": given, "answers": [None if answer is None else str(answer) for answer in said]}
        for index, (given, said) in enumerate(zip(rewards, answers, strict=True))
    ]
    write_records(path, SCORES, settings, scores)


def _as_completions(record: Record, prompt: Any, tokenizer: "PreTrainedTokenizerBase") -> list[Any]:
    """Return the completions of a record in the form that reward functions receive."""
    prompt_ids, number = encode_prompts([prompt], tokenizer)[0], len(record["completions"])
    return completions_for_rewards(
        [prompt] * number, [prompt_ids] * number, record["completion_ids"], record["completions"], tokenizer
    )


def _estimate(values: list[float]) -> dict[str, float]:
    """Mean over prompts, with its interval."""
    low, high = bootstrap_interval(values)
    return {"value": math.fsum(values) / len(values), "low": low, "high": high}


def _share(flags: Iterable[list[bool]]) -> float:
    flat = [flag for of_prompt in flags for flag in of_prompt]
    return sum(flat) / len(flat)
