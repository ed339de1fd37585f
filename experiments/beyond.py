"""Accuracy or loss against the bytes that a node sends: docs/beyond.md with its picture, and the table for Adam on docs/choosing.md.

    python experiments/beyond.py                   # rebuilds both pages from the results in experiments/results
    python experiments/beyond.py --data FOLDER     # first runs what is missing, of the sets that FOLDER has; can be stopped at any time

FOLDER has cifar-10-batches-bin/ (for a GPU; about an hour, estimated), fashion-mnist/ (half an hour of a CPU's core) and enwik8 (an hour).
Expect Gossip-PGA with 4 bits, and ideas that cost it few more bytes, close to Parallel SGD with a twelfth of its bytes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import adamw
import ddp_hooks
from images.networks import MLP
from images.study import PERCEPTRON, USUAL, Recipe, settings_of
from images.study import TABLES as IMAGES
from logistic import tables
from networks import compare
from networks.compare import Seeds
from networks.page import NOT_YET, RESULTS, ROOT, at_best, runs_by_rate, stores
from networks.runs import IID, QUASI_GLOBAL, TRACKING, Run
from networks.sent import share_of_parallel
from networks.store import Store
from rumor.checkpoint.files import replacing
from rumor.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from text.gpt import read

PAGE, CHOOSING = ROOT / "docs" / "beyond.md", ROOT / "docs" / "choosing.md"
PICTURE = ROOT / "docs" / "beyond" / "bytes.png"
SMALL_RECIPE = USUAL._replace(**PERCEPTRON, epochs=6)
SMALL = (
    "--net",
    "mlp",
    "--epochs",
    str(SMALL_RECIPE.epochs),
    "--table",
    "beyond small",
    "--device",
    "cpu",
    "--out",
    str(RESULTS / "beyond.csv"),
)
RATES = (0.004, 0.008, 0.016)
LARGE = (  # 3 M parameters
    *("--methods", "DDP", "DDP, 4 bits", "Gossip-PGA", "Gossip-PGA, H = 2", "Gossip-PGA, corrected", "--lr", "0.001", "0.002", "0.004"),
    *("--nodes", "8", "--width", "256", "--layers", "4", "--batch", "32", "--length", "128", "--steps", "1500"),
)
GPT_SIZE = {"steps": "400", "width": "96"}  # of the runs on the page
BOTH = "Gossip-PGA, H 3 to 24, state global, 4 bits"
PAIRS = (  # what is compared method by method
    (f"{QUASI_GLOBAL}, 4 bits", "Gossip-PGA, 4 bits"),
    (f"{QUASI_GLOBAL}, 4 bits", "Gossip-PGA, state global, 4 bits"),
    (f"{QUASI_GLOBAL}, 4 bits", "Gossip-PGA, H 3 to 24, 4 bits"),
    (f"{QUASI_GLOBAL}, H 3 to 24, 4 bits", BOTH),
    ("Scaffold, 4 bits", "Gossip-PGA, 4 bits"),
    (f"{TRACKING}, 4 bits", "Gossip-PGA, 4 bits"),
    ("Gossip-PGA, H 3 to 24, 4 bits", "Gossip-AGA, 4 bits"),
    (BOTH, "Gossip-AGA, 4 bits"),
)
GREY, BESIDE = "#777777", 1.025  # a colour; how far apart points of the same bytes are drawn
FAMILIES = {  # colour and marker
    "Parallel SGD": (BLACK, "o"),
    "Local SGD": (ORANGE, "s"),
    "Gossip SGD": (VERMILION, "v"),
    "Gossip-AGA": (GREEN, "^"),
    "Gossip-PGA": (BLUE, "o"),
    "Gossip-PGA, state averaged": (BLUE, "D"),
    "Gossip-PGA, H by learning rate": (SKY, "o"),
    "Gossip-PGA, H by learning rate, state averaged": (SKY, "D"),
    "Gossip-PGA on the base graph": (GREY, "o"),
    "Gossip-PGA, corrected for Adam": (GREEN, "D"),
    QUASI_GLOBAL: (VERMILION, "P"),
    "Scaffold": (PURPLE, "X"),
    TRACKING: (PURPLE, "*"),
}


class Point(NamedTuple):
    """A method in one setting: what it sends, as a share of Parallel SGD's bytes, and its value for each seed."""

    name: str
    family: str
    sent: float
    values: dict[int, float]  # by seed: accuracy in %, or a loss
    training: dict[int, float] | None = None  # the training loss by seed

    @property
    def mean(self) -> float:
        return statistics.mean(self.values.values())


