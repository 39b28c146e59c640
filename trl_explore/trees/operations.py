"""Operations on one search tree: select a node, expand it, back up an outcome. A function that changes a tree returns
a new tree that shares the unchanged nodes. After DeepSearch (https://huggingface.co/papers/2509.25454), sections
2.1-2.3.
"""

from collections.abc import Sequence
from typing import Any

import torch

from trl_explore.rows.rollouts import Continuation
from trl_explore.trees.rules import backup_value, frontier_score, mean_entropy, scaled_outcomes, uct_score
from trl_explore.trees.state import ROOT, Limits, Node, Tree, Verdict


def frontier(tree: Tree, limits: Limits) -> list[int]:
    """Return the non-terminal nodes that may get further children, in order of creation."""
    found = []
    for node in tree.nodes:
        # A node without children always has room. Checking that first is faster than calling `room`.
        if not node.terminal and (not node.children or room(tree, node, limits) > 0):
            found.append(node.index)
    return found


def room(tree: Tree, node: Node, limits: Limits) -> int:
    """Return how many more children a non-terminal node may have. Direct rollouts from the root do not count."""
    num_direct = 0
    if node.index == ROOT:
        num_direct = sum(tree.nodes[child].direct for child in node.children)
    return limits.width_at(node.depth) - (len(node.children) - num_direct)


def select(
    tree: Tree,
    limits: Limits,
    *,
    quality_weight: float = 0.4,
    entropy_weight: float = 0.0,
    depth_weight: float = 0.01,
    depth_bonus: str = "sqrt",
) -> int | None:
    """Select a node from the whole frontier (Eq. 9): return the node with the largest [`frontier_score`], the oldest
    of equal ones. If the frontier is empty, return the parent of the best terminal node that was not backed up yet, or
    None if there is none."""
    weights = dict(quality_weight=quality_weight, entropy_weight=entropy_weight, depth_weight=depth_weight)
    # Siblings have the same score except for their entropies. For speed, compute the equal part once per parent.
    shared_scores: dict[int, float] = {}  # score without entropy, by parent

    def score(index: int) -> float:
        node = tree.nodes[index]
        if node.parent not in shared_scores:
            parent_q = 0.0 if index == ROOT else tree.nodes[node.parent].q
            shared_scores[node.parent] = frontier_score(
                parent_q, 0.0, node.depth, max_depth=limits.max_depth, depth_bonus=depth_bonus, **weights
            )
        return shared_scores[node.parent] + entropy_weight * node.entropy

    open_nodes = frontier(tree, limits)
    if not open_nodes:
        return _parent_of_left_over(tree)
    return max(open_nodes, key=score)  # the first, so the oldest, of equal nodes


def select_random(tree: Tree, limits: Limits) -> int | None:
    """Select a random node of the frontier. This is the control for [`select`]. It uses the global random state, like
    the sampling of tokens. If the frontier is empty, return the same node as [`select`]."""
    open_nodes = frontier(tree, limits)
    if not open_nodes:
        return _parent_of_left_over(tree)
    return open_nodes[int(torch.randint(len(open_nodes), ()))]


def _parent_of_left_over(tree: Tree) -> int | None:
    """Return the parent of the best terminal node that was not backed up yet, or None if there is none."""
    candidates = tree.candidates
    if not candidates:
        return None
    return tree.nodes[choose_terminal(tree, candidates)].parent


def select_uct(tree: Tree, limits: Limits, *, coef: float = 2.0) -> int | None:
    """Select a node from the root down by upper confidence bounds. This is the ablation of [`select`]. Return the
    first node on the way that may get children, or that has a terminal child that was not backed up yet. Return None
    if there is none."""
    targets = set(frontier(tree, limits))  # nodes that may be returned
    for index in tree.candidates:
        targets.add(tree.nodes[index].parent)
    leads_to_target = [node.index in targets for node in tree.nodes]
    for node in reversed(tree.nodes[1:]):  # children before their parents
        if leads_to_target[node.index]:
            leads_to_target[node.parent] = True
    index = ROOT
    while index not in targets:
        children = [child for child in tree.nodes[index].children if leads_to_target[child]]
        if not children:
            return None
        index = best_child(tree, children, coef=coef)
    return index


def best_child(tree: Tree, children: Sequence[int], *, coef: float) -> int:
    """Return the sibling with the largest [`uct_score`] (Eq. 8), the oldest of equal ones. `children` are siblings, at
    least one."""
    parent = tree.nodes[tree.nodes[children[0]].parent]

    def score(child: int) -> float:
        node = tree.nodes[child]
        return uct_score(node.q, node.visits, parent.visits, coef=coef)

    return max(sorted(children), key=score)


