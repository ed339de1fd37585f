"""Draws the pictures of accuracy.py's results:

python benchmarks/accuracy_pictures.py        # draws docs/performance/*.png from benchmarks/results/accuracy.json
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

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
UNSHAPED = 8e9  # bits/s at which the curve shows a link without a rate


def draw(results: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    _save(_over_seconds(results["runs"], plt), folder / "accuracy.png", plt)
    if results["curve"]:
        _save(_over_bandwidth(results, plt), folder / "bandwidth.png", plt)


def _save(figure: Any, path: Path, plt: Any) -> None:
    with replacing(path) as aside:
        figure.savefig(aside, dpi=130)
    plt.close(figure)


def _over_seconds(runs: list[dict[str, Any]], plt: Any) -> Any:
    """Draws the accuracy of the mean model over time, with a panel for each number of hosts and each ratio."""
    panels = list(dict.fromkeys((run["hosts"], run["ratio"], run["rate"]) for run in runs))
    columns = len({ratio for _, ratio, _ in panels})
    rows = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.5 * columns, 3.6 * rows + 1.2), squeeze=False, layout="constrained")
    for (hosts, ratio, rate), axis in zip(panels, axes.flat, strict=False):
        goal = reached.target(runs, hosts)
        for method in LOOKS:
            _curve(axis, method, reached.pick(runs, hosts=hosts, ratio=ratio, method=method), 100 * goal)
        axis.axhline(100 * goal, color="grey", linewidth=0.8)
        axis.text(0.01, 100 * goal, f"target {100 * goal:.2f} %", transform=axis.get_yaxis_transform(), va="bottom", fontsize=8)
        what = f"all-reduce / computing = {ratio:g} ({_label(rate)})" if ratio else "loopback, unshaped"
        axis.set_title(f"{hosts} hosts, {what}", fontsize=9)
        axis.set(
            xlabel="wall-clock seconds", ylabel="accuracy of the mean model, %", xlim=(0, None), ylim=(100 * goal - 6, 100 * goal + 0.7)
        )
        axis.grid(alpha=0.25, linewidth=0.5)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    seeds = len({run["seed"] for run in runs})
    figure.suptitle(
        f"Fashion-MNIST. Mean of {seeds} seeds; bands: one standard deviation.\n"
        "Dot: the mean of the seeds reaches the target (the tables show the median of the seeds' times).",
        fontsize=10,
    )
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
