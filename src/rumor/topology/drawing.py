"""Drawing: positions of the nodes of a topology, pairs to connect, and a picture of braille dots for the terminal."""

from __future__ import annotations

import re

import numpy as np

from rumor.topology.matrix import Array, Indices
from rumor.topology.topology import Topology

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column
EMPTY = chr(0x2800)  # the braille character without dots
MOST_LINKS = 4_000  # beyond these a picture is a blot
NUMBERED_UP_TO = 40  # nodes


def positions(topology: Topology) -> Array:
    """Return positions [n, 2] between 0 and 1: rows and columns for grid and torus, else a circle, clockwise from the top."""
    if shape := _shape(topology):
        rows, columns = shape
        row, column = np.divmod(np.arange(topology.n), columns)
        cell = 1 / max(rows - 1, columns - 1)
        return np.stack([column * cell, row * cell], axis=1)
    angle = 2 * np.pi * np.arange(topology.n) / topology.n
    return np.stack([0.5 + 0.5 * np.sin(angle), 0.5 - 0.5 * np.cos(angle)], axis=1)


def _shape(topology: Topology) -> tuple[int, int] | None:
    """Return rows and columns of a grid or torus; None for other topologies, and for a grid that is a line."""
    found = re.search(r"shape=\((\d+), (\d+)\)", topology.name)
    rows, columns = map(int, found.groups()) if found else (1, 1)
    return (rows, columns) if min(rows, columns) > 1 else None


def has_hidden_links(topology: Topology) -> bool:
    """Return whether some links lie on top of others, as those around a torus do."""
    return topology.name.startswith("torus") and _shape(topology) is not None


def links(topology: Topology) -> Indices:
    """Return the pairs [m, 2] that exchange something at some step of the cycle, each once."""
    pairs = []
    for k in range(topology.period):
        rows, columns, _ = topology.matrix(k).triplets()
        apart = rows != columns
        pairs.append(np.sort(np.stack([rows[apart], columns[apart]], axis=1), axis=1))
    return np.unique(np.concatenate(pairs), axis=0)


def braille(topology: Topology, width: int = 44) -> str | None:
    """Return the graph in braille dots, about `width` characters wide; None if it has too many links to be seen."""
    pairs = links(topology)
    if len(pairs) > MOST_LINKS or topology.n > MOST_LINKS:
        return None
    across = 2 * width - 3  # dots; a character is 2 wide and 4 high, and about twice as high as wide, so dots are square
    dots = np.rint(positions(topology) * across).astype(int) + 1
    height = int(dots[:, 1].max()) + 2
    canvas = np.zeros((-(-height // 4) * 4, 2 * width), dtype=bool)
    for i, j in pairs:
        _line(canvas, dots[i], dots[j])
    lines = _characters(canvas)
    if topology.n <= NUMBERED_UP_TO:
        for i, (x, y) in enumerate(dots):
            _write(lines[y // 4], str(i), x // 2)
    return "\n".join("".join(line).rstrip(EMPTY) for line in lines)


def _write(line: list[str], text: str, at: int) -> None:
    start = max(0, min(at - len(text) // 2, len(line) - len(text)))
    line[start : start + len(text)] = text


def _line(canvas: np.ndarray[tuple[int, int], np.dtype[np.bool_]], a: Indices, b: Indices) -> None:
    steps = int(np.abs(b - a).max()) + 1
    x, y = (np.rint(np.linspace(a[axis], b[axis], steps)).astype(int) for axis in (0, 1))
    canvas[y, x] = True


def _characters(canvas: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> list[list[str]]:
    rows, columns = canvas.shape
    cells = canvas.reshape(rows // 4, 4, columns // 2, 2)
    codes = ord(EMPTY) + np.einsum("ryxc,yc->rx", cells.astype(int), np.array(DOTS))
    return [[chr(code) for code in row] for row in codes]
