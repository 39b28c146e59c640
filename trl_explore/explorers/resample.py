"""The smallest explorer: another group of plain samples for an unsolved prompt."""

from collections.abc import Sequence

from trl_explore.explorers.explorer import Explored, Explorer, PlainSampling, PromptGroup, split_rollout


class ResampleExplorer(Explorer):
    """
    Samples prompts again, as GRPO does.

    It is the control of all other explorers: it spends as many tokens on a prompt, and searches nothing.
    """

    name = "resample"

    def explore(self, groups: Sequence[PromptGroup], plain: PlainSampling) -> list[Explored]:
        size = self.args.num_generations
        prompts = []
        for group in groups:
            prompts += [group.prompt_ids] * size
        return split_rollout(plain(prompts), size)
