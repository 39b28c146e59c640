"""The completions table in a terminal: a line of numbers for every row, and below it prompt and completion in full."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text
from trl.trainer import grpo_trainer

from trl_explore.visible_text import visible_text

SHARED = "prefix_characters"  # the column that says where the trained part of a completion begins
INDENT = 2


@contextmanager
def printed_visibly() -> Iterator[None]:
    """TRL prints a table of narrow columns, as the model wrote it; a terminal would obey what looks like a command to
    it. The files and the trackers keep the text as it is."""
    before = grpo_trainer.print_prompt_completions_sample
    vars(grpo_trainer)["print_prompt_completions_sample"] = print_rows
    try:
        yield
    finally:
        vars(grpo_trainer)["print_prompt_completions_sample"] = before


def print_rows(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rewards: dict[str, Sequence[float]],
    advantages: Sequence[float] | None,
    step: int,
    num_samples: int | None = None,
    extra: dict[str, Sequence[Any]] | None = None,
) -> None:
    """
    Prints rows as TRL's `print_prompt_completions_sample` does, readable in 80 columns.

    Args:
        prompts (`Sequence`):
            Texts or conversations.
        completions (`Sequence`):
            Texts or conversations. Of a text, the first `extra["prefix_characters"]` are dim: shared, not trained.
        rewards (`dict[str, Sequence[float]]`):
            Rewards by the name of their function.
        advantages (`Sequence[float]`, *optional*):
            Advantages.
        step (`int`):
            The training step.
        num_samples (`int`, *optional*):
            How many rows, drawn at random, are printed. None for all.
        extra (`dict[str, Sequence]`, *optional*):
            Further columns.
    """
    console, extra, rows = Console(), extra or {}, range(len(prompts))
    chosen: Sequence[int] = rows
    if num_samples is not None and num_samples < len(rows):
        if num_samples <= 0:
            return
        chosen = random.sample(rows, num_samples)  # as upstream: the draw moves the global generator
    console.print(Rule(Text(f"Step {step}", style="bold")))
    for row in chosen:
        told = {"row": row, **{name: values[row] for name, values in extra.items() if name != SHARED}}
        numbers = {name: float(values[row]) for name, values in rewards.items()}
        if advantages is not None:
            numbers["advantage"] = float(advantages[row])
        console.print(_numbers(told, numbers))
        shared = extra[SHARED][row] if SHARED in extra else None
        for text, style in ((_said(prompts[row]), "yellow"), (_said(completions[row], shared), "green")):
            text.style = style
            console.print(Padding(text, (0, 0, 0, INDENT)))
        console.print()


def _numbers(told: dict[str, Any], numbers: dict[str, float]) -> Text:
    """Everything that is known of a row, apart from its texts."""
    line = Text(style="bold")
    known = {name: value for name, value in told.items() if not _missing(value)}
    for name, value in {**known, **numbers}.items():
        shown = f"{value:.4g}" if isinstance(value, float) else _plain(value)
        if name in numbers:
            shown = f"{value:.2f}"
        line.append(" · " if line.plain else "")
        line.append(f"{visible_text(name)} ", style="not bold")
        line.append(shown, style="cyan" if name in numbers else "")
    return line


def _missing(value: Any) -> bool:
    return value is None or isinstance(value, float) and math.isnan(value)


def _plain(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(message, dict) for message in value) and value:
        return _said(value).plain
    return visible_text(str(value))


def _said(entry: Any, shared: float | None = None) -> Text:
    """A text, or the messages of a conversation under their roles. The first `shared` characters of a text, or of the
    first message, are dim."""
    cut = 0 if shared is None or _missing(shared) else int(shared)
    if not (isinstance(entry, list) and all(isinstance(message, dict) for message in entry)):
        text = str(entry)
        return Text.assemble((visible_text(text[:cut]), "dim"), visible_text(text[cut:]))
    said = Text()
    for number, message in enumerate(entry):
        said.append("\n" if number else "")
        said.append(f"{visible_text(str(message.get('role', ''))).upper()} ", style="bold red")
        thoughts = message.get("reasoning_content") or message.get("thinking")
        if thoughts:
            said.append(f"{visible_text(thoughts)}\n", style="italic dim")
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
            text = part["text"] if part.get("type") == "text" else f"[{part.get('type')}]".upper()
            said.append(visible_text(text[:cut]), style="dim")
            said.append(visible_text(text[cut:]))
            cut = 0
        said.append(", ".join(_call(call.get("function", {})) for call in message.get("tool_calls") or []))
    return said


def _call(function: dict[str, Any]) -> str:
    """A tool call, whose arguments may be JSON."""
    given = function.get("arguments", {})
    arguments = json.loads(given) if isinstance(given, str) else given
    shown = ", ".join(f"{visible_text(str(name))}={visible_text(repr(_visible(v)))}" for name, v in arguments.items())
    return f"{visible_text(function.get('name', '?'))}({shown})"


def _visible(value: Any) -> Any:
    return visible_text(value) if isinstance(value, str) else value
