"""Monte Carlo tree search over completions: the loop that grows all trees of a batch. After DeepSearch
(https://huggingface.co/papers/2509.25454), sections 2.1-2.3."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from trl_explore.rows.rollouts import Continuation
from trl_explore.trees.operations import (
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
from trl_explore.trees.rules import backup_value, frontier_score, terminal_outcome, uct_score
from trl_explore.trees.state import NO_PARENT, ROOT, Leaf, Limits, Node, Tree, Verdict

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
    Grow one tree per prompt. All trees grow together.

    Each iteration calls `sample_fn` once and `value_fn` once for all trees. A process whose trees are finished also
    calls them, without requests, because other processes may wait for it.

    Each finished tree has exactly `limits.num_results` results. If a search ends with fewer, the tree is filled up:
    first with scored terminal nodes that were not backed up yet, then with direct rollouts from the root.

    Args:
        roots (`Sequence[list[int]]`):
            Tokens of the prompts, `[P][P_i]`.
        sample_fn (`SampleCall`):
            Samples continuations of nodes.
        value_fn (`Callable`):
            Returns the outcome of each completion.
        limits ([`Limits`]):
            Shape and budget of each tree. An iteration visits `limits.parallel` nodes of each tree.
        select_fn (`Callable`, *optional*, defaults to `select`):
            Selects the next node to visit, or returns None if there is none.
        uct_coef (`float`, *optional*, defaults to `2.0`):
            Weight of the exploration bonus in the choice among siblings (Eq. 8).
        decay_min (`float`, *optional*, defaults to `0.1`):
            See [`backup_value`].
        skip (`Sequence[bool]`, *optional*):
            True for prompts that get direct rollouts only, `[P]`.
        direct_fn (`SampleCall`, *optional*):
            Samples direct rollouts. It may leave out entropies. Default: `sample_fn`.
        any_active (`Callable[[bool], bool]`, *optional*):
            Returns whether any process passed True. All processes call it the same number of times.
        tell_begun (`bool`, *optional*, defaults to `False`):
            If True, pass `begun` to `sample_fn`: the number of tokens at the end of each prefix that belong to the
            completion.

    Returns:
        `list[Tree]`: The finished trees, `[P]`.
    """
    trees = [Tree.plant(list(prompt_ids)) for prompt_ids in roots]
    for i, skipped in enumerate(skip):
        if skipped:
            trees[i] = trees[i]._replace(current=(), reason="replayed")
    while True:
        visits = {i: tree.current for i, tree in enumerate(trees) if tree.current}
        if not any_active(bool(visits)):
            break
        num_nodes = {i: len(trees[i].nodes) for i in visits}  # before this iteration
        trees = _sample_children(trees, visits, sample_fn, limits, tell_begun=tell_begun)
        new: dict[int, list[int]] = {}  # new terminal nodes by tree
        for i in visits:
            new[i] = [node.index for node in trees[i].nodes[num_nodes[i] :] if node.terminal]
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
    """Return the trees with new children of the visited nodes. `visits` has these nodes by tree."""
    trees = list(trees)
    requests = []  # tree, node, token budget per child, number of children
    for i, nodes in visits.items():
        planned = 0
        for node in nodes:
            budget, count = _request(trees[i], node, limits, planned)
            planned += budget * count
            if count:
                requests.append((i, node, budget, count))
    prefixes, counts, budgets, begun = [], [], [], []
    for i, node, budget, count in requests:
        completion_ids = trees[i].completion_ids(node)
        prefixes.append(trees[i].prompt_ids + completion_ids)
        counts.append(count)
        budgets.append(budget)
        begun.append(len(completion_ids))
    options: dict[str, Any] = {"begun": begun} if tell_begun else {}
    sampled = sample_fn(prefixes, counts, budgets, **options)
    for (i, node, _, _), continuations in zip(requests, sampled, strict=True):
        trees[i] = expand(trees[i], node, continuations, limits)
    return trees


