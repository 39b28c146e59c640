"""SESA: the completions of a prompt are drafted one after another, each knowing the drafts before it."""

import math
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from trl_explore.metrics import coverage_at_k
from trl_explore.names import explain_unknown_fields, unknown_name
from trl_explore.rollouts import Rollout
from trl_explore.sketches import (
    Prompt,
    check_template,
    fill_prompt,
    first_occurrences,
    mean_similarity,
    newest_that_fit,
    split_candidates,
)

from .base import Chooser, ExplorationTrainer
from .config import ExplorationConfig

MODES = ("two_stage", "sequential")
COLLAPSE_RATIO = 1.05  # Pass@G / Pass@1 below it: the samples of a prompt succeed or fail together
SKETCH_TEMPLATE = (
    "{problem}\n\nDo not solve the problem yet. Describe in one or two sentences a strategy for solving it."
)
NEXT_SKETCH_TEMPLATE = (
    "{problem}\n\nStrategies that were proposed already:\n- {sketches}\n\nDo not solve the problem yet. Describe in "
    "one or two sentences a strategy that is clearly different from all of these."
)
SOLVE_TEMPLATE = "{problem}\n\nUse this strategy: {sketch}"
CANDIDATE_TEMPLATE = (
    "{problem}\n\nGive {num_candidates} answers that are all different from each other, each on a line of its own, "
    "and nothing else."
)


