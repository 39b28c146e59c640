"""What a disk without room looks like, whichever library wrote to it."""

import errno
import re

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# safetensors and torch raise errors of their own.
SAID = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|PytorchStreamWriter failed writing file"
)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one behind it, is that of a disk without room."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM or SAID.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
