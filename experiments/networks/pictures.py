"""Pictures of docs/networks.md: differences beside the paper's, and training curves as in its figures 2, 3 and 8."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from networks.compare import Seeds
from networks.order import Compared
from networks.store import Point
from rumor.checkpoint.files import replacing
from rumor.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

LOOKS = {  # colour and dashes; the dashes tell curves apart in grey print
    "Parallel SGD": (BLACK, "-"),
    "Local SGD": (ORANGE, (0, (1, 1))),
    "Gossip SGD": (VERMILION, (0, (5, 2))),
    "OSGP": (PURPLE, (0, (3, 1, 1, 1))),
    "Gossip-PGA": (BLUE, "-"),
    "Gossip-AGA": (GREEN, (0, (7, 2, 1, 2))),
    "SlowMo": (SKY, (0, (4, 1))),
}

VERDICTS = {"agrees": BLUE, "agrees, wide interval": SKY, "differs in size": ORANGE, "differs": VERMILION}


def draw_order(found: Sequence[Compared], names: Sequence[str], title: str, path: Path) -> None:
    """Draw each difference in the paper (diamond) and ours (dot, with its 95 % interval, in the colour of the verdict)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7.2, 1.5 + 0.25 * len(found)), layout="constrained")
    for row, one in enumerate(found):
        _draw_difference(axis, one, row, VERDICTS[one.verdict])
    kinds = {kind: colour for kind, colour in VERDICTS.items() if any(one.verdict == kind for one in found)}
    legend = {f"ours: {kind}": (colour, "o") for kind, colour in kinds.items()}
    _finish(figure, axis, dict(zip(names, found, strict=True)), legend, title, path)


def draw_first(by_length: Mapping[str, Mapping[str, Compared]], title: str, path: Path) -> None:
    """Draw the difference of each method to Parallel SGD in the paper (diamond) and ours, for runs of each length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = {method: one for found in by_length.values() for method, one in found.items()}
    of_paper = sorted(methods.items(), key=_minus_the_papers)
    legend = {f"ours, {length}": look for length, look in zip(by_length, ((BLUE, "o"), (ORANGE, "s")), strict=True)}
    figure, axis = pyplot.subplots(figsize=(7.2, 1.5 + 0.4 * len(of_paper)), layout="constrained")
    for place, (found, look) in enumerate(zip(by_length.values(), legend.values(), strict=True)):
        for row, (method, _) in enumerate(of_paper):
            if method in found:
                _draw_difference(axis, found[method], row + 0.3 * place - 0.15, *look)
    _finish(figure, axis, dict(of_paper), legend, title, path)


def _minus_the_papers(named: tuple[str, Compared]) -> float:
    return -(named[1].paper or 0.0)


def _draw_difference(axis: Any, one: Compared, row: float, colour: str, marker: str = "o") -> None:
    reach = [[one.ours - one.interval[0]], [one.interval[1] - one.ours]]
    axis.errorbar([one.ours], [row], xerr=reach, fmt=marker, color=colour, capsize=3, markersize=5)


def _finish(figure: Any, axis: Any, named: Mapping[str, Compared], legend: Mapping[str, tuple[str, str]], title: str, path: Path) -> None:
    """Add the paper's differences, the names of the rows and the legend (the colour and the marker of each entry), and save the picture."""
    rows, papers = range(len(named)), [one.paper for one in named.values()]
    axis.plot(papers, rows, linestyle="", marker="D", color=BLACK, markerfacecolor="none", markersize=6, label="the paper")
    for label, (colour, marker) in legend.items():
        axis.plot([], [], marker=marker, color=colour, label=label)
    axis.axvline(0, color=BLACK, linewidth=0.8)
    axis.set_yticks(rows, list(named), fontsize=9.5)
    axis.tick_params(axis="x", labelsize=9.5)
    axis.set_ylim(len(named) - 0.3, -0.7)  # the first at the top
    axis.set_xlabel("points of accuracy" if all(one.is_accuracy for one in named.values()) else "loss", fontsize=9.5)
    axis.grid(alpha=0.25, linewidth=0.5)
    figure.suptitle(title, fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9.5, frameon=False)
    _save(figure, path)


