"""Files that are never seen half written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Write a file, synced; readers see the old one or the whole new one. Its folder is made if need be.

    Raises OSError when the disk refuses; then the old file is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        part = Path(file.name)
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from error
        except BaseException:
            part.unlink(missing_ok=True)
            raise
