"""The pictures of docs/performance.md, from benchmarks/results; page.py draws them when it writes the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rumor.files import replacing
from rumor.plots import BLACK, BLUE, GREEN, ORANGE, SKY

LIBRARIES = {"Rumor": BLUE, "PyTorch": SKY, "torchft": ORANGE, "fairscale": GREEN, "no communication": "#999999"}


def library(name: str) -> str:
    if name == "computing alone":
        return "no communication"
    if name.startswith("DDP") or "(torch)" in name:
        return "PyTorch"
    return next((library for library in ("torchft", "fairscale") if f"({library})" in name), "Rumor")


def of_rate(rows: list[dict[str, Any]], rate: str) -> dict[str, dict[str, Any]]:
    """The rows of a rate by name, with DDP at its best bucket size only."""
    found = {row["what"]: row for row in rows if row["rate"] == rate}
    plain = [name for name in found if name.startswith("DDP, bucket")]
    best = min(plain, key=lambda name: found[name]["median"])
    return {"DDP" if name == best else name: row for name, row in found.items() if name == best or name not in plain}


def draw_peers(results: dict[str, Any], path: Path) -> None:
    """ms of a training step: a panel for each rate, fastest first in the leftmost, whiskers from the fastest turn to the slowest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rates = list(dict.fromkeys(row["rate"] for row in results["rows"]))
    panels = [of_rate(results["rows"], rate) for rate in rates]
    names = sorted(panels[0], key=lambda name: panels[0][name]["median"])
    size = (3.2 + 3.1 * len(rates), 1.3 + 0.27 * len(names))
    figure, axes = pyplot.subplots(1, len(rates), figsize=size, sharey=True, layout="constrained", squeeze=False)
    for panel, found, rate in zip(axes[0], panels, rates, strict=True):
        _draw_bars(panel, names, found)
        panel.set_title(rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s").replace("loopback", "loopback, unshaped"))
    axes[0][0].invert_yaxis()
    patches = [Patch(color=color, label=name) for name, color in LIBRARIES.items()]
    ddp = pyplot.Line2D([], [], color=BLACK, linestyle="--", linewidth=1, label="DDP at its best bucket size")
    figure.legend(handles=[*patches, ddp], loc="outside lower center", ncols=6, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        figure.savefig(aside, dpi=160, bbox_inches="tight")
    pyplot.close(figure)


def _draw_bars(axes: Any, names: list[str], found: dict[str, dict[str, Any]]) -> None:
    median = [1e3 * found[name]["median"] for name in names]
    spread = [[1e3 * abs(found[name]["median"] - found[name][end]) for name in names] for end in ("fastest", "slowest")]
    axes.barh(names, median, color=[LIBRARIES[library(name)] for name in names], xerr=spread, error_kw={"linewidth": 1, "alpha": 0.6})
    beside = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
    for at, (value, above) in enumerate(zip(median, spread[1], strict=True)):
        axes.annotate(f"{value:.0f}", (value + above, at), bbox={"color": "white", "pad": 0.8}, **beside)  # the line goes behind it
    axes.axvline(1e3 * found["DDP"]["median"], color=BLACK, linestyle="--", linewidth=1)
    axes.set(xlabel="ms a step", xlim=(0, 1.15 * max(m + a for m, a in zip(median, spread[1], strict=True))))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.margins(y=0.01)
