"""Accuracy or loss against the bytes that a node sends: docs/beyond.md with its pictures, and the table for Adam on docs/choosing.md.

    python experiments/beyond.py                   # rebuilds both pages from the results in experiments/results
    python experiments/beyond.py --data FOLDER     # first runs what is missing, of the sets that FOLDER has; can be stopped at any time

FOLDER has cifar-10-batches-bin/ (for a GPU; about an hour, estimated), fashion-mnist/ (half an hour of a CPU's core) and enwik8 (three
hours). Expect Gossip-PGA with 4 bits, and ideas that cost it few more bytes, close to Parallel SGD with a twelfth of its bytes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import adamw
import ddp_hooks
import forest
from images.networks import MLP
from images.study import ONE_PEER, PERCEPTRON, RECIPES, USUAL, Recipe, settings_of
from images.study import TABLES as IMAGES
from logistic import tables
from networks import compare
from networks.compare import Seeds
from networks.page import NOT_YET, RESULTS, ROOT, at_best, runs_by_rate, stores
from networks.runs import IID, QUASI_GLOBAL, TRACKING, Run
from networks.sent import share_of_parallel
from networks.store import Settings, Store
from text.gpt import read

PAGE, CHOOSING = ROOT / "docs" / "beyond.md", ROOT / "docs" / "choosing.md"
SMALL_RECIPE = USUAL._replace(**PERCEPTRON, epochs=6)
DILOCO_RATES = (SMALL_RECIPE.lr, 0.05)  # for 256 images per step
SMALL = ("--net", "mlp", "--epochs", str(SMALL_RECIPE.epochs), "--device", "cpu", "--out", str(RESULTS / "beyond.csv"))
SMALL_TABLES = (
    *((f"{name} small", SMALL_RECIPE.lr) for name in ("beyond", "cosine", "graphs")),
    *(("diloco small", lr) for lr in DILOCO_RATES),
)
RATES = (0.004, 0.008, 0.016)
LARGE = (  # 3 M parameters
    *("--methods", "DDP", "DDP, 4 bits, optimizer=", "Gossip-PGA", "Gossip-PGA, H = 2"),
    *("--width", "256", "--layers", "4", "--batch", "32", "--length", "128", "--best"),
)
LARGE_RUNS = {  # nodes: the steps, and the learning rates
    8: ("--steps", "1500", "--lr", "0.001", "0.002", "0.004", "0.008"),
    32: ("--steps", "1000", "--lr", "0.002", "0.004"),
}
LONG_STEPS = "960"  # of a run with few global averages
LONG = (
    *("--steps", LONG_STEPS, "--lr", "0.004", "0.008"),
    *("--methods", "DDP", *(name for H in adamw.PERIODS for name in adamw.few_averages(H))),
)
GPT_SIZE = {"steps": "400", "width": "96"}  # of the runs on the page
RECOMMENDED = "Gossip-PGA, H 1 to 24, 4 bits"
AVERAGED = "Gossip-PGA, H 3 to 24, state global, 4 bits"  # with averaged momentum
PAIRS = (  # what is compared method by method
    (f"{QUASI_GLOBAL}, 4 bits", "Gossip-PGA, 4 bits"),
    (f"{QUASI_GLOBAL}, 4 bits", "Gossip-PGA, state global, 4 bits"),
    (f"{QUASI_GLOBAL}, 4 bits", "Gossip-PGA, H 3 to 24, 4 bits"),
    (f"{QUASI_GLOBAL}, H 3 to 24, 4 bits", AVERAGED),
    (AVERAGED, "Gossip-PGA, H 3 to 24, 4 bits"),
    (RECOMMENDED, AVERAGED),
    (RECOMMENDED, f"{QUASI_GLOBAL}, 4 bits"),
    (RECOMMENDED, "Local SGD, H 1 to 8, 4 bits"),
    ("Scaffold, 4 bits", "Gossip-PGA, 4 bits"),
    (f"{TRACKING}, 4 bits", "Gossip-PGA, 4 bits"),
    ("Gossip-PGA, H 3 to 24, 4 bits", "Gossip-AGA, 4 bits"),
    (RECOMMENDED, "Gossip-AGA, 4 bits"),
)
SHORT = {"Parallel SGD, 4 bits": "Parallel SGD, 4 bits", "**recommended**": RECOMMENDED, "Gossip-PGA, 4 bits": "Gossip-PGA, 4 bits"}
CORRECTED_BITS = "DDP, 4 bits, optimizer="  # the advice for AdamW
PICTURES = {  # what the words of its panels begin with, and its title
    "bytes": ("cifar", "CIFAR-10: test accuracy minus Parallel SGD's, in points, with 95 % intervals"),
    "fashion": ("small", "Fashion-MNIST: test accuracy minus Parallel SGD's, in points, with 95 % intervals"),
    "gpt": ("gpt", "GPT with AdamW: held-out loss minus DDP's, with 95 % intervals (lower is better)"),
}


class Point(NamedTuple):
    """A method in one setting: what it sends, as a share of Parallel SGD's bytes, and its value for each seed."""

    name: str
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


