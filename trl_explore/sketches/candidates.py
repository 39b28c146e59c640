"""Candidates of a list, and the tokens of the list that the policy sampled for them."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import SequenceMatcher

from trl_explore.sketches.weights import Drawn

# Number of earlier tokens that are decoded together with a token. A character has at most four tokens.
DECODED_BEFORE = 8


@dataclass(frozen=True)
class SampledList:
    """A list, or the continuation of a list, as the policy sampled it."""

    prefix: list[int]  # tokens from which it was sampled
    token_ids: list[int]
    ends: list[int]  # number of characters up to the end of each token; empty if nobody needs them


@dataclass(frozen=True)
class Candidate:
    """A candidate of a list."""

    text: str  # without number or bullet
    start: int  # position of its first character in the text of `source`
    source: SampledList


def token_ends(token_ids: list[int], decode: Callable[[list[int]], str]) -> list[int]:
    """Return the number of characters of a text up to the end of each of its tokens, `[T]`."""
    ends = []
    end = 0
    for place in range(len(token_ids)):
        # Decode only a few earlier tokens, because decoding all of them each time would take quadratic time.
        first = max(0, place - DECODED_BEFORE)
        end += len(decode(token_ids[first : place + 1])) - len(decode(token_ids[first:place]))
        ends.append(end)
    return ends


def sampled_part(candidate: Candidate, token_ids: list[int], ends: list[int], *, first: int) -> Drawn | None:
    """
    Return the longest part of a row that the policy sampled in a list.

    A row has the text of a candidate without its number or bullet, and the tokenizer encodes this text again. So some
    tokens of the row may not be in the list: after `2.`, the list has the token ` Rome`, but the row begins with the
    token `Rome`. Such a token was not sampled, so it has no likelihood at sampling. A token was sampled if the list
    has the same token, and both end at the same character of the text.

    Args:
        candidate ([`Candidate`]):
            The candidate.
        token_ids (`list[int]`):
            Tokens of the candidate in the row, `[T]`.
        ends (`list[int]`):
            Number of characters of the candidate up to the end of each of these tokens, `[T]`.
        first (`int`):
            Position of the first of these tokens in the row.

    Returns:
        [`Drawn`] or `None`: The tokens, with the tokens before them in the list as context. None if no token of the
        candidate was sampled.
    """
    source = candidate.source
    own = [(token_id, candidate.start + end) for token_id, end in zip(token_ids, ends, strict=True)]
    sampled = list(zip(source.token_ids, source.ends, strict=True))
    match = SequenceMatcher(None, own, sampled, autojunk=False).find_longest_match()
    if match.size == 0:
        return None
    context = source.prefix + source.token_ids[: match.b]
    return Drawn(first + match.a, context, token_ids[match.a : match.a + match.size])
