"""The command line: `rumor demo`, `rumor plan`, `rumor probe` and `rumor topology`."""

from rumor.cli.command_line import main

__all__ = ["main"]
