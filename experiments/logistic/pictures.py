"""Figures drawn from their data files: a panel for each setting. Real data have the node error above and the objective below it.

A curve is the mean over trials, and its band is one standard deviation.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from logistic import tables
from logistic.figures import CLAIMS, H_PAPER, NAMES, Curve, Panel
from rumor.checkpoint.files import replacing
from rumor.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

# dashes tell the curves apart in grey print
LOOKS = {
    "parallel_sgd": (BLACK, "-"),
    "local_sgd": (ORANGE, (0, (1, 1))),
    "gossip_sgd": (VERMILION, (0, (5, 2))),
    "gossip_pga": (BLUE, "-"),
    "gossip_pga, short": (SKY, (0, (4, 1))),
    "gossip_aga": (GREEN, (0, (7, 2, 1, 2))),
    "gossip_sgd_final_average": (PURPLE, (0, (3, 1, 1, 1, 1, 1))),
}
COLUMNS = 3
METRICS = {"error": "error of the nodes", "gap": r"$f(\bar{x}) - f^\star$"}
NOTE = r"Dots mark $T_{tr}(1)$: from there on, the error is at most twice Parallel SGD's"


def metrics_of(panels: list[Panel]) -> list[str]:
    """On synthetic data, the objectives of all methods lie on each other, so the picture leaves them out."""
    return ["error"] if panels[0].setting.data == "synthetic" else list(METRICS)


def draw(figure: str, panels: list[Panel], folder: Path) -> None:
    """Draw folder/figure-X.png from the files folder/figure-X*.csv."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    values, metrics = tables.read(folder / f"figure-{figure}-curves.csv"), metrics_of(panels)
    stages = {"error": tables.read(folder / f"figure-{figure}.csv"), "gap": tables.read(folder / f"figure-{figure}-objective.csv")}
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns) * len(metrics)
    picture, axes = plt.subplots(
        lines, columns, figsize=(7.4, 2.1 * lines + 1.2), squeeze=False, sharex=True, sharey="row", layout="constrained"
    )
    for p, panel in enumerate(panels):
        band, column = divmod(p, columns)
        for row, metric in enumerate(metrics):
            axis = axes[len(metrics) * band + row][column]
            _panel(axis, panel, metric, values, stages[metric])
            if column == 0:
                axis.set_ylabel(METRICS[metric])
        axes[len(metrics) * band][column].set_title(panel.title, fontsize=9)
        axes[-1][column].set_xlabel("iteration $k$")
    handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    picture.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=9.5, frameon=False)
    picture.suptitle(f"{fill(CLAIMS[figure], 96)}\n{NOTE}", fontsize=10)
    with replacing(folder / f"figure-{figure}.png") as aside:
        picture.savefig(aside, dpi=150)
    plt.close(picture)


def _panel(axis: Any, panel: Panel, metric: str, values: list[tables.Row], stages: list[tables.Row]) -> None:
    for curve in panel.curves:
        label = NAMES[str(curve.row["method"])] if "H =" in panel.title else str(curve)
        _curve(axis, curve, label, metric, tables.of(curve, values), tables.of(curve, stages)[0])
    axis.set_yscale("log")
    axis.set_xticks([0, 5_000, 10_000], ["0", "5,000", "10,000"])
    axis.tick_params(labelsize=9)
    axis.grid(alpha=0.25, linewidth=0.5)


def _curve(axis: Any, curve: Curve, label: str, metric: str, values: list[tables.Row], stages: tables.Row) -> None:
    """Draw one curve and its transient stage."""
    k, mean, deviation = (np.array([float(str(row[name])) for row in values]) for name in ("k", f"{metric}_mean", f"{metric}_std"))
    short = curve.method == "gossip_pga" and (curve.H or 0) < H_PAPER
    colour, dashes = LOOKS["gossip_pga, short" if short else str(curve.row["method"])]
    axis.plot(k, mean, color=colour, linestyle=dashes, linewidth=1.5, label=label)
    # a band that reaches below zero can't be drawn on a log scale: it ends at a tenth of the mean
    axis.fill_between(k, np.maximum(mean - deviation, mean / 10), mean + deviation, color=colour, alpha=0.18, linewidth=0)
    stage = str(stages["T_tr_1"])
    if stage and int(stage) > 0 and curve.method != "parallel_sgd":
        axis.plot([int(stage)], [np.interp(int(stage), k, mean)], "o", color=colour, markersize=5)
