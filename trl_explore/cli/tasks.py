"""The command `trl-explore tasks`, which lists all tasks or shows an example of one task."""

import argparse
import importlib
import inspect
import json
import re
import shutil
import sys
import textwrap
from typing import Any, NamedTuple

from trl_explore.cli.flags import FlagParser
from trl_explore.environments.specs import SOURCES, names_a_spec
from trl_explore.errors import UsageError
from trl_explore.visible_text import visible_text

DESCRIPTION = """\
List the tasks, which bring data and rewards, or show an example of one task:

  trl-explore tasks                            # all tasks
  trl-explore tasks reasoning_gym              # the tasks of one package
  trl-explore tasks reasoning_gym:countdown    # prompt, columns, and fields of --task_config
  trl-explore tasks my_tasks:MAZE              # a task object of your own, by its import path

Train, compare and evaluate on them:

  trl-explore train --method deep_grpo --model_name_or_path M --task reasoning_gym:countdown --output_dir out
  trl-explore compare --task chain
  trl-explore eval --model_name_or_path out --task reasoning_gym:countdown --output_dir out/eval
"""
EMBEDDED, AGENTS = "embedded", "agents"
GROUPS = (EMBEDDED, AGENTS, *SOURCES)
TITLES = {
    EMBEDDED: "embedded, with a tiny model that is taught the task (train, compare, eval, filter)",
    AGENTS: "embedded, for agents, with a tiny model (train, compare)",
    "reasoning_gym": "reasoning-gym (train, compare, eval, filter)",
    "textarena": "TextArena, games for agents (train, compare)",
}
PACKAGES = {"reasoning_gym": "reasoning-gym", "textarena": "textarena"}  # names of the extras
# Fields for an example, which needs only one row. The default, 1,000 rows, takes a minute for some data sets.
ONE_ROW = {"size": 1, "eval_size": 1}
PIPED_WIDTH = 120  # characters per line if the output is not a terminal
SHORTEST_EXAMPLE = 20  # characters of an example in the list, at least
LONGEST_VALUE = 80  # characters of a field's or column's value, at most
VARIANT = re.compile(r"-v\d+")  # version in a game's id; the text after it names the variant


class Listed(NamedTuple):
    """A line of the list."""

    name: str
    group: str
    example: str  # a prompt; for games, the variants


def build_parser() -> FlagParser:
    """Return the parser of `trl-explore tasks`."""
    parser = FlagParser(
        prog="trl-explore tasks",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="trl-explore tasks [TASK] [--task_config JSON] [--json]",
        allow_abbrev=False,
    )
    parser.add_argument("task", nargs="?", metavar="TASK", help=f"a task, or one of {', '.join(GROUPS)}")
    parser.add_argument("--task_config", metavar="JSON", help="fields of the task, for its example")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def run(argv: list[str]) -> int:
    """Run `trl-explore tasks`, and return its exit status."""
    args = build_parser().parse(argv)
    if args.task is not None and args.task not in GROUPS:
        shown = describe(args.task, args.task_config)
        if args.json:
            print(json.dumps(shown, indent=2, default=str))
        else:
            print(description_text(shown))
        return 0
    if args.task_config is not None:
        raise UsageError(f"task_config={args.task_config!r} belongs to one task; name it, or leave task_config out")
    groups = GROUPS if args.task is None else (args.task,)
    listed, missing = list_tasks(groups)
    if args.json:
        tasks = [line._asdict() for line in listed]
        print(json.dumps({"tasks": tasks, "missing": missing}, indent=2))
    else:
        print(list_text(groups, listed, missing))
    return 0


# --------------------------------------------------------------------------------------------------------------- lists


def list_tasks(groups: tuple[str, ...]) -> tuple[list[Listed], dict[str, str]]:
    """
    List the tasks of some groups.

    Args:
        groups (`tuple[str, ...]`):
            Groups, from [`GROUPS`].

    Returns:
        `tuple[list[Listed], dict[str, str]]`: The tasks in the order of the groups. For each group whose package is
            missing, a sentence that tells how to install the package.
    """
    listed: list[Listed] = []
    missing: dict[str, str] = {}
    for group in groups:
        if group in SOURCES:
            try:
                listed += _of_package(group)
            except ImportError:
                package = PACKAGES[group]
                missing[group] = f'{package} is not installed: pip install "trl-explore[{package}]"'
        else:
            listed += _embedded(group)
    return listed, missing


def _embedded(group: str) -> list[Listed]:
    """Return the embedded tasks of a group."""
    from trl_explore import tasks

    chosen = tasks.TASKS if group == EMBEDDED else tasks.AGENTS
    return [Listed(name, group, prompt_text(task.evaluation_set(1)[0]["prompt"])) for name, task in chosen.items()]


def _of_package(source: str) -> list[Listed]:
    """Return the tasks of another package. Raise an ImportError if it is not installed."""
    module = {"reasoning_gym": "reasoning_gym", "textarena": "text_arena"}[source]
    names: list[str] = importlib.import_module(f"trl_explore.environments.{module}").list_names()
    if source == "textarena":
        return _games(names)
    return [Listed(f"{source}:{name}", source, _question(name)) for name in names]


def _question(name: str) -> str:
    """Return the question of one problem of a data set of reasoning-gym. This function does not create a spec, because
    a spec generates many rows: for all data sets, that would take minutes instead of two seconds."""
    from reasoning_gym.factory import create_dataset

    return str(create_dataset(name, size=1, seed=0)[0]["question"])


