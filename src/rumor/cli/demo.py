"""`rumor demo`: trains on handwritten digits with several methods, in real processes on this machine, and compares the methods."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rumor.cli.table import paragraph, table
from rumor.cli.topology import NAMES, build_topology
from rumor.cli.units import count, nodes, show_bytes
from rumor.cost import degree
from rumor.demo.digits import Digits, split_by_label
from rumor.demo.methods import DEFAULT, WITH_DELAY, WITH_H, Method, build_method
from rumor.demo.picture import draw
from rumor.demo.processes import ProcessError, Processes, Task
from rumor.demo.results import Result, write
from rumor.demo.training import AT_THE_END, watched_steps
from rumor.schedule import check_whole
from rumor.topology import Topology

MOST_NODES = 64  # each is a process of about 200 MB
H, STEPS = 6, 400
EVERY = 15.0  # seconds between two lines of progress if there is no terminal


def add_demo(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="train on handwritten digits with real processes on this machine, and compare the methods",
        description="Trains a small network on scikit-learn's digits, split by label, with real processes on this machine. It runs the "
        "methods one after the other, from the same initial model and on the same data. Prints a table and writes demo.json and demo.png.",
    )
    names = (*DEFAULT, "slowmo", "osgp")
    parser.add_argument(
        "--method",
        nargs="+",
        metavar="NAME",
        help=f"methods to run: {', '.join(names)} (default: the first five), or written out: 'gossip_pga(ring, H=6, bits=4)'",
    )
    parser.add_argument("--topology", default="ring", metavar="NAME", help=f"{', '.join(NAMES).replace('-', '_')} (default ring)")
    parser.add_argument("-n", "--nodes", type=nodes, default=8, help="number of processes (default 8)")
    parser.add_argument("--H", type=nodes, help=f"steps between two global averages, for {', '.join(WITH_H)} (default {H})")
    parser.add_argument(
        "--delay", type=int, choices=(0, 1), help="1: messages travel while the next step computes (default: 1 for osgp, 0 for the others)"
    )
    parser.add_argument("--steps", type=count, default=STEPS, help=f"number of steps with each method (default {STEPS})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial model, the batches and the test set (default 0)")
    parser.add_argument("--out", default="rumor-demo", metavar="FOLDER", help="folder to write to (default rumor-demo)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    topology, methods = _prepare(options)
    try:
        with _output_folder(options.out) as folder, _exit_on_signals():
            return _train_and_report(options, topology, methods, folder)
    except KeyboardInterrupt:
        print("rumor demo: stopped, together with its processes", file=sys.stderr)
        return 128 + signal.SIGINT


def _train_and_report(options: argparse.Namespace, topology: Topology, methods: list[Method], folder: Path) -> int:
    digits = split_by_label(options.nodes, options.seed)
    without_picture = _why_no_picture()
    if without_picture:
        print(f"rumor demo: there will be no picture: {without_picture}", file=sys.stderr)
    task = Task(methods, options.steps, watched_steps(options.steps), options.seed)
    try:
        results = _train(task, digits)
    except ProcessError as error:
        print(f"rumor demo: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(_page(options, topology, results))
    settings = {name: getattr(options, name) for name in ("nodes", "steps", "H", "delay", "seed")}
    write(folder / "demo.json", {"topology": topology.name, **settings}, results)
    print(f"\nwrote {folder / 'demo.json'}")
    if not without_picture:
        draw(results, topology, folder / "demo.png")
        print(f"wrote {folder / 'demo.png'}, a picture of the results")
    return 0


def _prepare(options: argparse.Namespace) -> tuple[Topology, list[Method]]:
    """Checks the options and builds the methods, before any process starts."""
    if not 2 <= options.nodes <= MOST_NODES:
        raise ValueError(f"--nodes must be a whole number from 2 to {MOST_NODES} (each node is a process), got {options.nodes}")
    check_whole("--steps", options.steps, 1)
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed must be a whole number from 0 to 2^32 - 1, got {options.seed}")
    names = [name if "(" in name else name.replace("-", "_") for name in options.method or DEFAULT]
    if len(set(names)) < len(names):
        raise ValueError(f"--method {' '.join(names)}: name each method once")
    topology = build_topology(options.topology, options.nodes)
    for option, takers in (("H", WITH_H), ("delay", WITH_DELAY)):
        if getattr(options, option) is not None and not set(takers) & set(names):
            raise ValueError(f"--{option} is for {', '.join(takers)}, but --method names none of them: leave out --{option}")
    options.H = H if options.H is None else options.H
    check_whole("--H", options.H, 1)
    return topology, [build_method(name, topology, options.H, options.delay, options.steps) for name in names]


@contextmanager
def _output_folder(out: str) -> Iterator[Path]:
    """Makes the folder and checks that it is writable, before any process starts. Removes a new folder that stays empty."""
    folder = Path(out)
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--out {out}: can't create this folder or write to it ({error.strerror}): give another one") from None
    try:
        yield folder
    finally:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()


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


def _train(task: Task, digits: Sequence[Digits]) -> list[Result]:
    n = len(digits)
    progress = _Progress(n, task)
    results = [Result(method, n) for method in task.methods]
    try:
        with Processes(n) as processes:
            for i, rank, point in processes.points(task, digits):
                if results[i].add(rank, point):
                    progress.show(i, results[i])
    finally:
        progress.clear()
    return results


class _Progress:
    """Shows a bar if stderr is a terminal. Otherwise prints a line for each method, and more lines if a method takes long."""

    def __init__(self, n: int, task: Task):
        self._task, self._is_live, self._began, self._said = task, sys.stderr.isatty(), 0.0, 0.0
        self._say(f"starting {n} processes, which takes a few seconds ...")

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        print(f"\r{text:<79}" if self._is_live else text, end="" if self._is_live else "\n", file=sys.stderr, flush=True)

    def show(self, i: int, result: Result) -> None:
        self._began = self._began or time.monotonic()
        steps, last = self._task.steps, result.curve[-1]
        shown = result.end if last.step == steps else last
        accuracies = f"mean {shown.mean_accuracy:.1%}, worst node {shown.worst_accuracy:.1%}"
        name = f"{result.method.label} ({i + 1}/{len(self._task.methods)})"
        if self._is_live:
            bar = ("#" * (20 * last.step // steps)).ljust(20, ".")
            self._say(f"{name:<18} [{bar}] {accuracies}{self._time_left(i * steps + last.step)}")
        elif last.step == steps or time.monotonic() > self._said + EVERY:
            self._say(f"{name}: {last.step} of {steps} steps in {last.seconds:.1f} s, {accuracies}")

    def _time_left(self, done: int) -> str:
        first = min(self._task.watched)  # the clock starts here
        if done <= first:
            return ""
        left = (time.monotonic() - self._began) / (done - first) * (self._task.steps * len(self._task.methods) - done)
        return f", {left:.0f} s left"

    def clear(self) -> None:
        if self._is_live:
            self._say("")
            print("\r", end="", file=sys.stderr, flush=True)


def _page(options: argparse.Namespace, topology: Topology, results: Sequence[Result]) -> str:
    ends = [(result.method.label, result.end) for result in results]
    rows = [
        (
            label,
            f"{end.mean_accuracy:.1%}",
            f"{end.worst_accuracy:.1%}",
            f"{end.consensus_distance:.1e}",
            show_bytes(end.bytes_per_node),
            f"{end.seconds:.1f}",
        )
        for label, end in ends
    ]
    head = ("method", "mean model", "worst node", "consensus distance", "sent per node", "seconds")
    return "\n".join(
        [
            f"{options.nodes} processes, digits split by label, {options.steps} steps, {topology.name}, H = {options.H}\n",
            table(head, rows),
            "",
            *(paragraph(note) for note in _notes(options, topology, results)),
        ]
    )


def _notes(options: argparse.Namespace, topology: Topology, results: Sequence[Result]) -> list[str]:
    names, n = {result.method.name for result in results}, options.nodes
    notes = [
        f"The accuracies are on a test set. The consensus distance is the mean squared distance of the nodes to their mean. Both are "
        f"averaged over the last {min(AT_THE_END, options.steps)} steps, because nodes drift apart between two global averages."
    ]
    if "parallel_sgd" in names and names - {"parallel_sgd", "local_sgd"} and topology.has_links and not topology.is_complete:
        notes.append(
            f"In a gossip step over {topology.name} a node sends the model {degree(topology):g} time{'s' * (degree(topology) != 1)}, all "
            f"at once. In an all-reduce of {n} nodes it sends the model {2 * (n - 1) / n:.3g} times, in {2 * (n - 1)} rounds that wait for "
            "each other."
        )
        if degree(topology) > 1:
            notes.append("To send the model once per gossip step, use --topology one_peer_exponential")
    return notes
