"""The smallest explorer: it samples another plain group for an unsolved prompt."""

from collections.abc import Sequence

from trl_explore.explorers.explorer import Explored, Explorer, PlainSampling, PromptGroup, split_rollout


class ResampleExplorer(Explorer):
    """
    Samples another group of completions as GRPO does.

    Use it as the control of other explorers: it spends tokens on the same prompts, but it does not search.
    """

    name = "resample"

    def explore(self, groups: Sequence[PromptGroup], plain: PlainSampling) -> list[Explored]:
        size = self.args.num_generations
        prompts = []
        for group in groups:
            prompts += [group.prompt_ids] * size
        return split_rollout(plain(prompts), size)
