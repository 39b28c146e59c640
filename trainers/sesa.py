"""SESA: the completions of a prompt are drafted one after another, each knowing the drafts before it."""

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from trl_explore.evaluation.metrics import coverage_at_k
from trl_explore.rewards.success import succeeded
from trl_explore.rows.rollouts import Rollout
from trl_explore.sketches.drafts import (
    END_THINK,
    THINK,
    Prompt,
    diversity,
    fill_prompt,
    first_distinct,
    newest_that_fit,
    other_prompts,
    split_candidates,
    split_thoughts,
)

from .base import Chooser
from .behaviour import Drawn
from .sesa_agent import SequentialActionTrainer, check_actions
from .sesa_config import SESAConfig

NO_THOUGHT = f"\n{END_THINK}\n\n"  # what ends a thought that the prompt has begun, as chat templates write it
COLLAPSE_RATIO = 1.05  # Pass@G / Pass@1 below it: the samples of a prompt succeed or fail together


class SESATrainer(SequentialActionTrainer):
    """
    GRPO whose completions follow sketches drafted one after another, each prompted to differ from those before it.

    Method of [The Road Less Traveled: Enhancing Exploration in LLMs via Sequential
    Sampling](https://huggingface.co/papers/2510.15502). What changes with respect to GRPO, per generation batch:

    1. For every prompt, `num_sketches` short sketches are drafted in turn; each prompt shows the earlier ones. Step j
       is one batched call for all prompts.
    2. One completion per row is sampled, from a prompt that shows the row's sketch, all in one call.
    3. Rows are trained under the original prompt: the likelihood sees no sketch, as at evaluation.

    With `mode="sequential"` one response lists the candidates of a group, and each becomes a row. With `mode="agent"`
    the trajectories of a group that stand before the same decision have `num_actions` actions proposed to them, one
    after another, and share them out. `max_trajectories` bounds the rows of a group that explore; the others are
    sampled as in GRPO. `num_sketches=0`, `branch_depth=0` and `max_trajectories=0` give GRPO's parameters bit for bit,
    as do sketches that no template shows. Deviations from the paper (all of them in `trainers/README.md`):

    1. The baseline of the advantage is the group's mean, not its maximum as printed in Eq. 1.
    2. Empty sketches are not shown; their rows are sampled from the plain prompt. Duplicates are kept and counted.
    3. A list of candidates that is too short is continued; if that does not help, its candidates are repeated.
    4. Actions are counted as equal if their tool calls are; a branch is a row of the batch, so their number is fixed.

    The constructor takes what [`~trl.GRPOTrainer`] takes; `args` is a [`SESAConfig`] or a plain [`~trl.GRPOConfig`].
    `mode="agent"` needs an `environment_factory`, the other modes accept neither environments nor tools.
    Vision-language models and `rollout_func` are refused. An environment that raises ends its trajectory with
    reward 0.
    """

    method = "sesa"

    max_completion_length: int
    num_generations: int
    config_class = SESAConfig
    samples_extra_rows = True
    needs_whole_groups = True

    def setup(self) -> None:
        super().setup()
        args = self.args
        self.max_trajectories = self.num_generations if args.max_trajectories is None else args.max_trajectories
        self.num_sketches = self.max_trajectories if args.num_sketches is None else args.num_sketches
        self._sketch_metrics: dict[str, float] = {}
        self.max_drawn = args.branch_depth if args.mode == "agent" else 1
        config: Any = self.accelerator.unwrap_model(self.model).config
        known = vars(config.get_text_config()).get("max_position_embeddings")
        self.context_length = min(args.context_length or known or math.inf, self.max_served_length or math.inf)
        sketch_length = args.max_sketch_length if args.mode == "two_stage" and self.num_sketches else 0
        if self.context_length - max(sketch_length, self.max_completion_length) < 1 and self._explores:
            raise ValueError(
                f"`max_sketch_length={args.max_sketch_length}` and "
                f"`max_completion_length={args.max_completion_length}` leave no room for a prompt in a context of "
                f"{self.context_length} tokens: lower them, or set `context_length` if the model has more."
            )
        if args.mode == "agent":
            for name, tools in self.environment_tools.items():
                check_actions(tools, "" if name is None else f"[{name!r}]")

    @property
    def _explores(self) -> bool:
        """Whether anything differs from plain GRPO."""
        knobs = {
            "two_stage": self.num_sketches,
            "sequential": self.num_generations,
            "agent": min(self.max_trajectories, self.args.branch_depth),
        }
        return knobs[self.args.mode] > 0

    def _check_arguments(self, args, train_dataset, tools, rollout_func, environment_factory) -> None:
        self.accepts_tools = args.mode == "agent"
        if args.mode == "agent" and environment_factory is None:
            raise ValueError(
                "`mode='agent'` needs an environment to act in: pass `environment_factory`, or choose "
                "`mode='two_stage'` for single-turn tasks."
            )
        if args.mode != "agent" and environment_factory is not None:
            raise ValueError(
                f"`mode={args.mode!r}` does not support `environment_factory` (multi-turn rollouts): set "
                "`mode='agent'`, or use GRPOTrainer."
            )
        super()._check_arguments(args, train_dataset, tools, rollout_func, environment_factory)
        rows = args.per_device_train_batch_size * args.steps_per_generation
        if args.sketch_assignment == "shuffled" and rows < 2 * args.num_generations:
            raise ValueError(
                "`sketch_assignment='shuffled'` exchanges sketches between the prompts of a process, which has only "
                f"one per generation batch: raise `per_device_train_batch_size={args.per_device_train_batch_size}` or "
                f"`steps_per_generation={args.steps_per_generation}`, or lower "
                f"`num_generations={args.num_generations}`."
            )

    # ------------------------------------------------------------------------------------------------ the algorithm

    def rollout(self, prompt_ids: list[list[int]], plain: Chooser) -> Rollout:
        if not self._explores:
            return plain(prompt_ids)
        if self.args.mode == "agent":
            return self.act(prompt_ids, plain)
        start = time.perf_counter()
        prompts = [example["prompt"] for example in self.main_examples[:: self.num_generations]]
        if self.args.mode == "sequential":
            return self._take_lists_apart(prompts, prompt_ids, start)
        sketches = self._draft(prompts)
        if self.args.sketch_assignment == "shuffled":
            sketches = self._exchanged(sketches, prompt_ids[:: self.num_generations])
        draft_seconds = time.perf_counter() - start

        start = time.perf_counter()
        size = self.num_generations
        rows = [
            sketches[i // size][i % self.num_sketches] if i % size < self.max_trajectories else ""
            for i in range(len(prompt_ids))
        ]
        shown = [self.main_examples[i]["prompt"] for i in range(len(prompt_ids))]
        solve_ids = self.encode_prompts(
            [
                fill_prompt(prompt, self.args.solve_template, {"sketch": sketch}) if sketch else prompt
                for prompt, sketch in zip(shown, rows, strict=True)
            ]
        )
        too_long = [len(ids) + self.max_completion_length > self.context_length for ids in solve_ids]
        solve_ids = [p if long else s for p, s, long in zip(prompt_ids, solve_ids, too_long, strict=True)]
        self._columns = {"sketch": ["" if long else sketch for sketch, long in zip(rows, too_long, strict=True)]}
        rollout = plain(solve_ids)
        self.drawn = [[Drawn(0, context, ids)] for context, ids in zip(solve_ids, rollout.completion_ids, strict=True)]
        self._sketch_metrics |= {
            "drafting_seconds": draft_seconds,
            "solving_seconds": time.perf_counter() - start,
            "too_long": sum(too_long),
            "sampled_tokens": self._sketch_metrics["tokens"] + sum(map(len, rollout.completion_ids)),
        }
        # Where the sampler saw another prompt, its log-probabilities say nothing about the behaviour under this one.
        logprobs = rollout.logprobs and [
            known if seen == prompt else [None] * len(known)
            for known, seen, prompt in zip(rollout.logprobs, solve_ids, prompt_ids, strict=True)
        ]
        return Rollout(rollout.completion_ids, logprobs)

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
        self._sketch_metrics = {"tokens": num_tokens, "dropped": num_dropped, **diversity(drafts)}
        return drafts

    def _exchanged(self, sketches: list[list[str]], prompt_ids: list[list[int]]) -> list[list[str]]:
        order = torch.randperm(len(sketches), generator=self.exploration_generator).tolist()
        return [sketches[place] for place in other_prompts([tuple(ids) for ids in prompt_ids], order)]

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
        """Rows from the candidates that are listed per prompt, repeated in turn where there are too few."""
        size = self.num_generations
        asked, found, num_tokens = self._list_candidates(prompts)
        distinct = [first_distinct(texts, size) for texts in found]
        # Under a prompt that begins a thought, an answer stands behind the end of it.
        before = [self._encode(NO_THOUGHT) if self._begins_thought(ids) else [] for ids in prompt_ids[::size]]
        candidates = [
            [self._candidate_ids(text, start) for text in texts] for texts, start in zip(distinct, before, strict=True)
        ]
        draft_seconds = time.perf_counter() - start

        start = time.perf_counter()
        # Completions of the plain prompt would fill a group with what the policy says anyway.
        empty = [g for g, rows in enumerate(candidates) if not rows]
        fillers = self.sample(
            [prompt_ids[g * size] for g in empty], size, self.max_completion_length, main_stream=True
        )
        logprobs: list[list[list[float | None]]] = [[[None] * len(ids) for ids in rows] for rows in candidates]
        for g, continuations in zip(empty, fillers, strict=True):
            candidates[g] = [continuation.token_ids for continuation in continuations]
            logprobs[g] = [c.logprobs or [None] * len(c.token_ids) for c in continuations]
        self._sketch_metrics = {
            "tokens": num_tokens,
            "repeats": sum(size - len(rows) for rows in candidates),
            "fillers": len(empty) * size,
            "drafting_seconds": draft_seconds,
            "solving_seconds": time.perf_counter() - start,
            "sampled_tokens": num_tokens + sum(len(c.token_ids) for group in fillers for c in group),
            **diversity(found),
        }
        # A candidate was drawn behind those before it, but for its end token, which a list has in another form.
        drawn = [
            [
                Drawn(
                    len(before[g]),
                    ids + self._begun_list(found[g][: found[g].index(text)]),
                    candidates[g][i][len(before[g]) : -1],
                )
                for i, text in enumerate(distinct[g])
            ]
            for g, ids in enumerate(asked)
        ]
        self.drawn = [[parts[i % len(parts)]] if parts else [] for parts in drawn for i in range(size)]
        self._columns = {"candidate": [i % len(parts) if parts else math.nan for parts in drawn for i in range(size)]}
        return Rollout(
            [list(rows[i % len(rows)]) for rows in candidates for i in range(size)],
            [list(rows[i % len(rows)]) for rows in logprobs for i in range(size)] if self.use_vllm else None,
        )

    def _list_candidates(self, prompts: list[Prompt]) -> tuple[list[list[int]], list[list[str]], int]:
        """
        Prompts that ask for lists, the candidates of each with duplicates, and the tokens they cost. A list that ends
        too early is continued: its distinct candidates are put into the model's mouth, behind what it thought before
        the first of them, each round in one call for all prompts.
        """
        args, size = self.args, self.num_generations
        asked = self.encode_prompts(
            [fill_prompt(prompt, args.candidate_template, {"num_candidates": str(size)}) for prompt in prompts]
        )
        most = args.max_list_length or size * self.max_completion_length
        found: list[list[str]] = [[] for _ in prompts]
        num_tokens = 0
        open_lists = set(range(len(prompts)))
        for _ in range(args.max_lists or size):
            begun = [asked[i] + self._begun_list(first_distinct(texts, size)) for i, texts in enumerate(found)]
            room = [int(min(most, self.context_length - len(ids))) for ids in begun]
            short = [i for i, texts in enumerate(found) if i in open_lists and len(set(texts)) < size and room[i] > 0]
            lists = self.sample([begun[i] for i in short], 1, [room[i] for i in short], main_stream=True)
            for i, (continuation,) in zip(short, lists, strict=True):
                text = self._text_and_thoughts(continuation.token_ids)
                thought, said = split_thoughts(text, opened=self._begins_thought(begun[i]))
                # A list that was cut off may end within a candidate: whole ones have a separator behind them.
                whole = said if continuation.finished else said.rpartition(args.candidate_separator)[0]
                texts = split_candidates(whole, separator=args.candidate_separator)
                if not found[i]:
                    asked[i] = asked[i] + self._encode(thought)
                if set(texts) <= set(found[i]):
                    open_lists.discard(i)  # the policy has nothing to add
                found[i] += texts
                num_tokens += len(continuation.token_ids)
        return asked, found, num_tokens

    def _begun_list(self, texts: list[str]) -> list[int]:
        return self._encode("".join(text + self.args.candidate_separator for text in texts))

    def _candidate_ids(self, text: str, before: list[int]) -> list[int]:
        ids = before + self._encode(text)
        return [*ids[: self.max_completion_length - 1], self.eos_token_ids[0]]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _begins_thought(self, prompt_ids: list[int]) -> bool:
        return self._text_and_thoughts(prompt_ids).rstrip().endswith(THINK)

    def _text_and_thoughts(self, token_ids: list[int]) -> str:
        """Text without special tokens, but with the tags of thoughts, which some tokenizers count among them."""
        added = self._tokenizer.added_tokens_decoder
        silent = {i for i, token in added.items() if token.special and token.content not in (THINK, END_THINK)}
        return self._tokenizer.decode([i for i in token_ids if i not in silent], skip_special_tokens=False)

    def assign_advantages(self, output: dict[str, Any]) -> torch.Tensor:
        advantages = output["advantages"]
        if self._explores:
            self._log_group()
        return self.weigh(advantages, output) if self._explores and self.args.off_policy_correction else advantages

    # -------------------------------------------------------------------------------------------------------- metrics

    def completion_columns(self) -> dict[str, list[Any]]:
        return self._columns

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True).strip()

    def _log_group(self) -> None:
        size = self.num_generations
        rewards = self.local(self._success_rewards()).view(-1, size)
        successes = succeeded(rewards, threshold=self.args.success_threshold).tolist()
        covered = []
        for g, example in enumerate(self.main_examples[::size]):
            if "targets" in example:
                texts = [self._text(ids) for ids in self.main_completion_ids[g * size : (g + 1) * size]]
                covered.append(coverage_at_k(texts, example["targets"], size))
        own = self._sketch_metrics
        if self.args.mode == "agent":
            rows = [tuple(ids) for ids in self.main_completion_ids]
            own["trajectories"] = sum(len(set(rows[i : i + size])) for i in range(0, len(rows), size))
        if self.args.mode == "two_stage":
            sketches = self._columns["sketch"]
            behind = [
                [ok for ok, sketch in zip(row, sketches[g * size :], strict=False) if sketch]
                for g, row in enumerate(successes)
            ]
            own |= {"sketched": sum(map(len, behind)), "sketched_correct": sum(map(sum, behind))}
            own |= {"sketched_groups": sum(map(bool, behind)), "sketched_solved": sum(map(any, behind))}
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
            self.log_metric(f"sketch/{name}", total[name] / max(total["lists"], 1))
        if "trajectories" in total:
            self.log_metric("agent/trajectories", total["trajectories"] / groups)
            self.log_metric("agent/decisions", total["lists"] / groups)
            self.log_metric("agent/duplicate_actions", total["duplicates"])
        for name in ("tokens", "sampled_tokens", "dropped", "too_long", "repeats", "fillers"):
            if name in total:
                self.log_metric(f"sketch/{name}", total[name])
        if sketched := total.get("sketched"):
            self.log_metric("sketch/success", total["sketched_correct"] / sketched)
            self.log_metric("sketch/group_success", total["sketched_solved"] / total["sketched_groups"])
        if "sketched" in total and (alone := groups * size - total["sketched"]):
            self.log_metric("sketch/plain_success", (total["correct"] - total["sketched_correct"]) / alone)
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
