"""`rumor demo`: trains on handwritten digits with real processes on this machine, and shows what a slow link, or a death, costs."""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from itertools import count as numbers
from pathlib import Path
from typing import Any

from rumor.cli import demo_comparison, demo_kill
from rumor.cli.topology import NAMES
from rumor.cli.units import bandwidth, count, nodes
from rumor.cost.network import in_python
from rumor.demo.methods import DEFAULT, WITH_H
from rumor.demo.processes import ProcessError
from rumor.schedule import check_whole

MOST_NODES = 64  # each is a process of about 200 MB
FOLDER = "rumor-demo"

DESCRIPTION = """Trains a small network on scikit-learn's digits, split by label, with real processes on this machine, each behind a link of
a given rate. It runs several methods one after the other, from the same initial model and on the same data. Prints a table and writes
demo.json and demo.png. With --kill it trains once, kills a node, and starts it again."""


def add_demo(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo", help="train on handwritten digits with real processes on this machine, and compare the methods", description=DESCRIPTION
    )
    names = [name for name in (*DEFAULT, "gossip_aga", "slowmo", "osgp") if "(" not in name]
    parser.add_argument("--kill", action="store_true", help="show a node that dies and comes back, instead of comparing methods")
    parser.add_argument(
        "--method",
        nargs="+",
        metavar="NAME",
        help=f"methods to run: {', '.join(names)}, or written out: 'gossip_pga(ring, H=6, bits=4)' (default: the first four, and the "
        "setting to start with)",
    )
    parser.add_argument("--topology", metavar="NAME", help=f"{in_python(', '.join(NAMES))} (default {demo_comparison.TOPOLOGY})")
    parser.add_argument(
        "-n", "--nodes", type=nodes, help=f"number of processes (default {demo_comparison.NODES}; with --kill {demo_kill.NODES})"
    )
    parser.add_argument("--H", type=nodes, help=f"steps between two global averages, for {', '.join(WITH_H)} (default {demo_comparison.H})")
    parser.add_argument(
        "--delay", type=int, choices=(0, 1), help="1: messages travel while the next step computes (default: 1 for osgp, 0 for the others)"
    )
    parser.add_argument("--rate", type=bandwidth, help=f"rate of each process's link (default {demo_comparison.RATE})")
    parser.add_argument(
        "--modelled", action="store_true", help="add bytes / rate to the measured times; without it, links are shaped where root allows it"
    )
    parser.add_argument(
        "--steps", type=count, help=f"number of steps with each method (default {demo_comparison.STEPS}; with --kill {demo_kill.STEPS})"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial model, the batches and the test set (default 0)")
    parser.add_argument("--out", metavar="FOLDER", help=f"folder to write to (default {FOLDER}, or {FOLDER}-2 while another demo uses it)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    kind = demo_kill if options.kill else demo_comparison
    options.nodes = kind.NODES if options.nodes is None else options.nodes
    options.steps = kind.STEPS if options.steps is None else options.steps
    _check(options)
    prepared = kind.prepare(options)
    try:
        with _output_folder(options.out) as folder, _exit_on_signals():
            why = _why_no_picture()
            if why:
                print(f"rumor demo: there will be no picture: {why}", file=sys.stderr)
            kind.run(options, prepared, folder, with_picture=not why)
            return 0
    except ProcessError as error:
        print(f"rumor demo: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("rumor demo: stopped, together with its processes", file=sys.stderr)
        return 128 + signal.SIGINT


def _check(options: argparse.Namespace) -> None:
    if not 2 <= options.nodes <= MOST_NODES:
        raise ValueError(f"--nodes must be a whole number from 2 to {MOST_NODES} (each node is a process), got {options.nodes}")
    check_whole("--steps", options.steps, 1)
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed must be a whole number from 0 to 2^32 - 1, got {options.seed}")


@contextmanager
def _output_folder(out: str | None) -> Iterator[Path]:
    """Makes the folder, and holds it until the end, before any process starts. Removes a new folder that stays empty.

    Without `out`, it is the first of rumor-demo, rumor-demo-2, ... that no other demo holds.
    """
    for folder in map(Path, [out] if out else chain([FOLDER], (f"{FOLDER}-{i}" for i in numbers(2)))):
        is_new = not folder.exists()
        held = _hold(folder)
        if held is not None:
            break
    else:
        raise ValueError(f"--out {out}: another demo is writing to this folder: give another one")
    try:
        yield folder
    finally:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
        os.close(held)


def _hold(folder: Path) -> int | None:
    """Makes a folder and locks it until the file that is returned is closed. None if another process has locked it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        opened = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ValueError(f"--out {folder}: can't create this folder or write to it ({error.strerror}): give another one") from None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        return None
    except OSError:
        pass  # this file system has no locks
    return opened


def _why_no_picture() -> str | None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "pictures need matplotlib: pip install 'rumor[plots]'"
    return None


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Turns SIGTERM, and SIGHUP of a closed terminal, into an exception, so that the processes are stopped."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
