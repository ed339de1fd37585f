"""Draws demo.png: the accuracy of the mean model during training, and the accuracy of each node at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rumor.demo.results import Result
from rumor.demo.training import AT_THE_END
from rumor.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, open_pyplot, save
from rumor.topology import Topology

COLORS = {  # as in the pictures of the studies
    "parallel_sgd": BLACK,
    "local_sgd": ORANGE,
    "gossip_sgd": VERMILION,
    "gossip_pga": BLUE,
    "gossip_aga": GREEN,
    "slowmo": SKY,
    "osgp": PURPLE,
}


def _color(result: Result) -> str:
    """The colour of a method, also of one that was written out with its options."""
    return COLORS.get(result.method.name.split("(")[0], BLACK)


def draw(results: Sequence[Result], topology: Topology, path: Path) -> None:
    pyplot = open_pyplot(str(path))
    figure, (curves, nodes) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained", width_ratios=(1, 1.15))
    steps = results[0].curve[-1].step
    figure.suptitle(f"{topology.n} processes learn handwritten digits, each from its own few digits: {topology.name}, {steps} steps")
    _draw_curves(curves, results)
    _draw_nodes(nodes, results)
    for axes in (curves, nodes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    save(figure, str(path))
    pyplot.close(figure)


def _draw_curves(axes: Any, results: Sequence[Result]) -> None:
    for result in results:
        curve = [*(each for each in result.curve if each.step <= result.end.step - AT_THE_END), result.end]
        is_dashed = result.method.name == "parallel_sgd"  # other lines may lie on this one
        axes.plot(
            [each.step for each in curve],
            [each.mean_accuracy for each in curve],
            marker="o",
            markersize=3,
            color=_color(result),
            linestyle="--" if is_dashed else "-",
            linewidth=2.2,
            zorder=3 if is_dashed else 2,
            label=result.method.label,
        )
    axes.set_title("The mean of all nodes", loc="left", fontsize=11)
    axes.set(xlabel="steps", ylabel="accuracy on the test set", ylim=(None, 1.0))
    axes.yaxis.get_major_locator().set_params(steps=[1, 2, 5, 10])  # whole percents
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend(frameon=False, loc="lower right")


def _draw_nodes(axes: Any, results: Sequence[Result]) -> None:
    """Draws one row for each method: a dot for each node and a diamond for their mean model. In a short row the nodes are close."""
    for row, result in enumerate(results):
        end, color = result.end, _color(result)
        best = max(*end.node_accuracies, end.mean_accuracy)
        axes.plot([end.worst_accuracy, best], [row, row], color=color, linewidth=6, alpha=0.25, solid_capstyle="round")
        axes.scatter(end.node_accuracies, [row] * len(end.node_accuracies), color=color, s=42, alpha=0.8, linewidths=0, zorder=3)
        axes.scatter([end.mean_accuracy], [row], marker="D", s=70, facecolor="white", edgecolor=color, linewidths=2, zorder=4)
        axes.annotate(
            f"worst {end.worst_accuracy:.1%}", (end.worst_accuracy, row), (0, 11), textcoords="offset points", ha="center", fontsize=9
        )
    axes.set_yticks(range(len(results)), [result.method.label for result in results], fontsize=11)
    axes.set_ylim(len(results) - 0.5, -0.6)
    axes.margins(x=0.12)
    axes.set_title(f"Each node (dots) and their mean (diamond), over the last {AT_THE_END} steps", loc="left", fontsize=11)
    axes.set(xlabel="accuracy on the test set")
    axes.xaxis.get_major_locator().set_params(steps=[1, 2, 5, 10])  # whole percents
    axes.xaxis.set_major_formatter("{x:.0%}")