class Panel(NamedTuple):
    """A setting. The first point is what the others are compared with."""

    word: str  # the table on the page
    title: str
    measure: str
    points: list[Point]


# ---- points from the results ----------------------------------------------------------------------------------------------------------


def family_of(run: Run) -> str:
    if run.method != "Gossip-PGA":
        return run.method
    if run.topology == "base_graph":
        return "Gossip-PGA on the base graph"
    marks = (["H by learning rate"] if isinstance(run.H, tuple) else []) + (["state averaged"] if run.state else [])
    return ", ".join(["Gossip-PGA", *marks])


def point_of(seeds: Seeds, mark: str = "") -> Point:
    times = 100 if seeds.is_accuracy else 1
    values = {seed: times * value for seed, value in zip(seeds.seeds, seeds.values, strict=True)}
    training = dict(zip(seeds.seeds, seeds.in_training().values, strict=True)) if seeds.is_accuracy else None
    return Point(seeds.run.name + mark, family_of(seeds.run), share_of_parallel(seeds.run, seeds.global_share), values, training)


def small_store(path: Path, recipe: Recipe = SMALL_RECIPE, images: int = 60_000) -> Store:
    """Open the results of the MLP on that many training images of Fashion-MNIST."""
    return Store(path, IMAGES, lambda run: settings_of(run, recipe, "fashion-mnist", images, MLP.__name__, path))


def of_images(table: str, store: Store, nodes: int, split: str) -> list[Point]:
    """Return the runs that have at least three seeds; none before Parallel SGD has, which the others are compared with."""
    found = [seeds for seeds in compare.of_table(IMAGES[table], store) if (seeds.run.nodes, seeds.run.split) == (nodes, split)]
    points = [point_of(seeds) for seeds in found if len(seeds.values) >= 3]
    return points if points and points[0].name == "Parallel SGD" else []


def of_bert(by_rate: Mapping[float, Store]) -> list[Point]:
    """Return each method of the earlier Table 11 at its best learning rate."""
    return [point_of(seeds, f", lr {lr:g}") for lr, seeds in at_best(runs_by_rate(by_rate)) if seeds.run.stretch == 1]


def gpt_rows(optimizer: str, nodes: int = 4) -> list[dict[str, str]]:
    """Return the runs of adamw.py that the pages show."""
    size = {**GPT_SIZE, "nodes": str(nodes)}
    return [row for row in read(adamw.RESULTS.with_stem(optimizer)) if all(row[name] == value for name, value in size.items())]


def of_gpt(rows: list[dict[str, str]]) -> list[Point]:
    """Return each method of adamw.py at its best learning rate."""
    sent = {row["method"]: float(row["megabytes"]) for row in rows}
    points = []
    for method, (lr, values) in adamw.at_best(rows).items():
        if len(values) < adamw.LEAST:
            continue
        corrected = "Gossip-PGA, corrected for Adam"
        base = "Parallel SGD" if method.startswith("DDP") else method.split(",")[0]
        family = corrected if "corrected" in method else "Gossip-PGA, state averaged" if "state" in method else base
        points.append(Point(f"{method}, lr {lr:g}", family, sent[method] / sent["DDP"], values))
    return points


def panels() -> list[Panel]:
    images, _, by_rate = stores()
    small = small_store(RESULTS / "beyond.csv")
    splits = {f"dirichlet({alpha})": f"labels split by Dirichlet({alpha})" for alpha in (0.3, 0.1)}
    found = []
    for title, table, store, nodes, odd in (
        ("CIFAR-10, ResNet of 2 M", "beyond", images, 32, 50),
        ("Fashion-MNIST, MLP of 13 k", "beyond small", small, 16, 20),
    ):
        word = table.replace("beyond ", "").replace("beyond", "cifar")
        for n, split in ((nodes, IID), (odd, IID), *((nodes, split) for split in splits)):
            name = ", ".join([title, f"{n} nodes", *([splits[split]] if split in splits else [])])
            mark = f"{n}" if split == IID else split.removeprefix("dirichlet(").removesuffix(")")
            found.append(Panel(f"{word}-{mark}", name, "test accuracy, %", of_images(table, store, n, split)))
    found.append(Panel("bert", "BERT with LAMB, 8 nodes, each at its best rate", "held-out loss", of_bert(by_rate)))
    found.append(Panel("gpt", "GPT with AdamW, 4 nodes, each at its best rate", "held-out loss", of_gpt(gpt_rows("adamw"))))
    return found


