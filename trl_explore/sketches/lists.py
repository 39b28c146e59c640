"""SESA in one response: it lists the candidates of a group, and each becomes a row."""

import math
import time
from collections.abc import Sequence

from trl_explore.explorers.explorer import Explored, PlainSampling, PromptGroup
from trl_explore.sketches.drafts import (
    END_THINK,
    THINK,
    Prompt,
    diversity,
    fill_prompt,
    first_distinct,
    split_candidates,
    split_thoughts,
)
from trl_explore.sketches.mode import Mode
from trl_explore.sketches.weights import Drawn

Candidate = tuple[str, list[int]]  # its text, and the context behind which it was drawn
NO_THOUGHT = f"\n{END_THINK}\n\n"  # what ends a thought that the prompt has begun, as chat templates write it


class Lists(Mode):
    """`mode="sequential"`; candidates are repeated in turn where a list has too few. With `candidate_context="alone"`
    every row is the first candidate of a list of its own."""

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
        # Under a prompt that begins a thought, an answer stands behind the end of it.
        before = [self.encode(NO_THOUGHT) if self._begins_thought(ids) else [] for ids in prompt_ids]
        candidates = [
            [self._candidate_ids(text, start) for text, _ in rows] for rows, start in zip(listed, before, strict=True)
        ]
        draft_seconds = time.perf_counter() - start

        start = time.perf_counter()
        # Completions of the plain prompt would fill a group with what the policy says anyway.
        empty = [g for g, rows in enumerate(candidates) if not rows]
        fillers = self.sample([prompt_ids[g] for g in empty], size, self.max_completion_length, main_stream=True)
        logprobs: list[list[list[float | None]]] = [[[None] * len(ids) for ids in rows] for rows in candidates]
        for g, continuations in zip(empty, fillers, strict=True):
            candidates[g] = [continuation.token_ids for continuation in continuations]
            logprobs[g] = [c.logprobs or [None] * len(c.token_ids) for c in continuations]
        self.metrics = {
            "tokens": num_tokens,
            "repeats": sum(size - len(rows) for rows in candidates),
            "fillers": len(empty) * size,
            "drafting_seconds": draft_seconds,
            "solving_seconds": time.perf_counter() - start,
            "sampled_tokens": num_tokens + sum(len(c.token_ids) for group in fillers for c in group),
            **diversity(found),
        }
        # A list has the end token of a candidate in another form.
        drawn = [
            [Drawn(len(start), context, ids[len(start) : -1]) for (_, context), ids in zip(rows, group, strict=False)]
            for rows, group, start in zip(listed, candidates, before, strict=True)
        ]
        self.drawn = [[parts[i % len(parts)]] if parts else [] for parts in drawn for i in range(size)]
        self.columns = {"candidate": [i % len(parts) if parts else math.nan for parts in drawn for i in range(size)]}
        explored = []
        for g, rows in enumerate(candidates):
            places = [i % len(rows) for i in range(size)]
            explored.append(
                Explored(
                    completion_ids=[list(rows[place]) for place in places],
                    logprobs=None if self.policy.serving is None else [list(logprobs[g][place]) for place in places],
                    columns=self.columns_of(g),
                )
            )
        return explored

    def _candidates(self, prompts: list[Prompt]) -> tuple[list[list[Candidate]], list[list[str]], int]:
        """Per prompt the candidates that become rows, and all that were listed, and the tokens of all prompts."""
        args, size = self.args, self.size
        if args.candidate_context == "list":
            most = args.max_list_length or size * self.max_completion_length
            asked, found, num_tokens = self._list_candidates(prompts, most=most, rounds=args.max_lists or size)
            listed = [
                [(text, ids + self._begun_list(texts[: texts.index(text)])) for text in first_distinct(texts, size)]
                for ids, texts in zip(asked, found, strict=True)
            ]
            return listed, found, num_tokens
        most = args.max_list_length or self.max_completion_length + len(self.encode(args.candidate_separator))
        repeated = [prompt for prompt in prompts for _ in range(size)]
        asked, found, num_tokens = self._list_candidates(repeated, most=most, rounds=1)
        starts = range(0, len(asked), size)
        listed = [[(found[i][0], asked[i]) for i in range(start, start + size) if found[i]] for start in starts]
        return listed, [[text for text, _ in rows] for rows in listed], num_tokens

    def _list_candidates(
        self, prompts: list[Prompt], *, most: int, rounds: int
    ) -> tuple[list[list[int]], list[list[str]], int]:
        """Prompts that ask for lists, the candidates of each with duplicates, and the tokens they cost. A list that
        ends too early is continued: its distinct candidates are put into the model's mouth, behind what it thought
        before the first of them, each round in one call for all prompts."""
        args, size = self.args, self.size
        asked = self.policy.encode_prompts(
            [fill_prompt(prompt, args.candidate_template, {"num_candidates": str(size)}) for prompt in prompts]
        )
        prompt_lengths = [len(ids) for ids in asked]
        found: list[list[str]] = [[] for _ in prompts]
        num_tokens = 0
        open_lists = set(range(len(prompts)))
        for _ in range(rounds):
            begun = [asked[i] + self._begun_list(first_distinct(texts, size)) for i, texts in enumerate(found)]
            room = [int(min(most, self.context_length - len(ids))) for ids in begun]
            short = [i for i, texts in enumerate(found) if i in open_lists and len(set(texts)) < size and room[i] > 0]
            lists = self.sample(
                [begun[i] for i in short],
                1,
                [room[i] for i in short],
                main_stream=True,
                begun=[len(begun[i]) - prompt_lengths[i] for i in short],
            )
            for i, (continuation,) in zip(short, lists, strict=True):
                text = self._text_and_thoughts(continuation.token_ids)
                thought, answer = split_thoughts(text, opened=self._begins_thought(begun[i]))
                # A list that was cut off may end within a candidate: whole ones have a separator behind them.
                whole = answer if continuation.finished else answer.rpartition(args.candidate_separator)[0]
                texts = split_candidates(whole, separator=args.candidate_separator)
                if not found[i]:
                    asked[i] = asked[i] + self.encode(thought)
                if set(texts) <= set(found[i]):
                    open_lists.discard(i)  # the policy has nothing to add
                found[i] += texts
                num_tokens += len(continuation.token_ids)
        return asked, found, num_tokens

    def _begun_list(self, texts: list[str]) -> list[int]:
        return self.encode("".join(text + self.args.candidate_separator for text in texts))

    def _candidate_ids(self, text: str, before: list[int]) -> list[int]:
        ids = before + self.encode(text)
        return [*ids[: self.max_completion_length - 1], self.policy.eos_token_ids[0]]

    def _begins_thought(self, prompt_ids: list[int]) -> bool:
        return self._text_and_thoughts(prompt_ids).rstrip().endswith(THINK)

    def _text_and_thoughts(self, token_ids: list[int]) -> str:
        """Text without special tokens, but with the tags of thoughts, which some tokenizers count among them."""
        added = self.policy.tokenizer.added_tokens_decoder
        silent = {i for i, token in added.items() if token.special and token.content not in (THINK, END_THINK)}
        return self.policy.tokenizer.decode([i for i in token_ids if i not in silent], skip_special_tokens=False)
