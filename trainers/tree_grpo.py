"""TreeGRPO: the completions of a prompt come from a Monte Carlo tree search, and its values credit every step."""

import math
import textwrap
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from trl_explore.advantages import combine_rewards, first_appearance, tree_advantages
from trl_explore.checkpoints import append_lines, cut_file, file_size, path_inside
from trl_explore.names import explain_unknown_fields, unknown_name
from trl_explore.replay import (
    SolutionCache,
    append_solutions,
    read_cache,
    replace_failures,
    write_cache,
)
from trl_explore.rollouts import Rollout
from trl_explore.tree_metrics import tree_counts, tree_metrics
from trl_explore.tree_records import tree_record
from trl_explore.tree_rules import DEPTH_BONUSES
from trl_explore.trees import (
    Leaf,
    Limits,
    Tree,
    Verdict,
    judge,
    search,
    select,
    select_uct,
    terminal_outcome,
)

from .base import ExplorationTrainer
from .config import ExplorationConfig

SOLUTIONS_FILE = "solutions.jsonl"
CHOICES = {
    "selection": ("global", "uct"),
    "depth_bonus": tuple(DEPTH_BONUSES),
    "advantage_normalization": ("mean", "mean_std"),
}


@explain_unknown_fields
@dataclass
class TreeGRPOConfig(ExplorationConfig):
    r"""
    Configuration of [`TreeGRPOTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of DeepSearch.

    Fields of GRPO keep TRL's defaults but for `epsilon_high`, which is the paper's 0.28. `scale_rewards` has no
    effect: `advantage_normalization` takes its place.

    Args:
        expansion_width (`int`, *optional*, defaults to `8`):
            Children per node, at least 1.
        max_tree_depth (`int`, *optional*, defaults to `64`):
            Depth at which a node ends its completion, at least 1.
        node_length (`int`, *optional*):
            Most tokens per node. `None` means the paper's 256, or an eighth of `max_completion_length` if less.
        max_search_iterations (`int`, *optional*):
            Most iterations (one sampling call each) per tree; direct rollouts fill the rows that are then missing.
            `None` means what a search needs at most: `num_generations` times the deepest possible tree.
        max_tree_tokens (`int`, *optional*):
            Most tokens that the search samples per tree, direct rollouts apart. `None` sets no limit.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            A completion whose total reward reaches it is correct (+1), any other wrong (-1).
        incomplete_score (`float`, *optional*, defaults to `-1.0`):
            Outcome of a wrong completion that a limit cut off, in [-1, 0].
        selection (`str`, *optional*, defaults to `"global"`):
            Where the search goes on after a completion has ended: `"global"` at the best node of the whole tree
            (Eq. 9), `"uct"` from the root down by upper confidence bounds.
        uct_coef (`float`, *optional*, defaults to `2.0`):
            Weight of the exploration bonus among siblings (Eq. 8).
        quality_weight (`float`, *optional*, defaults to `0.4`):
            Weight lambda 1 of the parent's mean value in the global score (Eq. 9).
        entropy_weight (`float`, *optional*, defaults to `0.0`):
            Weight lambda 2 of the node's mean token entropy; negative prefers confident nodes.
        depth_weight (`float`, *optional*, defaults to `0.01`):
            Weight lambda 3 of the depth bonus.
        depth_bonus (`str`, *optional*, defaults to `"sqrt"`):
            Depth bonus of a node at depth d (Eq. 10): `"sqrt"` is `sqrt(d / max_tree_depth)`, `"linear"` is `d`,
            `"log"` is `ln(d + 1)`.
        q_decay_min (`float`, *optional*, defaults to `0.1`):
            Smallest decay of an outcome on its way to the root (Eq. 5), in [0, 1].
        min_expansion_width (`int`, *optional*, defaults to `1`):
            Fewest children per node where `width_decay` shrinks the width.
        width_decay (`int`, *optional*, defaults to `0`):
            Children fewer per `max_tree_depth / expansion_width` levels of depth; 0 keeps the width.
        q_temperature (`float`, *optional*, defaults to `1.0`):
            Softness of the clip of a node's value, `tanh(value / q_temperature) * q_max` (Eq. 16), positive.
        q_max (`float`, *optional*, defaults to `1.0`):
            Limit of that clip, positive.
        advantage_normalization (`str`, *optional*, defaults to `"mean"`):
            `"mean"` subtracts the mean terminal score of the tree (Eq. 18); `"mean_std"` also divides by its standard
            deviation.
        overlong_buffer (`int`, *optional*, defaults to `0`):
            Tokens before `max_completion_length` over which a penalty grows to `overlong_penalty`; 0 means none.
        overlong_penalty (`float`, *optional*, defaults to `1.0`):
            Penalty of a completion of `max_completion_length` tokens.
        share_prefix_once (`bool`, *optional*, defaults to `False`):
            Whether a node that several completions share is trained in the first of them only.
        skip_uniform_trees (`bool`, *optional*, defaults to `True`):
            Whether a tree whose completions are all correct or all wrong trains nothing. The paper does not say
            so; without it, the first steps of all-wrong trees get positive advantages and those of all-correct trees
            negative ones.
        replay_buffer (`bool`, *optional*, defaults to `False`):
            Keep correct completions of hard prompts; at the next visit of such a prompt they replace failures among
            direct rollouts, and the search is saved.
        replay_threshold (`float`, *optional*, defaults to `0.25`):
            A prompt is hard if its tree's share of correct completions is above 0 and at most this.
        replay_solutions (`int`, *optional*, defaults to `2`):
            Most solutions kept per prompt, at least 1.
        replay_file (`str`, *optional*):
            Solutions of an earlier run to start from: the `solutions.jsonl` in its `output_dir`.
        dump_trees (`str`, *optional*):
            Folder inside `output_dir` to which every tree is written as a JSON line, one file per process;
            `trl-explore tree FILE` shows them.
    """

    epsilon_high: float | None = field(
        default=0.28, metadata={"help": "Upper clip of the probability ratio (clip-higher); None: epsilon."}
    )
    expansion_width: int = field(default=8, metadata={"help": "Children per node."})
    max_tree_depth: int = field(default=64, metadata={"help": "Depth at which a node ends its completion."})
    node_length: int | None = field(
        default=None,
        metadata={"help": "Most tokens per node; None: 256, or an eighth of max_completion_length if that is less."},
    )
    max_search_iterations: int | None = field(
        default=None, metadata={"help": "Most iterations per tree; None: as many as a search can need."}
    )
    max_tree_tokens: int | None = field(
        default=None, metadata={"help": "Most tokens that the search samples per tree; None: no limit."}
    )
    success_threshold: float = field(default=1.0, metadata={"help": "Smallest reward of a correct completion."})
    incomplete_score: float = field(default=-1.0, metadata={"help": "Outcome of a wrong, cut-off completion."})
    selection: str = field(default="global", metadata={"help": "'global' (frontier selection) or 'uct'."})
    uct_coef: float = field(default=2.0, metadata={"help": "Weight of the exploration bonus among siblings."})
    quality_weight: float = field(default=0.4, metadata={"help": "Weight lambda 1 of the parent's mean value."})
    entropy_weight: float = field(default=0.0, metadata={"help": "Weight lambda 2 of the node's entropy."})
    depth_weight: float = field(default=0.01, metadata={"help": "Weight lambda 3 of the depth bonus."})
    depth_bonus: str = field(default="sqrt", metadata={"help": "Depth bonus: 'sqrt', 'linear' or 'log'."})
    q_decay_min: float = field(default=0.1, metadata={"help": "Smallest decay of an outcome towards the root."})
    min_expansion_width: int = field(default=1, metadata={"help": "Fewest children where the width shrinks."})
    width_decay: int = field(default=0, metadata={"help": "How fast the width shrinks with depth; 0: not at all."})
    q_temperature: float = field(default=1.0, metadata={"help": "Softness of the clip of a node's value."})
    q_max: float = field(default=1.0, metadata={"help": "Limit of the clip of a node's value."})
    advantage_normalization: str = field(default="mean", metadata={"help": "'mean' or 'mean_std'."})
    overlong_buffer: int = field(default=0, metadata={"help": "Tokens over which the overlong penalty grows."})
    overlong_penalty: float = field(default=1.0, metadata={"help": "Penalty of the longest completion."})
    share_prefix_once: bool = field(default=False, metadata={"help": "Train a shared node in one row only."})
    skip_uniform_trees: bool = field(default=True, metadata={"help": "Train nothing where all outcomes are equal."})
    replay_buffer: bool = field(default=False, metadata={"help": "Reuse correct completions of hard prompts."})
    replay_threshold: float = field(default=0.25, metadata={"help": "Largest success ratio of a hard prompt."})
    replay_solutions: int = field(default=2, metadata={"help": "Most solutions kept per prompt."})
    replay_file: str | None = field(default=None, metadata={"help": "Solutions of an earlier run to start from."})
    dump_trees: str | None = field(default=None, metadata={"help": "Folder inside output_dir for the trees."})

    def validate(self) -> None:
        super().validate()
        for name, choices in CHOICES.items():
            value = vars(self)[name]
            if value not in choices:
                raise ValueError(f"`{name}`: {unknown_name('value', str(value), choices)}")
        counts = ("expansion_width", "max_tree_depth", "node_length", "max_search_iterations", "max_tree_tokens")
        for name in (*counts, "min_expansion_width", "replay_solutions"):
            value = vars(self)[name]
            if value is not None and value < 1:
                raise ValueError(f"`{name}={value}` must be at least 1.")
        for name in ("width_decay", "overlong_buffer", "uct_coef", "overlong_penalty"):
            if not 0 <= vars(self)[name] < math.inf:
                raise ValueError(f"`{name}={vars(self)[name]}` must be a finite number, at least 0.")
        for name in ("quality_weight", "entropy_weight", "depth_weight", "success_threshold"):
            if not math.isfinite(vars(self)[name]):
                raise ValueError(f"`{name}={vars(self)[name]}` must be a finite number.")
        for name in ("q_temperature", "q_max"):
            if not 0 < vars(self)[name] < math.inf:
                raise ValueError(f"`{name}={vars(self)[name]}` must be a positive number.")
        for name, low, high in (("incomplete_score", -1, 0), ("q_decay_min", 0, 1), ("replay_threshold", 0, 1)):
            if not low <= vars(self)[name] <= high:
                raise ValueError(f"`{name}={vars(self)[name]}` must be between {low} and {high}.")
        self._check_sizes()
        if self.replay_file is not None and not self.replay_buffer:
            raise ValueError(f"`replay_file={self.replay_file!r}` has no effect without `replay_buffer=True`: set it.")
        if self.dump_trees is not None:
            path_inside(self.output_dir or ".", self.dump_trees, field="dump_trees")

    def _check_sizes(self) -> None:
        budget = self.max_completion_length or 0
        if self.node_length is not None and self.node_length > budget:
            raise ValueError(
                f"`node_length={self.node_length}` is longer than a whole completion of "
                f"`max_completion_length={self.max_completion_length}` tokens: lower it, or leave it out for an "
                "eighth of the completion."
            )
        if self.overlong_buffer > budget:
            raise ValueError(
                f"`overlong_buffer={self.overlong_buffer}` is longer than "
                f"`max_completion_length={self.max_completion_length}`: lower it."
            )
        limits = self.limits()
        if limits.most_results < limits.num_results:
            raise ValueError(
                f"`num_generations={self.num_generations}` is more than the {limits.most_results} completions that a "
                f"tree of `expansion_width={self.expansion_width}` and depth {limits.deepest} can end with: raise "
                "`expansion_width` or `max_tree_depth`, shorten `node_length`, or lower `num_generations`."
            )

    def limits(self) -> Limits:
        """
        Shape and budget of the trees, with every default filled in.

        Returns:
            [`~trl_explore.trees.Limits`]: The limits.
        """
        budget, num_results = self.max_completion_length or 1, self.num_generations or 1
        limits = Limits(
            num_results=num_results,
            width=self.expansion_width,
            max_depth=self.max_tree_depth,
            node_length=self.node_length or min(256, max(1, budget // 8)),
            max_completion_length=budget,
            max_iterations=self.max_search_iterations or 1,
            max_tokens=self.max_tree_tokens,
            min_width=self.min_expansion_width,
            width_decay=self.width_decay,
        )
        if self.max_search_iterations is None:
            limits = replace(limits, max_iterations=num_results * limits.deepest)
        return limits


class TreeGRPOTrainer(ExplorationTrainer):
    """
    GRPO whose completions come from a tree search per prompt, with the values found by the search as advantages.

    Method of [DeepSearch: Overcome the Bottleneck of Reinforcement Learning with Verifiable Rewards via Monte Carlo
    Tree Search](https://huggingface.co/papers/2509.25454). What changes with respect to GRPO, per generation batch:

    1. Every prompt grows a tree of chunks of `node_length` tokens; all trees of the batch advance together, one
       batched sampling call per iteration. The reward functions score every completion that ends, once.
    2. Per iteration one completion is backed up: a correct one, else the most confident wrong one (Eq. 2-7). The
       search goes on at the best node of the whole tree (Eq. 9-10), until there are `num_generations` completions.
    3. Every token gets the softly clipped value of its node minus the mean outcome of the tree (Eq. 16-18).

    With `expansion_width=num_generations`, `max_tree_depth=1`, `node_length=max_completion_length` and
    `epsilon_high=None` it is GRPO with `scale_rewards="none"` on rewards of +1 and -1: the same parameters bit for
    bit, unless the rounding of a prompt that is encoded once changes a sampled token. Deviations from the paper (all
    of them in `trainers/README.md`):

    1. `skip_uniform_trees=True`: trees without contrast train nothing.
    2. `node_length` follows short completions, and iterations are bounded; both only matter where the paper is silent.
    3. A search that runs out of nodes first uses terminal nodes that it had passed over, then direct rollouts.

    The constructor takes what [`~trl.GRPOTrainer`] takes; `args` is a [`TreeGRPOConfig`] or a plain
    [`~trl.GRPOConfig`]. Tools, environments, vision-language models and `rollout_func` are refused.
    """

    _tag_names = ["trl", "grpo", "trl-explore", "tree-grpo"]
    _name = "TreeGRPO"
    card_template = "tree_grpo"
    _paper = {
        "title": "DeepSearch: Overcome the Bottleneck of Reinforcement Learning with Verifiable Rewards via Monte "
        "Carlo Tree Search",
        "id": "2509.25454",
        "citation": textwrap.dedent("""\
            @article{wu2025deepsearch,
                title        = {{DeepSearch: Overcome the Bottleneck of Reinforcement Learning with Verifiable Rewards
                                via Monte Carlo Tree Search}},
                author       = {Fang Wu and Weihao Xuan and Heli Qi and others},
                year         = 2025,
                eprint       = {arXiv:2509.25454},
            }"""),  # fmt: skip
    }

    max_completion_length: int
    num_generations: int
    config_class = TreeGRPOConfig
    samples_extra_rows = True
    needs_whole_groups = True

    def _check_arguments(self, args, train_dataset, tools, rollout_func, environment_factory) -> None:
        super()._check_arguments(args, train_dataset, tools, rollout_func, environment_factory)
        if args.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation={args.multi_objective_aggregation!r}` has no meaning for a tree "
                "search, whose completions are right or wrong: use 'sum_then_normalize'."
            )

    def setup(self) -> None:
        args = self.args
        self.limits = args.limits()
        self._select_fn = (
            partial(select_uct, coef=args.uct_coef)
            if args.selection == "uct"
            else partial(
                select,
                quality_weight=args.quality_weight,
                entropy_weight=args.entropy_weight,
                depth_weight=args.depth_weight,
                depth_bonus=args.depth_bonus,
            )
        )
        self._trees: list[Tree] = []
        self._seconds = {"sampling": 0.0, "scoring": 0.0}
        cache_options = dict(solutions_per_prompt=args.replay_solutions, threshold=args.replay_threshold)
        self.solutions = SolutionCache(**cache_options)
        if args.replay_file is not None:
            self.solutions = read_cache(args.replay_file, self._tokenizer, **cache_options)
        self._solutions_file_is_current = False

    # ---------------------------------------------------------------------------------------- the algorithm

    def rollout(self, prompt_ids, plain):
        start = time.perf_counter()
        self._seconds = {"sampling": 0.0, "scoring": 0.0}
        self.prefix_tokens_asked = self.prefix_tokens_encoded = 0
        roots = prompt_ids[:: self.num_generations]
        cached = [self._usable_solutions(root) for root in roots]
        trees = search(
            roots,
            self._sample_nodes,
            self._score_leaves,
            limits=self.limits,
            select_fn=self._select_fn,
            uct_coef=self.args.uct_coef,
            decay_min=self.args.q_decay_min,
            skip=[bool(solutions) for solutions in cached],
            any_active=self._any_process,
        )
        searched = trees
        if self.args.replay_buffer:
            trees = self._replay(trees, cached)
            self._remember(searched)
        self._trees = trees
        if self.args.dump_trees is not None:
            self._write_trees()
        self._log_trees(searched, trees, time.perf_counter() - start)
        nodes = [(tree, row) for tree in trees for row in tree.rows]
        masks = [mask for tree in trees for mask in first_appearance(tree)] if self.args.share_prefix_once else None
        return Rollout(
            completion_ids=[tree.completion_ids(row) for tree, row in nodes],
            logprobs=[tree.completion_logprobs(row) for tree, row in nodes] if self.use_vllm else None,
            loss_mask=masks,
            known_rewards=[list(tree.nodes[row].rewards) for tree, row in nodes],
            extra=[tree.nodes[row].extra for tree, row in nodes],
        )

    def assign_advantages(self, output):
        args = self.args
        rows = [
            row
            for tree in self._trees
            for row in tree_advantages(
                tree,
                q_temperature=args.q_temperature,
                q_max=args.q_max,
                normalization=args.advantage_normalization,
                skip_uniform=args.skip_uniform_trees,
                max_completion_length=args.max_completion_length,
                overlong_buffer=args.overlong_buffer,
                overlong_penalty_weight=args.overlong_penalty,
            )
        ]
        advantages = torch.zeros(output["completion_ids"].shape, device=output["completion_ids"].device)  # (B, T)
        for i, row in enumerate(rows):
            advantages[i, : len(row)] = torch.tensor(row)
        return advantages

    def _sample_nodes(self, prefixes, num_samples, max_new_tokens):
        start = time.perf_counter()
        sampled = self.sample(prefixes, num_samples, max_new_tokens, main_stream=True, entropies=True)
        self._seconds["sampling"] += time.perf_counter() - start
        return sampled

    def _score_leaves(self, leaves: list[Leaf]) -> list[Verdict]:
        start = time.perf_counter()
        examples = [self.main_examples[leaf.tree * self.num_generations] for leaf in leaves]
        rewards, extra = self.judge(examples, [leaf.completion_ids for leaf in leaves])
        self._seconds["scoring"] += time.perf_counter() - start
        if not leaves:
            return []
        per_func = torch.tensor(rewards, dtype=torch.float32)
        totals = combine_rewards(per_func, self.reward_weights.cpu()).tolist()
        return [
            Verdict(
                outcome=terminal_outcome(
                    total,
                    finished=leaf.finished,
                    success_threshold=self.args.success_threshold,
                    incomplete_score=self.args.incomplete_score,
                ),
                rewards=tuple(given),
                extra=logged,
            )
            for leaf, total, given, logged in zip(leaves, totals, rewards, extra, strict=True)
        ]

    def _any_process(self, here: bool) -> bool:
        return bool(self.gathered(here).any())

    # ----------------------------------------------------------------------------------- solutions of hard prompts

    def _usable_solutions(self, prompt_ids: list[int]) -> list[list[int]]:
        if not self.args.replay_buffer:
            return []
        return [s for s in self.solutions.get(prompt_ids) if len(s) <= self.max_completion_length]

    def _replay(self, trees: list[Tree], cached: list[list[list[int]]]) -> list[Tree]:
        """Put cached solutions in the place of failures among direct rollouts; they are scored like any completion."""
        placed: list[tuple[int, int]] = []
        trees = list(trees)
        for i, (tree, solutions) in enumerate(zip(trees, cached, strict=True)):
            outcomes = [tree.nodes[row].outcome for row in tree.rows]
            succeeded = [outcome is None or outcome > 0 for outcome in outcomes]  # unscorable is not failed
            nodes = list(tree.nodes)
            for position, which in replace_failures(succeeded, len(solutions)):
                node = tree.rows[position]
                ids = solutions[which]
                nodes[node] = nodes[node]._replace(
                    token_ids=ids, length=len(ids), entropy=0.0, total_entropy=0.0, finished=True, logprobs=None
                )
                placed.append((i, node))
            trees[i] = replace(tree, nodes=tuple(nodes))
        verdicts = self._score_leaves([Leaf(i, trees[i].completion_ids(node), True) for i, node in placed])
        for (i, node), verdict in zip(placed, verdicts, strict=True):
            trees[i] = judge(trees[i], {node: verdict})
        replaced, skipped = self.summed({"rows": len(placed), "prompts": sum(map(bool, cached))}).values()
        self.log_metric("replay/replaced_rows", replaced)
        self.log_metric("replay/prompts", skipped)
        return trees

    def _remember(self, trees: list[Tree]) -> None:
        found = []
        for tree in trees:
            solved = [row for row in tree.rows if (tree.nodes[row].outcome or 0.0) > 0]
            if solved and tree.reason != "replayed":
                solutions = [tree.completion_ids(row) for row in solved]
                found.append((tree.prompt_ids, solutions, len(solved) / len(tree.rows)))
        entries = [
            (prompt_ids, solution)
            for prompt_ids, solutions, ratio in gather_object(found)
            for solution in self.solutions.offer(prompt_ids, solutions, ratio)
        ]
        self.log_metric("replay/stored_prompts", len(self.solutions))
        if not self.accelerator.is_main_process or not (entries or not self._solutions_file_is_current):
            return
        path = Path(self.args.output_dir) / SOLUTIONS_FILE
        if self._solutions_file_is_current:
            append_solutions(path, entries)
        else:
            write_cache(path, self.solutions, self._tokenizer)
            self._solutions_file_is_current = True

    # -------------------------------------------------------------------------------- metrics, files, state

    def _log_trees(self, searched: list[Tree], trees: list[Tree], seconds: float) -> None:
        counts = tree_counts(searched, trees, self.limits)
        counts |= {"asked": self.prefix_tokens_asked, "encoded": self.prefix_tokens_encoded}
        for name, value in tree_metrics(self.summed(counts)).items():
            self.log_metric(f"tree/{name}", value)
        self.log_metric("tree/sampling_seconds", self._seconds["sampling"])
        self.log_metric("tree/scoring_seconds", self._seconds["scoring"])
        self.log_metric("tree/own_seconds", seconds - sum(self._seconds.values()))

    def method_files(self) -> list[str]:
        return [SOLUTIONS_FILE, *([self.args.dump_trees] if self.args.dump_trees else [])]

    @property
    def _trees_path(self) -> Path:
        folder = path_inside(self.args.output_dir, self.args.dump_trees, field="dump_trees")
        return folder / f"trees_{self.accelerator.process_index}.jsonl"

    def _write_trees(self) -> None:
        append_lines(
            self._trees_path,
            [
                tree_record(
                    tree,
                    step=self.state.global_step,
                    index=i,
                    decode=self._tokenizer.decode,
                    reward_weights=self.reward_weights.tolist(),
                    q_temperature=self.args.q_temperature,
                    q_max=self.args.q_max,
                )
                for i, tree in enumerate(self._trees)
            ],
        )

    def exploration_state(self) -> dict[str, Any]:
        return {
            "solutions": self.solutions.state_dict(),
            # A resumed run writes what came after the checkpoint again, so the file goes back to its length here.
            "trees_bytes": file_size(self._trees_path) if self.args.dump_trees else 0,
        }

    def load_exploration_state(self, state: dict[str, Any]) -> None:
        self.solutions.load_state_dict(state["solutions"])
        self._solutions_file_is_current = False
        if self.args.dump_trees:
            cut_file(self._trees_path, state["trees_bytes"])
