"""Success estimator: predicts from which depths branches succeed, and learns during training (DEEP-GRPO, section 4.2).

https://huggingface.co/papers/2602.14169
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch


class SuccessEstimator:
    """
    Logistic regression of a pivot's success on its relative depth: `P(success | r) = sigmoid(w r + b)` (section 4.2).

    The buffer holds the latest pairs `(r, y)` of depth and label. The parameters minimize the cross-entropy, summed
    over the buffer, plus `l2 / 2 * w**2`. The intercept has no penalty: with one, rare success would change the
    slope. Before the first fit `w = b = 0`, so that all depths have the same probability.

    Args:
        buffer_size (`int`):
            Maximum number of pairs in the buffer.
        l2 (`float`):
            Weight of the slope's penalty, positive: without it, separable labels have no finite fit. The cross-entropy
            is a sum, so the penalty matters less as the buffer fills.
        min_samples (`int`, *optional*, defaults to `10`):
            Number of pairs before the first fit.
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
        # This import takes more than a second. Do it here, so that the first training step is not slowed down.
        from sklearn.linear_model import LogisticRegression

        self._model_class = LogisticRegression

    def __len__(self) -> int:
        return len(self._buffer)

    def add(self, depths: Sequence[float], labels: Sequence[int]) -> None:
        """Store relative depths of pivots, in (0, 1], and their labels: 1 if at least one branch succeeded, else 0."""
        for depth, label in zip(depths, labels, strict=True):
            self._buffer.append((float(depth), int(label)))

    def fit(self) -> None:
        """Fit the parameters to the buffer, unless it has only one label, or fewer than `min_samples` pairs."""
        labels = [label for _, label in self._buffer]
        if len(set(labels)) < 2 or len(self) < self.min_samples:
            return
        # If success is rare, the likelihood is nearly flat in the slope, and the default solver stops too early. With
        # two parameters, Newton's method is cheap.
        model = self._model_class(C=1 / self.l2, solver="newton-cholesky", tol=1e-8)
        model.fit([[depth] for depth, _ in self._buffer], labels)
        self.weight, self.bias = float(model.coef_[0, 0]), float(model.intercept_[0])

    def predict(self, depths: torch.Tensor) -> torch.Tensor:
        """Return the estimated success probability at relative depths `(T,)`, in float64."""
        return torch.sigmoid(self.weight * torch.as_tensor(depths, dtype=torch.float64) + self.bias)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint, as plain numbers and lists."""
        return {"weight": self.weight, "bias": self.bias, "buffer": [list(pair) for pair in self._buffer]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. If the buffer is smaller now, it keeps the newest pairs."""
        self.weight, self.bias = state["weight"], state["bias"]
        self._buffer = deque(((depth, int(label)) for depth, label in state["buffer"]), maxlen=self.buffer_size)
