"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from alerting.files import write
from tests.disks import mounted


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "64k", lazily=True) as disk:
        yield disk


def test_a_full_disk_leaves_the_old_file_and_names_it(small_disk: Path) -> None:
    path = small_disk / "card"
    write(path, b"old")
    with pytest.raises(OSError, match="No space left") as caught:
        write(path, b"x" * 200_000)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_bytes() == b"old"
    assert list(small_disk.iterdir()) == [path]
