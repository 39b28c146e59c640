"""TreeGRPO: the completions of a prompt come from a Monte Carlo tree search, and its values credit every step."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trl_explore.rows.rollouts import Rollout
from trl_explore.saving.checkpoints import path_inside
from trl_explore.saving.whole_files import MethodFile
from trl_explore.trees.buffer import SOLUTIONS_FILE, ReplayBuffer
from trl_explore.trees.credit import first_appearance, node_credit, tree_advantages
from trl_explore.trees.metrics import NarrowSearch, tree_counts, tree_metrics
from trl_explore.trees.records import tree_record
from trl_explore.trees.search import Leaf, Tree, Verdict, search, select_by, terminal_outcome

from .base import ExplorationTrainer, Requires
from .tree_grpo_config import TreeGRPOConfig

WEIGHTS = ("quality_weight", "entropy_weight", "depth_weight", "depth_bonus", "uct_coef")  # of nodes to choose from


class TreeGRPOTrainer(ExplorationTrainer):
    """
    GRPO whose completions come from a tree search per prompt, with the values found by the search as advantages.

    Method of [DeepSearch: Overcome the Bottleneck of Reinforcement Learning with Verifiable Rewards via Monte Carlo
    Tree Search](https://huggingface.co/papers/2509.25454). What changes with respect to GRPO, per generation batch:

    1. Every prompt grows a tree of chunks of `node_length` tokens; all trees of the batch advance together, one
       batched sampling call per iteration. The reward functions score every completion that ends, once.
    2. Per iteration one completion is backed up: a correct one, else the most confident wrong one (Eq. 2-7). The
       search goes on at the best node of the whole tree (Eq. 9-10), until there are `num_generations` completions.
    3. Every token gets the softly clipped value of its node minus the mean outcome of the tree (Eq. 16-18). Outcomes
       are +1 for correct and -1 for wrong completions. Graded rewards are scaled to [-1, 1] in each tree
       (`reward_mapping`).

    With `expansion_width=num_generations`, `max_tree_depth=1`, `node_length=max_completion_length` and
    `epsilon_high=None` it is GRPO with `scale_rewards="none"` on rewards of +1 and -1: the same parameters bit for
    bit, unless the rounding of a prompt that is encoded once changes a sampled token. Deviations from the paper (all
    of them in `docs/methods/tree_grpo.md`):

    1. `skip_uniform_trees=True`: trees without contrast train nothing.
    2. `node_length` follows short completions, and iterations are bounded; both only matter where the paper is silent.
    3. A search that runs out of nodes or budget first uses terminal nodes that it had passed over, then direct
       rollouts.

    The constructor takes what [`~trl.GRPOTrainer`] takes; `args` is a [`TreeGRPOConfig`] or a plain
    [`~trl.GRPOConfig`]. Tools, environments, vision-language models and `rollout_func` are refused.
    """

    method = "tree_grpo"
    num_generations: int
    config_class = TreeGRPOConfig
    requires = Requires(samples=True, main_rows=True, whole_groups=True)
    plain_columns = {"origin": "plain", "depth": 0, "node_values": []}
    _trees: list[Tree]  # of the batch
    _roots: list[list[int]]  # tokens of the prompt of each tree

    # ------------------------------------------------------------------------------------------------ the algorithm

    def rollout(self, prompt_ids, plain):
        start = time.perf_counter()
        self.limits = self.args.limits()  # `max_completion_length` may grow during a run
        self._seconds = {"sampling": 0.0, "scoring": 0.0}
        self.sample.prefix_tokens_asked = self.sample.prefix_tokens_encoded = 0
        self._roots = roots = prompt_ids[:: self.num_generations]
        cached = [self.replay.usable(root) for root in roots]
        with self.sample.rollout():
            searched = trees = search(
                roots,
                self._sample_nodes,
                self._score_leaves,
                limits=self.limits,
                select_fn=self._select_fn,
                uct_coef=self.args.uct_coef,
                decay_min=self.args.q_decay_min,
                skip=[bool(solutions) for solutions in cached],
                direct_fn=partial(self._sample_nodes, entropies=False),
                any_active=lambda here: bool(self.ranks.gathered(here).any()),
                tell_begun=True,
            )
        if self.args.replay_buffer:
            trees = self.replay.replace(trees, cached, self._score_leaves)
            self.replay.remember(searched)
        self._trees = trees
        if self.args.dump_trees:
            weights = self.reward_weights.tolist()  # which a callback may change
            step, decode = self.state.global_step, self.tokenizer.decode
            noted: dict[str, Any] = {"step": step, "decode": decode, "reward_weights": weights, **self._credit}
            self.dump.append(tree_record(tree, index=i, **noted) for i, tree in enumerate(trees))
        self._log_trees(searched, trees, time.perf_counter() - start)
        nodes = [(tree, row) for tree in trees for row in tree.rows]
        ends = [tree.nodes[row] for tree, row in nodes]
        masks = [mask for tree in trees for mask in first_appearance(tree)] if self.args.share_prefix_once else None
        return Rollout(
            completion_ids=[tree.completion_ids(row) for tree, row in nodes],
            logprobs=[tree.completion_logprobs(row) for tree, row in nodes] if self.use_vllm else None,
            loss_mask=masks,
            known_rewards=[list(end.rewards) for end in ends],
            extra=[end.extra for end in ends],
        )

    def assign_advantages(self, output):
        args = self.args
        options: dict[str, Any] = {
            "credit": args.node_credit,
            "normalization": args.advantage_normalization,
            "skip_uniform": args.skip_uniform_trees,
            "max_completion_length": args.max_completion_length,
            "overlong_buffer": args.overlong_buffer,
            "overlong_penalty_weight": args.overlong_penalty,
            **self._credit,
        }
        rows = [row for tree in self._trees for row in tree_advantages(tree, **options)]
        advantages = torch.zeros(output["completion_ids"].shape, device=output["completion_ids"].device)  # (B, T)
        for i, row in enumerate(rows):
            advantages[i, : len(row)] = torch.tensor(row)
        return advantages

    def _sample_nodes(self, prefixes, num_samples, max_new_tokens, *, entropies=True, begun=None):
        # Also with `entropy_weight=0`: of completions that end together, the most confident one is backed up (Eq. 2).
        start = time.perf_counter()
        options: dict[str, Any] = {"main_stream": True, "entropies": entropies, "begun": begun}
        sampled = self.sample(prefixes, num_samples, max_new_tokens, **options)
        self._seconds["sampling"] += time.perf_counter() - start
        return sampled

    def _score_leaves(self, leaves: list[Leaf]) -> list[Verdict]:
        start = time.perf_counter()
        examples = [self.main_examples[leaf.tree * self.num_generations] for leaf in leaves]
        prompt_ids = [self._roots[leaf.tree] for leaf in leaves]
        rewards, extra = self.scorer.judge(examples, [leaf.completion_ids for leaf in leaves], prompt_ids=prompt_ids)
        self._seconds["scoring"] += time.perf_counter() - start
        if not leaves:
            return []
        deciding = self.scorer.success(torch.tensor(rewards, dtype=torch.float32)).tolist()
        bars = {"success_threshold": self.args.success_threshold, "incomplete_score": self.args.incomplete_score}
        outcomes = [terminal_outcome(r, finished=a.finished, **bars) for r, a in zip(deciding, leaves, strict=True)]
        graded = self.args.reward_mapping == "scaled"
        return [
            Verdict(outcome=outcome, reward=reward if graded else None, rewards=tuple(given), extra=logged)
            for outcome, reward, given, logged in zip(outcomes, deciding, rewards, extra, strict=True)
        ]

    # ----------------------------------------------------------------------------- its parts, metrics, files and state

    def check(self, args: Any, *, tools: Any, environment_factory: Any) -> None:
        super().check(args, tools=tools, environment_factory=environment_factory)
        if args.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation={args.multi_objective_aggregation!r}` has no meaning for a tree "
                "search, whose completions are right or wrong: use 'sum_then_normalize'."
            )

    def setup(self) -> None:
        super().setup()
        args = self.args
        self.limits = args.limits()
        self._select_fn = select_by(args.selection, **{name: vars(args)[name] for name in WEIGHTS})
        self._trees, self._seconds, self._narrow = [], {"sampling": 0.0, "scoring": 0.0}, NarrowSearch(args)
        self._credit: dict[str, Any] = {"q_temperature": args.q_temperature, "q_max": args.q_max}
        self.replay: ReplayBuffer = ReplayBuffer(self)
        self.solutions = self.replay.solutions
        folder = args.dump_trees and path_inside(args.output_dir, args.dump_trees, field="dump_trees", suffix="")
        self.dump: MethodFile = MethodFile(folder / f"trees_{self.ranks.index}.jsonl" if folder else None)

    def _log_trees(self, searched: list[Tree], trees: list[Tree], seconds: float) -> None:
        prefixes = {"asked": self.sample.prefix_tokens_asked, "encoded": self.sample.prefix_tokens_encoded}
        total = self.ranks.summed(tree_counts(searched, trees, self.limits) | prefixes)
        self._narrow.look(total)
        metrics = tree_metrics(total)
        metrics |= {f"{name}_seconds": spent for name, spent in self._seconds.items()}
        metrics["own_seconds"] = seconds - sum(self._seconds.values())
        for name, value in metrics.items():
            self.log_metric(f"tree/{name}", value)

    def completion_columns(self) -> dict[str, list[Any]]:
        rows = [(i, tree, row) for i, tree in enumerate(self._trees) for row in tree.rows]
        return {
            "origin": [
                "replayed" if (i, row) in self.replay.placed else "direct" if tree.nodes[row].direct else "search"
                for i, tree, row in rows
            ],
            "depth": [tree.nodes[row].depth for _, tree, row in rows],
            "node_values": [
                [round(node_credit(tree, node, **self._credit), 3) for node in tree.path(row)] for _, tree, row in rows
            ],
        }

    def method_files(self) -> list[str]:
        return [SOLUTIONS_FILE, *([self.args.dump_trees] if self.args.dump_trees else [])]

    def run_files(self) -> list[Path]:
        replayed = self.args.replay_file and Path(self.args.replay_file).resolve()
        return [path for path in super().run_files() if path.resolve() != replayed]  # its solutions are written again

    def exploration_state(self) -> dict[str, Any]:
        return {**self.replay.state(), "trees_bytes": self.dump.size}

    def load_exploration_state(self, state: dict[str, Any]) -> None:
        self.replay.load_state(state)
        self.dump.cut_back(state["trees_bytes"])
