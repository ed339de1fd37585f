"""Files that are whole or not there: written aside, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name beside `path` to write to, with the same suffix; it takes the place of `path` when the block ends, and is removed if it fails.

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
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
