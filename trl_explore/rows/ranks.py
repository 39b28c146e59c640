"""Sums, gathers and row numbers across the processes of a run."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather, gather_object


class Ranks:
    """Communicates between processes. All methods except [`own`] and [`local`] are collective: every process must call
    them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.device = accelerator.device
        self.number: int = accelerator.num_processes
        self.index: int = accelerator.process_index

    def gathered(self, value: float) -> torch.Tensor:
        """Return the `value` of each process as a float64 tensor `(num_processes,)`."""
        return self._of_all([float(value)])[:, 0]

    def summed(self, values: dict[str, float]) -> dict[str, float]:
        """Return the sum of each value over all processes. Every process passes the same names."""
        sums = self._of_all([*values.values()]).sum(dim=0)
        return dict(zip(values, sums.tolist(), strict=True))

    def most(self, value: int) -> int:
        """Return the largest `value` of all processes."""
        if self.number == 1:
            return value
        return int(self.gathered(value).max())

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all processes, `(N, ...)`. Every process passes the same number of rows."""
        return gather(rows)

    def objects(self, own: list[Any]) -> list[Any]:
        """Return the concatenated lists of all processes."""
        return gather_object(own)

    def own(self, num_rows: int) -> slice:
        """Return the slice of this process's rows in a gathered tensor with `num_rows` rows per process."""
        return slice(self.index * num_rows, (self.index + 1) * num_rows)

    def local(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return this process's rows `(B, ...)` of a tensor `(N, ...)` that was gathered over all processes."""
        return gathered[self.own(len(gathered) // self.number)]

    def _of_all(self, own: list[float]) -> torch.Tensor:
        """Return the K numbers of each process as a float64 tensor `(num_processes, K)`. For a single process, the
        tensor is on the CPU, because Apple's MPS devices have no float64."""
        if self.number == 1:
            return torch.tensor([own], dtype=torch.float64)
        return gather(torch.tensor([own], dtype=torch.float64, device=self.device))
