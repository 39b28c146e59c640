"""All processes of a run: numbers, tensors and objects of each, and which rows are whose."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather, gather_object


class Ranks:
    """What processes tell each other. Every method but [`own`] and [`local`] is collective: all processes call it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.device = accelerator.device
        self.number: int = accelerator.num_processes
        self.index: int = accelerator.process_index

    def gathered(self, value: float) -> torch.Tensor:
        """One number per process, float64 of shape `(num_processes,)`."""
        own = torch.tensor([float(value)], dtype=torch.float64, device=self.device)
        return gather(own) if self.number > 1 else own

    def summed(self, values: dict[str, float]) -> dict[str, float]:
        """Numbers added up over all processes, in one call; every process has the same names."""
        numbers = torch.tensor([list(values.values())], dtype=torch.float64, device=self.device)
        return dict(zip(values, gather(numbers).sum(dim=0).tolist(), strict=True))

    def most(self, value: int) -> int:
        """The largest of the processes' numbers."""
        return int(self.gathered(value).max()) if self.number > 1 else value

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of all processes `(N, ...)`, the same number from each."""
        return gather(rows)

    def objects(self, own: list[Any]) -> list[Any]:
        """Lists of all processes, one behind the other."""
        return gather_object(own)

    def own(self, num_rows: int) -> slice:
        """Where this process's rows are among those of all, `num_rows` each."""
        return slice(self.index * num_rows, (self.index + 1) * num_rows)

    def local(self, gathered: torch.Tensor) -> torch.Tensor:
        """This process's rows `(B, ...)` of a tensor `(N, ...)` gathered over all processes."""
        return gathered[self.own(len(gathered) // self.number)]
