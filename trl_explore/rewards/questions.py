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

# Text that the environment wrote into a plain completion. Match it as a whole, because a passage may contain any tag.
INFORMATION = re.compile(r"<information>.*?(?:</information>|\Z)", re.DOTALL)
TAG = re.compile(r"(</?(?:thinking|search|answer|information)>)")
# Parts of a trajectory in the form of `_shape`.
THINKING = "<thinking>.</thinking>"
SEARCH = "<search>.</search>"
ANSWER = "<answer>.</answer>"

Completion = str | list[dict[str, Any]]
Gold = str | Sequence[str]


def normalize_answer(text: str) -> str:
    """Normalize a text as SQuAD does: lower case, no ASCII punctuation, no articles, single spaces. Also apply NFC."""
    # Apply NFC before punctuation is removed, so that `=` with a combining stroke becomes `≠`, which is not ASCII.
    # Apply it again afterwards, because a letter and a combining accent may have become neighbours.
    lowered = " ".join(unicodedata.normalize("NFC", text.lower()).split())
    bare = unicodedata.normalize("NFC", lowered.translate(NO_PUNCTUATION))
    return " ".join(ARTICLES.sub(" ", bare).split())


def _golds(golds: Gold) -> list[str]:
    if isinstance(golds, str):
        return [golds]
    texts = [str(gold) for gold in golds]
    if not texts:
        raise ValueError("there is no gold answer to compare with: drop such rows, or make their answer None.")
    return texts


def exact_match(prediction: str, golds: Gold) -> float:
    """
    Return 1.0 if a prediction equals a gold answer after SQuAD's normalization, else 0.0.

    SQuAD's normalization removes articles, so the answers `A.`, `(a)` and `the` are equal.

    Args:
        prediction (`str`):
            Answer of the model.
        golds (`str` or `Sequence[str]`):
            Gold answer, or alternatives.

    Returns:
        `float`: 1.0 or 0.0.

    Raises:
        `ValueError`: If `golds` is empty.
    """
    forms = {normalize_answer(gold) for gold in _golds(golds)}
    return float(bool(prediction.strip()) and normalize_answer(prediction) in forms)


def f1_score(prediction: str, golds: Gold) -> float:
    """
    Return the F1 score of the words of a prediction, for the closest gold answer.

    As in HotpotQA, `yes`, `no` and `noanswer` count only as a whole answer.

    Args:
        prediction (`str`):
            Answer of the model.
        golds (`str` or `Sequence[str]`):
            Gold answer, or alternatives.

    Returns:
        `float`: The score, in `[0, 1]`.

    Raises:
        `ValueError`: If `golds` is empty.
    """
    gold_texts = _golds(golds)
    if not prediction.strip():
        return 0.0
    return max(_f1(normalize_answer(prediction), normalize_answer(gold)) for gold in gold_texts)


def _f1(prediction: str, gold: str) -> float:
    if prediction == gold:
        return 1.0
    if prediction in VERDICTS or gold in VERDICTS:
        return 0.0
    words, gold_words = Counter(prediction.split()), Counter(gold.split())
    common = (words & gold_words).total()
    if common == 0:
        return 0.0
    return 2 * common / (words.total() + gold_words.total())


SCORES: dict[str, Callable[[str, Gold], float]] = {"f1": f1_score, "em": exact_match}


def extract_tagged_answer(text: str, tag: str = "answer") -> str | None:
    """Return the stripped text in the last complete pair of tags, or `None` if there is none."""
    inner = re.findall(rf"<{tag}>((?:(?!</?{tag}>).)*)</{tag}>", text, re.DOTALL)
    if not inner:
        return None
    return inner[-1].strip()


def _assistant_messages(completion: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message for message in completion if message.get("role", "assistant") == "assistant"]


def _turns(completion: Completion) -> list[str]:
    """Return the texts of the model's turns, without text of the environment."""
    if isinstance(completion, str):
        return INFORMATION.split(completion)
    return [completion_text([message]) for message in _assistant_messages(completion)]


def _answer(completion: Completion) -> str:
    turns = _turns(completion)
    if not turns:
        return ""
    return extract_tagged_answer(turns[-1]) or ""


def _rewards(
    completions: Sequence[Completion], answer: Sequence[Any] | None, reward: Callable[[Completion, Gold], float]
) -> list[float | None]:
    if answer is None:
        raise ValueError(
            "this reward needs the gold answers in a column `answer`, and the data set has none; rename the column "
            "that holds them."
        )
    rewards: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        if gold is None:
            rewards.append(None)
        elif isinstance(gold, list | tuple):
            rewards.append(reward(completion, gold))
        else:
            rewards.append(reward(completion, str(gold)))
    return rewards


def f1_reward(
    completions: Sequence[Completion], answer: Sequence[Any] | None = None, **kwargs: Any
) -> list[float | None]:
    """
    Reward function: [`f1_score`] of the text in the last complete `<answer>` of the model's last turn.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions. Each is a text or the messages of several turns. In a text, the environment wrote the parts in
            `<information>`.
        answer (`list`):
            Gold answers of each row: a text or a list of texts.
        **kwargs:
            Other columns and TRL's arguments, not used.

    Returns:
        `list[float | None]`: Rewards in `[0, 1]`. 0 without a complete tag, and `None` if the gold answer is `None`.

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
    Reward function: [`exact_match`] of the text in the last complete `<answer>` of the model's last turn.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as in [`f1_reward`].
        answer (`list`):
            Gold answers of each row: a text or a list of texts.
        **kwargs:
            Other columns and TRL's arguments, not used.

    Returns:
        `list[float | None]`: 1.0 or 0.0, and `None` if the gold answer is `None`.

    Raises:
        ValueError: If the data set has no column `answer`.
    """
    return _rewards(completions, answer, lambda completion, gold: exact_match(_answer(completion), gold))


