"""Texts of sequential sampling: prompts that show earlier drafts, parsing of lists, and diversity of a group. After
SESA (https://huggingface.co/papers/2510.15502), section 3.1 and algorithm 1."""

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import combinations
from typing import Any

Prompt = Any  # a text, or a conversation as a list of messages

SLOT = re.compile(r"\{(problem|sketches|sketch|num_candidates|actions|hint)\}")
THINK, END_THINK = "<think>", "</think>"
THOUGHT = re.compile(rf"{THINK}.*?(?:{END_THINK}|\Z)", re.DOTALL)
LIST_MARK = re.compile(r"^\s*(?:\(?\d{1,3}[.):]|[-*])\s+")


def check_template(field: str, template: str, *, required: Sequence[str]) -> None:
    """Raise a ValueError that names the field if its template lacks a required slot, for example `"problem"`."""
    missing = []
    for name in required:
        slot = f"{{{name}}}"
        if slot not in template:
            missing.append(slot)
    if missing:
        raise ValueError(
            f"`{field}={template!r}` must contain {' and '.join(missing)}: this slot is replaced by the text that the "
            "model must see."
        )


def fill_template(template: str, slots: Mapping[str, str]) -> str:
    """Replace slots such as `{problem}` by texts. Other braces stay unchanged, also braces inside the texts."""

    def text_for(slot: re.Match[str]) -> str:
        return slots.get(slot[1], slot[0])

    return SLOT.sub(text_for, template)


def fill_prompt(prompt: Prompt, template: str, slots: Mapping[str, str]) -> Prompt:
    """
    Return a prompt made from a template.

    Args:
        prompt (`str` or `list`):
            A text, or a conversation that ends with a text message of the user. The text, or the last message, becomes
            `{problem}`.
        template (`str`):
            The template.
        slots (`Mapping[str, str]`):
            Texts of the other slots.

    Returns:
        `str` or `list`: The text, or the conversation with another last message.

    Raises:
        ValueError: If the last message is no text.
    """
    if isinstance(prompt, str):
        return fill_template(template, {**slots, "problem": prompt})
    *before, last = prompt
    if not isinstance(last["content"], str):
        raise ValueError(
            f"sketches and hints need prompts that end with a text message, but the last message is {last!r}: use "
            "plain texts as `content`."
        )
    return [*before, {**last, "content": fill_template(template, {**slots, "problem": last["content"]})}]


def newest_that_fit(sketches: Sequence[str], fits: Callable[[Sequence[str]], bool]) -> list[str]:
    """Drop the oldest sketches, which come first, until the others fit. Return the sketches that are kept."""
    for first in range(len(sketches)):
        if fits(sketches[first:]):
            return list(sketches[first:])
    return []


def answer_positions(text: str, *, opened: bool = False) -> list[int]:
    """Return the positions of the characters of a response that belong to its answer. Its arguments are explained in
    [`split_thoughts`]."""
    opening = THINK if opened else ""
    whole = opening + text
    kept: list[int] = []
    end = 0
    for thought in THOUGHT.finditer(whole):
        kept += range(end, thought.start())
        end = thought.end()
    kept += range(end, len(whole))
    without_thoughts = "".join(whole[i] for i in kept)
    # A `</think>` without `<think>` also ends a thought.
    num_answer = len(without_thoughts.rpartition(END_THINK)[2])
    return [i - len(opening) for i in kept[len(kept) - num_answer :]]


def split_thoughts(text: str, *, opened: bool = False) -> tuple[str, str]:
    """
    Split a response into its thoughts and its answer.

    Args:
        text (`str`):
            The response. Thoughts are between `<think>` and `</think>`.
        opened (`bool`, *optional*, defaults to `False`):
            If True, the prompt ends with `<think>`, so the response begins inside a thought.

    Returns:
        `tuple[str, str]`: The thoughts, which end after the last `</think>` and the spaces that follow it. They are
        empty if the response has no such tag. Then the answer: the text without thoughts. A thought without
        `</think>` extends to the end of the response.
    """
    answer = "".join(text[i] for i in answer_positions(text, opened=opened))
    if END_THINK not in text:
        return "", answer
    after_thoughts = text.rpartition(END_THINK)[2].lstrip()
    return text[: len(text) - len(after_thoughts)], answer