def point_of(seeds: Seeds, mark: str = "") -> Point:
    times = 100 if seeds.is_accuracy else 1
    values = {seed: times * value for seed, value in zip(seeds.seeds, seeds.values, strict=True)}
    training = dict(zip(seeds.seeds, seeds.in_training().values, strict=True)) if seeds.is_accuracy else None
    return Point(seeds.run.name + mark, share_of_parallel(seeds.run, seeds.global_share), values, training)


def small_store(path: Path, recipe: Recipe = SMALL_RECIPE, images: int = 60_000) -> Store:
    """Open the results of the MLP on that many training images of Fashion-MNIST."""

    def settings(run: Run) -> Settings:
        of_run = recipe._replace(decay=RECIPES[run.recipe].decay)
        return settings_of(run, of_run, "fashion-mnist", images, MLP.__name__, path)

    return Store(path, IMAGES, settings)


def of_images(table: str, store: Store, nodes: int, split: str) -> list[Point]:
    """Return the runs that have at least three seeds; none before Parallel SGD has, which the others are compared with."""
    found = [seeds for seeds in compare.of_table(IMAGES[table], store) if (seeds.run.nodes, seeds.run.split) == (nodes, split)]
    points = [point_of(seeds) for seeds in found if len(seeds.values) >= 3]
    return points if points and points[0].name == "Parallel SGD" else []


def of_bert(by_rate: Mapping[float, Store]) -> list[Point]:
    """Return each method of the earlier Table 11 at its best learning rate."""
    return [point_of(seeds, f", lr {lr:g}") for lr, seeds in at_best(runs_by_rate(by_rate)) if seeds.run.stretch == 1]


def gpt_rows(optimizer: str, nodes: int = 4, **size: str) -> list[dict[str, str]]:
    """Return the runs of adamw.py that the pages show. `size` is what differs from GPT_SIZE."""
    return adamw.with_values(read(adamw.RESULTS.with_stem(optimizer)), {**GPT_SIZE, "nodes": str(nodes), **size})


def of_gpt(rows: list[dict[str, str]]) -> list[Point]:
    """Return each method of adamw.py at its best learning rate."""
    sent = {row["method"]: float(row["megabytes"]) for row in rows}
    points = []
    for method, (lr, values) in adamw.at_best(rows).items():
        if len(values) >= adamw.LEAST:
            points.append(Point(f"{method}, lr {lr:g}", sent[method] / sent["DDP"], values))
    return points


def panels() -> list[Panel]:
    images, _, by_rate = stores()
    small = small_store(RESULTS / "beyond.csv")
    splits = {IID: "even data", **{f"dirichlet({alpha})": f"Dirichlet({alpha})" for alpha in (0.3, 0.1)}}
    found = []
    for table, store, nodes, odd in (("beyond", images, 32, 50), ("beyond small", small, 16, 20)):
        word = table.replace("beyond ", "").replace("beyond", "cifar")
        for n, split in ((nodes, IID), (odd, IID), *((nodes, split) for split in splits if split != IID)):
            name = f"{n} nodes, {splits[split]}"
            mark = f"{n}" if split == IID else split.removeprefix("dirichlet(").removesuffix(")")
            found.append(Panel(f"{word}-{mark}", name, "test accuracy, %", of_images(table, store, n, split)))
    found.append(Panel("bert", "8 nodes, each at its best learning rate", "held-out loss", of_bert(by_rate)))
    found.append(Panel("gpt", "4 nodes, each method at its best learning rate", "held-out loss", of_gpt(gpt_rows("adamw"))))
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
            f"minus {_bare(first)}'s": "-" if point is first else _away(point.values, first.values, digits),
        }
        if point.training and first.training:
            row["training loss minus its"] = "-" if point is first else _away(point.training, first.training, 3)
        rows.append(row)
    return tables.as_text(rows)


