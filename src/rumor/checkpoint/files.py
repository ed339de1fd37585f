"""Files that are complete or not there: written aside, then renamed. Damaged files are refused in one line."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a name beside `path` to write to. When the block ends, that file replaces `path`; if the block fails, it is removed.

    The new file is on disk before it is renamed, so a power cut leaves the old file or the new one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/table.csv") as aside:
    ...         _ = aside.write_text("n,beta")
    ...     (Path(folder) / "table.csv").read_text()
    'n,beta'
    """
    target = Path(path)
    aside = target.with_name(_aside(os.getpid(), target.name))
    try:
        yield aside
        _to_disk(aside)
        aside.replace(target)
        _to_disk(target.parent)
    finally:
        aside.unlink(missing_ok=True)


def remove_unfinished(folder: Path, pid: int) -> None:
    """Remove what process `pid`, which was killed, had not finished writing in `folder`."""
    for path in folder.glob(_aside(pid, "*")):
        path.unlink(missing_ok=True)


def _aside(pid: int, name: str) -> str:
    return f".{pid}.{name}"


def load_tensors(path: Path) -> Any:
    """Load what torch.save() wrote, to the CPU, as tensors and plain values: code in it is never run."""
    damaged = f"{path} is cut short or damaged, so it can't be loaded: go back to an earlier checkpoint"
    try:
        with zipfile.ZipFile(path) as parts:
            if torch.serialization.get_crc32_options() and parts.testzip() is not None:  # torch itself does not compare checksums
                raise ValueError(damaged)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, PermissionError):
        raise
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} holds more than tensors and plain values, so it is not loaded: code in it might run") from error
    except Exception as error:  # torch.load raises OSError, KeyError, EOFError, RuntimeError ...
        raise ValueError(damaged) from error


def _to_disk(path: Path) -> None:
    if os.name == "posix":  # on other systems a folder can't be opened
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
