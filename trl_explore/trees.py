"""Monte Carlo tree search over completions: select, expand, back up, and the loop that grows all trees of a batch.

All functions are pure: they return a new tree that shares its unchanged nodes with the old one. The language model
enters through one callable that is given the prefixes of all trees at once.

After DeepSearch (https://huggingface.co/papers/2509.25454), sections 2.1-2.3.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from trl_explore.rollouts import Continuation, Sampler
from trl_explore.tree_rules import backup_value, frontier_score, mean_entropy, terminal_outcome, uct_score
from trl_explore.tree_state import NO_PARENT, ROOT, Leaf, Limits, Node, Tree, Verdict

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
    "expand",
    "frontier",
    "frontier_score",
    "judge",
    "search",
    "select",
    "select_uct",
    "terminal_outcome",
    "uct_score",
]

SelectFn = Callable[[Tree, Limits], int | None]
ValueFn = Callable[[list[Leaf]], list[Verdict]]


def frontier(tree: Tree, limits: Limits) -> list[int]:
    """
    Nodes that can be expanded.

    Args:
        tree ([`Tree`]):
            A tree.
        limits ([`Limits`]):
            Its limits.

    Returns:
        `list[int]`: Non-terminal nodes that have room for children, in order of creation.
    """
    return [n.index for n in tree.nodes if not n.terminal and (not n.children or _room(tree, n, limits) > 0)]


def _room(tree: Tree, node: Node, limits: Limits) -> int:
    beside = sum(tree.nodes[child].direct for child in node.children) if node.index == ROOT else 0
    return limits.width_at(node.depth) - (len(node.children) - beside)


def select(
    tree: Tree,
    limits: Limits,
    *,
    quality_weight: float = 0.4,
    entropy_weight: float = 0.0,
    depth_weight: float = 0.01,
    depth_bonus: str = "sqrt",
) -> int | None:
    """
    Global frontier selection (Eq. 9): the best node of the whole tree.

    Args:
        tree ([`Tree`]):
            A tree.
        limits ([`Limits`]):
            Its limits.
        quality_weight (`float`, *optional*, defaults to `0.4`):
            See [`frontier_score`], like the three that follow.
        entropy_weight (`float`, *optional*, defaults to `0.0`):
            Weight of the entropy.
        depth_weight (`float`, *optional*, defaults to `0.01`):
            Weight of the depth bonus.
        depth_bonus (`str`, *optional*, defaults to `"sqrt"`):
            Form of the depth bonus.

    Returns:
        `int` or `None`: Node to visit; of equal ones the oldest. Where no node can be expanded, the parent of the best
        terminal node that is left over; `None` where there is none of these either.
    """

    weights = dict(quality_weight=quality_weight, entropy_weight=entropy_weight, depth_weight=depth_weight)
    of_siblings: dict[int, float] = {}  # what siblings have in common, computed once

    def score(index: int) -> float:
        node = tree.nodes[index]
        if node.parent not in of_siblings:
            parent_q = tree.nodes[node.parent].q if index != ROOT else 0.0
            of_siblings[node.parent] = frontier_score(
                parent_q, 0.0, node.depth, max_depth=limits.max_depth, depth_bonus=depth_bonus, **weights
            )
        return of_siblings[node.parent] + entropy_weight * node.entropy

    open_nodes = frontier(tree, limits)
    if open_nodes:
        return max(open_nodes, key=score)
    return tree.nodes[choose_terminal(tree, tree.candidates)].parent if tree.candidates else None


def select_uct(tree: Tree, limits: Limits, *, coef: float = 2.0) -> int | None:
    """
    Root-to-leaf selection by upper confidence bounds, the ablation of global frontier selection.

    Args:
        tree ([`Tree`]):
            A tree.
        limits ([`Limits`]):
            Its limits.
        coef (`float`, *optional*, defaults to `2.0`):
            Weight of the exploration bonus.

    Returns:
        `int` or `None`: The first node on the way down that has room for children or a terminal child left over;
        `None` where there is none.
    """
    left_over = {tree.nodes[index].parent for index in tree.candidates}
    useful = [node.index in left_over for node in tree.nodes]
    for index in frontier(tree, limits):
        useful[index] = True
    here = list(useful)
    for node in reversed(tree.nodes[1:]):
        useful[node.parent] |= useful[node.index]
    index = ROOT
    while not here[index]:
        children = [child for child in tree.nodes[index].children if useful[child]]
        if not children:
            return None
        index = best_child(tree, children, coef=coef)
    return index


def best_child(tree: Tree, children: Sequence[int], *, coef: float) -> int:
    """
    Local selection among siblings (Eq. 8).

    Args:
        tree ([`Tree`]):
            A tree.
        children (`Sequence[int]`):
            Siblings to choose from, not empty.
        coef (`float`):
            Weight of the exploration bonus.

    Returns:
        `int`: The child with the largest [`uct_score`], of equal ones the oldest.
    """
    parent = tree.nodes[tree.nodes[children[0]].parent]
    return max(
        sorted(children), key=lambda c: uct_score(tree.nodes[c].q, tree.nodes[c].visits, parent.visits, coef=coef)
    )


def choose_terminal(tree: Tree, candidates: Sequence[int]) -> int:
    """
    The one terminal node to back up (Eq. 2-3).

    Args:
        tree ([`Tree`]):
            A tree.
        candidates (`Sequence[int]`):
            Scored terminal nodes, not empty.

    Returns:
        `int`: A correct one if any, else a wrong but finished one, else an incomplete one; among these the one with
        the lowest [`Tree.trajectory_entropy`], the most confident; of equal ones the oldest.
    """

    def rank(index: int) -> tuple[int, float, int]:
        node = tree.nodes[index]
        assert node.outcome is not None
        kind = 0 if node.outcome > 0 else 1 if node.finished else 2
        return kind, tree.trajectory_entropy(index), index

    return min(candidates, key=rank) if len(candidates) > 1 else candidates[0]


def _with_nodes(tree: Tree, changed: dict[int, Node], added: Sequence[Node] = (), **fields: Any) -> Tree:
    nodes = list(tree.nodes)
    for index, node in changed.items():
        nodes[index] = node
    return replace(tree, nodes=(*nodes, *added), **fields)


def expand(
    tree: Tree, index: int, continuations: Sequence[Continuation], limits: Limits, *, direct: bool = False
) -> Tree:
    """
    Add sampled children to a node.

    Args:
        tree ([`Tree`]):
            A tree.
        index (`int`):
            The node.
        continuations (`Sequence[Continuation]`):
            What was sampled after it.
        limits ([`Limits`]):
            Limits of the tree.
        direct (`bool`, *optional*, defaults to `False`):
            Whether the children are whole completions beside the search.

    Returns:
        [`Tree`]: The tree with them. A child is terminal if it finished, reached the depth limit, used up the
        completion budget or is `direct`; the others have one visit with value 0.
    """
    parent = tree.nodes[index]
    at_depth = parent.depth + 1 >= limits.max_depth
    children = []
    for offset, continuation in enumerate(continuations):
        num_tokens, entropy = len(continuation.token_ids), mean_entropy(continuation)
        length = parent.length + num_tokens
        terminal = continuation.finished or at_depth or length >= limits.max_completion_length or direct
        children.append(
            Node(
                index=len(tree.nodes) + offset,
                parent=index,
                depth=parent.depth + 1,
                token_ids=list(continuation.token_ids),
                length=length,
                entropy=entropy,
                total_entropy=parent.total_entropy + entropy * num_tokens,
                terminal=terminal,
                finished=continuation.finished,
                iteration=tree.iterations + 1,
                direct=direct,
                visits=0 if terminal else 1,
                logprobs=continuation.logprobs,
            )
        )
    grown = parent._replace(children=(*parent.children, *(child.index for child in children)))
    new_tokens = sum(len(child.token_ids) for child in children)
    return _with_nodes(tree, {index: grown}, children, generated_tokens=tree.generated_tokens + new_tokens)


def backup(tree: Tree, leaf: int, *, decay_min: float) -> Tree:
    """
    Back up a terminal node's outcome along its trajectory, and count the trajectory among the results.

    Args:
        tree ([`Tree`]):
            A tree.
        leaf (`int`):
            A terminal node; one that could not be scored becomes a result without touching any value.
        decay_min (`float`):
            Smallest decay factor, in [0, 1].

    Returns:
        [`Tree`]: The tree with one more visit on every node from the leaf to the root, and a new [`backup_value`] on
        all of them but the root: it holds the problem and no step, so nothing speaks for or against what follows it.
    """
    results = (*tree.results, leaf)
    outcome = tree.nodes[leaf].outcome
    if outcome is None:
        return replace(tree, results=results)
    path = tree.path(leaf)
    root = tree.nodes[ROOT]
    changed = {ROOT: root._replace(visits=root.visits + 1)}
    for step, index in enumerate(path, start=1):
        node = tree.nodes[index]
        value = backup_value(node.value, outcome, step=step, length=len(path), decay_min=decay_min)
        changed[index] = node._replace(visits=node.visits + 1, value=value)
    return _with_nodes(tree, changed, results=results)


def judge(tree: Tree, verdicts: dict[int, Verdict]) -> Tree:
    """
    Note what terminal nodes are worth.

    Args:
        tree ([`Tree`]):
            A tree.
        verdicts (`dict[int, Verdict]`):
            Verdicts by node.

    Returns:
        [`Tree`]: The tree with them.
    """
    changed = {
        index: tree.nodes[index]._replace(outcome=v.outcome, rewards=v.rewards, extra=v.extra)
        for index, v in verdicts.items()
    }
    return _with_nodes(tree, changed)


def search(
    roots: Sequence[list[int]],
    sample_fn: Sampler,
    value_fn: ValueFn,
    *,
    limits: Limits,
    select_fn: SelectFn = select,
    uct_coef: float = 2.0,
    decay_min: float = 0.1,
    skip: Sequence[bool] = (),
    any_active: Callable[[bool], bool] = bool,
) -> list[Tree]:
    """
    Grow one tree per prompt, all in lock-step: one sampling call and one scoring call per iteration for all of them.

    Args:
        roots (`Sequence[list[int]]`):
            Tokens of the prompts, `[P][P_i]`.
        sample_fn ([`~trl_explore.rollouts.Sampler`]):
            Samples continuations of the prefixes of all trees; also called without any.
        value_fn (`Callable[[list[Leaf]], list[Verdict]]`):
            Scores the completions of all trees; also called without any.
        limits ([`Limits`]):
            Shape and budget of each tree.
        select_fn (`Callable[[Tree, Limits], int | None]`, *optional*, defaults to [`select`]):
            Chooses the node that comes after a terminal one was reached.
        uct_coef (`float`, *optional*, defaults to `2.0`):
            Weight of the exploration bonus on the way down.
        decay_min (`float`, *optional*, defaults to `0.1`):
            Smallest decay factor of the backup.
        skip (`Sequence[bool]`, *optional*):
            Prompts that get direct rollouts only, `[P]`; none by default.
        any_active (`Callable[[bool], bool]`, *optional*):
            Given whether a tree of this process still grows, tells whether one of any process does, so that all make
            the same number of calls. Every process calls it equally often.

    Returns:
        `list[Tree]`: Finished trees with exactly `limits.num_results` results each, `[P]`: where the search ended with
        fewer, direct rollouts from the root fill them up.
    """
    trees = [Tree.plant(list(prompt_ids)) for prompt_ids in roots]
    for i, skipped in enumerate(skip):
        if skipped:
            trees[i] = replace(trees[i], current=None, reason="replayed")
    while True:
        visits = {i: tree.current for i, tree in enumerate(trees) if tree.current is not None}
        if not any_active(bool(visits)):
            break
        num_nodes = {i: len(trees[i].nodes) for i in visits}
        trees = _sample_children(trees, visits, sample_fn, limits)
        trees = _score(trees, {i: _terminal_since(trees[i], num_nodes[i]) for i in visits}, value_fn)
        for i, node in visits.items():
            trees[i] = _advance(trees[i], node, limits, select_fn=select_fn, uct_coef=uct_coef, decay_min=decay_min)
    return _fill(trees, sample_fn, value_fn, limits, decay_min=decay_min, any_active=any_active)


def _terminal_since(tree: Tree, num_nodes: int) -> list[int]:
    return [node.index for node in tree.nodes[num_nodes:] if node.terminal]


def _sample_children(trees: list[Tree], visits: dict[int, int], sample_fn: Sampler, limits: Limits) -> list[Tree]:
    trees = list(trees)
    requests = {}  # by tree: most tokens per child, number of children
    for i, node in visits.items():
        budget, count = _request(trees[i], node, limits)
        if count:
            requests[i] = budget, count
    sampled = sample_fn(
        [trees[i].prompt_ids + trees[i].completion_ids(visits[i]) for i in requests],
        [count for _, count in requests.values()],
        [budget for budget, _ in requests.values()],
    )
    for i, continuations in zip(requests, sampled, strict=True):
        trees[i] = expand(trees[i], visits[i], continuations, limits)
    return trees


def _request(tree: Tree, index: int, limits: Limits) -> tuple[int, int]:
    """Most tokens of a child of the node, and how many children it may still get."""
    budget = min(limits.node_length, limits.max_completion_length - tree.nodes[index].length)
    room = _room(tree, tree.nodes[index], limits)
    if limits.max_tokens is not None:
        room = min(room, (limits.max_tokens - tree.generated_tokens) // budget)
    return budget, max(room, 0)


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


def _advance(tree: Tree, node: int, limits: Limits, *, select_fn: SelectFn, uct_coef: float, decay_min: float) -> Tree:
    """Back up one terminal child of the node just visited, if it has one, and choose the node to visit next."""
    iterations = tree.iterations + 1
    children = tree.nodes[node].children
    candidates = _candidates_below(tree, node)
    if candidates:
        tree = backup(tree, choose_terminal(tree, candidates), decay_min=decay_min)
    if len(tree.results) >= limits.num_results:
        return replace(tree, current=None, iterations=iterations, reason="complete")
    if iterations >= limits.max_iterations:
        return replace(tree, current=None, iterations=iterations, reason="iterations")
    # There is no child at all where the token budget allowed none.
    descend = children and not any(tree.nodes[child].terminal for child in children)
    following = best_child(tree, children, coef=uct_coef) if descend else select_fn(tree, limits)
    if following is None:
        return replace(tree, current=None, iterations=iterations, reason="empty frontier")
    if not _candidates_below(tree, following) and _request(tree, following, limits)[1] == 0:
        return replace(tree, current=None, iterations=iterations, reason="tokens")
    return replace(tree, current=following, iterations=iterations)


def _candidates_below(tree: Tree, node: int) -> list[int]:
    children = [tree.nodes[child] for child in tree.nodes[node].children]
    return [c.index for c in children if c.terminal and c.outcome is not None and c.index not in tree.results]


def _fill(
    trees: list[Tree],
    sample_fn: Sampler,
    value_fn: ValueFn,
    limits: Limits,
    *,
    decay_min: float,
    any_active: Callable[[bool], bool],
) -> list[Tree]:
    missing = {
        i: limits.num_results - len(t.results) for i, t in enumerate(trees) if len(t.results) < limits.num_results
    }
    if not any_active(bool(missing)):
        return trees
    trees = list(trees)
    sampled = sample_fn(
        [trees[i].prompt_ids for i in missing],
        list(missing.values()),
        [limits.max_completion_length] * len(missing),
    )
    first = {i: len(trees[i].nodes) for i in missing}
    for i, continuations in zip(missing, sampled, strict=True):
        trees[i] = expand(trees[i], ROOT, continuations, limits, direct=True)
    trees = _score(trees, {i: list(range(first[i], len(trees[i].nodes))) for i in missing}, value_fn)
    for i in missing:
        for index in range(first[i], len(trees[i].nodes)):
            trees[i] = backup(trees[i], index, decay_min=decay_min)
    return trees