def _away(ours: dict[int, float], theirs: dict[int, float], digits: int) -> str:
    """Format the difference, seed by seed, with the 95 % interval of its mean."""
    return compare.with_interval([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())], digits)


def cosine_table(store: Store) -> str:
    """The methods that send least, with a learning rate that falls like a cosine: accuracy minus Parallel SGD's in each setting."""
    settings = dict.fromkeys((run.nodes, run.split) for run in IMAGES["cosine small"].runs)
    titles = {(nodes, split): f"{nodes}, {'even' if split == IID else split.capitalize()}" for nodes, split in settings}
    rows: dict[str, tables.Row] = {}
    for nodes, split in settings:
        points = of_images("cosine small", store, nodes, split)
        for point in points[1:]:
            new: tables.Row = {"method": point.name, "bytes": f"1/{1 / point.sent:.1f}", **dict.fromkeys(titles.values(), "-")}
            rows.setdefault(point.name, new)[titles[nodes, split]] = _away(point.values, points[0].values, 2)
    return tables.as_text(list(rows.values())) if rows else NOT_YET


def graphs_table(store: Store) -> str:
    """Graphs with one peer a step: the accuracy with one_peer_exponential, and how far the others are from it."""
    found = {seeds.run: point_of(seeds) for seeds in compare.of_table(IMAGES["graphs small"], store)}
    rows: list[tables.Row] = []
    for run, one_peer in found.items():
        if run.topology == ONE_PEER[0]:
            split = "even data" if run.split == IID else run.split.capitalize()
            others = {graph: found.get(replace(run, topology=graph)) for graph in ONE_PEER[1:]}
            away = {graph: "-" if point is None else _away(point.values, one_peer.values, 1) for graph, point in others.items()}
            method = run.method if run.H is None else f"{run.method}, H = {run.H}"
            rows.append({"method, data": f"{method}, {split}", f"{ONE_PEER[0]}, %": f"{one_peer.mean:.2f}", **away})
    return tables.as_text(rows) if rows else NOT_YET


def diloco_table(stores: Sequence[Store]) -> str:
    """Local SGD and DiLoCo by their period, each with the better of the learning rates: accuracy minus Parallel SGD's best."""
    found = [seeds for store in stores for seeds in compare.of_table(IMAGES["diloco small"], store) if len(seeds.values) >= 3]
    best: dict[Run, Seeds] = {}
    for seeds in found:
        if seeds.run not in best or statistics.mean(seeds.values) > statistics.mean(best[seeds.run].values):
            best[seeds.run] = seeds
    parallel = next((point_of(seeds) for run, seeds in best.items() if run.method == "Parallel SGD"), None)
    rows: dict[str, tables.Row] = {}
    for run, seeds in best.items():
        if parallel is not None and run.method != "Parallel SGD":
            gossips = ", gossip" if run.topology != "isolated" else ""
            name = run.name.removesuffix(f", {run.bits} bits") + gossips
            row = rows.setdefault(name, {"method": name})
            point = point_of(seeds)
            row[f"H = {run.H} (bytes)"] = f"{_away(point.values, parallel.values, 1)} (1/{1 / point.sent:.0f})"
    return tables.as_text(list(rows.values())) if rows else NOT_YET


def diloco_gpt_table(rows: list[dict[str, str]]) -> str:
    """Local SGD and DiLoCo on the GPT by their period, each at the best of its learning rates: held-out loss minus DDP's best."""
    points = {_bare(point): point for point in of_gpt(rows)}
    if "DDP" not in points:
        return NOT_YET
    shown: dict[str, tables.Row] = {}
    for H in adamw.PERIODS:
        for name in adamw.few_averages(H).keys() & points.keys():
            method = name.replace(f", H = {H}", "")
            away = _away(points[name].values, points["DDP"].values, 3)
            shown.setdefault(method, {"method": method})[f"H = {H} (bytes)"] = f"{away} (1/{1 / points[name].sent:.0f})"
    return tables.as_text([shown[method] for method in sorted(shown, reverse=True)])


