"""Evaluation of a model on a dataset: pass@k and maj@k, with bootstrap intervals over the prompts."""

import math
import re
from collections.abc import Callable, Hashable, Sequence
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
from trl_explore.evaluation.grading import Graded, Grader
from trl_explore.evaluation.intervals import bootstrap_interval
from trl_explore.evaluation.metrics import NoRewardError, has_reward, prompt_values
from trl_explore.evaluation.samplers import PromptSampler, Sampling, TransformersSampler
from trl_explore.names import unknown_name
from trl_explore.rewards.answers import answer_key
from trl_explore.rewards.checks import checked
from trl_explore.rewards.success import check_success_reward
from trl_explore.rows.columns import check_prompts
from trl_explore.saving.fingerprints import digest, weight_probes
from trl_explore.saving.records import write_records

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

METRIC = re.compile(r"(pass|maj)@([1-9]\d*)")
SCORES = "trl-explore scores"


RewardFunction = Callable[..., Sequence[float | None]]


def default_metrics(num_samples: int) -> list[str]:
    """Return `pass@1` and, with several samples per prompt, pass@k and maj@k with k = `num_samples`."""
    if num_samples == 1:
        return ["pass@1"]
    return ["pass@1", f"pass@{num_samples}", f"maj@{num_samples}"]


def parse_metrics(names: Sequence[str], num_samples: int) -> dict[str, tuple[str, int]]:
    """
    Parse names of metrics.

    Args:
        names (`Sequence[str]`):
            Names such as `maj@8`.
        num_samples (`int`):
            Number of samples per prompt.

    Returns:
        `dict[str, tuple[str, int]]`: Each name with its kind (`"pass"` or `"maj"`) and its k.

    Raises:
        `ValueError`: If a name is unknown or its k is larger than `num_samples`.
    """
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
    Sample completions of a dataset's prompts, grade them, and average the metrics over the prompts.

    With `output_dir`, a call with the same settings continues where an earlier call stopped. Every call grades all
    completions again, so that other metrics and other rewards need no new samples.

    A sample without a reward is a failure. If no sample of a prompt has a reward, the metrics leave the prompt out and
    `unscored` counts it.

    Args:
        model ([`~transformers.PreTrainedModel`], `PeftModel` or [`~trl_explore.evaluation.samplers.PromptSampler`]):
            A model, which samples with `generate` on its current device, or a sampler.
        dataset ([`~datasets.Dataset`]):
            Prompts in a column `prompt`, plain or conversational, and the columns that the reward functions read.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer.
        reward_funcs (`Callable` or a list of them):
            Synchronous reward functions as [`~trl.GRPOTrainer`] takes them. Their rewards are summed.
        sampling ([`~trl_explore.evaluation.samplers.Sampling`], *optional*):
            Sampling options. By default, one completion per prompt at temperature 1.
        metrics (`Sequence[str]`, *optional*):
            Names such as `pass@1` and `maj@8`. [`default_metrics`] by default.
        answer_fn (`Callable`, *optional*, defaults to [`~trl_explore.rewards.answers.answer_key`]):
            Maps the text of a completion to its answer (hashable, or `None` if there is no answer), for the majority
            vote.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest sum of rewards that counts as success.
        success_reward (`str`, *optional*):
            Name of the reward function that decides success instead of the sum. The others are then not called.
        output_dir (`str` or `Path`, *optional*):
            Folder of `completions.jsonl` and `scores.jsonl`.
        source (`dict`, *optional*):
            Identifies the model in `completions.jsonl`, so that another model does not continue the file. JSON values.
            By default a hash of some of the model's weights, and nothing for a sampler.
        batch_size (`int`, *optional*, defaults to `64`):
            Number of completions per `generate` call.
        progress (`bool`, *optional*, defaults to `True`):
            If `True`, show progress bars.

    Returns:
        `dict`:
            - `metrics`: each metric's `value` and 95 % interval (`low`, `high`), in `[0, 1]`.
            - `num_prompts`, and the number of `unscored` prompts.
            - `truncated` and `unanswered`: shares of the samples, in `[0, 1]`.
            - `tokens`: number of sampled tokens. `seconds`: time of sampling.
            - `settings`: the sampling options, the names of the reward functions, and the rule of success.

    Raises:
        `ValueError`: If an argument is outside its range, if no sample has a reward (a `NoRewardError`), or if the
            files in `output_dir` were written with other settings (a `FileRefusedError`).

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
    if metrics is None:
        metrics = default_metrics(sampling.num_samples)
    kinds = parse_metrics(metrics, sampling.num_samples)
    check_prompts(dataset)
    funcs = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    if any(is_async_callable(func) for func in funcs):
        raise ValueError("reward_funcs must be synchronous functions; wrap an async one in `asyncio.run`.")
    names = [get_callable_name(func) for func in funcs]
    check_success_reward(success_reward, names)
    sampler: PromptSampler
    if isinstance(model, nn.Module):
        if source is None:
            source = {"weights": digest(weight_probes(model))}
        sampler = TransformersSampler(model, processing_class, batch_size=batch_size)  # type: ignore[arg-type]
    else:
        sampler = model
    completions_file = scores_file = None
    if output_dir is not None:
        completions_file = Path(output_dir, "completions.jsonl")
        scores_file = Path(output_dir, "scores.jsonl")
    rows = list(dataset)
    records = collect_completions(
        sampler,
        [row["prompt"] for row in rows],
        processing_class,
        sampling,
        source=source or {},
        path=completions_file,
        progress=progress,
    )
    rewards = []
    for name, func in zip(names, funcs, strict=True):
        if success_reward in (None, name):  # if one function decides success, the others are not called
            rewards.append((name, checked(func, name), 1.0))
    grade = Grader(rewards, answer_fn=answer_fn)
    graded: list[Graded] = []
    for record, row in tqdm(zip(records, rows, strict=True), "Scoring", len(rows), disable=not progress, leave=False):
        completions = _as_completions(record, row["prompt"], processing_class)
        graded += grade([row], completions, record["completion_ids"])
    settings = {
        **asdict(sampling),
        "reward_funcs": names,
        "success_threshold": success_threshold,
        "success_reward": success_reward,
    }
    if scores_file is not None:
        _write_scores(scores_file, settings, graded)
    scored = [grades for grades in graded if has_reward(grades.rewards)]
    if not scored:
        raise NoRewardError(
            f"no sample of any prompt has a reward: {success_reward or 'every reward function'} returned None; check "
            "the column of the gold answers."
        )
    values = prompt_values(
        [grades.rewards for grades in scored],
        [grades.answers for grades in scored],
        threshold=success_threshold,
        k=[k for kind, k in kinds.values() if kind == "pass"],
        maj_k=[k for kind, k in kinds.values() if kind == "maj"],
    )
    return {
        "metrics": {name: _estimate(values[f"{kind}_at_{k}"]) for name, (kind, k) in kinds.items()},
        "num_prompts": len(rows),
        "unscored": len(rows) - len(scored),
        **_count_samples(records, graded),
        "settings": settings,
    }


