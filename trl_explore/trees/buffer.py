"""Replay buffer: solutions that a search found for hard prompts replace failures in later batches."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_explore.rows.policy import Policy
from trl_explore.rows.truncation import is_trained
from trl_explore.saving.records import FileRefusedError
from trl_explore.saving.whole_files import MethodFile
from trl_explore.trees.replay import SolutionCache, append_solutions, read_cache, replace_failures, write_cache
from trl_explore.trees.search import Leaf, Tree, Verdict, backup, exchange, judge

if TYPE_CHECKING:
    from trl_explore.trainers.tree_grpo_config import TreeGRPOConfig

SOLUTIONS_FILE = "solutions.jsonl"


class ReplayBuffer:
    """Keeps solutions in memory and in a file of the run, as the fields `replay_*` of the configuration specify."""

    def __init__(self, policy: Policy, args: "TreeGRPOConfig") -> None:
        self.policy, self.args = policy, args
        self._options: dict[str, Any] = dict(
            solutions_per_prompt=self.args.replay_solutions, threshold=self.args.replay_threshold
        )
        self.solutions = SolutionCache(**self._options)
        if self.args.replay_file is not None:
            self.solutions = read_cache(self.args.replay_file, policy.tokenizer, **self._options)
        self.placed: set[tuple[int, int]] = set()  # tree number and node of the solutions in the newest batch
        self.path = Path(self.args.output_dir) / SOLUTIONS_FILE
        self.file = MethodFile(self.path, writes=policy.accelerator.is_main_process)
        self._file_is_current = False

    def usable(self, prompt_ids: list[int]) -> list[list[int]]:
        """Return the solutions of a prompt that are short enough for a completion, and that TRL trains."""
        if not self.args.replay_buffer:
            return []
        limit = self.args.max_completion_length
        assert limit is not None
        found = []
        for solution in self.solutions.get(prompt_ids):
            if len(solution) <= limit and is_trained(self.policy, solution):
                found.append(solution)
        return found

    def replace(
        self, trees: list[Tree], cached: list[list[list[int]]], score: Callable[[list[Leaf]], list[Verdict]]
    ) -> list[Tree]:
        """
        Replace failed direct rollouts by cached solutions, and score the solutions. A solution that is now wrong, for
        example because the data changed, leaves the cache.

        Args:
            trees (`list[Tree]`):
                Finished trees, `[P]`.
            cached (`list[list[list[int]]]`):
                Usable solutions of each prompt, `[P]`. A prompt with solutions got direct rollouts, and not a search.
            score (`Callable`):
                Calls the reward functions. Every process calls it once.

        Returns:
            `list[Tree]`: Trees with the solutions, `[P]`.
        """
        placed: list[tuple[int, int]] = []
        trees = list(trees)
        for i, (tree, solutions) in enumerate(zip(trees, cached, strict=True)):
            succeeded = []
            for row in tree.rows:
                outcome = tree.nodes[row].outcome
                succeeded.append(outcome is None or outcome > 0)  # no reward is not a failure
            for row_number, solution_number in replace_failures(succeeded, len(solutions)):
                node, ids = tree.rows[row_number], solutions[solution_number]
                # A solution that a length limit cut off has no end token.
                trees[i] = exchange(trees[i], node, ids, finished=ids[-1] in self.policy.eos_token_ids)
                placed.append((i, node))
        self.placed = set(placed)
        leaves = []
        for i, node in placed:
            leaves.append(Leaf(i, trees[i].completion_ids(node), trees[i].nodes[node].finished))
        verdicts = score(leaves)
        wrong = []
        for (i, node), verdict in zip(placed, verdicts, strict=True):
            trees[i] = backup(judge(trees[i], {node: verdict}), node, decay_min=self.args.q_decay_min)
            if verdict.outcome is not None and verdict.outcome <= 0:
                wrong.append((trees[i].prompt_ids, trees[i].completion_ids(node)))
        for prompt_ids, completion_ids in self.policy.ranks.objects(wrong):
            self.solutions.drop(prompt_ids, completion_ids)
            self._file_is_current = False  # appending cannot remove lines, so write the whole file again
        num_prompts = sum(bool(solutions) for solutions in cached)
        total = self.policy.ranks.summed({"rows": len(placed), "prompts": num_prompts})
        self.policy.log_metric("replay/replaced_rows", total["rows"])
        self.policy.log_metric("replay/prompts", total["prompts"])
        return trees

    def remember(self, trees: list[Tree]) -> None:
        """Keep the solutions that searches found for hard prompts, and drop prompts that are not hard any more. Then
        update the file."""
        found = []
        for tree in trees:
            solved = [row for row in tree.rows if (tree.nodes[row].outcome or 0.0) > 0]
            solutions = None  # None: the prompt got direct rollouts, because it has cached solutions
            if tree.reason != "replayed":
                solved_ids = [tree.completion_ids(row) for row in solved]
                solutions = [ids for ids in solved_ids if is_trained(self.policy, ids)]
            found.append((tree.prompt_ids, solutions, len(solved) / len(tree.rows)))
        entries, num_dropped = [], 0
        for prompt_ids, solutions, ratio in self.policy.ranks.objects(found):
            if solutions is None:
                num_dropped += self.solutions.refilter(prompt_ids, ratio)
            else:
                for solution in self.solutions.offer(prompt_ids, solutions, ratio):
                    entries.append((prompt_ids, solution))
        self.policy.log_metric("replay/stored_prompts", len(self.solutions))
        self.policy.log_metric("replay/left_prompts", num_dropped)
        if num_dropped:
            self._file_is_current = False  # appending cannot remove lines, so write the whole file again
        if not self.policy.accelerator.is_main_process:
            return
        if not self.path.is_file():  # a new run in the same folder has moved it
            self._file_is_current = False
        if self._file_is_current and not entries:
            return
        if self._file_is_current:
            append_solutions(self.path, entries)
        else:
            self._write_file()

    def forget(self) -> None:
        """Drop all solutions. The next call of `remember` writes the file again."""
        self.solutions.load_state_dict({"solutions": []})
        self._file_is_current = False

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. If a resumed run cannot continue the file, its size is 0."""
        size = self.file.size if self._file_is_current else 0
        return {"solutions": self.solutions.state_dict(), "solutions_bytes": size}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, and make the file show the restored solutions."""
        self.solutions.load_state_dict(state["solutions"])
        self._file_is_current = False
        size = state["solutions_bytes"]
        has_file = self.args.replay_buffer or size > 0
        if not has_file or not self.policy.accelerator.is_main_process:
            return
        if self.file.may_resume(size):
            self.file.cut_back(size)
            self._file_is_current = self._file_has_solutions()
        if not self._file_is_current:
            self._write_file()

    def _file_has_solutions(self) -> bool:
        """Return whether the file has whole lines, and the same solutions as the memory. This can be False after a
        cut, if the run had rewritten the file after the checkpoint."""
        if not self.path.read_bytes().endswith(b"\n"):
            return False
        try:
            written = read_cache(self.path, self.policy.tokenizer, **self._options)
        except FileRefusedError:
            return False
        return written.state_dict() == self.solutions.state_dict()

    def _write_file(self) -> None:
        """Write the whole file from the solutions in memory."""
        write_cache(self.path, self.solutions, self.policy.tokenizer)
        self._file_is_current = True
