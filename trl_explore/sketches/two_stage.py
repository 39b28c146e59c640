"""SESA in two stages: sketches are drafted one after another, and each completion follows one of them."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from trl_explore.rows.rollouts import Rollout
from trl_explore.sketches.drafts import Prompt, diversity, fill_prompt, newest_that_fit, other_prompts
from trl_explore.sketches.mode import Chooser, Mode
from trl_explore.sketches.weights import Drawn


class TwoStage(Mode):
    """Section 3.1 and algorithm 1 of the paper; `num_sketches` are drafted per prompt."""

    def __init__(self, *args: Any, num_sketches: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_sketches = num_sketches

    def rollout(self, prompt_ids: list[list[int]], examples: list[dict[str, Any]], plain: Chooser) -> Rollout:
        with self.sample.rollout():
            return self._drafted_and_solved(prompt_ids, examples, plain)

    def _drafted_and_solved(
        self, prompt_ids: list[list[int]], examples: list[dict[str, Any]], plain: Chooser
    ) -> Rollout:
        start = time.perf_counter()
        size = self.size
        sketches = self._draft([example["prompt"] for example in examples[::size]])
        if self.args.sketch_assignment == "shuffled":
            sketches = self._exchanged(sketches, prompt_ids[::size])
        draft_seconds = time.perf_counter() - start

        start = time.perf_counter()
        rows = [
            sketches[i // size][i % self.num_sketches] if i % size < self.num_explored else ""
            for i in range(len(prompt_ids))
        ]
        # Rows of a prompt that follow the same words are encoded once, and those without a sketch were already.
        places = {(i // size, sketch): i for i, sketch in enumerate(rows) if sketch}
        asked = [
            fill_prompt(examples[i]["prompt"], self.args.solve_template, {"sketch": sketch})
            for (_, sketch), i in places.items()
        ]
        behind = dict(zip(places, self.policy.encode_prompts(asked), strict=True))
        solve_ids = [
            behind.get((i // size, sketch), prompt)
            for i, (sketch, prompt) in enumerate(zip(rows, prompt_ids, strict=True))
        ]
        too_long = [len(ids) + self.args.max_completion_length > self.context_length for ids in solve_ids]
        solve_ids = [p if long else s for p, s, long in zip(prompt_ids, solve_ids, too_long, strict=True)]
        self.columns = {"sketch": ["" if long else sketch for sketch, long in zip(rows, too_long, strict=True)]}
        rollout = self._solved(solve_ids, plain)
        self.drawn = [[Drawn(0, context, ids)] for context, ids in zip(solve_ids, rollout.completion_ids, strict=True)]
        self.metrics |= {
            "drafting_seconds": draft_seconds,
            "solving_seconds": time.perf_counter() - start,
            "too_long": sum(too_long),
            "sampled_tokens": self.metrics["tokens"] + sum(map(len, rollout.completion_ids)),
        }
        # Where the sampler saw another prompt, its log-probabilities say nothing about the behaviour under this one.
        logprobs = rollout.logprobs and [
            known if seen == prompt else [None] * len(known)
            for known, seen, prompt in zip(rollout.logprobs, solve_ids, prompt_ids, strict=True)
        ]
        return Rollout(rollout.completion_ids, logprobs)

    def _solved(self, solve_ids: list[list[int]], plain: Chooser) -> Rollout:
        """Sample completions as GRPO does. If prefixes are kept, what rows have in common is encoded once."""
        options = self.args.generation_kwargs or {}
        most = options.get("max_new_tokens", self.args.max_completion_length)  # as in TRL
        if self.sample.paths is None or self.sample.batch_size is not None or most is None:
            return plain(solve_ids)
        return Rollout([one.token_ids for (one,) in self.sample(solve_ids, 1, most, main_stream=True)])

    def apart(self, num_rows: int) -> list[int]:
        return [row for row in range(num_rows) if row % self.size < self.num_explored]

    def _draft(self, prompts: list[Prompt]) -> list[list[str]]:
        """Sketches of every prompt, `[P][num_sketches]`: each step is one call for all of them, in which the
        `parallel_sketches` chains of a prompt get one more each."""
        chains = self.args.parallel_sketches
        drafts: list[list[str]] = [[] for _ in prompts]
        num_tokens = num_dropped = 0
        for first in range(0, self.num_sketches, chains):
            places = range(first, min(first + chains, self.num_sketches))
            steps = [(i, place) for i in range(len(prompts)) for place in places]
            shown = [[sketch for sketch in drafts[i][place % chains :: chains] if sketch] for i, place in steps]
            asked = self.policy.encode_prompts(
                [self._sketch_prompt(prompts[i], some) for (i, _), some in zip(steps, shown, strict=True)]
            )
            for row, ids in enumerate(asked):
                if len(ids) > self._sketch_room:
                    prompt = prompts[steps[row][0]]
                    kept = newest_that_fit(shown[row], partial(self._fits, prompt))
                    num_dropped += len(shown[row]) - len(kept)
                    asked[row] = self.policy.encode_prompts([self._sketch_prompt(prompt, kept)])[0]
            sampled = self.sample(asked, 1, self.args.max_sketch_length)
            for (i, _), (continuation,) in zip(steps, sampled, strict=True):
                drafts[i].append(self.text(continuation.token_ids))
                num_tokens += len(continuation.token_ids)
        self.metrics = {"tokens": num_tokens, "dropped": num_dropped, **diversity(drafts)}
        return drafts

    def _exchanged(self, sketches: list[list[str]], prompt_ids: list[list[int]]) -> list[list[str]]:
        order = torch.randperm(len(sketches), generator=self.policy.exploration_generator).tolist()
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
        return len(self.policy.encode_prompts([self._sketch_prompt(prompt, earlier)])[0]) <= self._sketch_room
