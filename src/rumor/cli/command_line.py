"""Parses the command line and runs one command.

Wrong input ends with one line, `rumor plan: error: ...`, and exit code 2.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from rumor.cli.coordinator import add_coordinator
from rumor.cli.demo import add_demo
from rumor.cli.plan import add_plan
from rumor.cli.probe import add_probe
from rumor.cli.topology import add_topology
from rumor.version import VERSION


class _Help(argparse.HelpFormatter):
    """Wraps lines between words only. Keeps paragraphs, and breaks an indented command as a shell does, with a backslash."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap(" ".join(text.split()), width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for part in re.split(r"\n(?= |\n)", text):
            if part.startswith("  "):
                first, *more = _wrap(part.strip(), width - 6)
                lines.append(" \\\n".join(["  " + first, *("    " + line for line in more)]))
            else:
                lines += ["", *_wrap(" ".join(part.split()), width)] if part.startswith("\n") else _wrap(" ".join(part.split()), width)
        return "\n".join(indent + line for line in "\n".join(lines).splitlines())


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line; `--help` explains the rest."""

    def __init__(self, **options: Any):
        super().__init__(**{"formatter_class": _Help, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line, with all commands."""
    parser = _Parser(prog="rumor", description="Choose a method, a topology and a period for decentralized training with PyTorch.")
    parser.add_argument("--version", action="version", version=f"rumor {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for add_command in (add_coordinator, add_demo, add_plan, add_probe, add_topology):
        add_command(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    parser = build_parser()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without braille characters shows "?" instead of failing
    options = parser.parse_args(_join_negative_values(sys.argv[1:] if arguments is None else arguments))
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return int(options.run(options))
    except BrokenPipeError:
        return 0  # `rumor topology ring -n 64 | head`
    except (ValueError, ArithmeticError, ImportError, OSError, RuntimeError) as error:  # errors that the user can fix
        print(f"rumor {options.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _join_negative_values(arguments: Sequence[str]) -> list[str]:
    """Turns ["--latency", "-5ms"] into ["--latency=-5ms"]. Otherwise argparse takes "-5ms" for an option, and its error is misleading."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and re.match(r"-\.?\d", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined
