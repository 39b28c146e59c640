"""What a search does to one tree; each function returns a new one that shares its unchanged nodes. After DeepSearch
(https://huggingface.co/papers/2509.25454), sections 2.1-2.3."""

from collections.abc import Sequence
from typing import Any

import torch

from trl_explore.rows.rollouts import Continuation
from trl_explore.trees.rules import backup_value, frontier_score, mean_entropy, scaled_outcomes, uct_score
from trl_explore.trees.state import ROOT, Limits, Node, Tree, Verdict


def frontier(tree: Tree, limits: Limits) -> list[int]:
    """Non-terminal nodes that have room for children, in order of creation."""
    return [n.index for n in tree.nodes if not n.terminal and (not n.children or room(tree, n, limits) > 0)]


def room(tree: Tree, node: Node, limits: Limits) -> int:
    """How many more children a non-terminal node may have; direct rollouts from the root take no place."""
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
    """Global frontier selection (Eq. 9): the node with the best [`frontier_score`], the oldest of equal ones. Without
    a frontier, the parent of the best terminal node that is left over; `None` where there is none either."""
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
    """Any node of the frontier, the control for [`select`], drawn from the global random state as a search's tokens
    are. Without a frontier, what [`select`] returns."""
    open_nodes = frontier(tree, limits)
    return open_nodes[int(torch.randint(len(open_nodes), ()))] if open_nodes else _above_left_over(tree)


def _above_left_over(tree: Tree) -> int | None:
    """Where a search without a frontier goes on: at the parent of the best terminal node that is left over."""
    return tree.nodes[choose_terminal(tree, tree.candidates)].parent if tree.candidates else None


def select_uct(tree: Tree, limits: Limits, *, coef: float = 2.0) -> int | None:
    """Root-to-leaf selection by upper confidence bounds, the ablation: the first node on the way down that has room
    for children or a terminal child left over; `None` where there is none."""
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
    """Local selection (Eq. 8) among siblings, at least one: the largest [`uct_score`], of equal ones the oldest."""
    parent = tree.nodes[tree.nodes[children[0]].parent]
    return max(
        sorted(children), key=lambda c: uct_score(tree.nodes[c].q, tree.nodes[c].visits, parent.visits, coef=coef)
    )


def choose_terminal(tree: Tree, candidates: Sequence[int]) -> int:
    """
    Return the scored terminal node to back up (Eq. 2-3): a correct one if any, else a wrong but finished one, else an
    incomplete one. Of these it is the most confident one (lowest [`Tree.trajectory_entropy`]), of equal ones the
    oldest. If nodes have a `reward`, the largest reward comes first; rewards of 0 and 1 choose the same node.
    """

    def rank(index: int) -> tuple[float, int, float, int]:
        node = tree.nodes[index]
        assert node.outcome is not None
        kind = 0 if node.outcome > 0 else 1 if node.finished else 2
        return -(node.reward or 0.0), kind, tree.trajectory_entropy(index), index

    return min(candidates, key=rank) if len(candidates) > 1 else candidates[0]


def _with_nodes(tree: Tree, changed: dict[int, Node], added: Sequence[Node] = (), **fields: Any) -> Tree:
    nodes = list(tree.nodes)
    for index, node in changed.items():
        nodes[index] = node
    return tree._replace(nodes=(*nodes, *added), **fields)


def expand(
    tree: Tree, index: int, continuations: Sequence[Continuation], limits: Limits, *, direct: bool = False
) -> Tree:
    """Add sampled children. One is terminal if it finished, reached the depth limit, used up the completion budget or
    is `direct` (beside the search); the others have one visit with value 0."""
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
    Back a terminal node's outcome up along its trajectory, and add it to the results. All nodes but the root, which is
    no step, get a [`backup_value`]. A node that could not be scored changes no value.

    If nodes have a `reward`, outcomes are scaled to the range of the tree's rewards. If the new result changes that
    range, all values are computed again.
    """
    results = (*tree.results, leaf)
    if tree.nodes[leaf].outcome is None:
        return tree._replace(results=results)
    tree = _rescaled(tree, results, decay_min=decay_min)
    outcome = tree.nodes[leaf].worth
    assert outcome is not None
    path = tree.path(leaf)
    root = tree.nodes[ROOT]
    changed = {ROOT: root._replace(visits=root.visits + 1)}
    for step, index in enumerate(path, start=1):
        node = tree.nodes[index]
        value = backup_value(node.value, outcome, step=step, length=len(path), decay_min=decay_min)
        changed[index] = node._replace(visits=node.visits + 1, value=value)
    return _with_nodes(tree, changed, results=results)


def _rescaled(tree: Tree, results: Sequence[int], *, decay_min: float) -> Tree:
    """Put the outcomes of `results` on the scale of their rewards. If that changes an outcome that was backed up,
    compute all values again. The last result was not backed up yet."""
    scored = [tree.nodes[row] for row in results if tree.nodes[row].outcome is not None]
    rewards, outcomes = [], []
    for node in scored:
        if node.reward is None:
            return tree
        assert node.outcome is not None
        rewards.append(node.reward)
        outcomes.append(node.outcome)
    scaled = scaled_outcomes(rewards, outcomes)
    changed = {}
    moved = False
    for place, node in enumerate(scored):
        new = node._replace(scaled=None if scaled is None else scaled[place])
        changed[node.index] = new
        moved = moved or (new.worth != node.worth and place < len(scored) - 1)
    tree = _with_nodes(tree, changed)
    if not moved:
        return tree
    values: dict[int, float] = {}
    for node in scored[:-1]:
        path = tree.path(node.index)
        outcome = tree.nodes[node.index].worth
        assert outcome is not None
        for step, index in enumerate(path, start=1):
            before = values.get(index, 0.0)
            values[index] = backup_value(before, outcome, step=step, length=len(path), decay_min=decay_min)
    return _with_nodes(tree, {index: tree.nodes[index]._replace(value=value) for index, value in values.items()})


def with_virtual_loss(tree: Tree, index: int) -> Tree:
    """The tree as if a visit of a node had failed, for the choice of others to visit beside it."""
    nodes = [tree.nodes[i] for i in (ROOT, *tree.path(index))]
    failed = {node.index: node._replace(visits=node.visits + 1, value=node.value - 1.0) for node in nodes}
    return _with_nodes(tree, failed | {index: failed[index]._replace(terminal=True)})


def exchange(tree: Tree, row: int, token_ids: list[int], *, finished: bool) -> Tree:
    """Put another completion in the place of a result that is a direct rollout, as if that had never been scored. It
    is among the results again once it is backed up."""
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
    """Note what terminal nodes are worth, by node."""
    changed = {
        index: tree.nodes[index]._replace(outcome=v.outcome, reward=v.reward, rewards=v.rewards, extra=v.extra)
        for index, v in verdicts.items()
    }
    return _with_nodes(tree, changed)
