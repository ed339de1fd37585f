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
TIMED = ("Gossip SGD", "Gossip-PGA, 4 bits")
CURVE = (reached.PARALLEL, "Gossip-PGA, 4 bits", "DDP, 4 bits", "DDP, bf16 hook")  # the columns of the table over the bandwidth
NAMES = {reached.PARALLEL: "Parallel SGD (DDP)", "Parallel SGD": "Parallel SGD (Rumor)"}


def iteration(results: Results) -> str:
    """The paper's Table 17 and ours: ms of a step, and in brackets the time beyond computing."""
    rows = []
    for name, alone, all_reduce, gossip in PAPER:
        rows.append(_iteration_row(name, (all_reduce - alone) / alone, alone, [_beyond(all_reduce, alone), _beyond(gossip, alone), "-"]))
    for timing in results["ratios"]:
        ms = {name: 1e3 * spread["median"] for name, spread in timing["seconds"].items()}
        alone = ms["computing alone"]
        cells = [_beyond(ms[name], alone) for name in (reached.best_ddp(timing["seconds"]), *TIMED)]
        rows.append(_iteration_row(f"{timing['hosts']} hosts, {shown(timing['rate'])}", ms["all-reduce alone"] / alone, alone, cells))
    return tables.as_text(rows)


def _iteration_row(name: str, ratio: float, alone: float, cells: list[str]) -> tables.Row:
    head = ("DDP", *TIMED)
    return {"ms a step (ratio)": f"{name} ({ratio:.1f})", "computing": f"{alone:.0f}", **dict(zip(head, cells, strict=True))}


def _beyond(ms: float, alone: float) -> str:
    return f"{ms:.0f} (+{ms - alone:.0f})"


def to_target(results: Results, hosts: int) -> str:
    """A row for each method: final accuracy, and for each ratio the seconds to the target and how many times as fast as DDP that is."""
    found = summaries(results, hosts)
    rows: list[tables.Row] = []
    for method in dict.fromkeys(method for by_method in found.values() for method in by_method):
        most = max((by_method[method] for by_method in found.values() if method in by_method), key=lambda row: row["seeds"])
        cells = {
            title(results, hosts, ratio): _seconds(by_method[method]) if method in by_method else "-" for ratio, by_method in found.items()
        }
        final = f"{100 * most['final']:.2f} ± {100 * most['error']:.2f}"
        rows.append({f"{hosts} hosts": NAMES.get(method, method), "final accuracy, %": final, **cells})
    return tables.as_text(rows)


def summaries(results: Results, hosts: int) -> dict[float | None, dict[str, dict[str, Any]]]:
    """The rows of `reached.summary` by ratio and method."""
    ratios = dict.fromkeys(run["ratio"] for run in results["runs"] if run["hosts"] == hosts)
    return {ratio: {row["method"]: row for row in reached.summary(results["runs"], hosts, ratio)} for ratio in ratios}


def never_reached(results: Results) -> list[str]:
    """The methods that do not reach the target in any seed at any ratio."""
    missed = [(row["method"], row["not reached"] == row["seeds"]) for row in _all_rows(results)]
    return [name for name in dict.fromkeys(name for name, _ in missed) if all(never for method, never in missed if method == name)]


def sometimes_missed(results: Results) -> list[tuple[str, int, int]]:
    """The methods that miss the target in some seeds but not in all: name, most seeds that miss it at one ratio, and seeds."""
    found: dict[str, tuple[str, int, int]] = {}
    for row in _all_rows(results):
        if 0 < row["not reached"] < row["seeds"] and row["not reached"] > found.get(row["method"], ("", 0, 0))[1]:
            found[row["method"]] = (NAMES.get(row["method"], row["method"]), row["not reached"], row["seeds"])
    return list(found.values())


def _all_rows(results: Results) -> list[dict[str, Any]]:
    hosts = dict.fromkeys(run["hosts"] for run in results["runs"])
    return [row for n in hosts for by_method in summaries(results, n).values() for row in by_method.values()]


def _timing(results: Results, hosts: int, ratio: float | None) -> dict[str, Any] | None:
    return next((timing for timing in results["ratios"] if (timing["hosts"], timing["ratio"]) == (hosts, ratio)), None)


def title(results: Results, hosts: int, ratio: float | None) -> str:
    """The rate of the links, and the ratio measured there together with the methods."""
    timing = _timing(results, hosts, ratio)
    if timing is None:
        return f"ratio {ratio:g}" if ratio else "loopback"
    seconds = {name: spread["median"] for name, spread in timing["seconds"].items()}
    return f"{shown(timing['rate'])}, ratio {seconds['all-reduce alone'] / seconds['computing alone']:.1f}"


def ceilings(results: Results, method: str) -> list[float]:
    """The most times as fast as DDP that a method's steps could be, at each ratio: if only computing and the links took time."""
    found = []
    for timing in results["ratios"]:
        seconds, size = timing["seconds"], 4 * results["settings"]["parameters"]
        shortest = shortest_step(method, timing["hosts"], fashion.H, size, timing["rate"], seconds["computing alone"]["median"])
        found.append(seconds[reached.best_ddp(seconds)]["median"] / shortest)
    return found


def _seconds(row: dict[str, Any]) -> str:
    """The median over seeds (fastest to slowest), how many times as fast as DDP, and how many seeds did not reach the target."""
    times, missed = row["to target"], row["not reached"]
    middle, there = reached.middle(times), [t for t in times if t < math.inf]
    if not there or middle == math.inf:
        return "not reached" + (f" in {missed} of {row['seeds']}" if there else "")
    note = f", {missed} of {row['seeds']} not" if missed else ""
    return f"{middle:.1f} s ({min(there):.1f} to {max(there):.1f}{note}): {_times(row['times as fast, to target'])}"


def _times(value: float) -> str:
    return f"**{value:.2f}**" if value > 0 and math.isfinite(value) else "-"


def bandwidth(results: Results) -> str:
    """Seconds to the target at each rate of the links, and how many times as fast as DDP that is."""
    points = reached.over_bandwidth(results["runs"], results["curve"])
    rows: list[tables.Row] = []
    for rate in dict.fromkeys(point["rate"] for point in points):
        own = {point["method"]: point["seconds"] for point in reached.pick(points, rate=rate)}
        parallel = own[reached.PARALLEL]
        cells = {NAMES.get(method, method): f"{own[method]:.1f} s" for method in CURVE[:1]}
        for method in CURVE[1:]:
            if method in own:
                cells[method] = f"{own[method]:.1f} s: {_times(parallel / own[method])}" if own[method] < math.inf else ""
        rows.append({"link": shown(rate), **cells})
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
