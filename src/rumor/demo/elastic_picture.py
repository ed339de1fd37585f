"""Draws kill.png: the accuracy of the mean model over time, and which nodes train, with the moments of death and return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rumor.demo.elastic import Story
from rumor.plots import BLUE, GREEN, VERMILION, open_pyplot, save


def draw(story: Story, path: Path) -> None:
    pyplot = open_pyplot(str(path))
    figure, (curve, nodes) = pyplot.subplots(
        2, 1, figsize=(10, 5.8), layout="constrained", sharex=True, height_ratios=(2.2, 0.3 + 0.3 * story.n)
    )
    figure.suptitle(f"One of {story.n} nodes dies and comes back; the others train on", fontsize=13)
    _draw_accuracy(curve, story)
    _draw_nodes(nodes, story)
    for axes in (curve, nodes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
        for at, color in _marks(story):
            axes.axvline(at, color=color, linewidth=1.5, linestyle="--", zorder=1)
    save(figure, str(path))
    pyplot.close(figure)


def _marks(story: Story) -> list[tuple[float, str]]:
    found = [(story.killed, VERMILION), (story.back, GREEN)]
    return [(moment[0], color) for moment, color in found if moment is not None]


def _draw_accuracy(axes: Any, story: Story) -> None:
    averages = story.averages
    axes.plot([story.seconds(m.at) for m in averages], [m.accuracy for m in averages], color=BLUE, linewidth=2.2, marker="o", markersize=3)
    axes.set(ylabel="accuracy after each\nglobal average")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(axis="y", alpha=0.25)
    texts = (f" node {story.victim} is killed", f" node {story.victim} is back,\n with the others' model")
    for (at, color), text in zip(_marks(story), texts, strict=False):
        axes.text(at, 0.08, text, color=color, fontsize=11, transform=axes.get_xaxis_transform(), va="bottom")


def _draw_nodes(axes: Any, story: Story) -> None:
    """Draws a line for each node, as long as it takes steps."""
    for node in range(story.n):
        at = [story.seconds(moment.at) for moment in story.moments if moment.node == node]
        returned = story.restarted if node == story.victim and story.restarted is not None else at[0]
        for part in ([t for t in at if t < returned], [t for t in at if t >= returned]):
            if part:
                axes.plot([part[0], part[-1]], [node, node], color=BLUE, linewidth=9, solid_capstyle="butt", alpha=0.5)
    axes.set_yticks(range(story.n), [f"node {node}" for node in range(story.n)])
    axes.set_ylim(story.n - 0.4, -0.6)
    axes.set(xlabel="seconds")
    axes.tick_params(axis="y", length=0)
