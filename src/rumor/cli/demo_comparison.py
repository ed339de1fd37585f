"""The comparison of `rumor demo`: trains with one method after the other, and prints a table."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rumor.cli.progress import Progress
from rumor.cli.table import columns, paragraph, table
from rumor.cli.topology import build_topology
from rumor.cli.units import bandwidth, show_bytes, show_rate
from rumor.demo import network
from rumor.demo.digits import split_by_label
from rumor.demo.methods import DEFAULT, WITH_DELAY, WITH_H, Method, build_method
from rumor.demo.picture import draw
from rumor.demo.processes import Processes
from rumor.demo.results import Link, Result, write
from rumor.demo.training import AT_THE_END, Training, watched_steps
from rumor.schedule import check_whole
from rumor.topology import Topology

NODES, STEPS, H, TOPOLOGY, RATE = 4, 200, 6, "one_peer_exponential", "20Mbit/s"
TARGET = 0.95  # the table says when a method has this accuracy


class Prepared(NamedTuple):
    """What the options ask for."""

    topology: Topology
    methods: list[Method]
    link: Link


def prepare(options: argparse.Namespace) -> Prepared:
    """Checks the options and builds the methods, before any process starts."""
    names = [re.sub(r"(?<=[a-z])-(?=[a-z])", "_", name) for name in options.method or DEFAULT]  # gossip-pga(one-peer-exponential)
    if len(set(names)) < len(names):
        raise ValueError(f"--method {' '.join(names)}: name each method once")
    topology = build_topology(options.topology or TOPOLOGY, options.nodes)
    for option, takers in (("H", WITH_H), ("delay", WITH_DELAY)):
        if getattr(options, option) is not None and not set(takers) & set(names):
            raise ValueError(f"--{option} is for {', '.join(takers)}, but --method names none of them: leave out --{option}")
    options.H = H if options.H is None else options.H
    check_whole("--H", options.H, 1)
    methods = [build_method(name, topology, options.H, options.delay, options.steps) for name in names]
    rate = bandwidth(RATE) if options.rate is None else options.rate
    if not 1e4 <= rate <= 1e11:
        raise ValueError(f"--rate must be from 80kbit/s to 800Gbit/s, got {show_rate(rate)}")
    return Prepared(topology, methods, Link(rate, "--modelled was given" if options.modelled else network.why_not(rate)))


def run(options: argparse.Namespace, prepared: Prepared, folder: Path, with_picture: bool) -> None:
    topology, _, link = prepared
    results = _train(options, prepared)
    print(_page(options, prepared, results))
    settings = {name: getattr(options, name) for name in ("nodes", "steps", "H", "delay", "seed")}
    settings |= {"topology": topology.name, "rate": link.rate, "seconds": link.kind}
    write(folder / "demo.json", settings, {"results": [result.as_dict() for result in results]})
    print(f"\nwrote {folder / 'demo.json'}")
    if with_picture:
        draw(
            results,
            f"{options.nodes} processes learn handwritten digits, each from its own few digits",
            show_rate(link.rate),
            folder / "demo.png",
        )
        print(f"wrote {folder / 'demo.png'}, a picture of the results")


def _train(options: argparse.Namespace, prepared: Prepared) -> list[Result]:
    n, (_, methods, link) = options.nodes, prepared
    digits, watched = split_by_label(n, options.seed), watched_steps(options.steps)
    results = [Result(method, n, link) for method in methods]
    progress = _Progress(len(methods), options.steps)
    try:
        with Processes(n, rate=link.rate if link.unshaped is None else None) as processes:
            progress.starts(n)
            processes.wait_until_ready()
            rendezvous = os.path.join(processes.folder, "rendezvous")
            for rank in range(n):
                processes.give(rank, Training(rank, n, rendezvous, methods, digits[rank], options.steps, watched, options.seed))
            for rank, (i, point) in processes.messages():
                if results[i].add(rank, point):
                    progress.show(i, results[i])
    finally:
        progress.line.clear()
    return results


class _Progress:
    """Shows a bar if stderr is a terminal. Otherwise prints a line for each method, and more lines if a method takes long."""

    def __init__(self, methods: int, steps: int):
        self.line, self._methods, self._steps = Progress(), methods, steps
        self._began: tuple[float, int] | None = None

    def starts(self, n: int) -> None:
        self.line.say(f"starting {n} processes, which takes a few seconds ...")

    def show(self, i: int, result: Result) -> None:
        last = result.curve[-1]
        accuracy = f"accuracy {(result.end if last.step == self._steps else last).mean_accuracy:.1%}"
        name = f"{result.method.label} ({i + 1}/{self._methods})"
        text = f"{name}: {last.step} of {self._steps} steps in {last.seconds_measured:.1f} s, {accuracy}"
        if self.line.is_live:
            self.line.bar(name, last.step / self._steps, accuracy + self._time_left(i * self._steps + last.step))
        elif last.step == self._steps:
            self.line.say(text)
        else:
            self.line.say_now_and_then(text)

    def _time_left(self, done: int) -> str:
        if self._began is None:
            self._began = time.monotonic(), done
        began, first = self._began
        if done == first:
            return ""
        return f", {(time.monotonic() - began) / (done - first) * (self._steps * self._methods - done):.0f} s left"


def _page(options: argparse.Namespace, prepared: Prepared, results: Sequence[Result]) -> str:
    about = [f"{options.nodes} processes", "digits split by label", f"{options.steps} steps"]
    short = {method.name for method in prepared.methods if "(" not in method.name}  # the others name their own topology and H
    about += [prepared.topology.name] * bool(short - {"parallel_sgd", "local_sgd"}) + [f"H = {options.H}"] * bool(short & set(WITH_H))
    parts = [
        paragraph(", ".join(about) + ".") + "\n" + paragraph(_how_timed(prepared.link)),
        _table(results),
        *map(paragraph, _verdict(results)),
        paragraph(_what_the_columns_are(options.steps)),
    ]
    return "\n\n".join(parts)


def _table(results: Sequence[Result]) -> str:
    head = ["method", "accuracy", "worst node", "sent", "ms a step", f"s to {TARGET:.0%}"]
    rows = []
    for result in results:
        end, to_target = result.end, result.seconds_to(TARGET)
        numbers = [f"{end.mean_accuracy:.1%}", f"{end.worst_accuracy:.1%}", show_bytes(end.bytes_per_node)]
        numbers += [f"{1e3 * result.seconds_a_step:.1f}", "-" if to_target is None else f"{to_target:.1f}"]
        rows.append([result.method.label, *numbers])
    if columns(sys.stdout) < 72:  # no room
        for row in (head, *rows):
            del row[2]
    return table(head, rows)


def _how_timed(link: Link) -> str:
    """Says what the times are, so that nobody takes a modelled one for a measured one."""
    if link.unshaped is None:
        return f"Each process sends through a link of {show_rate(link.rate)} (tc). Times are measured on it."
    return (
        f"Times are MODELLED for links of {show_rate(link.rate)}: measured seconds on this machine, without a limit, plus bytes / rate. "
        f"The links were not shaped: {link.unshaped}."
    )


def _verdict(results: Sequence[Result]) -> list[str]:
    """Compares the setting to start with and Parallel SGD, if both were run."""
    recommended = next((result for result in results if result.method.is_recommended), None)
    parallel = next((result for result in results if result.method.with_ddp), None)
    if recommended is None or parallel is None:
        return []
    fewer = parallel.end.bytes_per_node / recommended.end.bytes_per_node
    faster = parallel.seconds_a_step / recommended.seconds_a_step
    # of the accuracies as the table shows them: 97.3 beside 97.9 is 0.6 lower, whatever the further digits are
    points = round(round(100 * recommended.end.mean_accuracy, 1) - round(100 * parallel.end.mean_accuracy, 1), 1)
    away = f"{abs(points):.1f} points {'lower' if points < 0 else 'higher'}" if points else "the same"
    return [
        f"{recommended.method.label} is the setting to start with, {recommended.method.name}. Beside Parallel SGD (DDP, float32), it sends "
        f"1/{fewer:.1f} of the bytes, its step is {faster:.1f} times as fast ({parallel.link.kind}), and its accuracy is {away}."
    ]


def _what_the_columns_are(steps: int) -> str:
    return (
        f"accuracy: of the mean of all nodes on a test set, averaged over the last {min(AT_THE_END, steps)} steps, because nodes drift "
        f"apart between two global averages. sent: bytes per node; an all-reduce counts as a ring's. s to {TARGET:.0%}: seconds until the "
        "mean model had this accuracy."
    )