# ---- the page -------------------------------------------------------------------------------------------------------------------------


def table_of(panel: Panel) -> str:
    """A row for each method, the one that sends most first."""
    if not panel.points:
        return NOT_YET
    first = panel.points[0]
    digits = 2 if "%" in panel.measure else 3
    rows: list[tables.Row] = []
    for point in sorted(panel.points, key=lambda point: -point.sent):
        row: tables.Row = {
            "method": point.name,
            "bytes": "1" if point is first else f"1/{1 / point.sent:.1f}",
            f"{panel.measure} (seeds)": f"{point.mean:.{digits}f} ({len(point.values)})",
            f"minus {first.name.split(', lr')[0]}'s": "-" if point is first else _away(point.values, first.values, digits),
        }
        if point.training and first.training:
            row["training loss minus its"] = "-" if point is first else _away(point.training, first.training, 3)
        rows.append(row)
    return tables.as_text(rows)


def _away(ours: dict[int, float], theirs: dict[int, float], digits: int) -> str:
    """Format the difference, seed by seed, with the 95 % interval of its mean."""
    return compare.with_interval([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())], digits)


def pairs_table(by_word: Mapping[str, Panel]) -> str:
    """How far methods of nearly the same bytes are apart, in accuracy (%) and in training loss."""
    rows: list[tables.Row] = []
    for ours, theirs in PAIRS:
        row: tables.Row = {"method": ours.removesuffix(", 4 bits"), "minus": theirs.removesuffix(", 4 bits")}
        for word, title in (("small-16", "even"), ("small-0.3", "Dirichlet(0.3)"), ("small-0.1", "Dirichlet(0.1)")):
            found = {point.name: point for point in by_word[word].points}
            a, b = found.get(ours), found.get(theirs)
            row[title] = (
                "-" if a is None or b is None else f"{_away(a.values, b.values, 1)}; loss {_away(a.training or {}, b.training or {}, 3)}"
            )
        rows.append(row)
    return tables.as_text(rows)


def against_adaptive(panel: Panel) -> str:
    """How far our best method is from Gossip-AGA on CIFAR-10."""
    points = {point.name: point for point in panel.points}
    ours, theirs = points[BOTH], points["Gossip-AGA, 4 bits"]
    away = [_away(ours.values, theirs.values, 2), _away(ours.training or {}, theirs.training or {}, 3)]
    return f"{BOTH} minus Gossip-AGA, 4 bits, seed by seed: {away[0]} points of accuracy, {away[1]} of training loss."


def filled_in(text: str, found: Sequence[Panel]) -> str:
    by_word = {panel.word: panel for panel in found}
    special = {"pairs": lambda: pairs_table(by_word), "cifar-32-adaptive": lambda: against_adaptive(by_word["cifar-32"])}
    return tables.filled_in(text, lambda word: special[word]() if word in special else table_of(by_word[word]))


def choosing(text: str) -> str:
    """Return docs/choosing.md with its tables for Adam, for bits and for DDP's hooks rebuilt."""
    made = {
        "bits": lambda: adamw.bits_table({name: gpt_rows(name) for name in adamw.OPTIMIZERS}),
        "adamw": lambda: adamw.table(gpt_rows("adamw")),
        "adamw-8": lambda: adamw.table(gpt_rows("adamw", 8)),
        "hooks": lambda: ddp_hooks.table(read(ddp_hooks.RESULTS)),
    }
    return tables.filled_in(text, lambda word: made[word]())


# ---- the picture ----------------------------------------------------------------------------------------------------------------------


