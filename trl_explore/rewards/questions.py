"""Rewards for questions with short answers: SQuAD's F1 and exact match, and BranPO's reward for search agents."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from trl_explore.rewards.answers import completion_text

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
VERDICTS = {"yes", "no", "noanswer"}

# What the environment wrote into a completion that is one text; a passage may hold any tag.
INFORMATION = re.compile(r"<information>.*?(?:</information>|\Z)", re.DOTALL)
TAG = re.compile(r"(</?(?:thinking|search|answer|information)>)")
THINKING = "<thinking>.</thinking>"
SEARCH = "<search>.</search>"
ANSWER = "<answer>.</answer>"

Completion = str | list[dict[str, Any]]
Gold = str | Sequence[str]


def normalize_answer(text: str) -> str:
    """SQuAD's form: lower case, no ASCII punctuation, no articles, single spaces; composed characters (NFC)."""
    lowered = " ".join(unicodedata.normalize("NFC", text.lower()).split())
    bare = unicodedata.normalize("NFC", lowered.translate(NO_PUNCTUATION))
    return " ".join(ARTICLES.sub(" ", bare).split())


def _golds(golds: Gold) -> list[str]:
    texts = [golds] if isinstance(golds, str) else [str(gold) for gold in golds]
    if not texts:
        raise ValueError("there is no gold answer to compare with: drop such rows, or make their answer None.")
    return texts


def exact_match(prediction: str, golds: Gold) -> float:
    """1.0 for a gold answer up to SQuAD's normalisation (`A.`, `(a)` and `the` equal `A`), else 0.0."""
    forms = {normalize_answer(gold) for gold in _golds(golds)}
    return float(bool(prediction.strip()) and normalize_answer(prediction) in forms)


def f1_score(prediction: str, golds: Gold) -> float:
    """Overlap of words with the nearest gold answer, as in HotpotQA; `yes` and `no` are right as a whole."""
    best = max(_f1(normalize_answer(prediction), normalize_answer(gold)) for gold in _golds(golds))
    return best if prediction.strip() else 0.0


def _f1(prediction: str, gold: str) -> float:
    if prediction == gold:
        return 1.0
    if prediction in VERDICTS or gold in VERDICTS:
        return 0.0
    words, gold_words = Counter(prediction.split()), Counter(gold.split())
    common = (words & gold_words).total()
    return 2 * common / (words.total() + gold_words.total()) if common else 0.0


SCORES: dict[str, Callable[[str, Gold], float]] = {"f1": f1_score, "em": exact_match}


def extract_tagged_answer(text: str, tag: str = "answer") -> str | None:
    """What stands in the last complete pair of tags of a text, stripped; `None` without one."""
    inner = re.findall(rf"<{tag}>((?:(?!</?{tag}>).)*)</{tag}>", text, re.DOTALL)
    return inner[-1].strip() if inner else None


def _assistant_messages(completion: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message for message in completion if message.get("role", "assistant") == "assistant"]


def _turns(completion: Completion) -> list[str]:
    """What the model wrote, turn by turn; what it was shown is left out."""
    if isinstance(completion, str):
        return INFORMATION.split(completion)
    return [completion_text([message]) for message in _assistant_messages(completion)]


def _answer(completion: Completion) -> str:
    turns = _turns(completion)
    return (extract_tagged_answer(turns[-1]) if turns else None) or ""


def _rewards(
    completions: Sequence[Completion], answer: Sequence[Any] | None, reward: Callable[[Completion, Gold], float]
) -> list[float | None]:
    if answer is None:
        raise ValueError(
            "this reward needs the gold answers in a column `answer`, and the data set has none; rename the column "
            "that holds them."
        )
    return [
        None if gold is None else reward(completion, gold if isinstance(gold, list | tuple) else str(gold))
        for completion, gold in zip(completions, answer, strict=True)
    ]


def f1_reward(
    completions: Sequence[Completion], answer: Sequence[Any] | None = None, **kwargs: Any
) -> list[float | None]:
    """
    Reward function: [`f1_score`] of what stands in the last complete `<answer>` of the model's last turn.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions: one text, in which `<information>` is the environment's, or messages of several turns.
        answer (`list`):
            Gold answers of each row: a text or a list of texts.
        **kwargs:
            The other columns and TRL's arguments, unused.

    Returns:
        `list[float | None]`: Rewards; 0 without a complete tag, `None` where the gold answer is `None`.

    Raises:
        ValueError: If the data set has no column `answer`.

    Example:
    ```python
    >>> f1_reward(["<answer>Paris, France</answer>", "Paris"], answer=["Paris", ["Paris", "Lutetia"]])
    [0.6666666666666666, 0.0]
    ```
    """
    return _rewards(completions, answer, lambda completion, gold: f1_score(_answer(completion), gold))


def exact_match_reward(
    completions: Sequence[Completion], answer: Sequence[Any] | None = None, **kwargs: Any
) -> list[float | None]:
    """
    Reward function: [`exact_match`] of what stands in the last complete `<answer>` of the model's last turn.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as in [`f1_reward`].
        answer (`list`):
            Gold answers of each row: a text or a list of texts.
        **kwargs:
            The other columns and TRL's arguments, unused.

    Returns:
        `list[float | None]`: 1.0 or 0.0; `None` where the gold answer is `None`.

    Raises:
        ValueError: If the data set has no column `answer`.
    """
    return _rewards(completions, answer, lambda completion, gold: exact_match(_answer(completion), gold))


