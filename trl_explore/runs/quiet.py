"""What other libraries say that no user can act on."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_noise() -> Iterator[None]:
    """Hides what TRL and bitsandbytes make other libraries say at the start of every run: no user can act on it."""
    about_4bit = logging.getLogger("bitsandbytes.backends.cpu.ops")

    def is_needed(record: logging.LogRecord) -> bool:
        return "gemm_4bit_forward" not in record.getMessage()

    about_4bit.addFilter(is_needed)
    try:
        with warnings.catch_warnings():
            # The fields and methods of transformers that its version 6 renames; TRL 1.16 uses them.
            renamed = r"`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated and will be removed in v6"
            warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)
            # The argument that transformers 5.24 renames; PEFT 0.21 uses it.
            renamed = r"`past_key_values` is deprecated and will be removed in version"
            warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)
            yield
    finally:
        about_4bit.removeFilter(is_needed)


def quiet() -> None:
    """Keep the libraries' warnings and bars from burying the progress line."""
    import transformers

    warnings.filterwarnings("ignore")
    logging.getLogger("trl").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
