"""Shows progress: one line that is rewritten if stderr is a terminal, and lines now and then if it is not."""

from __future__ import annotations

import sys
import time

from rumor.cli.table import columns

EVERY = 15.0  # seconds between two lines if there is no terminal
LONGEST_BAR = 24


class Progress:
    """A line of progress, as wide as the terminal at most."""

    def __init__(self) -> None:
        self.is_live, self._said = sys.stderr.isatty(), 0.0

    def bar(self, name: str, share: float, after: str) -> None:
        """Show how much is done, on a terminal only.

        Args:
            name: what is done; cut if there is no room.
            share: from 0 to 1.
            after: text behind the bar.
        """
        room = columns(sys.stderr) - 1
        name = _cut(name, room - len(after) - 8)
        length = max(1, min(LONGEST_BAR, room - len(name) - len(after) - 4))
        bar = ("#" * int(length * share)).ljust(length, ".")
        self._rewrite(f"{name} [{bar}] {after}")

    def say(self, text: str) -> None:
        """Show a text until the next one."""
        self._said = time.monotonic()
        if self.is_live:
            self._rewrite(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def say_now_and_then(self, text: str) -> None:
        """Print a line if there is no terminal and nothing was printed for a while."""
        if not self.is_live and time.monotonic() > self._said + EVERY:
            self.say(text)

    def clear(self) -> None:
        if self.is_live:
            self._rewrite("")

    def _rewrite(self, text: str) -> None:
        room = columns(sys.stderr) - 1  # in the last column, some terminals begin another line
        print(f"\r{_cut(text, room).ljust(room)}\r", end=_cut(text, room), file=sys.stderr, flush=True)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: max(0, length - 3)]}..."
