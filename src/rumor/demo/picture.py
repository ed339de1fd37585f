"""Draws demo.png: the accuracy of the mean model over time on the link, and over the bytes that a node has sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rumor.demo.results import Evaluation, Result
from rumor.demo.training import AT_THE_END
from rumor.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, open_pyplot, save

COLORS = {  # as in the pictures of the studies
    "parallel_sgd": BLACK,
    "local_sgd": ORANGE,
    "gossip_sgd": VERMILION,
    "gossip_pga": BLUE,
    "gossip_aga": GREEN,
    "slowmo": SKY,
    "osgp": PURPLE,
}
LOWEST = 0.7  # accuracies below this are not shown, if methods get beyond it


def draw(results: Sequence[Result], title: str, rate: str, path: Path) -> None:
    """Draw the curves.

    Args:
        results: one for each method.
        title: of the whole picture.
        rate: of the links, as text.
        path: file to write.
    """
    pyplot = open_pyplot(str(path))
    figure, (over_time, over_bytes) = pyplot.subplots(1, 2, figsize=(12, 5.2), layout="constrained", sharey=True)
    figure.suptitle(title, fontsize=13)
    how = "measured" if results[0].link.unshaped is None else "modelled: measured seconds + bytes / rate"
    _draw_curves(over_time, results, lambda each: each.seconds)
    over_time.set_title(f"over time, on links of {rate}", loc="left", fontsize=11)
    over_time.set(xlabel=f"seconds ({how})", ylabel="accuracy of the mean model on the test set", xlim=(0, None))
    _draw_curves(over_bytes, results, lambda each: each.bytes_per_node / 1e6)
    over_bytes.set_title("over bytes", loc="left", fontsize=11)
    over_bytes.set(xlabel="MB sent per node (logarithmic)", xscale="log")
    over_bytes.xaxis.set_major_formatter("{x:g}")
    ends = [result.end.mean_accuracy for result in results]
    over_time.set_ylim(LOWEST if min(ends) > LOWEST + 0.1 else 0.0, 1.0)
    over_time.yaxis.set_major_formatter("{x:.0%}")
    handles, labels = over_time.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(results)), frameon=False, fontsize=11)
    save(figure, str(path))
    pyplot.close(figure)


def _draw_curves(axes: Any, results: Sequence[Result], at: Callable[[Evaluation], float]) -> None:
    for result in results:
        curve = [*(each for each in result.curve if each.step <= result.end.step - AT_THE_END), result.end]
        is_bold = result.method.is_recommended or result.method.with_ddp
        axes.plot(
            [at(each) for each in curve],
            [each.mean_accuracy for each in curve],
            color=COLORS.get(result.method.name.split("(")[0], BLACK),
            linestyle="--" if result.method.name == "gossip_pga" else "-",  # its colour is that of the recommended setting
            linewidth=2.6 if is_bold else 1.4,
            marker="o",
            markersize=4 if is_bold else 2.5,
            markevery=[-1],
            zorder=3 if is_bold else 2,
            label=f"{result.method.label} (recommended)" if result.method.is_recommended else result.method.label,
        )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
