"""Metrics of a batch of search trees: sums that processes can add up, and averages of these sums."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trl_explore.trees.credit import first_appearance, is_uniform
from trl_explore.trees.search import Limits, Tree, frontier

if TYPE_CHECKING:
    from trl_explore.trainers.tree_grpo_config import TreeGRPOConfig

# Names of the sums, in two lines for brevity. All processes must add them up in the same order.
SUMS = (
    *("trees", "grown", "rows", "iterations", "nodes", "depth", "frontier", "direct", "own_rows", "row_depth"),
    *("searched", "entropy", "successes", "solved", "uniform", "generated", "trained", "distinct"),
)


def tree_counts(searched: Sequence[Tree], trained: Sequence[Tree], limits: Limits) -> dict[str, float]:
    """
    Return sums over the trees of a process, by name.

    Args:
        searched (`Sequence[Tree]`):
            Trees after the search.
        trained (`Sequence[Tree]`):
            The same trees after cached solutions replaced some of their rows.
        limits ([`Limits`]):
            Limits of the search.
    """
    counts: dict[str, float] = dict.fromkeys(SUMS, 0)
    for tree in searched:
        counts["generated"] += tree.generated_tokens
        if tree.reason == "replayed":  # the prompt got direct rollouts without a search
            continue
        counts["grown"] += 1
        counts["iterations"] += tree.iterations
        counts["nodes"] += len(tree.nodes) - 1
        counts["depth"] += max(node.depth for node in tree.nodes)
        counts["frontier"] += len(frontier(tree, limits))
        counts["own_rows"] += len(tree.rows)
        counts["direct"] += sum(tree.nodes[row].direct for row in tree.rows)
    entropies = []  # of searched rows
    for tree in trained:
        counts["trees"] += 1
        counts["uniform"] += is_uniform(tree)
        counts["distinct"] += sum(map(sum, first_appearance(tree)))  # tokens, where shared nodes count once
        num_successes = 0
        for index in tree.rows:
            row = tree.nodes[index]
            counts["rows"] += 1
            counts["row_depth"] += row.depth
            counts["trained"] += row.length
            num_successes += (row.outcome or 0.0) > 0
            if not row.direct:
                counts["searched"] += 1
                entropies.append(tree.trajectory_entropy(index))
        counts["successes"] += num_successes
        counts["solved"] += num_successes > 0
    counts["entropy"] = sum(entropies)
    return counts


FIRST_BATCHES = 8  # number of batches after which `NarrowSearch` may warn
FEW, MOST = 0.1, 0.9  # limits of `NarrowSearch`, as shares of the trees of these batches

AVERAGES = {
    # metric: (sum, divisor)
    "iterations": ("iterations", "grown"),
    "nodes": ("nodes", "grown"),
    "max_depth": ("depth", "grown"),
    "frontier_size": ("frontier", "grown"),
    "direct_fraction": ("direct", "own_rows"),
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
    """Return metrics by name. `total` has the sums of [`tree_counts`] over all processes, and the numbers of prefix
    tokens `asked` and `encoded`. A metric whose divisor is 0 is left out."""
    averages = {}
    for name, (part, whole) in AVERAGES.items():
        if total[whole]:
            averages[name] = total[part] / total[whole]
    return {**averages, "sampled_tokens": total["generated"], "trained_tokens": total["trained"]}


class NarrowSearch:
    """
    Warns once if the completions of nearly every tree are all right or all wrong, while the model solves some prompts.

    Probably each search only samples variants of one completion. These trees train nothing, and few other trees decide
    optimizer steps of full size.
    """

    def __init__(self, args: "TreeGRPOConfig") -> None:
        self.args, self.batches, self.seen = args, 0, {"trees": 0.0, "solved": 0.0, "uniform": 0.0}

    def look(self, total: dict[str, float]) -> None:
        """Add the sums of a batch over all processes, and warn after [`FIRST_BATCHES`] batches."""
        self.batches += 1
        self.seen = {name: count + total[name] for name, count in self.seen.items()}
        num_trees = max(self.seen["trees"], 1)
        solved, uniform = self.seen["solved"] / num_trees, self.seen["uniform"] / num_trees
        if self.batches == FIRST_BATCHES and uniform > MOST and FEW < solved < MOST:
            args = self.args
            warnings.warn(
                f"In the first {FIRST_BATCHES} batches {uniform:.0%} of the search trees ended with completions that "
                f"were all right ({solved:.0%}) or all wrong, although the model solves some prompts and not others. "
                "These trees train nothing. The few other trees decide every update, so the model can unlearn what it "
                "knew. Probably each search only samples variants of its first completion: lower `depth_weight` (now "
                f"{args.depth_weight:g}), or raise `node_length` (now {args.limits().node_length}), or set "
                "`selection='uct'`.",
                stacklevel=2,
            )
