"""What a tree search does to one tree: select a node, expand it, judge the new leaves, back an outcome up.

All functions return a new tree that shares its unchanged nodes with the old one.
After DeepSearch (https://huggingface.co/papers/2509.25454), sections 2.1-2.3.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from trl_explore.rows.rollouts import Continuation
from trl_explore.trees.rules import backup_value, frontier_score, mean_entropy, uct_score
from trl_explore.trees.state import ROOT, Limits, Node, Tree, Verdict


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
    return [n.index for n in tree.nodes if not n.terminal and (not n.children or room(tree, n, limits) > 0)]


def room(tree: Tree, node: Node, limits: Limits) -> int:
    """
    How many more children a node may have.

    Args:
        tree ([`Tree`]):
            A tree.
        node ([`Node`]):
            Node of the tree that ends no completion.
        limits ([`Limits`]):
            Width of the tree.

    Returns:
        `int`: Free places; direct rollouts from the root take none.
    """
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
    return max(open_nodes, key=score) if open_nodes else _above_left_over(tree)


def select_random(tree: Tree, limits: Limits) -> int | None:
    """
    Any node of the frontier, the control for [`select`]: it chooses among the same nodes, and looks at none of them.

    The node is drawn from the global random state, as the tokens of a search are.

    Args:
        tree ([`Tree`]):
            A tree.
        limits ([`Limits`]):
            Its limits.

    Returns:
        `int` or `None`: Node to visit, each equally likely. Where no node can be expanded, what [`select`] returns.
    """
    open_nodes = frontier(tree, limits)
    return open_nodes[int(torch.randint(len(open_nodes), ()))] if open_nodes else _above_left_over(tree)


def _above_left_over(tree: Tree) -> int | None:
    """Where a search without a frontier goes on: at the parent of the best terminal node that is left over."""
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


def exchange(tree: Tree, row: int, token_ids: list[int], *, finished: bool) -> Tree:
    """
    Put another completion in the place of a direct rollout, to be judged and backed up like any.

    Args:
        tree ([`Tree`]):
            A tree.
        row (`int`):
            A result that is a direct rollout.
        token_ids (`list[int]`):
            The other completion.
        finished (`bool`):
            Whether it ends with an end-of-sequence token.

    Returns:
        [`Tree`]: The tree with it, as if the rollout had never been scored. It is among the results again once it is
        backed up.
    """
    old, root = tree.nodes[row], tree.nodes[ROOT]
    new = Node(
        index=row,
        parent=ROOT,
        depth=old.depth,
        token_ids=list(token_ids),
        length=len(token_ids),
        terminal=True,
        finished=finished,
        iteration=old.iteration,
        direct=True,
    )
    changed = {ROOT: root._replace(visits=root.visits - old.visits), row: new}
    return _with_nodes(tree, changed, results=tuple(result for result in tree.results if result != row))


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
