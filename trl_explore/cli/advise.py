"""`trl-explore advise`: what a run's own logs say about it, and what paid where a measured run looked alike."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import yaml
from rich.console import Console
from rich.text import Text

from trl_explore.advice.advise import Advice, advise, change
from trl_explore.advice.signs import read_signs
from trl_explore.fitting_table import FittingTable
from trl_explore.visible_text import visible_text

# A comment, so that what is printed stays a file.
DEPTH_WEIGHT = (
    "# depth_weight: if a wrong choice ends a completion. Else leave it out: TreeGRPO may unlearn\n"
    "# [docs/evidence.md#a-search-that-unlearns]"
)


def build_parser() -> argparse.ArgumentParser:
    """The flags of `trl-explore advise`."""
    parser = argparse.ArgumentParser(
        prog="trl-explore advise",
        description="Read a run of GRPO: what stands out, which measured run it resembles, and what paid there.",
        epilog="It reads trainer_state.json, and the tables that log_completions wrote. Nothing is loaded or trained.",
    )
    parser.add_argument("run", metavar="RUN", help="a run's output_dir, a checkpoint in it, or a trainer_state.json")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


def run(argv: list[str]) -> int:
    """Runs `trl-explore advise`."""
    args = build_parser().parse_args(argv)
    advice = advise(read_signs(Path(args.run).expanduser()))
    if args.json:
        changes = [change(arm) for arm in advice.arms]
        json.dump({**asdict(advice), "verdict": advice.verdict, "changes": changes}, sys.stdout, indent=2)
        print()
        return 0
    console = Console()
    _print_signs(console, advice)
    for finding in advice.findings:
        console.print(Text(f"- {visible_text(finding.text)} [{finding.link}]"))
    console.print(Text(f"\n{advice.verdict}", style="bold"))
    if not advice.signs.can_learn:
        return 0
    if advice.regime is None or not advice.arms:
        link = advice.regime.link if advice.regime else "docs/evidence.md"
        console.print(Text(f"The evidence: {link}"))
        return 0
    console.print(Text(f"Ahead of tuned GRPO in {advice.regime.name} ({advice.regime.link})", style="italic"))
    titles = ["what", f"{advice.regime.metric}, equal generated tokens", "equal CPU seconds"]
    console.print(FittingTable(titles, [[arm.name, _shown(arm.tokens), _shown(arm.seconds)] for arm in advice.arms]))
    console.print(
        f"Points of a hundred along the curve with 95 % intervals, {advice.regime.seeds} seeds, a tiny model: a "
        "reason to try, not what you will gain. To try the first, in a file for `trl-explore train --config`:\n",
        markup=False,
        highlight=False,
    )
    to_change = change(advice.arms[0])
    console.print(Text(yaml.safe_dump(to_change, sort_keys=False)), soft_wrap=True)
    if "depth_weight" in to_change:
        console.print(Text(DEPTH_WEIGHT), soft_wrap=True)
    return 0


def _print_signs(console: Console, advice: Advice) -> None:
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
            rows.append([title, *(f"{value:.3g}" for value in signs.values[name])])
    for title, pair in (("groups all wrong", signs.all_wrong), ("groups all right", signs.all_right)):
        if pair:
            rows.append([title, *(f"{value:.3g}" for value in pair)])
    for k, pair in signs.pass_at.items():
        rows.append([f"pass@{k}", *(f"{value:.3g}" for value in pair)])
    console.print(FittingTable(["", "start", "end"], rows))


def _shown(values: list[float]) -> str:
    mean, low, high = values
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"