def _shape(text: str) -> str:
    """The tags of a text, with a dot for what stands between them."""
    pieces = (piece for piece in TAG.split(text) if piece.strip())
    return "".join(piece if TAG.fullmatch(piece) else "." for piece in pieces)


def _follows_tags(turns: list[str], *, require_search: bool, require_thinking: bool) -> bool:
    """Whether turns are thought + search, again and again, and then thought + answer, with nothing else."""
    shapes = [_shape(turn) for turn in turns]
    # Text after the last search's result that is empty is the end of the completion and no turn.
    thoughts = [THINKING] if require_thinking else [THINKING, ""]
    searches = all(shape in [thought + SEARCH for thought in thoughts] for shape in shapes[:-1])
    enough = len(shapes) > 1 or not require_search
    return enough and searches and shapes[-1] in [thought + ANSWER for thought in thoughts]


def _calls_known_tools(completion: list[dict[str, Any]]) -> bool:
    """Whether no call was answered by what TRL says where there is no tool of that name."""
    answers = (message for message in completion if message.get("role") == "tool")
    return all(m.get("content") != str({"error": f"Tool {m.get('name')} not found."}) for m in answers)


def _follows_tools(messages: list[dict[str, Any]], *, require_search: bool, require_thinking: bool) -> bool:
    """Whether messages are calls of tools and then one with exactly one answer, whatever is written around it."""
    *before, last = messages
    shape = _shape(completion_text([last]))
    answered = not last.get("tool_calls") and shape.count(ANSWER) == 1 and shape.count("answer>") == 2
    searched = bool(before) or not require_search
    return (
        answered
        and searched
        and all(message.get("tool_calls") for message in before)
        and (not require_thinking or all(map(_thinks, messages)))
    )


def _thinks(message: dict[str, Any]) -> bool:
    # Where a model's template has thinking of its own, TRL takes it out of the content.
    thought = message.get("reasoning_content") or message.get("thinking")
    return bool(thought and thought.strip()) or THINKING in _shape(completion_text([message]))


def _is_well_formed(completion: Completion, *, trust_information: bool, **rules: bool) -> bool:
    if isinstance(completion, str):
        # Nothing in a text tells who wrote it: information that is not known to be the environment's is the model's.
        return _follows_tags(_turns(completion) if trust_information else [completion], **rules)
    turns = _turns(completion)
    if not turns or not _calls_known_tools(completion):
        return False
    messages = _assistant_messages(completion)
    called = any(message.get("tool_calls") for message in messages)
    if called or not any("<search>" in turn for turn in turns):
        return _follows_tools(messages, **rules)
    return _follows_tags(turns, **rules)


def make_search_reward(
    *,
    score: Literal["f1", "em"] = "f1",
    format_penalty: float = -0.5,
    require_search: bool = True,
    require_thinking: bool = False,
    trust_information: bool = False,
) -> Callable[..., list[float | None]]:
    """
    Reward of BranPO's search agents (https://huggingface.co/papers/2602.03719, appendix A.3).

    A trajectory that breaks the format, or answers without a search, gets the penalty, every other one the score of
    its answer. So does what was cut short, or has anything the paper's prompt (table 6) does not ask for.

    - Tags: each turn is `<thinking>...</thinking><search>...</search>`, the last one
      `<thinking>...</thinking><answer>...</answer>`. Turns are the assistant's messages, or the parts between
      `<information>...</information>` of one text, with `trust_information=True`.
    - Tool calls, as TRL gives them: every message of the assistant but the last calls a tool that exists; the last one
      holds exactly one `<answer>`. Thinking is a tag or the template's own. So are messages without any search judged.

    Args:
        score (`str`, *optional*, defaults to `"f1"`):
            `"f1"` for [`f1_score`], `"em"` for [`exact_match`]; a `ValueError` otherwise.
        format_penalty (`float`, *optional*, defaults to `-0.5`):
            Reward of a trajectory that breaks the format; the paper's.
        require_search (`bool`, *optional*, defaults to `True`):
            Whether an answer without a search breaks it.
        require_thinking (`bool`, *optional*, defaults to `False`):
            Whether a turn without thinking breaks it; the paper's tags require it.
        trust_information (`bool`, *optional*, defaults to `False`):
            Whether `<information>` in one text is the environment's, as where a `rollout_func` writes it. By default
            the model wrote it, and it breaks the format.

    Returns:
        `Callable`: A reward function `search_reward(completions, answer, **kwargs)`; see [`f1_reward`].
    """
    if score not in SCORES:
        raise ValueError(f"score={score!r} must be one of {', '.join(SCORES)}.")

    rules = {
        "require_search": require_search,
        "require_thinking": require_thinking,
        "trust_information": trust_information,
    }

    def reward(completion: Completion, gold: Gold) -> float:
        if not _is_well_formed(completion, **rules):
            return format_penalty
        return SCORES[score](_answer(completion), gold)

    def search_reward(
        completions: Sequence[Completion], answer: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[float | None]:
        return _rewards(completions, answer, reward)

    return search_reward


search_reward = make_search_reward()
