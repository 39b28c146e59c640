"""One thread for tiny models on a CPU. With more threads, operations wait for cores that other processes use."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Models of at most this number of parameters use one thread. Larger models keep torch's default, because their
# operations are large enough for several threads. The table has the time with two threads divided by that with one.
# The machine had two cores and a load of 7, and a batch had 32 rows of 48 tokens. The worst case of sampling was 65.
#
#   million parameters | 0.1 |  1 | 4 | 8
#   training step      |  11 |  5 | 2 | 3
#   sampling           |   6 | 20 | 4 | 6
TINY = 10_000_000


def suitable_threads(num_parameters: int, device: torch.device) -> int:
    """Return 1 for a tiny model on a CPU, unless the user has set `OMP_NUM_THREADS`. Otherwise return the current
    number of threads."""
    user_decides = bool(os.environ.get("OMP_NUM_THREADS"))
    if user_decides or device.type != "cpu" or num_parameters > TINY:
        return torch.get_num_threads()
    return 1


@contextmanager
def few_threads(model: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """Use a suitable number of threads inside the context, and restore the former number afterwards. This suits
    library functions, because their caller's number of threads does not change."""
    before = torch.get_num_threads()
    torch.set_num_threads(suitable_threads(*_size_and_device(model, device)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def limit_threads(model: nn.Module, device: torch.device | None = None) -> None:
    """Set a suitable number of threads for the rest of a command. Print a note if this changes the number."""
    num_parameters, device = _size_and_device(model, device)
    threads = suitable_threads(num_parameters, device)
    if threads == torch.get_num_threads():
        return
    torch.set_num_threads(threads)
    print(
        f"trl-explore: computing with one thread, because the model is small ({num_parameters:,} parameters) and on a "
        "CPU; set OMP_NUM_THREADS for another number",
        file=sys.stderr,
    )


def _size_and_device(model: nn.Module, device: torch.device | None) -> tuple[int, torch.device]:
    parameters = list(model.parameters())
    return sum(parameter.numel() for parameter in parameters), device or parameters[0].device
