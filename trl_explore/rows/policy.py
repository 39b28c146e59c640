"""`Policy`, the interface through which parts see the trainer, and `Pass`, the state of a pass over further rows."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import GenerationConfig, ProcessorMixin

from trl_explore.rows.ranks import Ranks
from trl_explore.rows.rollouts import Part, Rows

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig

Lists = defaultdict[str, list[Any]]


def _lists() -> Lists:
    return defaultdict(list)


@dataclass
class Pass:
    """
    State of TRL's methods while they work on rows other than the main rows.

    A pass collects everything that TRL logs and counts during it, so that the logs and counts of the main rows do not
    change.
    """

    name: str | None = None  # stream, whose name begins its metrics; None in `Scorer.judge`, which drops TRL's metrics
    rows: Rows | None = None  # rows that are already sampled; None while the loss of a stream is computed
    environments: list[Any] | None = None  # environment of each row after its completion, for reward functions
    keep_metrics: bool = False  # True: add the values in `pending` to the metrics of the main rows
    metrics: Lists = field(default_factory=_lists)  # metrics that TRL logs in this pass
    logs: dict[str, Any] = field(default_factory=dict)  # completions table of this pass
    columns: Lists = field(default_factory=_lists)  # values that reward functions log with `log_extra`
    pending: Lists = field(default_factory=_lists)  # values that reward functions log with `log_metric`
    rewards_per_func: torch.Tensor | None = None  # raw rewards, `(N, F)`; NaN if a row was not scored


class Policy(Protocol):
    """The trainer as its parts see it. [`~trl_explore.trainers.ExplorationTrainer`] is one."""

    accelerator: Any
    model: Any  # the model in training, wrapped by accelerate
    state: Any  # `TrainerState` of transformers
    eos_token_ids: list[int]
    reward_func_names: list[str]
    reward_weights: torch.Tensor  # `(F,)`
    log_completions: bool
    exploration_generator: torch.Generator  # for all random choices of a method; not used to sample main rows

    @property
    def args(self) -> "ExplorationConfig":
        """The configuration; a property, because each trainer narrows the type."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; with images, the tokenizer of the processor."""
        ...

    @property
    def ranks(self) -> Ranks:
        """The processes of the run: sums and gathers over them."""
        ...

    @property
    def training_progress(self) -> float:
        """Completed share of the training, from 0 to 1."""
        ...

    @property
    def serving(self) -> Any:
        """The vLLM backend, a [`~trl_explore.serving.session.Serving`]. None if transformers samples."""
        ...

    def generate(
        self, prefixes: list[list[int]], max_new_tokens: int, parts: Sequence[Part] | None = None
    ) -> list[list[int]]:
        """Return one continuation of each prefix, sampled by TRL with transformers. Some options count tokens from the
        start of a completion. For these, `parts` says how many tokens of its completion each prefix already has."""
        ...

    def generating(self) -> AbstractContextManager[tuple[Any, GenerationConfig]]:
        """Prepare the model for generation as TRL does with transformers. Yield the model and its sampling options.
        Every process must enter."""
        ...

    def forward(
        self, model: Any, ids: torch.Tensor, mask: torch.Tensor, width: int, **options: Any
    ) -> tuple[torch.Tensor, Any]:
        """Return log-probabilities `(R, width)` of the last `width` tokens of padded rows, and with `compute_entropy`
        their entropies, `(R, width)`."""
        ...

    def encode_prompts(self, prompts: list) -> list[list[int]]:
        """Return the tokens of prompts (texts or conversations), encoded as TRL encodes the prompts of a data set."""
        ...

    def running(self, other: Pass) -> AbstractContextManager[Pass]:
        """Let TRL's methods work in the pass `other`, and restore the state of the main rows at the end."""
        ...

    def scored(self, rows: Rows) -> dict[str, Any]:
        """Score the rows of the running pass. Return them as TRL's loss receives them."""
        ...

    def rewarded(self, rows: Rows) -> torch.Tensor:
        """Return the rewards `(N, F)` of the rows of the running pass. Compute no advantages or log-probabilities."""
        ...

    def loss(self, model: Any, rows: dict[str, Any]) -> torch.Tensor:
        """Return TRL's loss of a micro-batch."""
        ...

    def log_metric(self, name: str, value: float) -> None:
        """Log a training metric. Pass the same value on all processes. TRL logs the mean over the interval."""
        ...


def tokenizer_of(trainer: Any) -> Any:
    """Return the tokenizer of a trainer; with images, the tokenizer of its processor."""
    processing = trainer.processing_class
    if isinstance(processing, ProcessorMixin):
        return processing.tokenizer
    return processing
