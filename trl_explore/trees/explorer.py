"""TreeGRPO's explorer: it samples completions by a Monte Carlo tree search, and credits tokens by the node values."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trl_explore.explorers.explorer import Explored, Explorer, PlainSampling, PromptGroup
from trl_explore.rows.rollouts import Continuation
from trl_explore.rows.truncation import is_trained
from trl_explore.saving.checkpoints import path_inside
from trl_explore.saving.whole_files import MethodFile
from trl_explore.trees.buffer import ReplayBuffer
from trl_explore.trees.credit import first_appearance, node_credit, tree_advantages
from trl_explore.trees.metrics import NarrowSearch, tree_counts, tree_metrics
from trl_explore.trees.records import tree_record
from trl_explore.trees.search import Leaf, Tree, Verdict, search, select_by, terminal_outcome

if TYPE_CHECKING:
    from trl_explore.trainers.tree_grpo_config import TreeGRPOConfig


class TreeExplorer(Explorer):
    """
    Grows one tree per prompt. All trees of a batch grow together, with one sampling call per iteration.

    Method of [DeepSearch](https://huggingface.co/papers/2509.25454). `trees` holds the trees of the newest batch.
    """

    args: "TreeGRPOConfig"
    name = "tree"
    plain_columns = {"origin": "plain", "depth": 0, "node_values": []}

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        config = self.args
        self.limits = config.limits()
        self.trees: list[Tree] = []
        self.replay = ReplayBuffer(self.policy, self.args)
        self.dump = MethodFile(self._dump_path())
        self._groups: Sequence[PromptGroup] = ()
        self._seconds = {"sampling": 0.0, "scoring": 0.0}
        self._narrow = NarrowSearch(config)
        self._value_scale: dict[str, Any] = {"q_temperature": config.q_temperature, "q_max": config.q_max}
        self._select_fn = select_by(
            config.selection,
            quality_weight=config.quality_weight,
            entropy_weight=config.entropy_weight,
            depth_weight=config.depth_weight,
            depth_bonus=config.depth_bonus,
            uct_coef=config.uct_coef,
        )

    def explore(self, groups: Sequence[PromptGroup], plain: PlainSampling) -> list[Explored]:
        start = time.perf_counter()
        self.limits = self.args.limits()  # `max_completion_length` may grow during a run
        self._groups = groups
        self._seconds = {"sampling": 0.0, "scoring": 0.0}
        self.sample.prefix_tokens_asked = self.sample.prefix_tokens_encoded = 0
        solutions = [self.replay.usable(group.prompt_ids) for group in groups]
        searched = self._search(skip=[bool(found) for found in solutions])
        self.trees = searched
        if self.args.replay_buffer:
            self.trees = self.replay.replace(searched, solutions, self._score_leaves)
            self.replay.remember(searched)  # not `self.trees`: a replayed solution is not a success of the policy
        self._dump()
        self._log(searched, time.perf_counter() - start)
        return [self._explored(number, tree) for number, tree in enumerate(self.trees)]

    def state_dict(self) -> dict[str, Any]:
        return {**self.replay.state(), "trees_bytes": self.dump.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.replay.load_state(state)
        self.dump.cut_back(state["trees_bytes"])

    def forget_data(self) -> None:
        self.replay.forget()

    def _search(self, *, skip: list[bool]) -> list[Tree]:
        """Grow a tree for each prompt. A prompt with usable solutions in the replay buffer gets direct rollouts."""
        roots = [group.prompt_ids for group in self._groups]
        with self.sample.rollout():
            return search(
                roots,
                self._sample_nodes,
                self._score_leaves,
                limits=self.limits,
                select_fn=self._select_fn,
                uct_coef=self.args.uct_coef,
                decay_min=self.args.q_decay_min,
                skip=skip,
                direct_fn=partial(self._sample_nodes, entropies=False),
                any_active=self._any_process,
                tell_begun=True,
            )

    def _any_process(self, is_true: bool) -> bool:
        """Return whether any process passed True. Every process must call it."""
        return bool(self.policy.ranks.gathered(is_true).any())

    def _sample_nodes(
        self,
        prefixes: list[list[int]],
        num_samples: int | Sequence[int],
        max_new_tokens: int | Sequence[int],
        *,
        entropies: bool = True,
        begun: Sequence[int] | None = None,
    ) -> list[list[Continuation]]:
        # Entropies are needed even with `entropy_weight=0`: if all completions that end in an iteration are wrong, the
        # search backs up the most confident one (Eq. 2).
        start = time.perf_counter()
        sampled = self.sample(
            prefixes, num_samples, max_new_tokens, begun=begun, main_stream=True, entropies=entropies
        )
        self._seconds["sampling"] += time.perf_counter() - start
        return sampled

    def _score_leaves(self, leaves: list[Leaf]) -> list[Verdict]:
        """Return the outcomes and rewards of completions. Every process calls it, even without leaves."""
        start = time.perf_counter()
        examples, completion_ids, prompt_ids = [], [], []
        for leaf in leaves:
            group = self._groups[leaf.tree]
            examples.append(group.example)
            completion_ids.append(leaf.completion_ids)
            prompt_ids.append(group.prompt_ids)
        rewards, logged = self.scorer.judge(examples, completion_ids, prompt_ids=prompt_ids)
        self._seconds["scoring"] += time.perf_counter() - start
        if not leaves:
            return []
        args, verdicts = self.args, []
        deciding = self.scorer.success(torch.tensor(rewards, dtype=torch.float32)).tolist()
        for leaf, deciding_reward, raw_rewards, columns in zip(leaves, deciding, rewards, logged, strict=True):
            outcome = terminal_outcome(
                deciding_reward,
                finished=leaf.finished,
                success_threshold=args.success_threshold,
                incomplete_score=args.incomplete_score,
            )
            graded = deciding_reward if args.reward_mapping == "scaled" else None
            verdicts.append(Verdict(outcome=outcome, reward=graded, rewards=tuple(raw_rewards), extra=columns))
        return verdicts

    def _explored(self, number: int, tree: Tree) -> Explored:
        """Return the completions of a tree with their credit. `number` is the index of its prompt."""
        args = self.args
        completion_ids, rewards, logged = [], [], []
        for row in tree.rows:
            completion_ids.append(tree.completion_ids(row))
            rewards.append(list(tree.nodes[row].rewards))
            logged.append(tree.nodes[row].extra)
        logprobs = None
        if self.policy.serving is not None:
            logprobs = [tree.completion_logprobs(row) for row in tree.rows]
        advantages = tree_advantages(
            tree,
            credit=args.node_credit,
            normalization=args.advantage_normalization,
            skip_uniform=args.skip_uniform_trees,
            max_completion_length=args.max_completion_length or 0,
            overlong_buffer=args.overlong_buffer,
            overlong_penalty_weight=args.overlong_penalty,
            **self._value_scale,
        )
        loss_mask = None
        if args.share_prefix_once:
            loss_mask = first_appearance(tree, [is_trained(self.policy, ids) for ids in completion_ids])
        return Explored(
            completion_ids=completion_ids,
            logprobs=logprobs,
            loss_mask=loss_mask,
            rewards=rewards,
            logged=logged,
            advantages=advantages,
            columns=self._columns(number, tree),
        )

    def _columns(self, number: int, tree: Tree) -> dict[str, list[Any]]:
        """Return the columns of the completions table for the completions of a tree."""
        columns: dict[str, list[Any]] = {name: [] for name in self.plain_columns}
        for row in tree.rows:
            end = tree.nodes[row]
            origin = "direct" if end.direct else "search"
            if (number, row) in self.replay.placed:
                origin = "replayed"
            values = [round(node_credit(tree, node, **self._value_scale), 3) for node in tree.path(row)]
            columns["origin"].append(origin)
            columns["depth"].append(end.depth)
            columns["node_values"].append(values)
        return columns

    def _dump_path(self) -> Path | None:
        """Return the path of the file into which this process writes its trees. None without `dump_trees`."""
        if self.args.dump_trees is None:
            return None
        folder = path_inside(self.args.output_dir, self.args.dump_trees, field="dump_trees", suffix="")
        return folder / f"trees_{self.policy.ranks.index}.jsonl"

    def _dump(self) -> None:
        """Append the trees of the newest batch to the file of this process."""
        if not self.args.dump_trees:
            return
        shared: dict[str, Any] = {
            "step": self.policy.state.global_step,
            "decode": self.policy.tokenizer.decode,
            "reward_weights": self.policy.reward_weights.tolist(),  # a callback may change them
            **self._value_scale,
        }
        records = (tree_record(tree, index=i, **shared) for i, tree in enumerate(self.trees))
        self.dump.append(records)

    def _log(self, searched: list[Tree], seconds: float) -> None:
        """Log metrics of the search. `searched` are the trees before the replay buffer replaced some of them."""
        prefixes = {"asked": self.sample.prefix_tokens_asked, "encoded": self.sample.prefix_tokens_encoded}
        total = self.policy.ranks.summed(tree_counts(searched, self.trees, self.limits) | prefixes)
        self._narrow.look(total)
        metrics = tree_metrics(total)
        for name, spent in self._seconds.items():
            metrics[f"{name}_seconds"] = spent
        metrics["own_seconds"] = seconds - sum(self._seconds.values())
        for name, value in metrics.items():
            self.policy.log_metric(f"tree/{name}", value)