def _request(tree: Tree, index: int, limits: Limits, planned: int = 0) -> tuple[int, int]:
    """Return the token budget of a child of the node `index`, and the number of children that it may still get.
    `planned` is the number of tokens that this iteration will already sample for other nodes of the tree."""
    budget = min(limits.node_length, limits.max_completion_length - tree.nodes[index].length)
    children = room(tree, tree.nodes[index], limits)
    if limits.max_tokens is not None:
        children = min(children, (limits.max_tokens - tree.generated_tokens - planned) // budget)
    return budget, max(children, 0)


def _score(trees: list[Tree], new: dict[int, list[int]], value_fn: ValueFn) -> list[Tree]:
    """Return the trees with the outcomes of new terminal nodes. `new` has these nodes by tree."""
    trees = list(trees)
    places, leaves = [], []
    for i, indices in new.items():
        for index in indices:
            places.append((i, index))
            leaves.append(Leaf(i, trees[i].completion_ids(index), trees[i].nodes[index].finished))
    by_tree: dict[int, dict[int, Verdict]] = {i: {} for i in new}
    for (i, index), verdict in zip(places, value_fn(leaves), strict=True):
        by_tree[i][index] = verdict
    for i, found in by_tree.items():
        if found:
            trees[i] = judge(trees[i], found)
    return trees


def _advance(
    tree: Tree, nodes: tuple[int, ...], limits: Limits, *, select_fn: SelectFn, uct_coef: float, decay_min: float
) -> Tree:
    """Back up one terminal child of each visited node in `nodes`, if it has one. Then choose the nodes to visit
    next."""
    iterations = tree.iterations + 1
    for node in nodes:
        candidates = _candidates_below(tree, node)
        if candidates:
            tree = backup(tree, choose_terminal(tree, candidates), decay_min=decay_min)
        if len(tree.results) >= limits.num_results:
            return tree._replace(current=(), iterations=iterations, reason="complete")
    if iterations >= limits.max_iterations:
        return tree._replace(current=(), iterations=iterations, reason="iterations")
    reason = "empty frontier"
    seen = tree  # the tree as if visits of the nodes chosen so far had failed, so that the next choice differs
    following: list[int] = []
    num_missing = limits.parallel - len(nodes)  # visits without a node to continue from: `_next` selects one
    starts: list[int | None] = [*nodes, *[None] * num_missing]
    for start in starts:
        chosen = _next(seen, start, limits, select_fn=select_fn, uct_coef=uct_coef)
        if chosen is None or chosen in following:
            continue
        # A visit would do nothing if the token budget allows no child and no terminal child is left to back up.
        _, num_children = _request(tree, chosen, limits)
        if num_children == 0 and not _candidates_below(tree, chosen):
            reason = "tokens"
            continue
        following.append(chosen)
        if limits.parallel > 1:
            seen = with_virtual_loss(seen, chosen)
    if following:
        reason = ""
    return tree._replace(current=tuple(following), iterations=iterations, reason=reason)


def _next(tree: Tree, node: int | None, limits: Limits, *, select_fn: SelectFn, uct_coef: float) -> int | None:
    """Return the next node to visit after `node`, or None. Stay below `node` if it has children and none of them is
    terminal. Otherwise, or if `node` is None, use `select_fn`."""
    children = () if node is None else tree.nodes[node].children
    # A visited node has no children if the token budget was too small.
    if children and not any(tree.nodes[child].terminal for child in children):
        return best_child(tree, children, coef=uct_coef)
    return select_fn(tree, limits)


def _candidates_below(tree: Tree, node: int) -> list[int]:
    """Return the scored terminal children of a node that were not backed up yet."""
    candidates = []
    for index in tree.nodes[node].children:
        child = tree.nodes[index]
        if child.terminal and child.outcome is not None and index not in tree.results:
            candidates.append(index)
    return candidates


def _take_left_over(tree: Tree, limits: Limits, *, decay_min: float) -> Tree:
    """Back up scored terminal nodes until the tree has `limits.num_results` results, or no such node is left."""
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
    """Return the trees with `limits.num_results` results each, filled up by direct rollouts."""
    trees = [_take_left_over(tree, limits, decay_min=decay_min) for tree in trees]
    missing: dict[int, int] = {}  # number of missing results by tree
    for i, tree in enumerate(trees):
        if len(tree.results) < limits.num_results:
            missing[i] = limits.num_results - len(tree.results)
    if not any_active(bool(missing)):
        return trees
    prompts = [trees[i].prompt_ids for i in missing]
    sampled = sample_fn(prompts, list(missing.values()), [limits.max_completion_length] * len(missing))
    new: dict[int, list[int]] = {}  # direct rollouts by tree
    for i, continuations in zip(missing, sampled, strict=True):
        first = len(trees[i].nodes)
        trees[i] = expand(trees[i], ROOT, continuations, limits, direct=True)
        new[i] = list(range(first, len(trees[i].nodes)))
    trees = _score(trees, new, value_fn)
    for i, rollouts in new.items():
        for index in rollouts:
            trees[i] = backup(trees[i], index, decay_min=decay_min)
    return trees


def select_by(selection: str, *, uct_coef: float, **weights: Any) -> SelectFn:
    """Return the function that selects nodes: `"global"` ([`select`] with these weights), `"uct"` or `"random"`."""
    if selection == "global":
        return partial(select, **weights)
    if selection == "uct":
        return partial(select_uct, coef=uct_coef)
    return select_random
