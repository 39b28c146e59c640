"""What every run of a tiny model would do again and again, and what takes longer than the run itself: done once."""

import functools
import gc

from accelerate.utils import imports


def quicken():
    """To be called when everything is imported."""
    # Every training starts by collecting garbage, and would look at all that was imported.
    gc.collect()
    gc.freeze()
    # Every trainer has Accelerate ask the disk, several times, whether this and that package is installed.
    imports._is_package_available = functools.cache(imports._is_package_available)
