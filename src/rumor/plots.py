"""Draws pictures with matplotlib, an optional dependency: `pip install 'rumor[plots]'`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rumor.checkpoint.files import replacing
from rumor.theory import Mixing
from rumor.topology import Topology
from rumor.topology.drawing import MOST_LINKS, NUMBERED_UP_TO, has_hidden_links, links, positions
from rumor.topology.matrix import Array

# The colours of Okabe and Ito, which colour-blind readers can tell apart
BLACK, ORANGE, SKY, GREEN, VERMILION, BLUE, PURPLE = "#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7"
FORMATS = (".png", ".svg", ".pdf")


def open_pyplot(path: str) -> Any:
    """Imports pyplot, or raises an error that says why no picture can be written to `path`."""
    if Path(path).suffix not in FORMATS:
        raise ValueError(f"--out {path}: the name of a picture must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {Path(path).absolute().parent}")
    try:
        import matplotlib
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'rumor[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: str) -> None:
    with replacing(path) as aside:
        figure.savefig(aside, dpi=160, bbox_inches="tight")


def draw_topology(topology: Topology, values: Array | None, over_H: Sequence[Mixing], path: str) -> None:
    """Draws the graph, its spectrum (`values`), and C_beta and D_beta over H. The last of `over_H` is H = infinity."""
    pyplot = open_pyplot(path)
    figure, (graph, eigenvalues, periods) = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    figure.suptitle(f"{topology.name}: beta = {topology.beta:.5f}")
    _draw_graph(graph, topology)
    _draw_spectrum(eigenvalues, topology, values)
    _draw_constants(periods, over_H)
    save(figure, path)
    pyplot.close(figure)


def _draw_graph(axes: Any, topology: Topology) -> None:
    from matplotlib.collections import LineCollection

    at, pairs = positions(topology), links(topology)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.invert_yaxis()
    title = f"{len(pairs):,} links"
    if len(pairs) <= MOST_LINKS:
        axes.add_collection(LineCollection(list(at[pairs]), colors=SKY, linewidths=1.4 if len(pairs) < 200 else 0.4, zorder=1))
    else:
        title += ", too many to draw"
    title += "; wraps around the edges" if has_hidden_links(topology) else ""
    is_small = topology.n <= NUMBERED_UP_TO
    axes.scatter(*at.T, s=170 if is_small else 6, color="white" if is_small else BLACK, edgecolors=BLACK, zorder=2)
    if is_small:
        for i, (x, y) in enumerate(at):
            axes.text(x, y, str(i), ha="center", va="center", fontsize=8, zorder=3)
    axes.set_title(title)


def _draw_spectrum(axes: Any, topology: Topology, values: Array | None) -> None:
    axes.set_title(f"|eigenvalues| of {'a cycle of W' if topology.period > 1 else 'W'}")
    axes.set(xlabel="rank by size", ylim=(-0.03, 1.05))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if values is None:
        axes.text(0.5, 0.5, f"left out for n = {topology.n:,}", transform=axes.transAxes, ha="center")
    else:
        axes.plot(np.arange(1, len(values) + 1), values, "o" if len(values) <= 100 else "-", color=VERMILION, markersize=4)
    axes.grid(alpha=0.3)


def _draw_constants(axes: Any, over_H: Sequence[Mixing]) -> None:
    *finite, gossip = over_H  # the last one is H = infinity: Gossip SGD
    H = [row.H for row in finite]
    for values, limit, name, color, mark in (
        ([row.C for row in finite], gossip.C, "C_beta", GREEN, "o-"),
        ([row.D for row in finite], gossip.D, "D_beta", ORANGE, "s--"),  # dashed with hollow marks: the two lines may coincide
    ):
        hollow = "none" if "--" in mark else color
        axes.plot(H, values, mark, color=color, markerfacecolor=hollow, markersize=6, label=f"{name} ({limit:.3g} at H = inf)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set(xlabel="H", title="C_beta and D_beta")
    axes.grid(alpha=0.3)
    axes.legend()


class Bar(NamedTuple):
    """A method in the picture of a plan. Times are in seconds."""

    name: str
    computing: float
    communication: float
    remark: str
    is_chosen: bool


def draw_plan(bars: Sequence[Bar], title: str, path: str) -> None:
    """Draws the time of a step for each method of `rumor plan`, computing and communication, with a remark beside the bar."""
    pyplot = open_pyplot(path)
    figure, axes = pyplot.subplots(figsize=(7.2, 1.7 + 0.27 * len(bars)), layout="constrained")
    at, computing = range(len(bars)), [1e3 * bar.computing for bar in bars]
    axes.barh(at, computing, color=SKY, label="computing")
    axes.barh(at, [1e3 * bar.communication for bar in bars], left=computing, color=BLUE, label="communication")
    axes.set_yticks(at, [bar.name for bar in bars], fontsize=9)
    for place, (bar, label) in enumerate(zip(bars, axes.get_yticklabels(), strict=True)):
        total = 1e3 * (bar.computing + bar.communication)
        look = {"color": VERMILION, "fontweight": "bold"} if bar.is_chosen else {}
        label.set(**look)
        text = f"{total:.3g} ms{f': {bar.remark}' if bar.remark else ''}"
        axes.annotate(text, (total, place), (4, 0), textcoords="offset points", va="center", fontsize=9, **look)
    axes.set(xlim=(0, 1.35e3 * max(bar.computing + bar.communication for bar in bars)), xlabel="ms per step")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower right", ncols=2, fontsize=9, frameon=False)
    figure.suptitle(title, fontsize=10)
    save(figure, path)
    pyplot.close(figure)
