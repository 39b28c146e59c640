"""Configuration of AttnRL."""

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
    within("influence_quantile", low=0, high=1, words="be in [0, 1]; with 0, the first steps are forked"),
    within("success_threshold"),
)


@explain_fields
@dataclass
class AttnRLConfig(ExplorationConfig):
    r"""
    Configuration of [`AttnRLTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of AttnRL.

    Fields of GRPO keep TRL's defaults. The authors train with 6 generations, 64 prompts per step, `beta=0.001` and
    `epsilon_high=0.28`. A *step* is a part of a completion that ends at a blank line.

    Args:
        num_forks (`int`, *optional*, defaults to `2`):
            Number of steps (N) at which a chain is forked, at least 0. 0 is GRPO. The cost is proportional to it.
            Chains with fewer steps have fewer forks.
        branches_per_fork (`int`, *optional*, defaults to `2`):
            Number of continuations per fork (T), at least 1. A larger number gives a more precise value at each fork.
            The cost is proportional to it.
        fork_selection (`str`, *optional*, defaults to `"attention"`):
            Steps that are forked: `"attention"`, `"uncertain"` or `"random"`. `"attention"` forks the steps to which
            later steps attend. The others are controls for a comparison, and fork the same number of steps of the same
            chains. `"uncertain"` forks the steps whose first token had the highest `-log p`. `"random"` forks random
            steps.
        step_delimiters (`list[str]`, *optional*, defaults to `["\n\n"]`):
            Texts that end a step. More texts give more and shorter steps.
        step_length (`int`, *optional*):
            Number of tokens per step, at least 1. Use it for completions without such texts. None: `step_delimiters`
            end steps.
        fork_until (`list[str]`, *optional*, defaults to `["</think>"]`):
            Texts after which a completion is not forked any more. Upper and lower case do not matter. With `[]`, every
            step may be forked.
        min_fork_distance (`int`, *optional*):
            Smallest number of tokens between two forks of a chain, and before its first fork. With a larger distance,
            forks are later and farther apart. None: a sixteenth of `max_completion_length`, which is 512 for the
            authors' 8192.
        influence_distance (`int`, *optional*, defaults to `4`):
            Distance in steps from which attention counts as influence, at least 1.
        influence_quantile (`float`, *optional*, defaults to `0.8`):
            Share of a completion's steps that have too little influence to be forked, in [0, 1]. With a higher
            quantile, fewer steps can be forked, and they have more influence.
        attention_layers (`list[int]`, *optional*):
            Layers whose attention is read: the first layer, and the layer after the last one. `[8, 16]` reads the
            layers 8 to 15. None: all layers.
        adaptive_sampling (`bool`, *optional*, defaults to `True`):
            Fork fewer chains of prompts that are solved often: `ceil(G exp(-accuracy))` of G chains. Chains with the
            rarer outcome are forked first. A prompt that all chains solve is forked only if its influence is above the
            mean influence of these prompts. With `False`, all chains are forked.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward that counts as a success. The reward is the total reward, or the reward of `success_reward`
            if that is set. The accuracy of a prompt depends on it, so with a higher threshold more chains are forked.
            `explore_prompts="unsolved"` uses it, too.
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
        """Smallest number of tokens between two forks of a chain, and before its first fork."""
        if self.min_fork_distance is not None:
            return self.min_fork_distance
        return (self.max_completion_length or 8192) // 16

    @property
    def explores(self) -> bool:
        return self.num_forks > 0

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
                f"`attention_layers={layers}` must hold the first layer (from 0) and the one after the last, for "
                "example [8, 16]. Leave it out to read all layers."
            )
        self.check_stage("branches_per_fork", self.rows_per_generation * max(self.num_forks, 1))
