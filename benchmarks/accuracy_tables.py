"""Tables of the results of accuracy.py, for the page and for the screen."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fashion
import reached
from limits import shortest_step, shown

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

from logistic import tables

Results = dict[str, Any]
PAPER = (  # its Table 17, ms: without communication, with all-reduce, with gossip
    ("paper, ResNet-50, 25 Gbit/s", 146.0, 424.0, 296.0),
    ("paper, BERT", 445.0, 1913.8, 1011.5),
)
NOT_YET = "*Not measured yet.*"
TIMED = ("Gossip SGD", "Gossip-PGA", "Gossip-PGA, 4 bits")
NAMES = {reached.PARALLEL: "Parallel SGD (DDP)", "Parallel SGD": "Parallel SGD (Rumor)"}


def iteration(results: Results) -> str:
    """The paper's Table 17 and ours: ms of a step, and in brackets the time beyond computing."""
    rows = []
    for name, alone, all_reduce, gossip in PAPER:
        rows.append(
            _iteration_row(name, (all_reduce - alone) / alone, alone, [_beyond(all_reduce, alone), _beyond(gossip, alone), "-", "-"])
        )
    for timing in results["ratios"]:
        ms = {name: 1e3 * spread["median"] for name, spread in timing["seconds"].items()}
        alone = ms["computing alone"]
        cells = [_beyond(ms[name], alone) for name in (reached.best_ddp(timing["seconds"]), *TIMED)]
        rows.append(_iteration_row(f"{timing['hosts']} hosts, {shown(timing['rate'])}", ms["all-reduce alone"] / alone, alone, cells))
    return tables.as_text(rows)


def _iteration_row(name: str, ratio: float, alone: float, cells: list[str]) -> tables.Row:
    head = ("DDP", *TIMED)
    return {"ms a step": name, "all-reduce / computing": f"{ratio:.1f}", "computing": f"{alone:.0f}", **dict(zip(head, cells, strict=True))}


def _beyond(ms: float, alone: float) -> str:
    return f"{ms:.0f} (+{ms - alone:.0f})"


def to_target(results: Results, hosts: int) -> str:
    """A table for each ratio that was run, with a row for each method: final accuracy, and when it reached the target."""
    ratios = list(dict.fromkeys(run["ratio"] for run in results["runs"] if run["hosts"] == hosts))
    found = {ratio: {row["method"]: row for row in reached.summary(results["runs"], hosts, ratio)} for ratio in ratios}
    texts = []
    for ratio in ratios:
        rows: list[tables.Row] = []
        for method in dict.fromkeys(method for by_method in found.values() for method in by_method):
            most = max((by_method[method] for by_method in found.values() if method in by_method), key=lambda row: row["seeds"])
            whole, to_target, times = "-", "-", "-"
            if row := found[ratio].get(method):
                whole = f"{row['seconds']:.1f} ({row['times as fast, whole run']:.2f})"
                to_target = _seconds(row)
                times = _times(row["times as fast, to target"]) + _ceiling(results, row, hosts, ratio)
            rows.append(
                {
                    f"{hosts} hosts, {_title(results, hosts, ratio)}": NAMES.get(method, method),
                    "final accuracy": f"{100 * most['final']:.2f} ± {100 * most['error']:.2f} %",
                    "steps to target": _number(most["steps to target"]),
                    "whole run, s (times as fast)": whole,
                    "to target, s": to_target,
                    "times as fast to target": times,
                }
            )
        texts.append(tables.as_text(rows))
    return "\n\n".join(texts)


def _timing(results: Results, hosts: int, ratio: float | None) -> dict[str, Any] | None:
    return next((timing for timing in results["ratios"] if (timing["hosts"], timing["ratio"]) == (hosts, ratio)), None)


