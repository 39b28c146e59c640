"""The knobs of AttnRL."""

from dataclasses import dataclass, field

from trl_explore.chains.steps import SELECTIONS
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
            Steps N at which a chain is forked; 0: none, GRPO. Fewer where it has fewer.
        branches_per_fork (`int`, *optional*, defaults to `2`):
            Continuations T of a fork.
        fork_selection (`str`, *optional*, defaults to `"attention"`):
            Steps to fork at: those that later ones attend to (`"attention"`), or the controls `"uncertain"` and
            `"random"`. They fork as many steps of the same chains: where the first token had the highest `-log p`, or
            any.
        step_delimiters (`list[str]`, *optional*, defaults to `["\n\n"]`):
            Texts that end a step.
        step_length (`int`, *optional*):
            Tokens of a step, for completions without such texts; `None`: steps end with `step_delimiters`.
        fork_until (`list[str]`, *optional*, defaults to `["</think>"]`):
            Texts, in any case, behind which no step is forked any more.
        min_fork_distance (`int`, *optional*):
            Fewest tokens between two forks of a chain, and before the first; `None`: a sixteenth of
            `max_completion_length`, 512 with the authors' 8192.
        influence_distance (`int`, *optional*, defaults to `4`):
            Steps further on from which attention counts.
        influence_quantile (`float`, *optional*, defaults to `0.8`):
            Share of a completion's steps that have less influence than those that may be forked, in [0, 1].
        attention_layers (`list[int]`, *optional*):
            First layer that is read and the one behind the last, for example `[8, 16]`; `None`: all.
        adaptive_sampling (`bool`, *optional*, defaults to `True`):
            Fork `ceil(G exp(-accuracy))` of a prompt's G chains, those of the rarer outcome first, and of prompts that
            are solved by all only those with more influence than usual. `False` forks all chains.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward of a success: the total, or that of `success_reward`. It decides the accuracy, and which
            prompts `explore_prompts="unsolved"` forks.
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
