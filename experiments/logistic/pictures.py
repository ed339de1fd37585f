"""Figures drawn from their data files: one column per panel, with the node error above and the objective below it.

A curve is the mean over trials, and its band is one standard deviation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from logistic import tables
from logistic.figures import CLAIMS, H_PAPER, Curve, Panel
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
METRICS = {"error": r"$\frac{1}{n}\sum_i\|x_i - x^\star\|^2$", "gap": r"$f(\bar{x}) - f^\star$"}
NOTE = r"Lines and dots mark $T_{tr}(1)$: from there on at most twice Parallel SGD's value. Bands: one standard deviation over trials."


def draw(figure: str, panels: list[Panel], folder: Path) -> None:
    """Draw folder/figure-X.png from the files folder/figure-X*.csv."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    values = tables.read(folder / f"figure-{figure}-curves.csv")
    stages = {"error": tables.read(folder / f"figure-{figure}.csv"), "gap": tables.read(folder / f"figure-{figure}-objective.csv")}
    columns = min(COLUMNS, len(panels))
    bands = -(-len(panels) // columns)  # rows of panels; each has two rows of axes
    picture, axes = plt.subplots(
        2 * bands, columns, figsize=(4.4 * columns, 4.8 * bands + 0.8), squeeze=False, sharex=True, layout="constrained"
    )
    for p, panel in enumerate(panels):
        band, column = divmod(p, columns)
        for row, metric in enumerate(METRICS):
            axis = axes[2 * band + row][column]
            _panel(axis, panel, metric, values, stages[metric])
            if column == 0:
                axis.set_ylabel(METRICS[metric])
        axes[2 * band][column].set_title(panel.title, fontsize=10)
        axes[-1][column].set_xlabel("iteration $k$")
    picture.suptitle(f"{CLAIMS[figure]}\n{NOTE}", fontsize=10)
    with replacing(folder / f"figure-{figure}.png") as aside:
        picture.savefig(aside, dpi=110)
    plt.close(picture)


def _panel(axis: Any, panel: Panel, metric: str, values: list[tables.Row], stages: list[tables.Row]) -> None:
    lowest = [_curve(axis, curve, metric, tables.of(curve, values), tables.of(curve, stages)[0]) for curve in panel.curves]
    axis.set_yscale("log")
    axis.set_ylim(bottom=min(lowest) / 2)
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.legend(fontsize=7.5, loc="upper right", framealpha=0.85, edgecolor="none")


def _curve(axis: Any, curve: Curve, metric: str, values: list[tables.Row], stages: tables.Row) -> float:
    """Draw one curve and its transient stage, and return its lowest mean."""
    k, mean, deviation = (np.array([float(str(row[name])) for row in values]) for name in ("k", f"{metric}_mean", f"{metric}_std"))
    short = curve.method == "gossip_pga" and (curve.H or 0) < H_PAPER
    colour, dashes = LOOKS["gossip_pga, short" if short else str(curve.row["method"])]
    stage = str(stages["T_tr_1"])
    is_baseline = curve.method == "parallel_sgd"
    reached = "" if is_baseline else f": $T_{{tr}}$ = {int(stage):,}" if stage else ": not reached"
    axis.plot(k, mean, color=colour, linestyle=dashes, linewidth=1.5, label=f"{curve}{reached}")
    # a band that reaches below zero can't be drawn on a log scale: it ends at a tenth of the mean
    axis.fill_between(k, np.maximum(mean - deviation, mean / 10), mean + deviation, color=colour, alpha=0.18, linewidth=0)
    if stage and int(stage) > 0 and not is_baseline:
        axis.axvline(int(stage), color=colour, linestyle=":", linewidth=0.9)
        axis.plot([int(stage)], [np.interp(int(stage), k, mean)], "o", color=colour, markersize=4)
    return float(mean.min())
