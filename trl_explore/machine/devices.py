"""The accelerator of this machine."""

import torch


def available_accelerator() -> torch.device | None:
    """
    Return the accelerator of this machine, or None if it has none.

    `torch.accelerator.current_accelerator` names the accelerator that torch was built for. The build that pip installs
    on Linux is built for CUDA, also on a machine without a GPU.
    """
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
