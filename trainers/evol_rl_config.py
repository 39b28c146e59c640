"""The knobs of EVOL-RL."""

from dataclasses import dataclass

from trl_explore.credit.checks import refuse
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
            What is right: the prompt's `"majority"` answer, or what the `"reward"` functions say. With the first no
            label is needed, and reward functions are only logged.
        novelty_band (`float`, *optional*, defaults to `0.5`):
            Width of the bands of rewards, in [0, 1). Right rows get from 1 minus it to 1, wrong ones from -1 to -1
            plus it, the more unusual the more; 0 gives 1 and -1, and GRPO with `correctness="reward"`.
        novelty_scores (`str`, *optional*, defaults to `"embedding"`):
            `"embedding"`, or the control `"shuffled"`. The control that a comparison needs: the same scores, permuted
            at random among the right and among the wrong rows of a prompt.
        embedding_model (`str`, *optional*, defaults to `"Qwen/Qwen3-Embedding-4B"`):
            Model of sentence-transformers that compares texts, a name or a folder; or `"ngrams"`. The last one counts
            groups of three characters and needs no model.
        embedding_batch_size (`int`, *optional*, defaults to `32`):
            Texts per call of the embedding model.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward (the total, or that of `success_reward`) of a right row, with `correctness="reward"`.
    """

    correctness: str = "majority"
    novelty_band: float = 0.5
    novelty_scores: str = "embedding"
    embedding_model: str = "Qwen/Qwen3-Embedding-4B"
    embedding_batch_size: int = 32
    success_threshold: float = 1.0

    def validate(self) -> None:
        super().validate()
        run_checks(self, CHECKS)
        if self.advantage in ("maxrl", "passk"):
            refuse(self, ["advantage"], "needs rewards of at least 0, or of 0 and 1, and EVOL-RL's have signs")
