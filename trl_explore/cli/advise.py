"""The command `trl-explore advise`, which reads the logs of a run and prints advice."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import yaml
from rich.console import Console
from rich.text import Text

from trl_explore.advice.advise import Advice, advise
from trl_explore.advice.signs import Pair, read_signs
from trl_explore.fitting_table import FittingTable
from trl_explore.visible_text import visible_text


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `trl-explore advise`."""
    parser = argparse.ArgumentParser(
        prog="trl-explore advise",
        description="Read the logs of a run of GRPO, and say what to do: keep GRPO, change the data, or explore.",
        epilog="It reads trainer_state.json and the tables that log_completions wrote. It loads no model.",
    )
    parser.add_argument("run", metavar="RUN", help="a run's output_dir, a checkpoint in it, or a trainer_state.json")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


def run(argv: list[str]) -> int:
    """Run `trl-explore advise`, and return its exit status."""
    args = build_parser().parse_args(argv)
    advice = advise(read_signs(Path(args.run).expanduser()))
    if args.json:
        json.dump(asdict(advice), sys.stdout, indent=2)
        print()
        return 0
    console = Console()
    _print_signs(console, advice)
    for finding in advice.findings:
        console.print(Text(f"- {visible_text(finding.text)} [{finding.link}]"))
    console.print(Text(f"\n{advice.verdict}", style="bold"))
    console.print(Text(f"See {advice.link}. Pages named here are in the repository."))
    for change in advice.changes:
        console.print(Text("To try it, set in a file for `trl-explore train --config`:\n"))
        console.print(Text(yaml.safe_dump(change, sort_keys=False)), soft_wrap=True)
    return 0


def _print_signs(console: Console, advice: Advice) -> None:
    """Print the numbers on which the advice is based."""
    signs = advice.signs
    console.print(Text(f"{signs.steps} steps", style="italic"))
    rows = []
    names = {
        "reward": "reward",
        "frac_reward_zero_std": "groups without contrast",
        "entropy": "entropy (nats)",
        "completions/clipped_ratio": "completions cut off",
        "completions/mean_length": "tokens per completion",
    }
    for name, title in names.items():
        if name in signs.values:
            rows.append(_row(title, signs.values[name]))
    # A pair is None if the logs do not contain its numbers.
    for title, pair in (("groups all wrong", signs.all_wrong), ("groups all right", signs.all_right)):
        if pair:
            rows.append(_row(title, pair))
    for name, pair in signs.sources.items():
        per_thousand = Pair(1000 * pair.start, 1000 * pair.end)
        rows.append(_row(f"contrast per 1,000 tokens: {name}", per_thousand))
    if signs.explored:
        rows.append(_row("prompts explored", signs.explored))
    for name, pair in signs.solved.items():
        rows.append(_row(f"explored prompts solved: {name}", pair))
    for k, pair in signs.pass_at.items():
        rows.append(_row(f"pass@{k}", pair))
    console.print(FittingTable(["", "start", "end"], rows))


def _row(title: str, pair: Pair) -> list[str]:
    """Return a row of the table: its title, and the values at the start and at the end of the run."""
    return [title, f"{pair.start:.3g}", f"{pair.end:.3g}"]
