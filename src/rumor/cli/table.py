"""Text for people: tables whose columns line up, and paragraphs that fit."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 110


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns two spaces apart; the first `left` of them flush left, the others flush right. An empty row is a blank line.

    >>> print(table(("method", "ms"), [("Gossip SGD", "296"), ("Local", "7")]))
    method       ms
    Gossip SGD  296
    Local         7
    """
    filled = [row for row in (head, *rows) if row]
    widths = [max(len(row[i]) for row in filled) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = (cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=False)))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def paragraph(text: str, indent: str = "") -> str:
    """Wrapped; lines after the first are indented."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