def _write_scores(path: Path, settings: dict[str, Any], graded: list[Graded]) -> None:
    scores = []
    for index, grades in enumerate(graded):
        answers = [answer if answer is None else str(answer) for answer in grades.answers]
        scores.append({"index": index, "rewards": grades.rewards, "answers": answers})
    write_records(path, SCORES, settings, scores)


def _as_completions(record: Record, prompt: Any, tokenizer: "PreTrainedTokenizerBase") -> list[Any]:
    """Return the completions of a record in the form that reward functions receive."""
    prompt_ids, num_samples = encode_prompts([prompt], tokenizer)[0], len(record["completions"])
    return completions_for_rewards(
        [prompt] * num_samples,
        [prompt_ids] * num_samples,
        record["completion_ids"],
        record["completions"],
        tokenizer,
    )


def _estimate(values: list[float]) -> dict[str, float]:
    """Return the mean over prompts and its interval."""
    low, high = bootstrap_interval(values)
    return {"value": math.fsum(values) / len(values), "low": low, "high": high}


def _count_samples(records: list[Record], graded: list[Graded]) -> dict[str, float]:
    """Return shares of truncated and unanswered samples, the number of tokens, and the seconds of sampling."""
    num_samples = num_truncated = num_unanswered = num_tokens = 0
    for record, grades in zip(records, graded, strict=True):
        num_samples += len(grades.answers)
        num_truncated += sum(record["truncated"])
        num_unanswered += grades.answers.count(None)
        num_tokens += sum(len(ids) for ids in record["completion_ids"])
    return {
        "truncated": num_truncated / num_samples,
        "unanswered": num_unanswered / num_samples,
        "tokens": num_tokens,
        "seconds": round(sum(record["seconds"] for record in records), 3),
    }
