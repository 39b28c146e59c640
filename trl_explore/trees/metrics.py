"""What a batch of search trees cost and found, as sums that processes can add up and the averages made of them."""

import warnings
from collections.abc import Sequence
from typing import Any

from trl_explore.trees.credit import first_appearance, is_uniform
from trl_explore.trees.search import Limits, Tree, frontier


def tree_counts(searched: Sequence[Tree], trained: Sequence[Tree], limits: Limits) -> dict[str, float]:
    """Sums over a process's trees: as the search left them, and as trained, with cached solutions in place."""
    grown = [tree for tree in searched if tree.reason != "replayed"]
    rows = [(tree, tree.nodes[row]) for tree in trained for row in tree.rows]
    return {
        "trees": len(trained),
        "grown": len(grown),
        "rows": len(rows),
        "iterations": sum(tree.iterations for tree in grown),
        "nodes": sum(len(tree.nodes) - 1 for tree in grown),
        "depth": sum(max(node.depth for node in tree.nodes) for tree in grown),
        "frontier": sum(len(frontier(tree, limits)) for tree in grown),
        "direct": sum(tree.nodes[row].direct for tree in grown for row in tree.rows),
        "row_depth": sum(row.depth for _, row in rows),
        "searched": sum(not row.direct for _, row in rows),
        "entropy": sum(tree.trajectory_entropy(row.index) for tree, row in rows if not row.direct),
        "successes": sum((row.outcome or 0.0) > 0 for _, row in rows),
        "solved": sum(any((tree.nodes[row].outcome or 0.0) > 0 for row in tree.rows) for tree in trained),
        "uniform": sum(is_uniform(tree) for tree in trained),
        "generated": sum(tree.generated_tokens for tree in searched),
        "trained": sum(row.length for _, row in rows),
        "distinct": sum(sum(map(sum, first_appearance(tree))) for tree in trained),
    }


FIRST_BATCHES = 8  # that are looked at
FEW, MOST = 0.1, 0.9  # of their trees

AVERAGES = {
    # metric: (sum, what it is divided by)
    "iterations": ("iterations", "grown"),
    "nodes": ("nodes", "grown"),
    "max_depth": ("depth", "grown"),
    "frontier_size": ("frontier", "grown"),
    "direct_fraction": ("direct", "rows"),
    "trajectory_depth": ("row_depth", "rows"),
    "trajectory_entropy": ("entropy", "searched"),
    "success_fraction": ("successes", "rows"),
    "solved_fraction": ("solved", "trees"),
    "uniform_fraction": ("uniform", "trees"),
    "token_ratio": ("generated", "trained"),
    "distinct_fraction": ("distinct", "trained"),
    "encoded_fraction": ("encoded", "asked"),
}


def tree_metrics(total: dict[str, float]) -> dict[str, float]:
    """Metrics of [`tree_counts`] and prefix tokens `asked` and `encoded`, all summed; none whose divisor is 0."""
    averages = {name: total[part] / total[whole] for name, (part, whole) in AVERAGES.items() if total[whole]}
    return {**averages, "sampled_tokens": total["generated"], "trained_tokens": total["trained"]}


class NarrowSearch:
    """Warns once where nearly every tree holds copies of one completion: what is left to train is noise, of which the
    optimizer still makes steps of full size. `args` are a [`~trl_explore.trainers.TreeGRPOConfig`]."""

    def __init__(self, args: Any) -> None:
        self.args, self.batches, self.seen = args, 0, {"trees": 0.0, "solved": 0.0, "uniform": 0.0}

    def look(self, total: dict[str, float]) -> None:
        """Looks at the sums of a batch."""
        self.batches += 1
        self.seen = {name: count + total[name] for name, count in self.seen.items()}
        solved, uniform = (self.seen[name] / max(self.seen["trees"], 1) for name in ("solved", "uniform"))
        if self.batches == FIRST_BATCHES and uniform > MOST and FEW < solved < MOST:
            args = self.args
            warnings.warn(
                f"In the first {FIRST_BATCHES} batches {uniform:.0%} of the search trees ended with completions that "
                f"were all right ({solved:.0%}) or all wrong, although the reward tells prompts apart. They train "
                "nothing, and the few others decide every update, which can unlearn what the model knew. Likely the "
                f"search goes on beside its first completion: lower `depth_weight` (now {args.depth_weight:g}), or "
                f"raise `node_length` (now {args.limits().node_length}), or take `selection='uct'`.",
                stacklevel=2,
            )
