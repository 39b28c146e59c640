"""How likely branches recover at which depth, learned while training goes on (section 4.2 of DEEP-GRPO).

https://huggingface.co/papers/2602.14169
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch


class SuccessEstimator:
    """
    Logistic regression of recoverability on relative depth, `P(success | r) = sigmoid(w r + b)` (section 4.2).

    The parameters minimise the cross-entropy, summed over a first-in-first-out buffer of `(r, y)`, plus
    `l2 / 2 * w**2`. The intercept is not penalised: where success is rare, the slope would have to say so instead.
    Until `min_samples` pairs are held, and both labels among them, `w = b = 0`, which makes every depth equally
    promising. A buffer that holds one label only has no finite fit; the last one stays.

    Args:
        buffer_size (`int`):
            Pairs kept.
        l2 (`float`):
            Weight of the slope's quadratic penalty, positive: without it separable labels have no minimum. Each
            outcome counts 1, so that the penalty fades as they come in.
        min_samples (`int`, *optional*, defaults to `10`):
            Pairs needed before the first fit.
    """

    def __init__(self, *, buffer_size: int, l2: float, min_samples: int = 10) -> None:
        if buffer_size < 1:
            raise ValueError(f"`buffer_size` must be at least 1, got {buffer_size}.")
        if not l2 > 0:
            raise ValueError(f"`l2` must be positive, got {l2}: separable labels have no finite fit without it.")
        self.buffer_size = buffer_size
        self.l2 = l2
        self.min_samples = min_samples
        self.weight = 0.0
        self.bias = 0.0
        self._buffer: deque[tuple[float, int]] = deque(maxlen=buffer_size)
        # Its import takes more than a second, which the first training step should not.
        from sklearn.linear_model import LogisticRegression

        self._model_class = LogisticRegression

    def __len__(self) -> int:
        return len(self._buffer)

    def add(self, depths: Sequence[float], labels: Sequence[int]) -> None:
        """Remember relative depths of pivots, in (0, 1], and labels: 1 where at least one branch succeeded."""
        for depth, label in zip(depths, labels, strict=True):
            self._buffer.append((float(depth), int(label)))

    def fit(self) -> None:
        """Refit to the buffer. Does nothing while it holds one label only, or fewer than `min_samples` pairs."""
        labels = [label for _, label in self._buffer]
        if len(set(labels)) < 2 or len(self) < self.min_samples:
            return
        # Newton's steps are exact for two parameters. The default solver stops early where success is rare: there the
        # likelihood is flat in the slope.
        model = self._model_class(C=1 / self.l2, solver="newton-cholesky", tol=1e-8)
        model.fit([[depth] for depth, _ in self._buffer], labels)
        self.weight, self.bias = float(model.coef_[0, 0]), float(model.intercept_[0])

    def predict(self, depths: torch.Tensor) -> torch.Tensor:
        """Estimated probability of recovering at relative depths `(T,)`, in float64."""
        return torch.sigmoid(self.weight * torch.as_tensor(depths, dtype=torch.float64) + self.bias)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as plain numbers and lists."""
        return {"weight": self.weight, "bias": self.bias, "buffer": [list(pair) for pair in self._buffer]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what [`~SuccessEstimator.state_dict`] returned; a smaller buffer keeps the newest pairs."""
        self.weight, self.bias = state["weight"], state["bias"]
        self._buffer = deque(((depth, int(label)) for depth, label in state["buffer"]), maxlen=self.buffer_size)
