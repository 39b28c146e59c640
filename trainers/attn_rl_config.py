"""The knobs of AttnRL."""

from dataclasses import dataclass, field

from trl_explore.chains.influence import SELECTIONS
from trl_explore.names import explain_fields

from .config import ExplorationConfig, at_least, one_of, run_checks, within
from .tree_rl_config import check_tree

CHECKS = (
    at_least(0, "num_forks", words="; 0 is GRPO"),
    at_least(1, "branches_per_fork", "influence_distance"),
    at_least(0, "min_fork_distance", optional=True, words=" tokens, or None for a sixteenth of a completion"),
    at_least(1, "step_length", optional=True, words=" token, or None for `step_delimiters`"),
    one_of("fork_selection", SELECTIONS),
    within("influence_quantile", low=0, high=1, words="be in [0, 1]; 0 takes the first steps"),
    within("success_threshold"),
)


@explain_fields
@dataclass
class AttnRLConfig(ExplorationConfig):
    r"""
    Configuration of [`AttnRLTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of AttnRL.

    Fields of GRPO keep TRL's defaults; the authors train with 6 generations, 64 prompts per step, `beta=0.001` and
    `epsilon_high=0.28`. A *step* is a stretch of a completion up to a blank line.

    Args:
        num_forks (`int`, *optional*, defaults to `2`):
            Steps (N) at which a forked chain is left, at least 0. The cost grows in proportion; 0 is GRPO. Chains with
            fewer steps are forked at fewer.
        branches_per_fork (`int`, *optional*, defaults to `2`):
            Continuations (T) per fork, at least 1. More give a steadier value at each fork; the cost grows in
            proportion.
        fork_selection (`str`, *optional*, defaults to `"attention"`):
            Which steps are forked: `"attention"`, `"uncertain"` or `"random"`. `"attention"` takes steps that later
            steps attend to. The others are controls for a comparison, with as many steps of the same chains:
            `"uncertain"` takes steps whose first token had the highest `-log p`, `"random"` any.
        step_delimiters (`list[str]`, *optional*, defaults to `["\n\n"]`):
            Texts that end a step. More texts give more and shorter steps.
        step_length (`int`, *optional*):
            Tokens per step, at least 1, for completions without such texts. `None` cuts at `step_delimiters`.
        fork_until (`list[str]`, *optional*, defaults to `["</think>"]`):
            Texts, in any case, after which a completion is not forked any more. `[]` forks anywhere.
        min_fork_distance (`int`, *optional*):
            Fewest tokens between two forks of a chain, and before the first. A larger distance forks later and farther
            apart. `None` is a sixteenth of `max_completion_length`, which is 512 with the authors' 8192.
        influence_distance (`int`, *optional*, defaults to `4`):
            Distance in steps from which attention counts as influence, at least 1.
        influence_quantile (`float`, *optional*, defaults to `0.8`):
            Share of a completion's steps with too little influence to be forked, in [0, 1]. A higher quantile leaves
            fewer steps to choose from, with more influence.
        attention_layers (`list[int]`, *optional*):
            Layers that are read: the first, and the one after the last, for example `[8, 16]`. `None` reads all.
        adaptive_sampling (`bool`, *optional*, defaults to `True`):
            Fork fewer chains of prompts that are solved often: `ceil(G exp(-accuracy))` of G. Chains of the rarer
            outcome come first, and prompts that all chains solve are forked only if their influence is above the
            average of such prompts. `False` forks all chains.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward of a success: the total, or that of `success_reward`. It decides the accuracy of a prompt,
            so with a higher value more chains are forked, and which prompts `explore_prompts="unsolved"` forks.
    """

    num_forks: int = 2
    branches_per_fork: int = 2
    fork_selection: str = "attention"
    step_delimiters: list[str] = field(default_factory=lambda: ["\n\n"])
    step_length: int | None = None
    fork_until: list[str] = field(default_factory=lambda: ["</think>"])
    min_fork_distance: int | None = None
    influence_distance: int = 4
    influence_quantile: float = 0.8
    attention_layers: list[int] | None = None
    adaptive_sampling: bool = True
    success_threshold: float = 1.0

    @property
    def fork_distance(self) -> int:
        """Fewest tokens between two forks of a chain, and before the first."""
        given = self.min_fork_distance
        return (self.max_completion_length or 8192) // 16 if given is None else given

    @property
    def asks_about_success(self) -> bool:
        return True

    def validate(self) -> None:
        super().validate()
        run_checks(self, CHECKS)
        check_tree(self, self.fork_until)
        if not self.step_delimiters or not all(self.step_delimiters):
            raise ValueError(f"`step_delimiters={self.step_delimiters!r}` must hold non-empty texts.")
        layers = self.attention_layers
        if layers is not None and not (len(layers) == 2 and 0 <= layers[0] < layers[1]):
            raise ValueError(
                f"`attention_layers={layers}` must hold the first layer, from 0, and the one behind the last, for "
                "example [8, 16], or be left out for all."
            )
        self.check_stage("branches_per_fork", self.rows_per_generation * max(self.num_forks, 1))