def draw(found: Sequence[Panel], path: Path) -> None:
    """One panel for each setting; the studies on a GPU on the left, those on a CPU on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = [[*found[:4], found[8]], [*found[4:8], found[9]]]
    figure, axes = pyplot.subplots(5, 2, figsize=(11, 17), layout="constrained")
    for side, column in enumerate(columns):
        for axis, panel in zip(axes[:, side], column, strict=True):
            _draw_panel(axis, panel)
    handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    order = [family for family in FAMILIES if family in handles]
    figure.legend([handles[name] for name in order], order, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        figure.savefig(aside, dpi=110)
    pyplot.close(figure)


def _draw_panel(axis: Any, panel: Panel) -> None:
    shares = [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32]
    axis.set(title=panel.title, xlabel="bytes that a node sends, as a share of Parallel SGD's", ylabel=panel.measure, xscale="log")
    axis.title.set_fontsize(10)
    axis.set_xticks(shares, ["1", *(f"1/{1 / share:.0f}" for share in shares[1:])])
    axis.minorticks_off()
    axis.set_xlim(1.15, 1 / 60)  # fewer bytes to the right
    axis.grid(alpha=0.25, linewidth=0.5)
    places = _side_by_side([point.sent for point in panel.points])
    for point, place in zip(panel.points, places, strict=True):
        colour, marker = FAMILIES[point.family]
        look = {"color": colour, "marker": marker, "markersize": 6, "linewidth": 1, "capsize": 2, "alpha": 0.85}
        axis.errorbar(place, point.mean, _half(point, panel.points[0]), label=point.family, **look)
    if not panel.points:
        axis.text(0.5, 0.5, "not run yet", transform=axis.transAxes, ha="center")
        return
    axis.axhline(panel.points[0].mean, color=BLACK, linewidth=0.7, linestyle=":")
    low, high = _range(panel)
    axis.set_ylim(low, high)
    for point, place in zip(panel.points, places, strict=True):  # an arrow for what is left out
        if not low <= point.mean <= high:
            edge, back = (low, 14) if point.mean < low else (high, -14)
            arrow = {"arrowstyle": "->", "color": FAMILIES[point.family][0]}
            axis.annotate("", (place, edge), (0, back), textcoords="offset points", arrowprops=arrow)


def _side_by_side(shares: Sequence[float]) -> list[float]:
    """Move points a little apart that would hide each other: those of nearly the same share, around where they are.

    >>> [round(share, 3) for share in _side_by_side([0.1, 0.1, 0.5])]
    [0.101, 0.099, 0.5]
    """
    clusters: list[list[int]] = []
    for place in sorted(range(len(shares)), key=lambda place: -shares[place]):
        if clusters and shares[clusters[-1][-1]] / shares[place] < BESIDE:
            clusters[-1].append(place)
        else:
            clusters.append([place])
    moved = {place: BESIDE ** ((len(near) - 1) / 2 - order) for near in clusters for order, place in enumerate(near)}
    return [share * moved[place] for place, share in enumerate(shares)]


def _range(panel: Panel) -> tuple[float, float]:
    """Return the range of the y-axis. Points that are far worse than most would hide the differences, so it leaves them out."""
    first = panel.points[0]
    gaps = {point.name: abs(point.mean - first.mean) for point in panel.points}
    most = 1.6 * max(sorted(gaps.values())[int(0.8 * (len(gaps) - 1))], 1e-3)
    near = [point for point in panel.points if gaps[point.name] <= most]
    low, high = (
        side([side(point.mean, point.mean + sign * min(_half(point, first), most)) for point in near])
        for side, sign in ((min, -1), (max, 1))
    )
    room = max(0.08 * (high - low), 1e-3)
    return low - room, high + room


def _half(point: Point, first: Point) -> float:
    """Return half the 95 % interval of the difference to the first point, seed by seed; 0 for the first point."""
    both = point.values.keys() & first.values.keys()
    half = compare.half_interval([point.values[seed] - first.values[seed] for seed in both])
    return 0.0 if math.isnan(half) else half


# ---- the command ----------------------------------------------------------------------------------------------------------------------


def commands(folder: Path, device: str) -> list[list[str]]:
    """The commands that run what is missing, for the data sets that the folder has; those for a GPU first, if there is one."""
    here, has_gpu, found = Path(__file__).parent, device != "cpu", []
    images, gpt = str(here / "image_classification.py"), [str(here / "adamw.py"), "--data", str(folder), "--seeds", "3"]
    if (folder / "cifar-10-batches-bin").is_dir() and has_gpu:
        found.append([images, "--data", str(folder / "cifar-10-batches-bin"), "--table", "beyond"])
    if (folder / "enwik8").is_file() and has_gpu:
        found.append([*gpt, *LARGE])
    if (folder / "fashion-mnist").is_dir():
        found.append([images, "--data", str(folder / "fashion-mnist"), *SMALL])
    if (folder / "enwik8").is_file():
        found.append([*gpt, "--lr", *map(str, RATES), "--device", "cpu"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with data sets: run what is missing first")
    options = parser.parse_args()
    if options.data is not None:
        for arguments in commands(options.data, "cuda" if torch.cuda.is_available() else "cpu"):
            print(" ".join(arguments), flush=True)
            subprocess.run([sys.executable, *arguments], check=True)
    found = panels()
    tables.write(PAGE, filled_in(PAGE.read_text(), found))
    tables.write(CHOOSING, choosing(CHOOSING.read_text()))
    draw(found, PICTURE)


if __name__ == "__main__":
    main()
