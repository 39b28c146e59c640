"""What a batch of search trees cost and found, as sums that processes can add up and the averages made of them."""

from collections.abc import Sequence

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