def split_candidates(text: str, *, separator: str) -> list[tuple[int, str]]:
    """Return the candidates of a response in order, with duplicates: the position of the first character, and the
    text. Remove numbers, bullets and empty candidates."""
    candidates = []
    start = 0
    for part in text.split(separator):
        rest = LIST_MARK.sub("", part).lstrip()
        if rest:
            candidates.append((start + len(part) - len(rest), rest.rstrip()))
        start += len(part) + len(separator)
    return candidates


def first_distinct(texts: Sequence[str], most: int) -> list[str]:
    """Return the first `most` different texts, in order."""
    return list(dict.fromkeys(texts))[:most]


def other_prompts(prompts: Sequence[Hashable], order: Sequence[int]) -> list[int]:
    """
    Return another prompt for each prompt.

    Args:
        prompts (`Sequence[Hashable]`):
            The prompts, `[P]`.
        order (`Sequence[int]`):
            A permutation of the numbers 0 to P - 1. It decides which prompts are paired.

    Returns:
        `list[int]`: Number of a different prompt for each prompt, `[P]`. If all prompts are equal, its own number.
        Every number occurs once, unless more than half of the prompts are equal.
    """
    groups: dict[Hashable, list[int]] = {}
    for place in order:
        groups.setdefault(prompts[place], []).append(place)
    ring: list[int] = []  # all places, equal prompts next to each other
    for members in groups.values():
        ring += members
    # Shifting the ring by the size of its largest group gives every prompt a place of another group.
    shift = max(map(len, groups.values()), default=0)
    sources = list(range(len(prompts)))
    end = 0
    for members in groups.values():
        begin, end = end, end + len(members)
        others = ring[end:] + ring[:begin]  # the ring after these members, without them
        if not others:
            continue
        for j, place in enumerate(members):
            # Member j is at place `begin + j` of the ring, and its source is `shift` places later. `others` starts at
            # place `end`, which is `begin + len(members)`.
            sources[place] = others[(j + shift - len(members)) % len(others)]
    return sources


def mean_similarity(texts: Sequence[str]) -> float:
    """Return the mean of `difflib`'s ratio over all pairs of texts, in [0, 1]. It is 1 if all texts are equal, and 0
    if there is only one text."""
    pairs = list(combinations(texts, 2))
    if not pairs:
        return 0.0
    return math.fsum(_similarity(a, b) for a, b in pairs) / len(pairs)


@lru_cache(maxsize=2**14)  # many sketches occur in several batches
def _similarity(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b, autojunk=False).ratio()


def diversity(drafts: Sequence[Sequence[str]]) -> dict[str, float]:
    """
    Return sums over lists of drafts, which processes can add up.

    Args:
        drafts (`Sequence[Sequence[str]]`):
            Lists of drafts; a list may be empty.

    Returns:
        `dict[str, float]`: Five sums. `lists` is the number of lists, and `duplicates` the number of drafts that
        repeat an earlier draft of their list. `distinct` and `empty` add up the share of such drafts in each list, and
        `similarity` the mean similarity of each list.
    """
    distinct, empty, similarity, num_duplicates = [], [], [], 0
    for texts in drafts:
        num_distinct = len(set(texts))
        num_duplicates += len(texts) - num_distinct
        similarity.append(mean_similarity(texts))
        if texts:
            distinct.append(num_distinct / len(texts))
            empty.append(texts.count("") / len(texts))
    return {
        "lists": len(drafts),
        "distinct": sum(distinct),
        "duplicates": num_duplicates,
        "empty": sum(empty),
        "similarity": sum(similarity),
    }
