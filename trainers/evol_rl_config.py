"""Configuration of EVOL-RL."""

from dataclasses import dataclass

from trl_explore.credit.checks import refuse
from trl_explore.credit.functions import advantage_parts
from trl_explore.names import explain_fields

from .config import ExplorationConfig, at_least, one_of, run_checks, within

CHECKS = (
    one_of("correctness", ("majority", "reward")),
    one_of("novelty_scores", ("embedding", "shuffled")),
    within("novelty_band", low=0, high=0.999, words="be in [0, 1); 0 ignores novelty"),
    within("success_threshold"),
    at_least(1, "embedding_batch_size"),
)


@explain_fields
@dataclass
class EvolRLConfig(ExplorationConfig):
    r"""
    Configuration of [`EvolRLTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of EVOL-RL.

    Fields of GRPO keep TRL's defaults. The paper trains with `epsilon_high=0.28` and an entropy bonus
    (`entropy_coef`).

    Args:
        correctness (`str`, *optional*, defaults to `"majority"`):
            Rule that decides which completions are right: `"majority"` or `"reward"`. With `"majority"`, the answer
            that most completions of the prompt give is right. It needs no labels, and reward functions are only
            logged. With `"reward"`, reward functions decide.
        novelty_band (`float`, *optional*, defaults to `0.5`):
            Width of the bands of rewards, in [0, 1). Right completions get rewards from 1 minus this width to 1. Wrong
            ones get rewards from -1 to -1 plus this width. In both bands, more novel completions get larger rewards.
            With a wider band, novelty has more weight. With 0, rewards are 1 and -1, and with `correctness="reward"`
            the method is GRPO.
        novelty_scores (`str`, *optional*, defaults to `"embedding"`):
            Novelty scores: `"embedding"` or `"shuffled"`. `"shuffled"` is the control for a comparison: the same
            scores, permuted at random among the right and among the wrong completions of a prompt, so that they carry
            no information.
        embedding_model (`str`, *optional*, defaults to `"Qwen/Qwen3-Embedding-4B"`):
            Model of sentence-transformers that compares texts: a name or a folder. `Qwen/Qwen3-Embedding-0.6B` has a
            seventh of the default's size. `"ngrams"` counts groups of three characters and needs no model.
        embedding_batch_size (`int`, *optional*, defaults to `32`):
            Number of texts per call of the embedding model, at least 1. Larger batches need fewer calls and more
            memory.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward of a right completion, with `correctness="reward"`. The reward is the total reward, or the
            reward of `success_reward` if that is set.
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
        if self.correctness == "majority":
            self._refuse_fields_that_need_rewards()
        if any(part.name in ("maxrl", "passk", "reinforce") for part in advantage_parts(self)):
            refuse(self, ["advantage"], "needs rewards of at least 0, or of 0 and 1, but EVOL-RL's can be negative")

    def _refuse_fields_that_need_rewards(self) -> None:
        """Raise a ValueError if a field chooses prompts by the reward functions."""
        questions = {
            "explore": "which prompts are unsolved",
            "dynamic_sampling": "which groups have contrast",
            "explore_threshold": "which prompts are solved",
        }
        for field, question in questions.items():
            value = getattr(self, field)
            if value not in (None, "off"):
                raise ValueError(
                    f"`{field}={value!r}` asks the reward functions {question}, and `correctness='majority'` trains "
                    f"without them: set `correctness='reward'`, or leave `{field}` out."
                )
