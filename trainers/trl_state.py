"""The attributes of TRL's trainer that a pass over further rows replaces, and restores at its end."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self


@dataclass
class TRLState:
    """
    The attributes that TRL's methods read and write while they sample, score and train rows.

    If the installed TRL does not have one of these attributes, its value here has no effect.
    """

    logs: dict[str, Any]  # completions table
    metrics: defaultdict[str, list[Any]]  # metrics of training
    pending_metrics: defaultdict[str, list[Any]]  # values that reward functions log with `log_metric`
    pending_columns: defaultdict[str, list[Any]]  # values that reward functions log with `log_extra`
    num_tokens_seen: int  # counter that the metric `num_tokens` shows
    num_generations: int  # size of a group
    has_entropy_bonus: bool  # True: the loss has an entropy bonus
    has_router_loss: bool  # True: the loss has the router loss of a mixture of experts
    tools: list[Any]  # every tool that some row may call
    environments: list[Any] | None  # environment of each row
    environment_factories: dict[Any, Callable[[], Any]] | None  # by environment name
    rollout_func: Callable[..., Any] | None

    @classmethod
    def of(cls, trainer: Any) -> Self:
        """Return the current values of a trainer."""
        return cls(
            logs=trainer._logs,
            metrics=trainer._metrics["train"],
            pending_metrics=trainer._pending_metrics,
            pending_columns=trainer._pending_extra_logs,
            num_tokens_seen=trainer.state.num_input_tokens_seen,
            num_generations=trainer.num_generations,
            has_entropy_bonus=getattr(trainer, "_entropy_bonus_enabled", False),
            has_router_loss=trainer.aux_loss_enabled,
            tools=trainer.tools,
            environments=getattr(trainer, "environments", None),
            environment_factories=getattr(trainer, "environment_factories", None),
            rollout_func=trainer.rollout_func,
        )

    def put_into(self, trainer: Any) -> None:
        """Set these values in a trainer."""
        trainer._logs = self.logs
        trainer._metrics["train"] = self.metrics
        trainer._pending_metrics = self.pending_metrics
        trainer._pending_extra_logs = self.pending_columns
        trainer.state.num_input_tokens_seen = self.num_tokens_seen
        trainer.num_generations = self.num_generations
        trainer._entropy_bonus_enabled = self.has_entropy_bonus
        trainer.aux_loss_enabled = self.has_router_loss
        trainer.tools = self.tools
        trainer.environments = self.environments
        trainer.environment_factories = self.environment_factories
        trainer.rollout_func = self.rollout_func
