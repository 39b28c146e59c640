"""SESA in two stages: draft sketches one after another, and then sample completions that each follow one sketch."""

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
    """Explorer for `mode="two_stage"`: it drafts `num_sketches` sketches per prompt, and samples each explored row
    from a prompt that shows one of them. After section 3.1 and algorithm 1 of the paper."""

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
        prompts, group_ids = [], []
        for group in groups:
            prompts.append(group.example["prompt"])
            group_ids.append(group.prompt_ids)
        drafts = self._draft(prompts)  # [P][num_sketches]
        if self.args.sketch_assignment == "shuffled":
            drafts = self._exchanged(drafts, group_ids)
        draft_seconds = time.perf_counter() - start

        start = time.perf_counter()
        sketches: list[str] = []  # sketch of each row; empty if the row follows no sketch
        prompt_ids: list[list[int]] = []
        num_sketched = 0
        for group, own_drafts in zip(groups, drafts, strict=True):
            for place in range(self.size):
                sketch = ""
                if place < self.num_explored:
                    # Count rows over the whole batch, not per prompt. If `num_explored` is not a multiple of
                    # `num_sketches`, counting per prompt would use the first sketches more often than the last ones.
                    sketch = own_drafts[num_sketched % self.num_sketches]
                    num_sketched += 1
                sketches.append(sketch)
                prompt_ids.append(group.prompt_ids)
        solve_ids = self._encode_solving(groups, sketches, prompt_ids)
        num_too_long = 0
        for row, ids in enumerate(solve_ids):
            if len(ids) + (self.args.max_sampled_tokens or 0) > self.context_length:
                solve_ids[row], sketches[row] = prompt_ids[row], ""
                num_too_long += 1
        self.columns = {"sketch": sketches}
        rollout = self._solved(solve_ids, plain)
        self.drawn = []
        for context, ids in zip(solve_ids, rollout.completion_ids, strict=True):
            self.drawn.append([Drawn(0, context, ids)])
        self.metrics |= {
            "drafting_seconds": draft_seconds,
            "solving_seconds": time.perf_counter() - start,
            "too_long": num_too_long,
            "sampled_tokens": self.metrics["tokens"] + sum(map(len, rollout.completion_ids)),
        }
        if rollout.logprobs is not None:
            # The log-probabilities of a row that was sampled from a prompt with a sketch do not fit its own prompt.
            for row, ids in enumerate(rollout.completion_ids):
                if solve_ids[row] != prompt_ids[row]:
                    rollout.logprobs[row] = [None] * len(ids)
        explored = split_rollout(rollout, self.size)
        for number, prompt_result in enumerate(explored):
            prompt_result.columns = self.columns_of(number)
        return explored

    def _encode_solving(
        self, groups: Sequence[PromptGroup], sketches: list[str], prompt_ids: list[list[int]]
    ) -> list[list[int]]:
        """Return the prompt tokens from which each row is sampled: the prompt with the row's sketch. A row without a
        sketch has the tokens of its plain prompt. Rows of a group with equal sketches are encoded once."""
        prompts: dict[tuple[int, str], Prompt] = {}  # by the number of the group, and the sketch
        for row, sketch in enumerate(sketches):
            group = row // self.size
            if sketch and (group, sketch) not in prompts:
                prompt = groups[group].example["prompt"]
                prompts[group, sketch] = fill_prompt(prompt, self.args.solve_template, {"sketch": sketch})
        encoded = dict(zip(prompts, self.policy.encode_prompts(list(prompts.values())), strict=True))
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
            sketched = []  # successes of the rows with a sketch
            for place, success in enumerate(group):
                if sketches[g * self.size + place]:
                    sketched.append(success)
            counts["sketched"] += len(sketched)
            counts["sketched_correct"] += sum(sketched)
            counts["sketched_groups"] += bool(sketched)
            counts["sketched_solved"] += any(sketched)
        return counts

    def _solved(self, solve_ids: list[list[int]], plain: PlainSampling) -> Rollout:
        """Sample one completion per row as GRPO does. If the sampler of every process has a path cache and no limit of
        rows per call, it samples them instead of `plain`, because it encodes common prefixes of rows only once."""
        most = self.args.max_sampled_tokens
        # The sampler calls collectives, and `plain` does not. So all processes must take the same way.
        some_has_no_paths = self.policy.ranks.most(self.sample.paths is None) > 0
        if some_has_no_paths or self.sample.batch_size is not None or most is None:
            return plain(solve_ids)
        sampled = self.sample(solve_ids, 1, most, main_stream=True)
        return Rollout([continuation.token_ids for (continuation,) in sampled])

    def rows_with_other_context(self, num_rows: int) -> list[int]:
        return [row for row in range(num_rows) if row % self.size < self.num_explored]

    def _draft(self, prompts: list[Prompt]) -> list[list[str]]:
        """
        Draft the sketches of every prompt, `[P][num_sketches]`. Set `metrics` to the counts of the drafts.

        A prompt has `parallel_sketches` chains of sketches, and a sketch sees the earlier sketches of its own chain.
        Each step is one sampling call that adds one sketch to every chain of every prompt.
        """
        num_chains = self.args.parallel_sketches
        drafts: list[list[str]] = [[] for _ in prompts]  # sketch n belongs to chain n % num_chains
        num_tokens = num_dropped = 0
        for first in range(0, self.num_sketches, num_chains):
            # 1. Make a request for each new sketch. It shows the earlier sketches of the chain.
            owners, shown, requests = [], [], []  # of each new sketch; the owner is the index of its prompt
            for owner, prompt in enumerate(prompts):
                for n in range(first, min(first + num_chains, self.num_sketches)):
                    chain = drafts[owner][n % num_chains :: num_chains]
                    earlier = [sketch for sketch in chain if sketch]  # empty sketches are not shown
                    owners.append(owner)
                    shown.append(earlier)
                    requests.append(self._sketch_prompt(prompt, earlier))
            request_ids = self.policy.encode_prompts(requests)
            # 2. If a prompt is too long, drop the oldest sketches.
            for i, ids in enumerate(request_ids):
                if len(ids) > self._sketch_room:
                    prompt = prompts[owners[i]]
                    kept = newest_that_fit(shown[i], partial(self._fits, prompt))
                    num_dropped += len(shown[i]) - len(kept)
                    request_ids[i] = self.policy.encode_prompts([self._sketch_prompt(prompt, kept)])[0]
            # 3. Sample all new sketches.
            sampled = self.sample(request_ids, 1, self.args.max_sketch_length)
            for owner, (continuation,) in zip(owners, sampled, strict=True):
                drafts[owner].append(self.text(continuation.token_ids))
                num_tokens += len(continuation.token_ids)
        self.metrics = {"tokens": num_tokens, "dropped": num_dropped, **diversity(drafts)}
        return drafts

    def _exchanged(self, drafts: list[list[str]], prompt_ids: list[list[int]]) -> list[list[str]]:
        """Return drafts in which each prompt has the sketches of another prompt, chosen at random."""
        order = torch.randperm(len(drafts), generator=self.policy.exploration_generator).tolist()
        others = other_prompts(list(map(tuple, prompt_ids)), order)
        return [drafts[place] for place in others]

    def _sketch_prompt(self, prompt: Prompt, earlier: Sequence[str]) -> Prompt:
        """Return the prompt that asks for a sketch. If there are earlier sketches, the prompt shows them."""
        if not earlier:
            return fill_prompt(prompt, self.args.sketch_template, {})
        slots = {"sketches": self.args.sketch_separator.join(earlier)}
        return fill_prompt(prompt, self.args.next_sketch_template, slots)

    @property
    def _sketch_room(self) -> float:
        """Maximum number of tokens of a prompt that asks for a sketch."""
        return self.context_length - self.args.max_sketch_length

    def _fits(self, prompt: Prompt, earlier: Sequence[str]) -> bool:
        """Return whether the prompt that shows these earlier sketches is short enough."""
        return len(self.policy.encode_prompts([self._sketch_prompt(prompt, earlier)])[0]) <= self._sketch_room
