"""Cache for models that trl-explore creates: converted models, and models after a supervised warm start."""

import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

from trl_explore.errors import UsageError


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the cache: `cache_dir` if given, then `$TRL_EXPLORE_CACHE`, then `~/.cache/trl-explore`."""
    return Path(
        cache_dir or os.environ.get("TRL_EXPLORE_CACHE") or Path.home() / ".cache" / "trl-explore"
    ).expanduser()


def check_cache(folder: Path) -> None:
    """Raise a UsageError if a folder is not writable. Call this before a model for the folder is trained."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(
            f"models cannot be kept in the cache folder {str(folder)!r} ({error.strerror}); name another folder in "
            "TRL_EXPLORE_CACHE"
        ) from error


def publish(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a model and its tokenizer in `folder`. Even if the process is killed, `folder` is complete or absent."""
    unfinished = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    unfinished.mkdir(parents=True)
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
    except OSError:
        # If `folder` exists now, another process has saved the same model in the meantime: keep its copy.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
