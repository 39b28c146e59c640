"""Filters for warnings of other libraries that users cannot prevent."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_noise() -> Iterator[None]:
    """Hide the warnings that TRL, PEFT and bitsandbytes cause at the start of every run."""
    about_4bit = logging.getLogger("bitsandbytes.backends.cpu.ops")

    def is_needed(record: logging.LogRecord) -> bool:
        return "gemm_4bit_forward" not in record.getMessage()

    about_4bit.addFilter(is_needed)
    try:
        with warnings.catch_warnings():
            # TRL 1.16 uses fields and methods of transformers that transformers 6 renames.
            renamed = r"`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated and will be removed in v6"
            warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)
            # PEFT 0.21 uses an argument that transformers 5.24 renames.
            renamed = r"`past_key_values` is deprecated and will be removed in version"
            warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)
            yield
    finally:
        about_4bit.removeFilter(is_needed)


def quiet() -> None:
    """Hide the libraries' warnings and progress bars, so that the command's own progress stays visible."""
    import transformers

    warnings.filterwarnings("ignore")
    logging.getLogger("trl").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
