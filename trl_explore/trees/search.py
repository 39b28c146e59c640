"""Monte Carlo tree search over completions: the loop that grows all trees of a batch. After DeepSearch
(https://huggingface.co/papers/2509.25454), sections 2.1-2.3."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from trl_explore.rows.rollouts import Continuation
from trl_explore.trees.rules import backup_value, frontier_score, terminal_outcome, uct_score
from trl_explore.trees.state import NO_PARENT, ROOT, Leaf, Limits, Node, Tree, Verdict
from trl_explore.trees.steps import (
    backup,
    best_child,
    choose_terminal,
    exchange,
    expand,
    frontier,
    judge,
    room,
    select,
    select_random,
    select_uct,
    with_virtual_loss,
)

__all__ = [
    "NO_PARENT",
    "ROOT",
    "Leaf",
    "Limits",
    "Node",
    "Tree",
    "Verdict",
    "backup",
    "backup_value",
    "best_child",
    "choose_terminal",
    "exchange",
    "expand",
    "frontier",
    "frontier_score",
    "judge",
    "search",
    "select",
    "select_random",
    "select_uct",
    "terminal_outcome",
    "uct_score",
    "with_virtual_loss",
]


class SampleCall(Protocol):
    """Function that samples continuations, such as a [`~trl_explore.sampling.sampler.Sampler`]."""

    def __call__(
        self, prefixes: list[list[int]], num_samples: int | Sequence[int], max_new_tokens: int | Sequence[int]
    ) -> list[list[Continuation]]:
        """Return `num_samples` continuations of each prefix, `[R][num_samples_i]`, with at most `max_new_tokens`
        tokens each. A prefix contains the prompt and a partial completion."""
        ...


SelectFn = Callable[[Tree, Limits], int | None]
ValueFn = Callable[[list[Leaf]], list[Verdict]]


def search(
    roots: Sequence[list[int]],
    sample_fn: SampleCall,
    value_fn: ValueFn,
    *,
    limits: Limits,
    select_fn: SelectFn = select,
    uct_coef: float = 2.0,
    decay_min: float = 0.1,
    skip: Sequence[bool] = (),
    direct_fn: SampleCall | None = None,
    any_active: Callable[[bool], bool] = bool,
    tell_begun: bool = False,
) -> list[Tree]:
    """
    Grow one tree per prompt, all in lock-step: one call of `sample_fn` and one of `value_fn` per iteration for all,
    `limits.parallel` nodes of each, also where a process has nothing to ask; `any_active` says whether any process's
    tree still grows, and all call it equally often. Prompts in `skip` get direct rollouts only, from `direct_fn`,
    which need not know entropies. With `tell_begun`, `sample_fn` also gets `begun`, the number of tokens at the end of
    each prefix that belong to the completion.

    Each finished tree has exactly `limits.num_results` results: where the search ended with fewer, scored terminal
    nodes that still wait fill them up, and then direct rollouts from the root.
    """
    trees = [Tree.plant(list(prompt_ids)) for prompt_ids in roots]
    for i, skipped in enumerate(skip):
        if skipped:
            trees[i] = trees[i]._replace(current=(), reason="replayed")
    while True:
        visits = {i: tree.current for i, tree in enumerate(trees) if tree.current}
        if not any_active(bool(visits)):
            break
        num_nodes = {i: len(trees[i].nodes) for i in visits}
        trees = _sample_children(trees, visits, sample_fn, limits, tell_begun=tell_begun)
        new = {i: [node.index for node in trees[i].nodes[n:] if node.terminal] for i, n in num_nodes.items()}
        trees = _score(trees, new, value_fn)
        for i, nodes in visits.items():
            trees[i] = _advance(trees[i], nodes, limits, select_fn=select_fn, uct_coef=uct_coef, decay_min=decay_min)
    return _fill(trees, direct_fn or sample_fn, value_fn, limits, decay_min=decay_min, any_active=any_active)


def _sample_children(
    trees: list[Tree],
    visits: dict[int, tuple[int, ...]],
    sample_fn: SampleCall,
    limits: Limits,
    *,
    tell_begun: bool,
) -> list[Tree]:
    trees = list(trees)
    requests = []  # tree, node, most tokens per child, number of children
    for i, nodes in visits.items():
        planned = 0
        for node in nodes:
            budget, count = _request(trees[i], node, limits, planned)
            planned += budget * count
            if count:
                requests.append((i, node, budget, count))
    begun = [trees[i].completion_ids(node) for i, node, _, _ in requests]
    told: dict[str, Any] = {"begun": [len(ids) for ids in begun]} if tell_begun else {}
    sampled = sample_fn(
        [trees[i].prompt_ids + ids for (i, *_), ids in zip(requests, begun, strict=True)],
        [count for *_, count in requests],
        [budget for _, _, budget, _ in requests],
        **told,
    )
    for (i, node, _, _), continuations in zip(requests, sampled, strict=True):
        trees[i] = expand(trees[i], node, continuations, limits)
    return trees


def _request(tree: Tree, index: int, limits: Limits, planned: int = 0) -> tuple[int, int]:
    """Most tokens of a child of the node, and how many children it may still get, with so many tokens `planned`."""
    budget = min(limits.node_length, limits.max_completion_length - tree.nodes[index].length)
    children = room(tree, tree.nodes[index], limits)
    if limits.max_tokens is not None:
        children = min(children, (limits.max_tokens - tree.generated_tokens - planned) // budget)
    return budget, max(children, 0)


def _score(trees: list[Tree], leaves: dict[int, list[int]], value_fn: ValueFn) -> list[Tree]:
    trees = list(trees)
    asked = [(i, index) for i, indices in leaves.items() for index in indices]
    verdicts = value_fn([Leaf(i, trees[i].completion_ids(n), trees[i].nodes[n].finished) for i, n in asked])
    by_tree: dict[int, dict[int, Verdict]] = {i: {} for i in leaves}
    for (i, index), verdict in zip(asked, verdicts, strict=True):
        by_tree[i][index] = verdict
    for i, found in by_tree.items():
        trees[i] = judge(trees[i], found) if found else trees[i]
    return trees


def _advance(
    tree: Tree, nodes: tuple[int, ...], limits: Limits, *, select_fn: SelectFn, uct_coef: float, decay_min: float
) -> Tree:
    """Back up one terminal child of each node just visited, if it has one, and choose the nodes to visit next."""
    iterations = tree.iterations + 1
    for node in nodes:
        if candidates := _candidates_below(tree, node):
            tree = backup(tree, choose_terminal(tree, candidates), decay_min=decay_min)
        if len(tree.results) >= limits.num_results:
            return tree._replace(current=(), iterations=iterations, reason="complete")
    if iterations >= limits.max_iterations:
        return tree._replace(current=(), iterations=iterations, reason="iterations")
    seen, reason = tree, "empty frontier"  # `seen`: as if what is visited next had failed, for those that follow
    following: list[int] = []
    walkers: list[int | None] = [*nodes, *[None] * (limits.parallel - len(nodes))]
    for walker in walkers:
        chosen = _next(seen, walker, limits, select_fn=select_fn, uct_coef=uct_coef)
        if chosen is None or chosen in following:
            continue
        if not _candidates_below(tree, chosen) and _request(tree, chosen, limits)[1] == 0:
            reason = "tokens"
            continue
        following.append(chosen)
        seen = with_virtual_loss(seen, chosen) if limits.parallel > 1 else seen
    return tree._replace(current=tuple(following), iterations=iterations, reason="" if following else reason)


def _next(tree: Tree, node: int | None, limits: Limits, *, select_fn: SelectFn, uct_coef: float) -> int | None:
    """Where the search goes on from a node, or, without one, beside the nodes that it goes on from."""
    children = () if node is None else tree.nodes[node].children
    # There is no child at all where the token budget allowed none.
    if children and not any(tree.nodes[child].terminal for child in children):
        return best_child(tree, children, coef=uct_coef)
    return select_fn(tree, limits)


def _candidates_below(tree: Tree, node: int) -> list[int]:
    children = [tree.nodes[child] for child in tree.nodes[node].children]
    return [c.index for c in children if c.terminal and c.outcome is not None and c.index not in tree.results]


def _take_left_over(tree: Tree, limits: Limits, *, decay_min: float) -> Tree:
    """Back up what was sampled and scored before anything more is sampled."""
    while tree.candidates and len(tree.results) < limits.num_results:
        tree = backup(tree, choose_terminal(tree, tree.candidates), decay_min=decay_min)
    return tree


def _fill(
    trees: list[Tree],
    sample_fn: SampleCall,
    value_fn: ValueFn,
    limits: Limits,
    *,
    decay_min: float,
    any_active: Callable[[bool], bool],
) -> list[Tree]:
    trees = [_take_left_over(tree, limits, decay_min=decay_min) for tree in trees]
    missing = {
        i: limits.num_results - len(t.results) for i, t in enumerate(trees) if len(t.results) < limits.num_results
    }
    if not any_active(bool(missing)):
        return trees
    sampled = sample_fn(
        [trees[i].prompt_ids for i in missing], list(missing.values()), [limits.max_completion_length] * len(missing)
    )
    first = {i: len(trees[i].nodes) for i in missing}
    for i, continuations in zip(missing, sampled, strict=True):
        trees[i] = expand(trees[i], ROOT, continuations, limits, direct=True)
    trees = _score(trees, {i: list(range(first[i], len(trees[i].nodes))) for i in missing}, value_fn)
    for i in missing:
        for index in range(first[i], len(trees[i].nodes)):
            trees[i] = backup(trees[i], index, decay_min=decay_min)
    return trees


def select_by(selection: str, *, uct_coef: float, **weights: Any) -> SelectFn:
    """How nodes are chosen: `"global"` by the frontier score with these weights (Eq. 9), `"uct"` or `"random"`."""
    if selection == "global":
        return partial(select, **weights)
    return partial(select_uct, coef=uct_coef) if selection == "uct" else select_random