@explain_unknown_fields
@dataclass
class SESAConfig(ExplorationConfig):
    r"""
    Configuration of [`SESATrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of SESA.

    Fields of GRPO keep TRL's defaults.

    Args:
        mode (`str`, *optional*, defaults to `"two_stage"`):
            `"two_stage"` drafts sketches one after another and solves each in a completion of its own;
            `"sequential"` takes the candidates of one response that lists `num_generations` of them (short answers).
        num_sketches (`int`, *optional*):
            Sketches per prompt with `mode="two_stage"`, at most `num_generations`, which share them in turn. `None`
            means `num_generations`; 0 is plain GRPO.
        max_sketch_length (`int`, *optional*, defaults to `64`):
            Most tokens per sketch.
        sketch_template (`str`, *optional*):
            Prompt of the first sketch, with `{problem}`.
        next_sketch_template (`str`, *optional*):
            Prompt of the others, with `{problem}` and `{sketches}`, those before.
        sketch_separator (`str`, *optional*, defaults to `"\n- "`):
            What stands between earlier sketches.
        solve_template (`str`, *optional*):
            Prompt of a solution, with `{problem}` and, usually, `{sketch}`.
        candidate_template (`str`, *optional*):
            Prompt of a list with `mode="sequential"`, with `{problem}` and, optionally, `{num_candidates}`.
        candidate_separator (`str`, *optional*, defaults to `"\n"`):
            What stands between the candidates of a list.
        max_list_length (`int`, *optional*):
            Most tokens of a list. `None` means `num_generations * max_completion_length`, or what the context allows.
        context_length (`int`, *optional*):
            Tokens that prompt and completion may have together. `None` means the model's `max_position_embeddings`.
        off_policy_correction (`bool`, *optional*, defaults to `False`):
            Weight every token of a solution by `pi(token | problem) / pi(token | problem, sketch)`, cut at
            `off_policy_cap`. Beyond the paper; only with `mode="two_stage"`.
        off_policy_cap (`float`, *optional*, defaults to `2.0`):
            Largest such weight.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward of a correct completion, for the metrics.
    """

    mode: str = field(default="two_stage", metadata={"help": "'two_stage' or 'sequential'."})
    num_sketches: int | None = field(
        default=None, metadata={"help": "Sketches per prompt; None: num_generations, 0: plain GRPO."}
    )
    max_sketch_length: int = field(default=64, metadata={"help": "Most tokens per sketch."})
    sketch_template: str = field(default=SKETCH_TEMPLATE, metadata={"help": "Prompt of the first sketch."})
    next_sketch_template: str = field(default=NEXT_SKETCH_TEMPLATE, metadata={"help": "Prompt of the other sketches."})
    sketch_separator: str = field(default="\n- ", metadata={"help": "Text between earlier sketches."})
    solve_template: str = field(default=SOLVE_TEMPLATE, metadata={"help": "Prompt of a solution."})
    candidate_template: str = field(default=CANDIDATE_TEMPLATE, metadata={"help": "Prompt of a list of candidates."})
    candidate_separator: str = field(default="\n", metadata={"help": "Text between candidates of a list."})
    max_list_length: int | None = field(default=None, metadata={"help": "Most tokens of a list of candidates."})
    context_length: int | None = field(default=None, metadata={"help": "Tokens of prompt and completion together."})
    off_policy_correction: bool = field(
        default=False, metadata={"help": "Weight tokens by their likelihood without over with the sketch."}
    )
    off_policy_cap: float = field(default=2.0, metadata={"help": "Largest such weight."})
    success_threshold: float = field(default=1.0, metadata={"help": "Smallest reward of a correct completion."})

    def validate(self) -> None:
        super().validate()
        if self.mode not in MODES:
            raise ValueError(f"`mode`: {unknown_name('value', str(self.mode), MODES)}")
        group = self.num_generations or 1
        if self.num_sketches is not None and not 0 <= self.num_sketches <= group:
            raise ValueError(
                f"`num_sketches={self.num_sketches}` must be between 0 (plain GRPO) and `num_generations={group}`, "
                "which solve one sketch each."
            )
        for name in ("max_sketch_length", "max_list_length", "context_length"):
            value = vars(self)[name]
            if value is not None and value < 1:
                raise ValueError(f"`{name}={value}` must be at least 1 token.")
        if not 0 < self.off_policy_cap < math.inf or not math.isfinite(self.success_threshold):
            raise ValueError(
                f"`off_policy_cap={self.off_policy_cap}` must be positive and "
                f"`success_threshold={self.success_threshold}` finite."
            )
        if self.off_policy_correction and self.mode != "two_stage":
            raise ValueError(
                f"`off_policy_correction=True` needs `mode='two_stage'`, not {self.mode!r}: a candidate of a list was "
                "sampled behind all candidates before it."
            )
        check_template("sketch_template", self.sketch_template, required=["problem"])
        check_template("next_sketch_template", self.next_sketch_template, required=["problem", "sketches"])
        check_template("solve_template", self.solve_template, required=["problem"])
        check_template("candidate_template", self.candidate_template, required=["problem"])
        for name in ("sketch_separator", "candidate_separator"):
            if not vars(self)[name]:
                raise ValueError(f"`{name}` must not be empty: texts would run into each other.")


