"""The command `trl-explore env`, which prints installed versions, devices and supported features."""

import platform
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from trl_explore import __version__
from trl_explore.compat import SEAMS, difference
from trl_explore.methods import METHODS

PACKAGES = ("torch", "trl", "transformers", "accelerate", "peft", "datasets", "vllm", "bitsandbytes")


def _supported_ranges() -> dict[str, Requirement]:
    """Return the supported version ranges of packages, from the metadata of the installed trl-explore."""
    try:
        requirements = [Requirement(text) for text in requires("trl-explore") or []]
    except PackageNotFoundError:  # a clone on sys.path that is not installed
        return {}
    return {requirement.name: requirement for requirement in requirements}


def _describe_package(name: str, ranges: dict[str, Requirement]) -> str:
    """Return the installed version of a package, and whether it is supported."""
    try:
        installed = version(name)
    except PackageNotFoundError:
        return "not installed"
    if name not in ranges or not str(ranges[name].specifier):
        return installed
    supported = ranges[name].specifier
    # A development build of a supported version is also supported.
    if supported.contains(installed, prereleases=True):
        return f"{installed} (supported: {supported})"
    return f"{installed} (NOT SUPPORTED, expected: {supported})"


def _describe_vllm(ranges: dict[str, Requirement]) -> str:
    """Return whether sampling with vLLM is possible."""
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return "no (--use_vllm needs pip install 'trl-explore[vllm]')"
    if "vllm" in ranges and not ranges["vllm"].specifier.contains(installed, prereleases=True):
        return f"not supported with vllm {installed} (pip install 'trl-explore[vllm]')"
    return "yes (--use_vllm)"


def _describe_devices() -> str:
    """Return the names of the GPUs. Without a GPU, return the type of the device."""
    import torch

    from trl_explore.machine.devices import available_accelerator

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    accelerator = available_accelerator()
    if accelerator is None:
        return f"cpu ({torch.get_num_threads()} threads)"
    return accelerator.type


def describe_environment() -> str:
    """
    Describe the environment for an issue.

    Returns:
        `str`: Lines `- name: value` with the versions, the devices, the methods, the sampling backends, and the number
        of seams that differ. A seam is a part of TRL or transformers that [`trl_explore.compat`] checks. Each seam
        that differs has a line of its own.
    """
    ranges = _supported_ranges()
    facts = {
        "trl-explore": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _describe_package(name, ranges) for name in PACKAGES},
        "devices": _describe_devices(),
        "methods": ", ".join(METHODS),
        "sampling with transformers": "yes",
        "sampling with transformers continuous batching": "yes (--use_transformers_continuous_batching)",
        "sampling with vllm": _describe_vllm(ranges),
    }
    num_moved = 0
    seam_lines = []
    for seam in SEAMS:
        found = difference(seam)
        num_moved += found is not None
        if found is not None:
            seam_lines.append(f"  - {seam.path} ({seam.needed_by or seam.door}): {found}")
    fit = f"{num_moved} of {len(SEAMS)} differ" if num_moved else f"all {len(SEAMS)} are as expected"
    facts["parts of TRL and transformers that the trainers rely on"] = fit
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    return "\n".join(lines + seam_lines)
