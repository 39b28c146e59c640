"""Sequential sampling: prompts that carry what was drafted before, lists taken apart, and how diverse a group is.

After SESA (https://huggingface.co/papers/2510.15502), section 3.1 and algorithm 1. Drafts are short texts that go into
the next prompt, so they are text here; what is trained is token ids again.
"""

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import combinations
from typing import Any

Prompt = Any  # a text, or a conversation as a list of messages

SLOT = re.compile(r"\{(problem|sketches|sketch|num_candidates|actions)\}")
THINK, END_THINK = "<think>", "</think>"
THOUGHT = re.compile(rf"{THINK}.*?(?:{END_THINK}|\Z)", re.DOTALL)
LIST_MARK = re.compile(r"^\s*(?:\(?\d{1,3}[.):]|[-*])\s+")


def check_template(field: str, template: str, *, required: Sequence[str]) -> None:
    """
    Check that a template has its slots.

    Args:
        field (`str`):
            Name of the configuration field, for the error message.
        template (`str`):
            The template.
        required (`Sequence[str]`):
            Slots that it must have, such as `"problem"`.

    Raises:
        ValueError: Naming the field and the slot that is missing.
    """
    missing = [f"{{{slot}}}" for slot in required if f"{{{slot}}}" not in template]
    if missing:
        raise ValueError(
            f"`{field}={template!r}` must contain {' and '.join(missing)}: "
            "that is where the text goes which the model is to see."
        )


def fill_template(template: str, slots: Mapping[str, str]) -> str:
    """
    Put texts into the slots of a template, once: a slot's name inside a text stays as it is.

    Args:
        template (`str`):
            Text with slots such as `{problem}`; other braces are left alone.
        slots (`Mapping[str, str]`):
            Texts by slot.

    Returns:
        `str`: The text.
    """
    return SLOT.sub(lambda match: slots.get(match[1], match[0]), template)


def fill_prompt(prompt: Prompt, template: str, slots: Mapping[str, str]) -> Prompt:
    """
    Wrap a data-set prompt into a template.

    Args:
        prompt (`str` or `list[dict]`):
            A plain prompt, or a conversation that ends with a text message of the user.
        template (`str`):
            The template; `{problem}` stands for the prompt, in a conversation for its last message.
        slots (`Mapping[str, str]`):
            Texts of the other slots.

    Returns:
        `str` or `list[dict]`: A prompt of the same kind; the one given is left alone.

    Raises:
        ValueError: If a conversation does not end with a text message.
    """
    if isinstance(prompt, str):
        return fill_template(template, {**slots, "problem": prompt})
    *before, last = prompt
    if not isinstance(last["content"], str):
        raise ValueError(
            f"sketches need prompts that end with a text message, but the last message is {last!r}: use plain texts "
            "as `content`."
        )
    return [*before, {**last, "content": fill_template(template, {**slots, "problem": last["content"]})}]


def newest_that_fit(sketches: Sequence[str], fits: Callable[[Sequence[str]], bool]) -> list[str]:
    """
    Drop the oldest sketches until the rest fits.

    Args:
        sketches (`Sequence[str]`):
            Sketches, oldest first.
        fits (`Callable[[Sequence[str]], bool]`):
            Whether some of them fit; if they do, fewer do too.

    Returns:
        `list[str]`: The newest ones; empty if not even one fits.
    """
    for first in range(len(sketches)):
        if fits(sketches[first:]):
            return list(sketches[first:])
    return []


def split_thoughts(text: str, *, opened: bool = False) -> tuple[str, str]:
    """
    Tell what a model says from what it thinks, between `<think>` and `</think>`.

    Args:
        text (`str`):
            One response, or its beginning.
        opened (`bool`, *optional*, defaults to `False`):
            Whether the prompt has begun a thought already, as some chat templates do. Without it, an end tag that
            nothing opened ends such a thought all the same.

    Returns:
        `tuple[str, str]`: The text up to the end of its last whole thought, blanks behind it included, empty if there
        is none; and what is said: the text without thoughts, one that does not end included.
    """
    said = THOUGHT.sub("", THINK * opened + text).rpartition(END_THINK)[2]
    behind = text.rpartition(END_THINK)[2].lstrip() if END_THINK in text else text
    return text[: len(text) - len(behind)], said


def split_candidates(text: str, *, separator: str) -> list[str]:
    """
    Take a list of candidates apart.

    Args:
        text (`str`):
            One response.
        separator (`str`):
            What stands between candidates.

    Returns:
        `list[str]`: Candidates in order, without numbering, bullets and empty ones; with duplicates.
    """
    parts = (LIST_MARK.sub("", part).strip() for part in text.split(separator))
    return [part for part in parts if part]


def first_distinct(texts: Sequence[str], most: int) -> list[str]:
    """
    The first texts that do not repeat an earlier one.

    Args:
        texts (`Sequence[str]`):
            Texts.
        most (`int`):
            How many of them at most.

    Returns:
        `list[str]`: Different texts, in order.
    """
    return list(dict.fromkeys(texts))[:most]


def other_prompts(prompts: Sequence[Hashable], order: Sequence[int]) -> list[int]:
    """
    Give every prompt another one, whose sketches it is shown.

    Args:
        prompts (`Sequence[Hashable]`):
            Prompts, `[P]`; some may be equal.
        order (`Sequence[int]`):
            The places 0 to P - 1 in any order, which decides who gets whom.

    Returns:
        `list[int]`: For each prompt the place of one that differs from it, `[P]`; its own place only if all are
        equal. Every place occurs once, unless more than half of the prompts are equal.
    """
    groups: dict[Hashable, list[int]] = {}
    for place in order:
        groups.setdefault(prompts[place], []).append(place)
    ring = [place for members in groups.values() for place in members]
    # A turn of the ring by the size of the largest group takes everybody out of their own.
    turn = max(map(len, groups.values()), default=0)
    sources, end = list(range(len(prompts))), 0
    for members in groups.values():
        end += len(members)
        others = ring[end:] + ring[: end - len(members)]
        for j, place in enumerate(members if others else []):
            sources[place] = others[(turn - len(members) + j) % len(others)]
    return sources


def mean_similarity(texts: Sequence[str]) -> float:
    """
    How alike texts are on average over all pairs.

    Args:
        texts (`Sequence[str]`):
            Texts; one alone is like nothing.

    Returns:
        `float`: Mean of `difflib`'s ratio, in [0, 1]; 1 if all are equal.
    """
    pairs = list(combinations(texts, 2))
    if not pairs:
        return 0.0
    return math.fsum(SequenceMatcher(None, a, b, autojunk=False).ratio() for a, b in pairs) / len(pairs)


def diversity(drafts: Sequence[Sequence[str]]) -> dict[str, float]:
    """
    How different the drafts of each list are, as sums over lists that can be added up further.

    Args:
        drafts (`Sequence[Sequence[str]]`):
            Drafts of each list.

    Returns:
        `dict[str, float]`: Number of `lists`; their shares of `distinct` and `empty` drafts and their mean
        `similarity`; and the number of `duplicates` of earlier drafts.
    """
    return {
        "lists": len(drafts),
        "distinct": sum(len(set(texts)) / len(texts) for texts in drafts if texts),
        "duplicates": sum(len(texts) - len(set(texts)) for texts in drafts),
        "empty": sum(sum(not text for text in texts) / len(texts) for texts in drafts if texts),
        "similarity": sum(mean_similarity(texts) for texts in drafts),
    }
