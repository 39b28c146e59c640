"""Print the completions table in a terminal: a line of numbers per row, and below it the prompt and the completion."""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text
from trl.trainer import grpo_trainer

from trl_explore.visible_text import visible_text

SHARED = "prefix_characters"  # column with the number of characters before the trained part of a completion
INDENT = 2


@contextmanager
def printed_visibly() -> Iterator[None]:
    """
    Replace TRL's function that prints completions by [`print_rows`] inside the block.

    TRL prints narrow columns, and it prints control characters that a model wrote, which a terminal would obey. Files
    and trackers still get the text unchanged.
    """
    before = grpo_trainer.print_prompt_completions_sample
    grpo_trainer.print_prompt_completions_sample = print_rows
    try:
        yield
    finally:
        grpo_trainer.print_prompt_completions_sample = before


def print_rows(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rewards: Mapping[str, Sequence[float]],
    advantages: Sequence[float] | None,
    step: int,
    num_samples: int | None = None,
    extra: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """
    Print rows in place of TRL's `print_prompt_completions_sample`, readable in 80 columns.

    Args:
        prompts (`Sequence`):
            Texts or conversations.
        completions (`Sequence`):
            Texts or conversations. The first `extra["prefix_characters"]` characters of a completion are dim, because
            they are a shared prefix that is not trained.
        rewards (`Mapping[str, Sequence[float]]`):
            Rewards by the name of the reward function.
        advantages (`Sequence[float]`, *optional*):
            Advantages.
        step (`int`):
            The training step.
        num_samples (`int`, *optional*):
            Number of rows to print, chosen at random. None for all.
        extra (`Mapping[str, Sequence]`, *optional*):
            Further columns.
    """
    console, rows = Console(), range(len(prompts))
    columns = dict(extra or {})
    prefix_characters = columns.pop(SHARED, None)
    chosen: Sequence[int] = rows
    if num_samples is not None and num_samples < len(rows):
        if num_samples <= 0:
            return
        # Use the global generator as TRL does, so that later random numbers stay the same.
        chosen = random.sample(rows, num_samples)
    console.print(Rule(Text(f"Step {step}", style="bold")))
    for row in chosen:
        fields = {"row": row, **{name: values[row] for name, values in columns.items()}}
        numbers = {name: float(values[row]) for name, values in rewards.items()}
        if advantages is not None:
            numbers["advantage"] = float(advantages[row])
        console.print(_numbers(fields, numbers))
        shared = None if prefix_characters is None else prefix_characters[row]
        prompt, completion = _as_text(prompts[row]), _as_text(completions[row], shared)
        prompt.style, completion.style = "yellow", "green"
        for text in (prompt, completion):
            console.print(Padding(text, (0, 0, 0, INDENT)))
        console.print()


def _numbers(fields: dict[str, Any], numbers: dict[str, float]) -> Text:
    """Return the line with the fields of a row that have a value, and with its rewards and advantage (`numbers`)."""
    line = Text(style="bold")
    known = {name: value for name, value in fields.items() if not _missing(value)}
    for name, value in {**known, **numbers}.items():
        style = ""
        if name in numbers:
            shown, style = f"{value:.2f}", "cyan"
        elif isinstance(value, float):
            shown = f"{value:.4g}"
        else:
            shown = _plain(value)
        if line.plain:
            line.append(" · ")
        line.append(f"{visible_text(name)} ", style="not bold")
        line.append(shown, style=style)
    return line


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def _plain(value: Any) -> str:
    if value and _is_conversation(value):
        return _as_text(value).plain
    return visible_text(str(value))


def _as_text(entry: Any, shared: float | None = None) -> Text:
    """Return a text, or the messages of a conversation with their roles. The first `shared` characters of the text, or
    of the first message, are dim."""
    cut = 0 if shared is None or _missing(shared) else int(shared)
    if not _is_conversation(entry):
        text = str(entry)
        return Text.assemble((visible_text(text[:cut]), "dim"), visible_text(text[cut:]))
    shown = Text()
    for number, message in enumerate(entry):
        if number:
            shown.append("\n")
        shown.append(f"{visible_text(str(message.get('role', ''))).upper()} ", style="bold red")
        thoughts = message.get("reasoning_content") or message.get("thinking")
        if thoughts:
            shown.append(f"{visible_text(thoughts)}\n", style="italic dim")
        for text in _parts_of(message.get("content")):
            shown.append(visible_text(text[:cut]), style="dim")
            shown.append(visible_text(text[cut:]))
            cut = 0
        calls = message.get("tool_calls") or []
        shown.append(", ".join(_call(call.get("function", {})) for call in calls))
    return shown


def _parts_of(content: Any) -> list[str]:
    """Return the texts of a message's content. A part that is no text, such as an image, becomes `[IMAGE]`."""
    if not isinstance(content, list):
        return [content or ""]
    texts = []
    for part in content:
        if part.get("type") == "text":
            texts.append(part["text"])
        else:
            texts.append(f"[{part.get('type')}]".upper())
    return texts


def _call(function: dict[str, Any]) -> str:
    """Return a tool call as `name(argument=value)`. A model may write arguments that are no dictionary. Then the
    parentheses contain their text."""
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(json.JSONDecodeError):
            arguments = json.loads(arguments)
    shown = []
    if isinstance(arguments, dict):
        for name, value in arguments.items():
            shown.append(f"{visible_text(str(name))}={visible_text(repr(_visible(value)))}")
    else:
        shown.append(visible_text(str(arguments)))
    return f"{visible_text(function.get('name', '?'))}({', '.join(shown)})"


def _visible(value: Any) -> Any:
    if isinstance(value, str):
        return visible_text(value)
    return value