def pairs_table(by_word: Mapping[str, Panel]) -> str:
    """How far methods of nearly the same bytes are apart: a table for the accuracy (%), and one for the training loss."""
    tables_of = {"accuracy": (lambda point: point.values, 1), "training loss": (lambda point: point.training or {}, 3)}
    return "\n\n".join(tables.as_text([_pair(by_word, pair, what, *how) for pair in PAIRS]) for what, how in tables_of.items())


def _pair(
    by_word: Mapping[str, Panel], pair: tuple[str, str], what: str, values_of: Callable[[Point], dict[int, float]], digits: int
) -> tables.Row:
    row: tables.Row = {what: " - ".join(name.removesuffix(", 4 bits") for name in pair)}
    for word, title in (("small-16", "even"), ("small-0.3", "Dirichlet(0.3)"), ("small-0.1", "Dirichlet(0.1)")):
        found = {point.name: values_of(point) for point in by_word[word].points}
        row[title] = _away(found[pair[0]], found[pair[1]], digits) if found.keys() >= set(pair) else "-"
    return row


def against_adaptive(panel: Panel) -> str:
    """How far our best method is from Gossip-AGA on CIFAR-10."""
    points = {point.name: point for point in panel.points}
    ours, theirs = points[RECOMMENDED], points["Gossip-AGA, 4 bits"]
    away = [_away(ours.values, theirs.values, 2), _away(ours.training or {}, theirs.training or {}, 3)]
    return f"{RECOMMENDED} minus Gossip-AGA, 4 bits, seed by seed: {away[0]} points of accuracy, {away[1]} of training loss."


def headline(cifar: Sequence[Panel]) -> str:
    """The first sentence of the page: how far the recommended method is from Parallel SGD on CIFAR-10."""
    points = [(panel.points[0], point) for panel in cifar if (point := _named(panel, RECOMMENDED)) is not None]
    found = [_from(*both) for both in points]
    away, beyond = [mean for mean, _ in found], sum(abs(mean) > half for mean, half in found)
    chance = f"{beyond} of these differences can't be chance" if beyond else "All of these differences may be chance"
    return (
        "With an eleventh of the bytes, **Gossip-PGA with 4 bits and a period that follows the learning rate** ends close to Parallel\n"
        f"SGD's accuracy on CIFAR-10: {min(away):+.2f} to {max(away):+.2f} points from it, in four settings with even and uneven data.\n"
        f"{chance} (95 % intervals)."
    )


def short_table(cifar: Sequence[Panel]) -> str:
    """How far the methods that send little are from Parallel SGD on CIFAR-10; their bytes are in brackets."""
    sent = {point.name: f"1/{1 / point.sent:.2g}" for point in cifar[0].points}
    names = {f"{shown} ({sent[name]})": name for shown, name in SHORT.items()}
    return tables.as_text([{"CIFAR-10": panel.title, **{shown: _gap(panel, name) for shown, name in names.items()}} for panel in cifar])


def _gap(panel: Panel, name: str) -> str:
    away = _from_first(panel, name)
    return "not run" if math.isnan(away) else f"{away:+.2f}"


def _from_first(panel: Panel, name: str) -> float:
    """Return the mean difference of a method to the panel's first point; NaN if it was not run."""
    point = _named(panel, name)
    return math.nan if point is None else _from(panel.points[0], point)[0]


def _named(panel: Panel, name: str) -> Point | None:
    return next((point for point in panel.points if point.name == name), None)


def filled_in(text: str, found: Sequence[Panel]) -> str:
    by_word = {panel.word: panel for panel in found}
    cifar = [panel for panel in found if panel.word.startswith("cifar")]
    special = {
        "headline": lambda: headline(cifar),
        "short": lambda: short_table(cifar),
        "pairs": lambda: pairs_table(by_word),
        "cosine": lambda: cosine_table(small_store(RESULTS / "beyond.csv")),
        "graphs": lambda: graphs_table(small_store(RESULTS / "beyond.csv")),
        "diloco": lambda: diloco_table([small_store(RESULTS / "beyond.csv", SMALL_RECIPE._replace(lr=lr)) for lr in DILOCO_RATES]),
        "diloco-gpt": lambda: diloco_gpt_table(gpt_rows("adamw", steps=LONG_STEPS)),
        "cifar-32-adaptive": lambda: against_adaptive(by_word["cifar-32"]),
    }
    return tables.filled_in(text, lambda word: special[word]() if word in special else table_of(by_word[word]))


