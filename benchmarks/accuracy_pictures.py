"""Draws the pictures of accuracy.py's results:

python benchmarks/accuracy_pictures.py        # draws docs/performance/*.png from benchmarks/results/accuracy.json
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

import accuracy_tables
import reached
from bed import LOOPBACK
from limits import bytes_per_second, shown
from rumor.checkpoint.files import replacing
from rumor.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

ROOT = Path(__file__).parents[1]
# The main methods. Dashes tell them apart in grey print.
LOOKS = {
    "DDP": (BLACK, "-", "Parallel SGD (DDP)"),
    "Local SGD": (ORANGE, (0, (1, 1)), "Local SGD"),
    "Gossip SGD": (VERMILION, (0, (5, 2)), "Gossip SGD"),
    "Gossip-PGA": (SKY, (0, (4, 1)), "Gossip-PGA"),
    "Gossip-PGA, delay=1": (PURPLE, (0, (3, 1, 1, 1)), "Gossip-PGA, delay=1"),
    "Gossip-PGA, 4 bits": (BLUE, "-", "Gossip-PGA, 4 bits"),
    "DDP, 4 bits": (GREEN, (0, (7, 2, 1, 2)), "DDP, 4 bits"),
    "DDP, bf16 hook": ("grey", (0, (2, 1)), "DDP, bf16 hook"),
}
CURVES = ("DDP", "Local SGD", "Gossip-PGA, 4 bits", "DDP, 4 bits", "DDP, bf16 hook")  # more would hide each other
BAR_NAMES = {
    "DDP, bf16 hook": "DDP, bf16",
    "DDP, PowerSGD hook": "DDP, PowerSGD",
    "Gossip-PGA": "Gossip-PGA, 32 bits",
    "Local SGD": "Local SGD, 32 bits",
}
BARS = ("Gossip-PGA, 4 bits", "Gossip-PGA", "Local SGD", "DDP, 4 bits", "DDP, bf16 hook", "DDP, PowerSGD hook", "DDP")
UNSHAPED = 8e9  # bits/s at which the curve shows a link without a rate


def draw(results: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    _save(_to_target(results, plt), folder / "accuracy.png", plt)
    _save(_over_seconds(results, plt), folder / "curves.png", plt)
    if results["curve"]:
        _save(_over_bandwidth(results, plt), folder / "bandwidth.png", plt)


def _save(figure: Any, path: Path, plt: Any) -> None:
    with replacing(path) as aside:
        figure.savefig(aside, dpi=150)
    plt.close(figure)


def _panels(results: dict[str, Any], height: float, plt: Any) -> tuple[Any, list[tuple[int, float | None, Any]]]:
    """Opens a figure with a panel for each number of hosts (a row) and each ratio (a column). Its title has the measured ratio."""
    found = list(dict.fromkeys((run["hosts"], run["ratio"]) for run in results["runs"]))
    columns = len({ratio for _, ratio in found})
    rows = math.ceil(len(found) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(7.4, height * rows), squeeze=False, sharey=True, layout="constrained")
    for (hosts, ratio), axis in zip(found, axes.flat, strict=False):
        axis.set_title(f"{hosts} hosts, {accuracy_tables.title(results, hosts, ratio)}", fontsize=10)
    return figure, [(hosts, ratio, axis) for (hosts, ratio), axis in zip(found, axes.flat, strict=False)]


def _to_target(results: dict[str, Any], plt: Any) -> Any:
    """Draws the seconds to the target: the median of the seeds, and a line from the fastest seed to the slowest one."""
    figure, panels = _panels(results, 3.3, plt)
    for hosts, ratio, axis in panels:
        by_method = accuracy_tables.summaries(results, hosts)[ratio]
        methods = [method for method in BARS if method in by_method]
        for row, method in enumerate(methods):
            _bar(axis, row, by_method[method])
        names = [BAR_NAMES.get(method, method) for method in methods]
        axis.set_yticks(range(len(methods)), names, fontsize=9.5)
        axis.set_ylim(len(methods) - 0.4, -0.6)
        slowest = max(t for method in methods for t in by_method[method]["to target"] if t < math.inf)
        axis.set(xlabel="seconds to the target", xlim=(0, 1.5 * slowest))
        axis.spines[["top", "right"]].set_visible(False)
    goals = {hosts: 100 * reached.target(results["runs"], hosts) for hosts, *_ in panels}
    figure.suptitle(f"Fashion-MNIST: seconds until {', '.join(f'{goal:.2f} %' for goal in goals.values())} accuracy", fontsize=11)
    return figure


def _bar(axis: Any, row: int, found: dict[str, Any]) -> None:
    seconds, there = reached.middle(found["to target"]), [t for t in found["to target"] if t < math.inf]
    if seconds == math.inf:
        axis.text(0, row, " never reached" if not there else " not reached by most seeds", va="center", fontsize=9, color=VERMILION)
        return
    axis.barh(row, seconds, color=BLUE if "Gossip" in found["method"] else BLACK if found["method"] == reached.PARALLEL else "#999999")
    axis.plot([min(there), max(there)], [row, row], color=ORANGE, linewidth=2)
    text = f"{seconds:.1f} s" + ("" if found["method"] == reached.PARALLEL else f", {found['times as fast, to target']:.2f}x as fast")
    axis.annotate(text, (max(there), row), (4, 0), textcoords="offset points", va="center", fontsize=9)


def _over_seconds(results: dict[str, Any], plt: Any) -> Any:
    """Draws the accuracy of the mean model over time."""
    figure, panels = _panels(results, 3.8, plt)
    for hosts, ratio, axis in panels:
        goal = 100 * reached.target(results["runs"], hosts)
        for method in CURVES:
            _curve(axis, method, reached.pick(results["runs"], hosts=hosts, ratio=ratio, method=method), goal)
        axis.axhline(goal, color="grey", linewidth=0.8)
        axis.text(0.01, goal, f"target {goal:.2f} %", transform=axis.get_yaxis_transform(), va="bottom", fontsize=9)
        axis.set(xlabel="seconds", xlim=(0, None), ylim=(goal - 6, goal + 0.7))
        axis.grid(alpha=0.25, linewidth=0.5)
    panels[0][2].set_ylabel("accuracy of the mean model, %")
    handles, labels = panels[0][2].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9.5, frameon=False)
    figure.suptitle("Fashion-MNIST: mean of the seeds; bands: one standard deviation", fontsize=11)
    return figure


def _curve(axis: Any, method: str, runs: list[Any], goal: float) -> None:
    if not runs:
        return
    colour, dashes, label = LOOKS[method]
    seconds = np.mean([run["seconds"] for run in runs], axis=0)
    accuracy = 100 * np.array([run["accuracy"] for run in runs])
    mean, deviation = accuracy.mean(0), accuracy.std(0, ddof=1) if len(runs) > 1 else 0 * accuracy[0]
    axis.plot(seconds, mean, color=colour, linestyle=dashes, linewidth=1.5, label=label)
    axis.fill_between(seconds, mean - deviation, mean + deviation, color=colour, alpha=0.12, linewidth=0)
    there = np.flatnonzero(mean >= goal)[:1]
    axis.plot(seconds[there], mean[there], "o", color=colour, markersize=6)


def _over_bandwidth(results: dict[str, Any], plt: Any) -> Any:
    points = reached.over_bandwidth(results["runs"], results["curve"])
    figure, axis = plt.subplots(figsize=(7.5, 5), layout="constrained")
    for method, (colour, dashes, label) in LOOKS.items():
        own = [point for point in reached.pick(points, method=method) if point["seconds"] < math.inf]
        if own:
            rates = [_bits(point["rate"]) for point in own]
            axis.plot(rates, [point["seconds"] for point in own], "o", linestyle=dashes, color=colour, markersize=4, label=label)
    ticks = {rate: _label(rate) for rate in dict.fromkeys(point["rate"] for point in points)}
    axis.set(xscale="log", yscale="log", xlabel="every link, both directions", ylabel="seconds to the target (steps x seconds a step)")
    axis.set_xticks([_bits(rate) for rate in ticks], list(ticks.values()), fontsize=9)
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.tick_params(axis="y", which="minor", labelsize=8)
    axis.grid(alpha=0.25, linewidth=0.5, which="both")
    axis.legend(fontsize=9, frameon=False)
    never = [label for method, (*_, label) in LOOKS.items() if any(p["seconds"] == math.inf for p in reached.pick(points, method=method))]
    note = f"\nNot reached by most seeds: {', '.join(never)}" if never else ""
    axis.set_title(f"Fashion-MNIST, {points[0]['hosts']} hosts: time to the target over the links' rate{note}", fontsize=10)
    return figure


def _bits(rate: str) -> float:
    if rate == LOOPBACK:
        return UNSHAPED
    return 8 * bytes_per_second(rate)


def _label(rate: str) -> str:
    return "loopback,\nunshaped" if rate == LOOPBACK else shown(rate)


if __name__ == "__main__":
    draw(json.loads((ROOT / "benchmarks" / "results" / "accuracy.json").read_text()), ROOT / "docs" / "performance")
