"""`trl-explore env`: what is installed here and which parts of the package can use it."""

import platform
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from trl_explore import __version__
from trl_explore.compat import SEAMS, difference
from trl_explore.methods import METHODS

PACKAGES = ("torch", "trl", "transformers", "accelerate", "peft", "datasets", "vllm", "bitsandbytes")


def _supported_ranges() -> dict[str, Requirement]:
    """The ranges that this installation declares, so that they are written down once, in pyproject.toml."""
    try:
        requirements = [Requirement(text) for text in requires("trl-explore") or []]
    except PackageNotFoundError:  # a bare clone on sys.path
        return {}
    return {requirement.name: requirement for requirement in requirements}


def _describe_package(name: str, ranges: dict[str, Requirement]) -> str:
    try:
        installed = version(name)
    except PackageNotFoundError:
        return "not installed"
    if name not in ranges or not str(ranges[name].specifier):
        return installed
    supported = ranges[name].specifier
    # prereleases: a development build of a supported version is in range
    verdict = "supported" if supported.contains(installed, prereleases=True) else "NOT SUPPORTED, expected"
    return f"{installed} ({verdict}: {supported})"


def _describe_vllm(ranges: dict[str, Requirement]) -> str:
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return "no (--use_vllm needs pip install 'trl-explore[vllm]')"
    if "vllm" in ranges and not ranges["vllm"].specifier.contains(installed, prereleases=True):
        return f"not supported with vllm {installed} (pip install 'trl-explore[vllm]')"
    return "yes (--use_vllm)"


def _describe_devices() -> str:
    import torch

    from trl_explore.machine.devices import available_accelerator

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    accelerator = available_accelerator()
    return accelerator.type if accelerator is not None else f"cpu ({torch.get_num_threads()} threads)"


def describe_environment() -> str:
    """
    Versions, devices, methods, sampling backends and what is relied on of TRL and transformers, ready to be pasted
    into an issue: a `- name: value` line each.
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
    seams = {f"{seam.path} ({seam.needed_by or seam.door})": difference(seam) for seam in SEAMS}
    moved = sum(what is not None for what in seams.values())
    facts["seams into TRL and transformers"] = f"{moved} of {len(seams)} moved" if moved else f"all {len(seams)} fit"
    return "\n".join(
        [
            *(f"- {name}: {value}" for name, value in facts.items()),
            *(f"  - {seam}: {what or 'fits'}" for seam, what in seams.items()),
        ]
    )
