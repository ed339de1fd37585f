"""Formats text for the terminal: tables with aligned columns, and wrapped paragraphs."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

WIDTH = 80  # of a terminal that nobody has made wider, and of the code on the pages


def columns(stream: TextIO) -> int:
    """The width of the terminal behind `stream`, at most WIDTH; WIDTH if there is no terminal."""
    try:
        found = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return WIDTH
    return min(WIDTH, found or WIDTH)  # some terminals say 0


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Formats a table. The first `left` columns are aligned left, the others right.

    An empty row gives a blank line, and a row of one cell a heading.

    >>> print(table(("method", "ms"), [("Gossip SGD", "296"), ("Local", "7")]))
    method       ms
    Gossip SGD  296
    Local         7
    """
    filled = [row for row in (head, *rows) if len(row) == len(head)]
    widths = [max(len(row[i]) for row in filled) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = (cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=False)))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def paragraph(text: str, indent: str = "") -> str:
    """Wraps `text` to the width of the terminal; the lines after the first one start with `indent`."""
    return textwrap.fill(text, columns(sys.stdout), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
