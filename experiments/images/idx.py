"""Reads IDX files, the format of Fashion-MNIST."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Reads an IDX file of bytes: two zeros, the type (8), the number of dimensions, their sizes as big-endian int32, the data."""
    raw = path.read_bytes()
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an IDX file of bytes: it must begin with 00 00 08, not {raw[:3].hex(' ')}")
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def find(folder: Path | None) -> Path:
    """Finds the folder that holds FILES: `folder` or one of its subfolders."""
    if folder is not None:
        for images in sorted(folder.rglob(FILES[0])):
            if all(images.with_name(name).exists() for name in FILES):
                return images.parent
    where = f"{folder} does not have" if folder else "give --data FOLDER with"
    raise FileNotFoundError(f"Fashion-MNIST is missing: {where} all of {', '.join(FILES)} (unpacked)")
