"""Formats text for the terminal: tables with aligned columns, and wrapped paragraphs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 110


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Formats a table. The first `left` columns are aligned left, the others right. An empty row gives a blank line.

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
    """Wraps `text`; the lines after the first one start with `indent`."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