def choose_terminal(tree: Tree, candidates: Sequence[int]) -> int:
    """
    Return the scored terminal node to back up (Eq. 2-3).

    Prefer correct nodes, then wrong but finished nodes, then incomplete nodes. Of these, return the most confident one
    (lowest [`Tree.trajectory_entropy`]), and the oldest of equal ones. If nodes have a `reward`, compare the rewards
    before all this, and prefer the largest. If all rewards are 0 or 1, the result is the same with and without them.
    """

    def rank(index: int) -> tuple[float, int, float, int]:
        node = tree.nodes[index]
        assert node.outcome is not None
        if node.outcome > 0:
            kind = 0
        elif node.finished:
            kind = 1
        else:
            kind = 2
        return -(node.reward or 0.0), kind, tree.trajectory_entropy(index), index

    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=rank)


def _with_nodes(tree: Tree, changed: dict[int, Node], added: Sequence[Node] = (), **fields: Any) -> Tree:
    """Return the tree with the nodes `changed` (by index) replaced, the nodes `added` appended, and `fields` set."""
    nodes = list(tree.nodes)
    for index, node in changed.items():
        nodes[index] = node
    return tree._replace(nodes=(*nodes, *added), **fields)


def expand(
    tree: Tree, index: int, continuations: Sequence[Continuation], limits: Limits, *, direct: bool = False
) -> Tree:
    """Add sampled children to the node `index`. A child is terminal if it finished, reached the depth limit, used up
    the completion budget, or is `direct` (a whole completion, sampled without a search). Other children start with one
    visit and value 0."""
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
    new = [child.index for child in children]
    grown = parent._replace(children=(*parent.children, *new))
    new_tokens = sum(len(child.token_ids) for child in children)
    return _with_nodes(tree, {index: grown}, children, generated_tokens=tree.generated_tokens + new_tokens)


def backup(tree: Tree, leaf: int, *, decay_min: float) -> Tree:
    """
    Back up the outcome of a terminal node along its trajectory, and add the node to the results.

    All nodes of the trajectory except the root get a [`backup_value`]. A node without an outcome changes no value.

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
    scored, rewards, outcomes = [], [], []
    for result in results:
        node = tree.nodes[result]
        if node.outcome is None:
            continue
        if node.reward is None:  # outcomes are not scaled
            return tree
        scored.append(node)
        rewards.append(node.reward)
        outcomes.append(node.outcome)
    scaled = scaled_outcomes(rewards, outcomes)
    changed = {}
    for position, node in enumerate(scored):
        changed[node.index] = node._replace(scaled=None if scaled is None else scaled[position])
    tree = _with_nodes(tree, changed)
    backed_up = scored[:-1]
    if all(changed[node.index].worth == node.worth for node in backed_up):
        return tree
    values: dict[int, float] = {}
    for node in backed_up:
        path = tree.path(node.index)
        outcome = tree.nodes[node.index].worth
        assert outcome is not None
        for step, index in enumerate(path, start=1):
            before = values.get(index, 0.0)
            values[index] = backup_value(before, outcome, step=step, length=len(path), decay_min=decay_min)
    revalued = {index: tree.nodes[index]._replace(value=value) for index, value in values.items()}
    return _with_nodes(tree, revalued)


def with_virtual_loss(tree: Tree, index: int) -> Tree:
    """Return the tree as if a visit of the node `index` had failed. A choice in this tree prefers other nodes, so that
    the nodes that one iteration visits differ."""
    changed = {}
    for on_path in (ROOT, *tree.path(index)):
        node = tree.nodes[on_path]
        changed[on_path] = node._replace(visits=node.visits + 1, value=node.value - 1.0)
    changed[index] = changed[index]._replace(terminal=True)  # a terminal node is not selected again
    return _with_nodes(tree, changed)


def exchange(tree: Tree, row: int, token_ids: list[int], *, finished: bool) -> Tree:
    """Replace the completion of a direct rollout, as if the old completion had never been scored. `row` is the index
    of its node. The new completion becomes a result of the tree when it is backed up."""
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
    results = tuple(result for result in tree.results if result != row)
    return _with_nodes(tree, changed, results=results)


def judge(tree: Tree, verdicts: dict[int, Verdict]) -> Tree:
    """Set the outcomes and rewards of terminal nodes, by index."""
    changed = {}
    for index, verdict in verdicts.items():
        changed[index] = tree.nodes[index]._replace(
            outcome=verdict.outcome, reward=verdict.reward, rewards=verdict.rewards, extra=verdict.extra
        )
    return _with_nodes(tree, changed)