class SESATrainer(ExplorationTrainer):
    """
    GRPO whose completions follow sketches drafted one after another, each prompted to differ from those before it.

    Method of [The Road Less Traveled: Enhancing Exploration in LLMs via Sequential
    Sampling](https://huggingface.co/papers/2510.15502). What changes with respect to GRPO, per generation batch:

    1. For every prompt, `num_sketches` short sketches are drafted in turn; each prompt shows the earlier ones. Step j
       is one batched call for all prompts.
    2. One completion per row is sampled, from a prompt that shows the row's sketch, all in one call.
    3. Rows are trained under the original prompt: the likelihood sees no sketch, as at evaluation.

    With `mode="sequential"` one response lists the candidates of a group, and each becomes a row. `num_sketches=0`
    gives GRPO's parameters bit for bit, as do sketches that no template shows. Deviations from the paper (all of them
    in `trainers/README.md`):

    1. The baseline of the advantage is the group's mean, not its maximum as printed in Eq. 1.
    2. Empty sketches are not shown; their rows are sampled from the plain prompt. Duplicates are kept and counted.
    3. What is missing in a list of candidates is filled up with completions of the plain prompt.

    The constructor takes what [`~trl.GRPOTrainer`] takes; `args` is a [`SESAConfig`] or a plain [`~trl.GRPOConfig`].
    Tools, environments, vision-language models, `rollout_func` and vLLM are refused.
    """

    _tag_names = ["trl", "grpo", "trl-explore", "sesa"]
    _name = "SESA"
    _paper = {
        "title": "The Road Less Traveled: Enhancing Exploration in LLMs via Sequential Sampling",
        "id": "2510.15502",
        "citation": textwrap.dedent("""\
            @article{kang2025road,
                title        = {{The Road Less Traveled: Enhancing Exploration in LLMs via Sequential Sampling}},
                author       = {Shijia Kang and Muhan Zhang},
                year         = 2025,
                eprint       = {arXiv:2510.15502},
            }"""),  # fmt: skip
    }

    max_completion_length: int
    num_generations: int
    config_class = SESAConfig
    samples_extra_rows = True
    needs_whole_groups = True

    def setup(self) -> None:
        args = self.args
        self.num_sketches = self.num_generations if args.num_sketches is None else args.num_sketches
        self._sketch_metrics: dict[str, float] = {}
        self._ratios: torch.Tensor | None = None
        config: Any = self.accelerator.unwrap_model(self.model).config
        known = vars(config.get_text_config()).get("max_position_embeddings")
        self.context_length = args.context_length or known or math.inf
        room = self.context_length - max(args.max_sketch_length, args.max_completion_length)
        if self.num_sketches and room < 1:
            raise ValueError(
                f"`max_sketch_length={args.max_sketch_length}` and "
                f"`max_completion_length={args.max_completion_length}` leave no room for a prompt in a context of "
                f"{self.context_length} tokens: lower them, or set `context_length` if the model has more."
            )

    # ------------------------------------------------------------------------------------------------ the algorithm

    def rollout(self, prompt_ids: list[list[int]], plain: Chooser) -> Rollout:
        self._ratios = None
        if self.args.mode == "two_stage" and self.num_sketches == 0:
            self._sketch_metrics = {}
            return plain(prompt_ids)
        start = time.perf_counter()
        prompts = [example["prompt"] for example in self.main_examples[:: self.num_generations]]
        if self.args.mode == "sequential":
            return self._take_lists_apart(prompts, prompt_ids, start)
        sketches = self._draft(prompts)
        draft_seconds = time.perf_counter() - start

        start = time.perf_counter()
        rows = [sketches[i // self.num_generations][i % self.num_sketches] for i in range(len(prompt_ids))]
        shown = [self.main_examples[i]["prompt"] for i in range(len(prompt_ids))]
        solve_ids = self.encode_prompts(
            [
                fill_prompt(prompt, self.args.solve_template, {"sketch": sketch}) if sketch else prompt
                for prompt, sketch in zip(shown, rows, strict=True)
            ]
        )
        too_long = [len(ids) + self.max_completion_length > self.context_length for ids in solve_ids]
        solve_ids = [p if long else s for p, s, long in zip(prompt_ids, solve_ids, too_long, strict=True)]
        rollout = plain(solve_ids)
        if self.args.off_policy_correction:
            self._ratios = self._likelihood_ratios(prompt_ids, solve_ids, rollout.completion_ids)
        self._sketch_metrics |= {
            "drafting_seconds": draft_seconds,
            "solving_seconds": time.perf_counter() - start,
            "too_long": sum(too_long),
            "sampled_tokens": self._sketch_metrics["tokens"] + sum(map(len, rollout.completion_ids)),
        }
        # The sampler saw another prompt: its log-probabilities say nothing about the behaviour under this one.
        return Rollout(rollout.completion_ids)

    def _draft(self, prompts: list[Prompt]) -> list[list[str]]:
        """Sketches of every prompt, `[P][num_sketches]`: step j is one call for all of them."""
        args = self.args
        drafts: list[list[str]] = [[] for _ in prompts]
        num_tokens = num_dropped = 0
        for _ in range(self.num_sketches):
            told = [[sketch for sketch in earlier if sketch] for earlier in drafts]
            asked = self.encode_prompts(
                [self._sketch_prompt(prompt, some) for prompt, some in zip(prompts, told, strict=True)]
            )
            for i, ids in enumerate(asked):
                if len(ids) > self._sketch_room:
                    kept = newest_that_fit(told[i], partial(self._fits, prompts[i]))
                    num_dropped += len(told[i]) - len(kept)
                    asked[i] = self.encode_prompts([self._sketch_prompt(prompts[i], kept)])[0]
            sampled = self.sample(asked, 1, args.max_sketch_length)
            for earlier, (continuation,) in zip(drafts, sampled, strict=True):
                earlier.append(self._text(continuation.token_ids))
                num_tokens += len(continuation.token_ids)
        self._sketch_metrics = {"tokens": num_tokens, "dropped": num_dropped, **_diversity(drafts)}
        return drafts

    def _sketch_prompt(self, prompt: Prompt, earlier: Sequence[str]) -> Prompt:
        if not earlier:
            return fill_prompt(prompt, self.args.sketch_template, {})
        slots = {"sketches": self.args.sketch_separator.join(earlier)}
        return fill_prompt(prompt, self.args.next_sketch_template, slots)

    @property
    def _sketch_room(self) -> float:
        return self.context_length - self.args.max_sketch_length

    def _fits(self, prompt: Prompt, earlier: Sequence[str]) -> bool:
        return len(self.encode_prompts([self._sketch_prompt(prompt, earlier)])[0]) <= self._sketch_room

    def _take_lists_apart(self, prompts: list[Prompt], prompt_ids: list[list[int]], start: float) -> Rollout:
        """Rows from one list of candidates per prompt; what is missing is sampled from the plain prompt."""
        args, size = self.args, self.num_generations
        slots = {"num_candidates": str(size)}
        asked = self.encode_prompts([fill_prompt(prompt, args.candidate_template, slots) for prompt in prompts])
        most = args.max_list_length or size * self.max_completion_length
        budgets = [max(1, int(min(most, self.context_length - len(ids)))) for ids in asked]
        lists = [continuation for (continuation,) in self.sample(asked, 1, budgets, main_stream=True)]
        found = [split_candidates(self._text(c.token_ids), separator=args.candidate_separator) for c in lists]
        # A list that was cut off ends in the middle of a candidate.
        found = [texts if c.finished else texts[:-1] for c, texts in zip(lists, found, strict=True)]
        distinct = [[texts[i] for i in first_occurrences(texts)][:size] for texts in found]
        candidates = [[self._candidate_ids(text) for text in texts] for texts in distinct]
        draft_seconds = time.perf_counter() - start

        start = time.perf_counter()
        missing = [size - len(rows) for rows in candidates]
        open_groups = [g for g, number in enumerate(missing) if number]
        fillers = self.sample(
            [prompt_ids[g * size] for g in open_groups],
            [missing[g] for g in open_groups],
            self.max_completion_length,
            main_stream=True,
        )
        for g, continuations in zip(open_groups, fillers, strict=True):
            candidates[g] += [continuation.token_ids for continuation in continuations]
        num_tokens = sum(len(c.token_ids) for c in lists)
        self._sketch_metrics = {
            "tokens": num_tokens,
            "fillers": sum(missing),
            "drafting_seconds": draft_seconds,
            "solving_seconds": time.perf_counter() - start,
            "sampled_tokens": num_tokens + sum(len(c.token_ids) for group in fillers for c in group),
            **_diversity(found),
        }
        return Rollout([ids for rows in candidates for ids in rows])

    def _candidate_ids(self, text: str) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids[: self.max_completion_length - 1], self.eos_token_ids[0]]

    def _likelihood_ratios(self, prompt_ids, solve_ids, completion_ids) -> torch.Tensor:
        """`pi(token | problem) / pi(token | problem, sketch)`, cut at the cap; shape `(B, T)`, 1 on padding."""
        plain = self.token_logprobs(prompt_ids, completion_ids)
        told = self.token_logprobs(solve_ids, completion_ids)
        ratios = torch.ones(len(plain), max(map(len, plain)))
        for i, (p, s) in enumerate(zip(plain, told, strict=True)):
            ratios[i, : len(p)] = (torch.tensor(p) - torch.tensor(s)).exp()
        return ratios

    def assign_advantages(self, output: dict[str, Any]) -> torch.Tensor:
        advantages = output["advantages"]
        if self.args.mode != "two_stage" or self.num_sketches:
            self._log_group()
        if self._ratios is None:
            return advantages
        ratios, cap = self._ratios.to(advantages.device), self.args.off_policy_cap
        real = output["completion_mask"][:, : ratios.shape[1]].bool()
        counts = self.summed(
            {"sum": ratios[real].sum().item(), "capped": (ratios[real] > cap).sum().item(), "n": real.sum().item()}
        )
        self.log_metric("sketch/ratio_mean", counts["sum"] / max(counts["n"], 1))
        self.log_metric("sketch/ratio_capped_fraction", counts["capped"] / max(counts["n"], 1))
        wide = torch.ones_like(output["completion_mask"], dtype=ratios.dtype)  # (B, T)
        wide[:, : ratios.shape[1]] = ratios.clamp(max=cap)
        return advantages.unsqueeze(1) * wide

    # -------------------------------------------------------------------------------------------------------- metrics

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True).strip()

    def _log_group(self) -> None:
        size = self.num_generations
        rewards = self.local(self._total_rewards()).view(-1, size)
        successes = (rewards >= self.args.success_threshold).tolist()
        covered = []
        for g, example in enumerate(self.main_examples[::size]):
            if "targets" in example:
                texts = [self._text(ids) for ids in self.main_completion_ids[g * size : (g + 1) * size]]
                covered.append(coverage_at_k(texts, example["targets"], size))
        own = self._sketch_metrics
        total = self.summed(
            {
                **own,
                "groups": len(successes),
                "correct": sum(map(sum, successes)),
                "solved": sum(map(any, successes)),
                "covered": sum(covered),
                "with_targets": len(covered),
            }
        )
        groups = total["groups"]
        for name in ("distinct", "similarity", "empty"):
            self.log_metric(f"sketch/{name}", total[name] / groups)
        for name in ("tokens", "sampled_tokens", "dropped", "too_long", "fillers"):
            if name in total:
                self.log_metric(f"sketch/{name}", total[name])
        self.log_metric("sketch/drafting_seconds", own["drafting_seconds"])
        self.log_metric("sketch/solving_seconds", own["solving_seconds"])
        self.log_metric("sketch/token_ratio", total["tokens"] / max(total["sampled_tokens"], 1))
        if total["with_targets"]:
            self.log_metric("sketch/coverage", total["covered"] / total["with_targets"])
        if total["correct"]:
            each = total["correct"] / (groups * size)
            ratio = total["solved"] / groups / each
            self.log_metric("sketch/pass_ratio", ratio)
            self.log_metric("sketch/collapse_alarm", float(ratio < COLLAPSE_RATIO and each < 1 / COLLAPSE_RATIO))


def _diversity(drafts: list[list[str]]) -> dict[str, float]:
    """Sums over prompts: shares of distinct and empty drafts, and how alike they are."""
    return {
        "distinct": sum(len(set(texts)) / len(texts) for texts in drafts if texts),
        "empty": sum(sum(not text for text in texts) / len(texts) for texts in drafts if texts),
        "similarity": sum(mean_similarity(texts) for texts in drafts),
    }
