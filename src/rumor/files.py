"""Files that are whole or not there: written aside, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name beside `path` to write to, with the same suffix; it takes the place of `path` when the block ends, and is removed if it fails.

    What was written is on disk before it is renamed, so that a power cut leaves the old file or the new one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/table.csv") as aside:
    ...         _ = aside.write_text("n,beta")
    ...     (Path(folder) / "table.csv").read_text()
    'n,beta'
    """
    target = Path(path)
    aside = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        yield aside
        _to_disk(aside)
        aside.replace(target)
        _to_disk(target.parent)
    finally:
        aside.unlink(missing_ok=True)


def _to_disk(path: Path) -> None:
    if os.name == "posix":  # elsewhere a folder can't be opened
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