def choosing(text: str) -> str:
    """Return docs/choosing.md with its tables for Adam, for bits and for DDP's hooks rebuilt."""
    made = {
        "bits": lambda: adamw.bits_table({name: gpt_rows(name) for name in adamw.OPTIMIZERS}),
        "adamw": lambda: _adamw(nodes=4),
        "adamw-8": lambda: _adamw(nodes=8),
        **{f"adamw-large-{nodes}": partial(_adamw, nodes, 1, width="256", steps=more[1]) for nodes, more in LARGE_RUNS.items()},
        "lamb": lambda: adamw.table(gpt_rows("lamb")),
        "lamb-8": lambda: adamw.table(gpt_rows("lamb", nodes=8)),
        "hooks": lambda: ddp_hooks.table(read(ddp_hooks.RESULTS)),
    }
    return tables.filled_in(text, lambda word: made[word]())


def _adamw(nodes: int, least: int = adamw.LEAST, **size: str) -> str:
    rows = gpt_rows("adamw", nodes, **size)
    return adamw.table(rows, least) if rows else NOT_YET


# ---- the pictures ---------------------------------------------------------------------------------------------------------------------


def draw(found: Sequence[Panel], title: str, path: Path) -> None:
    """Draw how far each method is from the first one; the method that sends most is at the top."""
    first = next(_bare(panel.points[0]) for panel in found if panel.points)
    recommended = RECOMMENDED if first == "Parallel SGD" else CORRECTED_BITS
    panels = {panel.title: {_bare(point): _from(panel.points[0], point) for point in panel.points} for panel in found}
    forest.draw(panels, forest.Rows(_labels(found), first, recommended), title, path)


def _labels(found: Sequence[Panel]) -> dict[str, str]:
    """Each method of the panels with its bytes, as a share of the first one's."""
    sent: dict[str, float] = {}
    for point in (point for panel in found for point in panel.points):
        sent.setdefault(_bare(point), point.sent)
    shares = {name: "1" if share == 1 else f"1/{1 / share:.2g}" for name, share in sent.items()}
    return {name: f"{name}:  {shares[name]}" for name in sorted(sent, key=lambda name: -sent[name])}


def _bare(point: Point) -> str:
    """The name without the learning rate."""
    return point.name.split(", lr ")[0]


def _from(first: Point, point: Point) -> tuple[float, float]:
    """Return the difference to the first point, seed by seed, and half its 95 % interval."""
    away = [point.values[seed] - first.values[seed] for seed in point.values.keys() & first.values.keys()]
    half = compare.half_interval(away)
    return statistics.mean(away), 0.0 if math.isnan(half) else half


# ---- the command ----------------------------------------------------------------------------------------------------------------------


def commands(folder: Path, device: str) -> list[list[str]]:
    """The commands that run what is missing, for the data sets that the folder has; those for a GPU first, if there is one."""
    here, has_gpu, found = Path(__file__).parent, device != "cpu", []
    images, gpt = str(here / "image_classification.py"), [str(here / "adamw.py"), "--data", str(folder), "--seeds", "3"]
    if (folder / "cifar-10-batches-bin").is_dir() and has_gpu:
        found.append([images, "--data", str(folder / "cifar-10-batches-bin"), "--table", "beyond"])
    if (folder / "enwik8").is_file() and has_gpu:
        found += [[*gpt, *LARGE, "--nodes", str(nodes), *more] for nodes, more in LARGE_RUNS.items()]
    if (folder / "fashion-mnist").is_dir():
        small = [images, "--data", str(folder / "fashion-mnist"), *SMALL]
        found += [[*small, "--table", table, "--lr", str(lr)] for table, lr in SMALL_TABLES]
    if (folder / "enwik8").is_file():
        found += [[*gpt, "--lr", *map(str, RATES), "--device", "cpu"], [*gpt, *LONG, "--device", "cpu"]]
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
    for name, (word, title) in PICTURES.items():
        draw([panel for panel in found if panel.word.startswith(word)], title, PAGE.with_suffix("") / f"{name}.png")


if __name__ == "__main__":
    main()
