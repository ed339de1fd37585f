"""API reference: turn doctests in docstrings into code blocks, because Markdown would read them as quotations."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(
    r"^( *)>>> .*(?:\n(?! *$).+)*", re.M
)  # up to the next empty line


class Doctests(griffe.Extension):
    """Put a fence around each doctest when griffe collects it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(
                lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```",
                obj.docstring.value,
            )
