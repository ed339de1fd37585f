"""The command line: `rumor demo`, `rumor plan`, `rumor probe` and `rumor topology`.

Wrong input ends with one line, `rumor plan: error: ...`, and exit code 2.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from rumor import __version__
from rumor.cli import demo, plan, probe, topology


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; `--help` has the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    parser = _Parser(prog="rumor", description="Choose a method, a topology and a period for decentralized training with PyTorch.")
    parser.add_argument("--version", action="version", version=f"rumor {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (demo, plan, probe, topology):
        command.add_to(commands)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # where a terminal knows no braille, better "?" than nothing
    options = parser.parse_args(_joined(sys.argv[1:] if arguments is None else arguments))
    try:
        return int(options.run(options))
    except BrokenPipeError:
        return 0  # `rumor topology ring -n 64 | head`
    except (ValueError, ArithmeticError, ImportError, OSError, RuntimeError) as error:  # what a user can mend
        print(f"rumor {options.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _joined(arguments: Sequence[str]) -> list[str]:
    """["--latency", "-5ms"] as ["--latency=-5ms"]: argparse would take a negative number with a unit for an option, and not say why."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and re.match(r"-\.?\d", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined
