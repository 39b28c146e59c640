"""Sequential sampling in text: prompts that carry what was drafted before, lists taken apart, how diverse a group is.
After SESA (https://huggingface.co/papers/2510.15502), section 3.1 and algorithm 1."""

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import combinations
from typing import Any

Prompt = Any  # a text, or a conversation as a list of messages

SLOT = re.compile(r"\{(problem|sketches|sketch|num_candidates|actions)\}")
THINK, END_THINK = "<think>", "</think>"
THOUGHT = re.compile(rf"{THINK}.*?(?:{END_THINK}|\Z)", re.DOTALL)
LIST_MARK = re.compile(r"^\s*(?:\(?\d{1,3}[.):]|[-*])\s+")


def check_template(field: str, template: str, *, required: Sequence[str]) -> None:
    """ValueError, naming the field and the slot, if a template lacks one such as `"problem"`."""
    missing = [f"{{{slot}}}" for slot in required if f"{{{slot}}}" not in template]
    if missing:
        raise ValueError(
            f"`{field}={template!r}` must contain {' and '.join(missing)}: "
            "that is where the text goes which the model is to see."
        )


def fill_template(template: str, slots: Mapping[str, str]) -> str:
    """Put texts into slots such as `{problem}`, once: other braces, also inside a text, stay as they are."""
    return SLOT.sub(lambda match: slots.get(match[1], match[0]), template)


def fill_prompt(prompt: Prompt, template: str, slots: Mapping[str, str]) -> Prompt:
    """A copy of a plain prompt, or of a conversation that ends with a text message of the user (else a ValueError),
    with it, or that message, as `{problem}` in the template."""
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
    """Drop the oldest sketches, which come first, until the rest fits; if some fit, fewer do too."""
    for first in range(len(sketches)):
        if fits(sketches[first:]):
            return list(sketches[first:])
    return []


def split_thoughts(text: str, *, opened: bool = False) -> tuple[str, str]:
    """The text to the end of its last whole `<think>` thought, with blanks behind it; and what is said: the text
    without thoughts, an unended one included. `opened`: the prompt began one. An unopened end tag ends one too."""
    said = THOUGHT.sub("", THINK * opened + text).rpartition(END_THINK)[2]
    behind = text.rpartition(END_THINK)[2].lstrip() if END_THINK in text else text
    return text[: len(text) - len(behind)], said


def split_candidates(text: str, *, separator: str) -> list[str]:
    """Candidates of one response in order, without numbering, bullets and empty ones; with duplicates."""
    parts = (LIST_MARK.sub("", part).strip() for part in text.split(separator))
    return [part for part in parts if part]


def first_distinct(texts: Sequence[str], most: int) -> list[str]:
    """The first different texts, in order."""
    return list(dict.fromkeys(texts))[:most]


def other_prompts(prompts: Sequence[Hashable], order: Sequence[int]) -> list[int]:
    """For each of P prompts the place of one that differs from it, its own only if all are equal; `order` (0 to P - 1)
    decides who gets whom. Every place occurs once, unless more than half of the prompts are equal."""
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
    """Mean of `difflib`'s ratio over all pairs, in [0, 1]: 1 if all are equal; one text alone is like nothing."""
    pairs = list(combinations(texts, 2))
    if not pairs:
        return 0.0
    return math.fsum(_similarity(a, b) for a, b in pairs) / len(pairs)


@lru_cache(maxsize=2**14)  # sketches come again from batch to batch
def _similarity(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b, autojunk=False).ratio()


def diversity(drafts: Sequence[Sequence[str]]) -> dict[str, float]:
    """Sums that can be added up further: number of `lists`; their shares of `distinct` and `empty` drafts and their
    mean `similarity`; and the number of `duplicates` of earlier drafts."""
    return {
        "lists": len(drafts),
        "distinct": sum(len(set(texts)) / len(texts) for texts in drafts if texts),
        "duplicates": sum(len(texts) - len(set(texts)) for texts in drafts),
        "empty": sum(sum(not text for text in texts) / len(texts) for texts in drafts if texts),
        "similarity": sum(mean_similarity(texts) for texts in drafts),
    }
