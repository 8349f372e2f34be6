"""File systems that are soon full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, size: str, *, lazily: bool = False) -> Iterator[Path]:
    """Have a file system of `size` ("64k") in memory at `folder`; the test is skipped where that cannot be.

    Unless it goes `lazily`, nothing in it may be open at the end.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs root and the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", *["--lazy"] * lazily, str(folder)], check=True)