def _games(ids: list[str]) -> list[Listed]:
    """Return one line per game, with the names of its variants. They differ in size and difficulty."""
    families: dict[str, list[str]] = {}
    for name in ids:
        game = VARIANT.split(name, maxsplit=1)[0]
        families.setdefault(game, []).append(name)
    lines = []
    for variants in families.values():
        first = min(variants, key=len)
        others = [name for name in variants if name != first]
        count = "1 variant"
        if others:
            count = f"{len(variants)} variants, also {', '.join(others)}"
        lines.append(Listed(f"textarena:{first}", "textarena", count))
    return lines


def list_text(groups: tuple[str, ...], listed: list[Listed], missing: dict[str, str]) -> str:
    """Return the list as text with one line per task. A line is at most as wide as the terminal."""
    width = PIPED_WIDTH
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    longest = max((len(line.name) for line in listed), default=0)
    room = max(SHORTEST_EXAMPLE, width - longest - 4)
    lines: list[str] = []
    for group in groups:
        lines.append(f"{TITLES[group]}:")
        if group in missing:
            lines.append(f"  {missing[group]}")
        for line in listed:
            if line.group == group:
                lines.append(f"  {line.name:<{longest}}  {short(line.example, room)}")
    lines.append("An example of one: trl-explore tasks NAME")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------ one task


def describe(name: str, config: str | None = None) -> dict[str, Any]:
    """
    Describe one task.

    Args:
        name (`str`):
            Name of the task.
        config (`str`, *optional*):
            Fields of the task, as JSON text.

    Returns:
        `dict`: `name`; `agent`, True if the task has tools; the `prompt` of a held-out row; the other `columns` of
            that row with their values; the `fields` of `task_config` with the values that the task uses; and the
            training `options` that suit the task.

    Raises:
        UsageError: If there is no task with this name, or its rows cannot be generated.
    """
    from trl_explore.runs.tasks import find_run_task, read_task_config

    fields = read_task_config(config)
    task = find_run_task(name, fields)
    from_package = names_a_spec(name)
    example = find_run_task(name, {**ONE_ROW, **fields}) if from_package else task
    try:
        row = dict(example.held_out_rows(1)[0])
    except ValueError as error:
        raise UsageError(f"task={name!r}: {error}") from error
    prompt = row.pop("prompt")
    if task.is_agent and not task.has_tiny_model:
        prompt = _with_first_message(example.task, prompt, row)
    return {
        "name": name,
        "agent": task.is_agent,
        "prompt": prompt,
        "columns": row,
        "fields": config_fields(task.task) if from_package else {},
        "options": task.options,
    }


def _with_first_message(spec: Any, prompt: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the prompt with the first message of the environment, which TRL appends to the last message."""
    first_message = spec.environment_factory().reset(prompt=prompt, **row)
    if not isinstance(first_message, str):
        return prompt
    *before, last = prompt
    return [*before, {**last, "content": last["content"] + first_message}]


def config_fields(spec: Any) -> dict[str, Any]:
    """
    Return the fields of a task's `task_config`.

    Args:
        spec ([`TaskSpec`]):
            The task.

    Returns:
        `dict`: Names and values: the arguments of the spec with their defaults, and the fields of the data set or
            game with the values that the task uses.
    """
    parameters = list(inspect.signature(type(spec)).parameters.values())[1:]  # the first one is the name
    own = {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return own
    source, _, name = spec.name.partition(":")
    if source == "reasoning_gym":
        more = _data_set_fields(name)
    else:
        more = _game_arguments(name)
    return {**more, **getattr(spec, "config", {}), **own}


def _data_set_fields(name: str) -> dict[str, Any]:
    """Return the fields of a data set of reasoning-gym with their defaults."""
    from reasoning_gym.factory import DATASETS

    from trl_explore.environments.gym_worker import field_defaults

    return field_defaults(DATASETS[name][1])


def _game_arguments(name: str) -> dict[str, Any]:
    """Return the arguments of a game of TextArena with their defaults."""
    from trl_explore.environments.text_arena_registry import arguments_of

    return arguments_of(name)


def description_text(shown: dict[str, Any]) -> str:
    """Return the description of a task as text."""
    kind = "played with tools" if shown["agent"] else "one turn"
    lines = [f"{shown['name']} ({kind})", "", "prompt:"]
    lines.append(textwrap.indent(visible_text(prompt_text(shown["prompt"])), "  "))
    lines += ["", "other columns, with their values for this prompt:", *_pairs(shown["columns"])]
    if shown["fields"]:
        lines += ["", "fields of task_config, with their values:", *_pairs(shown["fields"])]
    else:
        lines += ["", "task_config: none, the task has no fields"]
    lines += ["", "training options, unless you give others:", *_pairs(shown["options"])]
    return "\n".join(lines)


def _pairs(values: dict[str, Any]) -> list[str]:
    """Return one line per name, with its value."""
    longest = max((len(name) for name in values), default=0)
    return [f"  {name:<{longest}}  {short(_shown(value), LONGEST_VALUE)}" for name, value in values.items()]


def _shown(value: Any) -> str:
    """Return a value as JSON text, which `--task_config` accepts. If JSON cannot represent it, return its `repr`."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        return repr(value)


def prompt_text(prompt: Any) -> str:
    """Return the text of a prompt. If it has several messages, each begins with its role."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def short(text: str, most: int) -> str:
    """Return a text as one line of at most `most` characters."""
    line = visible_text(" ".join(text.split()))
    if len(line) <= most:
        return line
    return f"{line[: most - 3]}..."
