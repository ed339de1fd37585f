"""Inline code on the site breaks where a reader would break it, and not after a hyphen or inside a name."""

import re
from typing import Any

INLINE = re.compile(r"(?<!</span>)(?<!<pre>)<code>([^<\n]+)</code>")
CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.S)
SHORT = 30  # characters that fit into a line on a phone
AFTER = re.compile(r"[_(,.=/]")


def on_page_content(html: str, **_: Any) -> str:
    """Keep short code in one line. In a table, let names break after their parts."""

    def in_a_cell(cell: re.Match[str]) -> str:
        return INLINE.sub(
            lambda code: (
                "<code>"
                + AFTER.sub(lambda sign: f"{sign[0]}<wbr>", code[1])
                + "</code>"
            ),
            cell[0],
        )

    def in_a_line(code: re.Match[str]) -> str:
        kind = ' class="short"' if len(code[1]) <= SHORT else ""
        return f"<code{kind}>{code[1]}</code>"

    return INLINE.sub(in_a_line, CELL.sub(in_a_cell, html))