def draw_curves(found: Sequence[Seeds], measures: Sequence[str], title: str, path: Path, names: Sequence[str] = ()) -> None:
    """Draw a row of panels for each measure of the curves, "training loss" first. `names` replaces the method names in the legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    named = zip(found, names or [seeds.run.name for seeds in found], strict=True)
    once = {name: seeds for seeds, name in named if seeds.run.stretch == 1 and seeds.run.method in LOOKS}
    if not once:
        return
    figure, axes = pyplot.subplots(len(measures), 2, figsize=(7.4, 2.6 * len(measures) + 0.8), squeeze=False, layout="constrained")
    for place, (measure, row) in enumerate(zip(measures, axes, strict=True)):
        for name, seeds in once.items():
            done = np.arange(1, len(seeds.curves[0]) + 1) / len(seeds.curves[0])  # share of the run at each point of its curve
            for axis, whole in zip(row, (seeds.steps, seeds.hours), strict=True):
                _draw(axis, seeds, done * whole, place, name)
        low, high = _range(list(once.values()), place)
        for axis, label in zip(row, ("iterations", "modelled hours"), strict=True):
            axis.set(xlabel=label, ylabel=measure, xlim=(0, None), ylim=(low, high))
            axis.grid(alpha=0.25, linewidth=0.5)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9.5, frameon=False)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def draw_periods(found: Mapping[str, Seeds], title: str, path: Path) -> None:
    """Draw the steps for each global average over the iterations, by name: the inverse of the share of global rounds in an epoch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for colour, (name, seeds) in zip((GREEN, BLUE, ORANGE, PURPLE), found.items(), strict=False):
        share = np.array([[point.global_rounds for point in curve] for curve in seeds.curves]).mean(0)
        x = seeds.steps * np.arange(1, len(share) + 1) / len(share)
        axis.plot(x[share > 0], 1 / share[share > 0], color=colour, linewidth=1.4, label=name)  # no global round: longer than an epoch
    axis.set(xlabel="iterations", ylabel="steps for each global average", xlim=(0, None), ylim=(0, None), title=title)
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.legend(fontsize=9, frameon=False)
    _save(figure, path)


def draw_steps(found: Sequence[Seeds], title: str, path: Path) -> None:
    """Draw one run of each method: held-out loss, the length of the mean model's steps, and how far the nodes are apart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measures: dict[str, Callable[[Point], float | None]] = {
        "held-out loss": lambda point: point.value,
        "step of the mean model": lambda point: point.moved,
        "distance between nodes": lambda point: math.sqrt(point.spread) if point.spread else None,  # 0 after a global average
    }
    figure, axes = pyplot.subplots(1, len(measures), figsize=(9, 3.2), layout="constrained")
    for axis, (name, measure) in zip(axes, measures.items(), strict=True):
        for seeds in found:
            curve, (colour, dashes) = seeds.curves[0], LOOKS[seeds.run.method]
            drawn = [(seeds.steps * place / len(curve), measure(point)) for place, point in enumerate(curve, 1)]
            some = [(x, y) for x, y in drawn if y is not None]
            axis.plot(*zip(*some, strict=True) if some else ((), ()), color=colour, linestyle=dashes, linewidth=1.4, label=seeds.run.name)
        axis.set(xlabel="iterations", title=name, xlim=(0, None))
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.25, linewidth=0.5)
    axes[1].set_ylim(0, 1.4)
    axes[2].set_ylim(0, None)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9.5, frameon=False)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        figure.savefig(aside, dpi=150)
    pyplot.close(figure)


def _values(seeds: Seeds, place: int) -> Any:
    """Return the values as [seeds, points], accuracies in %."""
    return np.array([[point[place] for point in curve] for curve in seeds.curves]) * (100 if place and seeds.is_accuracy else 1)


def _draw(axis: Any, seeds: Seeds, x: Any, place: int, name: str) -> None:
    colour, dashes = LOOKS[seeds.run.method]
    values = _values(seeds, place)
    mean, deviation = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else 0 * values[0]
    axis.plot(x, mean, color=colour, linestyle=dashes, linewidth=1.4, label=name)
    axis.fill_between(x, mean - deviation, mean + deviation, color=colour, alpha=0.12, linewidth=0)


def _range(found: Sequence[Seeds], place: int) -> tuple[float, float]:
    """Return the range of the y-axis. The first third of the run is left out, because it would hide the differences at the end."""
    later = np.concatenate([_values(seeds, place)[:, len(seeds.curves[0]) // 3 :].ravel() for seeds in found])
    room = 0.04 * (later.max() - later.min())
    return float(later.min() - room), float(later.max() + room)
