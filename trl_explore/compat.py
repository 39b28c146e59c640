"""Which versions of TRL this release was written against."""

from packaging.version import Version

MIN_TRL, MAX_TRL = "1.16.0", "1.17"


def check_trl_version(version: str) -> None:
    """
    Refuse a TRL version whose internals are not the ones the trainers re-enter.

    Args:
        version (`str`):
            Installed version of TRL.

    Raises:
        ImportError: If it is outside the supported range.
    """
    if not Version(MIN_TRL) <= Version(version) < Version(MAX_TRL):
        raise ImportError(
            f"trl-explore needs trl>={MIN_TRL},<{MAX_TRL}, but trl {version} is installed. "
            f"Run `pip install 'trl>={MIN_TRL},<{MAX_TRL}'`, or install a trl-explore made for that version."
        )
