"""What the parts of a trainer know of it: the policy that is trained, and the pass that is running."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, ProcessorMixin

from trl_explore.rows.ranks import Ranks
from trl_explore.rows.rollouts import Part, Rows

Lists = defaultdict[str, list[Any]]


def _lists() -> Lists:
    return defaultdict(list)


@dataclass
class Pass:
    """TRL's methods at work on other rows than the main ones; nothing that they log or count there touches those."""

    name: str | None = None  # stream, prefix of its metrics; `None` for a judgement, whose logs are dropped
    rows: Rows | None = None  # sampled already; `None` while a stream's loss is computed
    environments: list[Any] | None = None  # after each of the rows, for reward functions
    keep_metrics: bool = False  # metrics that reward functions log are the main rows' all the same
    metrics: Lists = field(default_factory=_lists)  # what TRL logs meanwhile, like the three below
    logs: dict[str, Any] = field(default_factory=dict)
    columns: Lists = field(default_factory=_lists)  # `log_extra` of reward functions
    pending: Lists = field(default_factory=_lists)  # `log_metric` of reward functions
    rewards_per_func: torch.Tensor | None = None  # raw, `(N, F)`; NaN where not scored


class Policy(Protocol):
    """The trainer as its parts see it. [`~trl_explore.trainers.ExplorationTrainer`] is one."""

    args: Any
    accelerator: Any
    model: Any  # as it is trained
    state: Any  # transformers': how far the training is
    eos_token_ids: list[int]
    reward_func_names: list[str]
    reward_weights: torch.Tensor  # `(F,)`
    log_completions: bool
    exploration_generator: torch.Generator  # draws everything beside the main stream

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, also where images are processed."""
        ...

    @property
    def ranks(self) -> Ranks:
        """The processes of the run."""
        ...

    @property
    def training_progress(self) -> float:
        """Share of the training that is over, from 0 to 1."""
        ...

    @property
    def serving(self) -> Any:
        """The vLLM backend, a [`~trl_explore.serving.session.Serving`]; `None` where transformers samples."""
        ...

    def generate(
        self, prefixes: list[list[int]], max_new_tokens: int, parts: Sequence[Part] | None = None
    ) -> list[list[int]]:
        """Return one continuation of each prefix, by TRL's own generation in transformers. `parts` are the places of
        the new tokens in their completions, for options that count from the start of a completion."""
        ...

    def generating(self) -> AbstractContextManager[tuple[Any, GenerationConfig]]:
        """The model as TRL generates with it in transformers, and its sampling options; every process enters."""
        ...

    def forward(
        self, model: Any, ids: torch.Tensor, mask: torch.Tensor, width: int, **options: Any
    ) -> tuple[torch.Tensor, Any]:
        """Log-probabilities and, with `compute_entropy`, entropies `(R, width)` of the last tokens of padded rows."""
        ...

    def encode_prompts(self, prompts: list) -> list[list[int]]:
        """Tokens of prompts, as TRL encodes those of the data set."""
        ...

    def running(self, other: Pass) -> AbstractContextManager[Pass]:
        """Let TRL's methods work on another pass."""
        ...

    def scored(self, rows: Rows) -> dict[str, Any]:
        """The rows of the pass that is running, as TRL's loss receives them."""
        ...

    def rewarded(self, rows: Rows) -> torch.Tensor:
        """Rewards `(N, F)` of the rows of the pass that is running, and nothing more."""
        ...

    def loss(self, model: Any, rows: dict[str, Any]) -> torch.Tensor:
        """TRL's loss of a micro-batch."""
        ...

    def log_metric(self, name: str, value: float) -> None:
        """Log a training metric, averaged over the logging interval."""
        ...


def tokenizer_of(trainer: Any) -> Any:
    """The tokenizer of a trainer, also where it processes images."""
    processing = trainer.processing_class
    return processing.tokenizer if isinstance(processing, ProcessorMixin) else processing
