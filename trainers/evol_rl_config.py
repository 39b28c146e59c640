"""The knobs of EVOL-RL."""

from dataclasses import dataclass

from trl_explore.credit.checks import refuse
from trl_explore.credit.functions import advantage_parts
from trl_explore.names import explain_fields

from .config import ExplorationConfig, at_least, one_of, run_checks, within

CHECKS = (
    one_of("correctness", ("majority", "reward")),
    one_of("novelty_scores", ("embedding", "shuffled")),
    within("novelty_band", low=0, high=0.999, words="be in [0, 1): 0 does not look at novelty"),
    within("success_threshold"),
    at_least(1, "embedding_batch_size"),
)


@explain_fields
@dataclass
class EvolRLConfig(ExplorationConfig):
    r"""
    Configuration of [`EvolRLTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of EVOL-RL.

    Fields of GRPO keep TRL's defaults; the paper trains with `epsilon_high=0.28` and an entropy bonus
    (`entropy_coef`).

    Args:
        correctness (`str`, *optional*, defaults to `"majority"`):
            What is right: the `"majority"` answer, or what `"reward"` functions say. The majority is that of the
            prompt's completions; it needs no labels, and reward functions are then only logged.
        novelty_band (`float`, *optional*, defaults to `0.5`):
            Width of the bands of rewards, at least 0 and below 1. Right completions get from 1 minus it to 1, wrong
            ones from -1 to -1 plus it, the more novel the higher. A wider band makes novelty count more beside right
            and wrong; 0 gives 1 and -1, and with `correctness="reward"` GRPO.
        novelty_scores (`str`, *optional*, defaults to `"embedding"`):
            Novelty scores: `"embedding"` or `"shuffled"`. The second is the control for a comparison: the same scores,
            permuted at random among the right and among the wrong completions of a prompt, so that they say nothing.
        embedding_model (`str`, *optional*, defaults to `"Qwen/Qwen3-Embedding-4B"`):
            Model of sentence-transformers that compares texts, a name or a folder; or `"ngrams"`.
            `Qwen/Qwen3-Embedding-0.6B` has a seventh of the default's size. `"ngrams"` counts groups of three
            characters and needs no model.
        embedding_batch_size (`int`, *optional*, defaults to `32`):
            Texts per call of the embedding model, at least 1. Larger batches need fewer calls and more memory.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward of a right completion, with `correctness="reward"`. It is the total, or that of
            `success_reward`.
    """

    correctness: str = "majority"
    novelty_band: float = 0.5
    novelty_scores: str = "embedding"
    embedding_model: str = "Qwen/Qwen3-Embedding-4B"
    embedding_batch_size: int = 32
    success_threshold: float = 1.0

    @property
    def asks_about_success(self) -> bool:
        return super().asks_about_success or self.correctness == "reward"

    def validate(self) -> None:
        super().validate()
        run_checks(self, CHECKS)
        if self.explore is not None and self.correctness == "majority":
            raise ValueError(
                f"`explore={self.explore!r}` asks the reward functions which prompts are unsolved, and "
                "`correctness='majority'` trains without them: set `correctness='reward'`, or leave `explore` out."
            )
        if any(part.name in ("maxrl", "passk", "reinforce") for part in advantage_parts(self)):
            refuse(self, ["advantage"], "needs rewards of at least 0, or of 0 and 1, and EVOL-RL's have signs")
