"""Formats text for the terminal: tables with aligned columns, and wrapped paragraphs."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

WIDTH = 80  # where there is no terminal, and on the pages
NARROWEST, WIDEST = 40, 140  # narrower lines break words, longer ones are hard to read


def columns(stream: TextIO) -> int:
    """The width to write to `stream`: $COLUMNS if it is set, else that of the terminal, else WIDTH."""
    try:
        found = int(os.environ.get("COLUMNS", 0)) or os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return WIDTH
    return max(NARROWEST, min(WIDEST, found)) if found > 0 else WIDTH  # some terminals say 0


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Formats a table. The first `left` columns are aligned left, the others right. An empty row gives a blank line,
    and a row of one cell is a heading.

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
        lines.append("  ".join(cells if len(row) == len(head) else row).rstrip())
    return "\n".join(lines)


def fitted(head: Sequence[str], rows: Sequence[Sequence[str]], less_needed: Sequence[str], width: int) -> tuple[str, list[str]]:
    """Formats a table, and leaves out the columns that are `less_needed` (the first ones first) until it is no wider than `width`.

    Returns it, and the names of the columns that were left out.

    >>> fitted(("method", "ms", "bytes"), [("Gossip SGD", "296", "102 MB")], ["bytes"], width=20)
    ('method       ms\\nGossip SGD  296', ['bytes'])
    """
    left_out: list[str] = []
    while True:
        kept = [i for i, name in enumerate(head) if name not in left_out]
        text = table([head[i] for i in kept], [[row[i] for i in kept if i < len(row)] for row in rows])
        if max(map(len, text.splitlines())) <= width or len(left_out) == len(less_needed):
            return text, left_out
        left_out.append(less_needed[len(left_out)])


def paragraph(text: str, indent: str = "") -> str:
    """Wraps `text` to the width of the terminal; the lines after the first one start with `indent`."""
    return textwrap.fill(text, columns(sys.stdout), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
