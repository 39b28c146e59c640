"""SESA in two stages: sketches are drafted one after another, and each completion follows one of them."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from trl_explore.explorers.explorer import Explored, PlainSampling, PromptGroup, split_rollout
from trl_explore.rows.rollouts import Rollout
from trl_explore.sketches.drafts import Prompt, diversity, fill_prompt, newest_that_fit, other_prompts
from trl_explore.sketches.mode import Mode
from trl_explore.sketches.weights import Drawn


class TwoStage(Mode):
    """Section 3.1 and algorithm 1 of the paper; `num_sketches` are drafted per prompt."""

    name = "sketches"
    plain_columns = {"sketch": ""}

    def __init__(self, *args: Any, num_sketches: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_sketches = num_sketches

    def explore(self, groups: Sequence[PromptGroup], plain: PlainSampling) -> list[Explored]:
        self.begin(groups)
        with self.sample.rollout():
            return self._drafted_and_solved(groups, plain)

    def _drafted_and_solved(self, groups: Sequence[PromptGroup], plain: PlainSampling) -> list[Explored]:
        start = time.perf_counter()
        size = self.size
        sketches = self._draft([group.example["prompt"] for group in groups])
        if self.args.sketch_assignment == "shuffled":
            sketches = self._exchanged(sketches, [group.prompt_ids for group in groups])
        draft_seconds = time.perf_counter() - start

        start = time.perf_counter()
        rows: list[str] = []  # the sketch of each row; empty if the row follows none
        prompt_ids: list[list[int]] = []
        for group, drafts in zip(groups, sketches, strict=True):
            for place in range(size):
                # Counted over the batch, so that all sketches are followed equally often if rows are no multiple.
                sketch = drafts[len(rows) % self.num_sketches]
                rows.append(sketch if place < self.num_explored else "")
                prompt_ids.append(group.prompt_ids)
        solve_ids = self._encode_solving(groups, rows, prompt_ids)
        too_long = [len(ids) + self.max_completion_length > self.context_length for ids in solve_ids]
        for row, long in enumerate(too_long):
            if long:
                solve_ids[row], rows[row] = prompt_ids[row], ""
        self.columns = {"sketch": rows}
        rollout = self._solved(solve_ids, plain)
        self.drawn = [[Drawn(0, context, ids)] for context, ids in zip(solve_ids, rollout.completion_ids, strict=True)]
        self.metrics |= {
            "drafting_seconds": draft_seconds,
            "solving_seconds": time.perf_counter() - start,
            "too_long": sum(too_long),
            "sampled_tokens": self.metrics["tokens"] + sum(map(len, rollout.completion_ids)),
        }
        if rollout.logprobs is not None:
            # If the sampler saw another prompt, its log-probabilities are not those of this prompt's policy.
            for row, ids in enumerate(rollout.completion_ids):
                if solve_ids[row] != prompt_ids[row]:
                    rollout.logprobs[row] = [None] * len(ids)
        explored = split_rollout(rollout, size)
        for number, one in enumerate(explored):
            one.columns = self.columns_of(number)
        return explored

    def _encode_solving(
        self, groups: Sequence[PromptGroup], sketches: list[str], prompt_ids: list[list[int]]
    ) -> list[list[int]]:
        """Return the prompt tokens that each row is sampled from. Rows of a prompt with the same sketch are encoded
        once, and rows without a sketch are encoded already."""
        asked: dict[tuple[int, str], Prompt] = {}
        for row, sketch in enumerate(sketches):
            group = row // self.size
            if sketch and (group, sketch) not in asked:
                prompt = groups[group].example["prompt"]
                asked[group, sketch] = fill_prompt(prompt, self.args.solve_template, {"sketch": sketch})
        encoded = dict(zip(asked, self.policy.encode_prompts(list(asked.values())), strict=True))
        solve_ids = []
        for row, sketch in enumerate(sketches):
            solve_ids.append(encoded.get((row // self.size, sketch), prompt_ids[row]))
        return solve_ids

    def group_counts(self, completion_ids: list[list[int]], successes: list[list[bool]]) -> dict[str, float]:
        counts: dict[str, float] = dict.fromkeys(
            ("sketched", "sketched_correct", "sketched_groups", "sketched_solved"), 0
        )
        sketches = self.columns["sketch"]
        for g, group in enumerate(successes):
            of_sketched = []
            for place, success in enumerate(group):
                if sketches[g * self.size + place]:
                    of_sketched.append(success)
            counts["sketched"] += len(of_sketched)
            counts["sketched_correct"] += sum(of_sketched)
            counts["sketched_groups"] += bool(of_sketched)
            counts["sketched_solved"] += any(of_sketched)
        return counts

    def _solved(self, solve_ids: list[list[int]], plain: PlainSampling) -> Rollout:
        """Sample completions as GRPO does. If prefixes are kept, what rows have in common is encoded once."""
        options: Any = self.args.generation_kwargs or {}
        most = options.get("max_new_tokens", self.max_completion_length)  # as in TRL
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
