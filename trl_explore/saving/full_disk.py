"""Detection of errors that a full disk causes, in Python and in libraries that write files."""

import errno
import re

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Texts of errors of safetensors and torch, which raise no OSError for a full disk.
DISK_FULL_TEXT = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|PytorchStreamWriter failed writing file"
)


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether a full disk caused an error, or one of the errors that led to it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return True
        if DISK_FULL_TEXT.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
