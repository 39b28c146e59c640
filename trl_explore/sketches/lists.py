"""SESA in one response: the policy lists candidates for a prompt, and each candidate becomes a completion."""

import math
import time
from collections.abc import Sequence
from functools import cached_property

from trl_explore.explorers.explorer import Explored, PlainSampling, PromptGroup
from trl_explore.sketches.candidates import Candidate, SampledList, sampled_part, token_ends
from trl_explore.sketches.drafts import (
    END_THINK,
    THINK,
    Prompt,
    answer_positions,
    diversity,
    fill_prompt,
    first_distinct,
    split_candidates,
    split_thoughts,
)
from trl_explore.sketches.mode import Mode
from trl_explore.sketches.weights import Drawn

# Text that ends a thought at once, as chat templates write it. It follows a prompt that has begun a thought.
NO_THOUGHT = f"\n{END_THINK}\n\n"


class Lists(Mode):
    """
    Explorer for `mode="sequential"`: the policy lists candidates, and each becomes the completion of a row.

    If a list has too few candidates, several rows get the same candidate. With `candidate_context="alone"`, each row
    has a list of its own, and the first candidate of this list becomes the completion.
    """

    name = "lists"
    plain_columns = {"candidate": math.nan}

    def explore(self, groups: Sequence[PromptGroup], plain: PlainSampling) -> list[Explored]:
        self.begin(groups)
        start = time.perf_counter()
        size = self.size
        prompts = [group.example["prompt"] for group in groups]
        with self.sample.rollout():
            listed, found, num_tokens = self._candidates(prompts)
        prompt_ids = [group.prompt_ids for group in groups]
        # If a prompt begins a thought, the completion must end the thought before the answer.
        thought_ends: list[list[int]] = []
        for ids in prompt_ids:
            thought_ends.append(self.encode(NO_THOUGHT) if self._begins_thought(ids) else [])
        completions: list[list[list[int]]] = []  # the different completions of each prompt, at most `size`
        logprobs: list[list[list[float | None]]] = []  # of their tokens; None for candidates, which come from a list
        for candidates, thought_end in zip(listed, thought_ends, strict=True):
            completions.append([self._candidate_ids(candidate.text, thought_end) for candidate in candidates])
            logprobs.append([[None] * len(ids) for ids in completions[-1]])
        draft_seconds = time.perf_counter() - start

        start = time.perf_counter()
        # Only prompts without any candidate get plain completions. Other prompts repeat candidates if some are
        # missing, because plain completions would repeat the usual samples of the policy.
        empty = [g for g, rows in enumerate(completions) if not rows]
        empty_prompts = [prompt_ids[g] for g in empty]
        fillers = self.sample(empty_prompts, size, self.max_completion_length, main_stream=True)
        num_filler_tokens = 0
        for g, continuations in zip(empty, fillers, strict=True):
            for continuation in continuations:
                completions[g].append(continuation.token_ids)
                logprobs[g].append(continuation.logprobs or [None] * len(continuation.token_ids))
                num_filler_tokens += len(continuation.token_ids)
        self.metrics = {
            "tokens": num_tokens,
            "repeats": size * len(completions) - sum(map(len, completions)),
            "fillers": len(empty) * size,
            "drafting_seconds": draft_seconds,
            "solving_seconds": time.perf_counter() - start,
            "sampled_tokens": num_tokens + num_filler_tokens,
            **diversity(found),
        }
        self._note_origins(listed, completions, thought_ends)
        explored = []
        for g, rows in enumerate(completions):
            result = Explored([], columns=self.columns_of(g))
            if self.policy.serving is not None:
                result.logprobs = []
            for i in range(size):
                place = i % len(rows)  # if a list has too few candidates, repeat them
                result.completion_ids.append(list(rows[place]))
                if result.logprobs is not None:
                    result.logprobs.append(list(logprobs[g][place]))
            explored.append(result)
        return explored

    def _note_origins(
        self, listed: list[list[Candidate]], completions: list[list[list[int]]], thought_ends: list[list[int]]
    ) -> None:
        """Set `drawn` and the column `candidate` of all rows. They are empty and NaN for a row without a candidate."""
        self.drawn = []
        numbers: list[float] = []  # number of the candidate of each row
        for candidates, rows, thought_end in zip(listed, completions, thought_ends, strict=True):
            for i in range(self.size):
                if not candidates:
                    self.drawn.append([])
                    numbers.append(math.nan)
                    continue
                number = i % len(candidates)
                self.drawn.append(self._drawn(candidates[number], rows[number], thought_end))
                numbers.append(number)
        self.columns = {"candidate": numbers}

    def _drawn(self, candidate: Candidate, row: list[int], thought_end: list[int]) -> list[Drawn]:
        """Return the tokens of a row that the policy sampled in its list. The end of the thought and the end token
        were not sampled. Without `off_policy_correction`, nobody needs the tokens, so return an empty list."""
        if not self.args.off_policy_correction:
            return []
        candidate_ids = row[len(thought_end) : -1]
        ends = token_ends(candidate_ids, self._text_and_thoughts)
        part = sampled_part(candidate, candidate_ids, ends, first=len(thought_end))
        return [] if part is None else [part]

    def _candidates(self, prompts: list[Prompt]) -> tuple[list[list[Candidate]], list[list[str]], int]:
        """
        Sample lists of candidates.

        Returns:
            `tuple`: The candidates of each prompt that become completions; the texts of each prompt, for the metrics
            of diversity; and the number of sampled tokens of all prompts.
        """
        if self.args.candidate_context == "list":
            return self._from_one_list(prompts)
        return self._from_own_lists(prompts)

    def _from_one_list(self, prompts: list[Prompt]) -> tuple[list[list[Candidate]], list[list[str]], int]:
        """Take the first distinct candidates of one list per prompt."""
        size = self.size
        most = self.args.max_list_length or size * self.max_completion_length
        found, num_tokens = self._list_candidates(prompts, most=most, rounds=self.args.max_lists or size)
        listed = []
        texts_of_prompts = []
        for candidates in found:
            texts = [candidate.text for candidate in candidates]
            listed.append([candidates[texts.index(text)] for text in first_distinct(texts, size)])
            texts_of_prompts.append(texts)
        return listed, texts_of_prompts, num_tokens

    def _from_own_lists(self, prompts: list[Prompt]) -> tuple[list[list[Candidate]], list[list[str]], int]:
        """Sample a list for each row, and take its first candidate. An empty list gives no candidate."""
        args, size = self.args, self.size
        most = args.max_list_length or self.max_completion_length + len(self.encode(args.candidate_separator))
        prompt_of_rows = []
        for prompt in prompts:
            prompt_of_rows += [prompt] * size
        found, num_tokens = self._list_candidates(prompt_of_rows, most=most, rounds=1)
        listed = []
        texts_of_prompts = []
        for start in range(0, len(found), size):
            candidates = [of_row[0] for of_row in found[start : start + size] if of_row]
            listed.append(candidates)
            texts_of_prompts.append([candidate.text for candidate in candidates])
        return listed, texts_of_prompts, num_tokens

    def _list_candidates(self, prompts: list[Prompt], *, most: int, rounds: int) -> tuple[list[list[Candidate]], int]:
        """
        Ask the policy for a list of candidates per prompt.

        If a list ends with too few distinct candidates, the next round continues it. Then the response of the policy
        begins with its earlier thought and its distinct candidates. Each round is one sampling call.

        Args:
            prompts (`list`):
                Prompts, `[P]`.
            most (`int`):
                Maximum number of new tokens of a prompt in a round.
            rounds (`int`):
                Maximum number of rounds.

        Returns:
            `tuple`: The candidates of each prompt, with duplicates; and the number of sampled tokens of all prompts.
        """
        args, size = self.args, self.size
        slots = {"num_candidates": str(size)}
        request_ids = self.policy.encode_prompts(
            [fill_prompt(prompt, args.candidate_template, slots) for prompt in prompts]
        )
        prompt_lengths = list(map(len, request_ids))  # without thoughts, which are appended to `request_ids` below
        found: list[list[Candidate]] = [[] for _ in prompts]
        num_tokens = 0
        open_lists = set(range(len(prompts)))  # prompts whose list may go on: the last round added a candidate
        for _ in range(rounds):
            continued: list[int] = []  # prompts whose list is begun or continued in this round
            prefixes, budgets, begun = [], [], []
            for i, candidates in enumerate(found):
                texts = [candidate.text for candidate in candidates]
                if i not in open_lists or len(set(texts)) >= size:
                    continue
                prefix = request_ids[i] + self._begun_list(first_distinct(texts, size))
                budget = int(min(most, self.context_length - len(prefix)))
                if budget > 0:
                    continued.append(i)
                    prefixes.append(prefix)
                    budgets.append(budget)
                    begun.append(len(prefix) - prompt_lengths[i])
            lists = self.sample(prefixes, 1, budgets, main_stream=True, begun=begun)
            for i, prefix, (continuation,) in zip(continued, prefixes, lists, strict=True):
                text = self._text_and_thoughts(continuation.token_ids)
                opened = self._begins_thought(prefix)
                thought, answer = split_thoughts(text, opened=opened)
                if not continuation.finished:
                    # The list was cut off, maybe in the middle of a candidate. Keep the candidates before a separator.
                    answer = answer.rpartition(args.candidate_separator)[0]
                if not found[i]:
                    request_ids[i] = request_ids[i] + self.encode(thought)
                earlier = {candidate.text for candidate in found[i]}
                positions = answer_positions(text, opened=opened)
                source = self._sampled_list(prefix, continuation.token_ids)
                for start, candidate_text in split_candidates(answer, separator=args.candidate_separator):
                    found[i].append(Candidate(candidate_text, positions[start], source))
                if earlier == {candidate.text for candidate in found[i]}:
                    open_lists.discard(i)  # the policy added no new candidate
                num_tokens += len(continuation.token_ids)
        return found, num_tokens

    def _sampled_list(self, prefix: list[int], token_ids: list[int]) -> SampledList:
        """Return a list with the tokens before it. Only `off_policy_correction` needs the ends of its tokens."""
        ends: list[int] = []
        if self.args.off_policy_correction:
            ends = token_ends(token_ids, self._text_and_thoughts)
        return SampledList(prefix, token_ids, ends)

    def _begun_list(self, texts: list[str]) -> list[int]:
        """Return the tokens of a list with these candidates, each with a separator after it."""
        list_text = ""
        for text in texts:
            list_text += text + self.args.candidate_separator
        return self.encode(list_text)

    def _candidate_ids(self, text: str, before: list[int]) -> list[int]:
        """Return the tokens of a completion: `before`, the candidate and the end token. If they are too many, cut the
        candidate."""
        ids = before + self.encode(text)
        return [*ids[: self.max_completion_length - 1], self.policy.eos_token_ids[0]]

    def _begins_thought(self, prompt_ids: list[int]) -> bool:
        """Return whether a prompt ends with the tag that begins a thought."""
        return self._text_and_thoughts(prompt_ids).rstrip().endswith(THINK)

    def _text_and_thoughts(self, token_ids: list[int]) -> str:
        """Decode tokens without special tokens, but with `<think>` and `</think>`, which are special in some
        tokenizers."""
        kept = [token_id for token_id in token_ids if token_id not in self._removed_ids]
        return self.policy.tokenizer.decode(kept, skip_special_tokens=False)

    @cached_property
    def _removed_ids(self) -> set[int]:
        """Ids of the special tokens, except `<think>` and `</think>`."""
        removed = set()
        for token_id, token in self.policy.tokenizer.added_tokens_decoder.items():
            if token.special and token.content not in (THINK, END_THINK):
                removed.add(token_id)
        return removed