def _title(results: Results, hosts: int, ratio: float | None) -> str:
    """The rate of the links, and the ratio measured there together with the methods."""
    timing = _timing(results, hosts, ratio)
    if timing is None:
        return f"ratio {ratio:g}" if ratio else "loopback"
    seconds = {name: spread["median"] for name, spread in timing["seconds"].items()}
    return f"{shown(timing['rate'])}, ratio {seconds['all-reduce alone'] / seconds['computing alone']:.1f}"


def _ceiling(results: Results, row: dict[str, Any], hosts: int, ratio: float | None) -> str:
    """The most times as fast as DDP that its steps could be."""
    timing = _timing(results, hosts, ratio)
    if timing is None or not row["times as fast, to target"]:
        return ""
    seconds, settings = timing["seconds"], results["settings"]
    shortest = shortest_step(
        row["method"], hosts, fashion.H, 4 * settings["parameters"], timing["rate"], seconds["computing alone"]["median"]
    )
    return f" of {seconds[reached.best_ddp(seconds)]['median'] / shortest:.2f}"


def _seconds(row: dict[str, Any]) -> str:
    """The median over seeds (fastest to slowest), and how many seeds did not reach the target."""
    times, missed = row["to target"], row["not reached"]
    note = f", not reached in {missed} of {row['seeds']}" if missed else ""
    if missed == row["seeds"]:
        return note[2:]
    middle, there = reached.middle(times), [t for t in times if t < math.inf]
    return f"{_number(middle, '.1f')} ({min(there):.1f} to {max(there):.1f}){note}"


def _number(value: float, form: str = ".0f") -> str:
    return f"{value:{form}}" if value < math.inf else "-"


def _times(value: float) -> str:
    return f"**{value:.2f}**" if value > 0 and math.isfinite(value) else "-"


def bandwidth(results: Results) -> str:
    """Seconds to the target at each rate of the links, and how many times as fast as DDP that is."""
    points = reached.over_bandwidth(results["runs"], results["curve"])
    rates = list(dict.fromkeys(point["rate"] for point in points))
    parallel = {point["rate"]: point["seconds"] for point in reached.pick(points, method=reached.PARALLEL)}
    rows: list[tables.Row] = []
    for method in dict.fromkeys(point["method"] for point in points):
        own = {point["rate"]: point["seconds"] for point in reached.pick(points, method=method)}
        cells = {shown(rate): f"{own[rate]:.1f} ({_times(parallel[rate] / own[rate])})" if own[rate] < math.inf else "" for rate in rates}
        rows.append({"s to target (times as fast)": NAMES.get(method, method), **cells})
    return tables.as_text(rows)


def target_line(results: Results) -> str:
    runs = results["runs"]
    lines = []
    for hosts in dict.fromkeys(run["hosts"] for run in runs):
        finals, goal = reached.finals_of(runs, hosts), reached.target(runs, hosts)
        lines.append(f"{hosts} hosts: {100 * goal:.2f} % (Parallel SGD ends at {100 * statistics.mean(finals):.2f} %, {len(finals)} seeds)")
    return "Target, " + "; ".join(lines) + "."


def make(name: str, results: Results) -> str:
    """Build the table with this name on the page."""
    if name.startswith("to-target-"):
        hosts = int(name.rsplit("-", 1)[1])
        return to_target(results, hosts) if reached.pick(results["runs"], hosts=hosts) else NOT_YET
    if name == "bandwidth" and not results["curve"]:
        return NOT_YET
    parts: dict[str, Callable[[Results], str]] = {"iteration": iteration, "target": target_line, "bandwidth": bandwidth}
    return parts[name](results)


def everything(results: Results) -> str:
    """Build all tables, for the screen."""
    parts = [iteration(results)] if results["ratios"] else []
    parts += [target_line(results)]
    parts += [to_target(results, hosts) for hosts in dict.fromkeys(run["hosts"] for run in results["runs"])]
    parts += [bandwidth(results)] if results["curve"] else []
    return "\n\n".join(parts)