def _shape(text: str) -> str:
    """Return the tags of a text, with a dot for each text between tags."""
    shape = ""
    for piece in TAG.split(text):
        if TAG.fullmatch(piece):
            shape += piece
        elif piece.strip():
            shape += "."
    return shape


def _follows_tags(turns: list[str], *, require_search: bool, require_thinking: bool) -> bool:
    """Return whether the last turn is an answer, and every earlier turn a search. A thought may come first in a turn.
    With `require_thinking`, it must. With `require_search`, there must be an earlier turn."""
    search_shapes, answer_shapes = [THINKING + SEARCH], [THINKING + ANSWER]
    if not require_thinking:
        search_shapes.append(SEARCH)
        answer_shapes.append(ANSWER)
    *searches, last = [_shape(turn) for turn in turns]
    if require_search and not searches:
        return False
    return last in answer_shapes and all(shape in search_shapes for shape in searches)


def _calls_known_tools(completion: list[dict[str, Any]]) -> bool:
    """Return whether the model called only tools that exist. TRL answers other calls with an error."""
    for message in completion:
        error = str({"error": f"Tool {message.get('name')} not found."})
        if message.get("role") == "tool" and message.get("content") == error:
            return False
    return True


def _follows_tools(messages: list[dict[str, Any]], *, require_search: bool, require_thinking: bool) -> bool:
    """Return whether every message calls a tool, except the last, which has exactly one answer and any other text.
    With `require_thinking`, every message must have a thought. With `require_search`, there must be an earlier
    message."""
    *searches, last = messages
    if require_search and not searches:
        return False
    if require_thinking and not all(_thinks(message) for message in messages):
        return False
    shape = _shape(completion_text([last]))
    # `ANSWER` contains "answer>" twice, so a count of 2 means that there is no other answer tag.
    has_one_answer = shape.count(ANSWER) == 1 and shape.count("answer>") == 2
    if last.get("tool_calls") or not has_one_answer:
        return False
    return all(message.get("tool_calls") for message in searches)


def _thinks(message: dict[str, Any]) -> bool:
    # If the chat template of a model has thoughts, TRL moves them from the content to their own field.
    thought = message.get("reasoning_content") or message.get("thinking")
    return bool(thought and thought.strip()) or THINKING in _shape(completion_text([message]))


def _is_well_formed(completion: Completion, *, trust_information: bool, **rules: bool) -> bool:
    if isinstance(completion, str):
        # A text does not show who wrote it. Unless the user trusts `<information>`, assume that the model wrote it.
        turns = [completion]
        if trust_information:
            turns = _turns(completion)
        return _follows_tags(turns, **rules)
    turns = _turns(completion)
    if not turns or not _calls_known_tools(completion):
        return False
    messages = _assistant_messages(completion)
    has_tool_calls = any(message.get("tool_calls") for message in messages)
    has_search_tags = any("<search>" in turn for turn in turns)
    if has_search_tags and not has_tool_calls:
        return _follows_tags(turns, **rules)
    return _follows_tools(messages, **rules)


def make_search_reward(
    *,
    score: Literal["f1", "em"] = "f1",
    format_penalty: float = -0.5,
    require_search: bool = True,
    require_thinking: bool = False,
    trust_information: bool = False,
) -> Callable[..., list[float | None]]:
    """
    Return the reward function of BranPO's search agents (https://huggingface.co/papers/2602.03719, appendix A.3).

    A trajectory that breaks the format gets the penalty, and every other trajectory gets the score of its answer. The
    format of the paper's prompt (table 6) is required exactly. Truncated trajectories and, by default, answers without
    a search break it. There are two formats:

    - Tags. Each turn is `<thinking>...</thinking><search>...</search>`, and the last turn is
      `<thinking>...</thinking><answer>...</answer>`. Turns are the assistant's messages. In a text with
      `trust_information=True`, turns are the parts between `<information>...</information>`.
    - Tool calls of TRL. Every assistant message except the last calls a tool that exists. The last message contains
      exactly one `<answer>`. A thought is a `<thinking>` tag, or the field `reasoning_content` or `thinking` of a
      message, into which TRL moves the thoughts of a chat template. This format also applies to messages without any
      search.

    Args:
        score (`str`, *optional*, defaults to `"f1"`):
            `"f1"` for [`f1_score`] or `"em"` for [`exact_match`].
        format_penalty (`float`, *optional*, defaults to `-0.5`):
            Reward of a trajectory that breaks the format. The default is the paper's.
        require_search (`bool`, *optional*, defaults to `True`):
            If `True`, an answer without a search breaks the format.
        require_thinking (`bool`, *optional*, defaults to `False`):
            If `True`, a turn without a thought breaks the format, as in the paper.
        trust_information (`bool`, *optional*, defaults to `False`):
            If `True`, assume that the environment wrote all `<information>`, for example in a `rollout_func`. If
            `False`, assume that the model wrote it, which breaks the format.

    Returns:
        `Callable`: A reward function `search_reward(completions, answer, **kwargs)` with the arguments of
        [`f1_reward`].

    Raises:
        `ValueError`: If `score` is unknown.
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
