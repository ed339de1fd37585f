"""Write the tables, the first sentences and the pictures of docs/networks.md from the results files.

    python experiments/networks/page.py            # rewrites the text between <!-- table X --> and <!-- end -->

No number of these blocks is typed by hand.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from images.study import RECIPES as IMAGE_RECIPES
from images.study import TABLES as IMAGES
from images.study import settings_of as image_settings
from logistic import tables
from networks import compare, trials, verdicts
from networks.compare import Seeds
from networks.paper import Reported, reported
from networks.pictures import draw_curves, draw_first, draw_order, draw_periods, draw_steps
from networks.runs import Run, Table
from networks.store import Settings, Store, rows_of
from networks.verdicts import NOT_YET
from text.study import RECIPES as TEXT_RECIPES
from text.study import TABLES as TEXT
from text.study import settings_of as text_settings

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
STEP_TIMES = ROOT / "benchmarks" / "results" / "simulated-step.json"
TRAINED = "training accuracy, %"
LR = TEXT_RECIPES["earlier"].lr
CIFAR = ("cifar10", 50_000, "SmallResNet")  # the data, the training images and the network of the image tables
TEXT_SIZE = "small"
BELOW = 0.0026  # Table 7: the distance of the target below Parallel SGD's accuracy, as 76 % is below the paper's 76.26 %


def image_table(name: str, table: Table, store: Store) -> str:
    """Accuracies beside the paper's; for Table 7 a second table with the time to the target."""

    def row_of(seeds: Seeds, parallel: Seeds | None, paper: Reported | None) -> tables.Row:
        row: tables.Row = {
            "method": _method(seeds.run, name),
            "accuracy, %": _over_seeds(seeds, 100, 2),
            "paper: %": f"{paper.value:.2f}" if paper else "-",
            "p": _p(seeds, parallel),
        }
        if name == "labels":
            row["worst node"] = f"{100 * seeds.worst_node:.2f}"
        trained = [curve[-1].trained for curve in seeds.curves if curve[-1].trained is not None]
        row[TRAINED] = f"{100 * statistics.mean(trained):.2f}" if trained else "-"
        return row | _hours(name, table, seeds, paper, 2)

    def target_row_of(seeds: Seeds, parallel: Seeds | None, paper: Reported | None) -> tables.Row:
        reached = "-" if parallel is None else _to_target(seeds, parallel.mean - BELOW)
        papers = paper.to_target if paper else "-"
        return {"method": _method(seeds.run, name), "epochs / hours to target": reached, "paper: epochs / hours to 76 %": papers}

    has_target = any(paper and paper.to_target for paper in (reported(name, run) for run in table.runs))
    parts = (row_of, target_row_of) if has_target and name == verdicts.LONG else (row_of,)
    return "\n\n".join(_table(name, table, store, part) for part in parts)


def nodes_table(table: Table, store: Store) -> str:
    """Table 10: a row for each number of nodes, with our accuracies and the paper's in brackets."""
    rows: dict[int, tables.Row] = {}
    for seeds in compare.of_table(table, store):
        paper = reported("10", seeds.run)
        row = rows.setdefault(seeds.run.nodes, {"nodes": seeds.run.nodes})
        row[f"{seeds.run.name} (paper), %"] = f"{100 * seeds.mean:.2f} ± {100 * seeds.deviation:.2f}" + (
            f" ({paper.value:.1f})" if paper else ""
        )
    return tables.as_text(list(rows.values())) if rows else NOT_YET


def _table(name: str, table: Table, store: Store, row_of: Callable[[Seeds, Seeds | None, Reported | None], tables.Row]) -> str:
    """A row for each run that has results. Left out: what the paper does not report, and the training accuracy if some runs lack it."""
    found = compare.of_table(table, store)
    rows = [row_of(seeds, _parallel(seeds, found), reported(name, seeds.run)) for seeds in found]
    left_out = {column for column in (rows[0] if rows else ()) if column.startswith("paper") and all(row[column] == "-" for row in rows)}
    left_out |= {TRAINED} if any(row.get(TRAINED) == "-" for row in rows) else set()  # earlier runs have not recorded it
    return tables.as_text([{k: v for k, v in row.items() if k not in left_out} for row in rows]) if rows else NOT_YET


def _hours(name: str, table: Table, seeds: Seeds, paper: Reported | None, digits: int) -> tables.Row:
    """The modelled hours and the paper's, in tables for which the paper has them."""
    papers = [reported(name, run) for run in table.runs]
    if not all(each and each.hours for each in papers) or paper is None:
        return {}
    return {"hours (paper)": f"{seeds.hours:.{digits}f} ({paper.hours:.{digits}f})"}


def _parallel(seeds: Seeds, found: list[Seeds]) -> Seeds | None:
    """Find Parallel SGD with the same number of nodes, the same split and the same momentum."""
    wanted = ("nodes", "split", "momentum")
    alike = (s for s in found if s.run.method == "Parallel SGD" and all(getattr(s.run, w) == getattr(seeds.run, w) for w in wanted))
    return next(alike, None)


def _method(run: Run, table: str) -> str:
    """The method, and the setting that varies within the table."""
    marks = ["ring"] if run.topology == "ring" else []
    marks += [f"H = {run.H}"] if run.H is not None and table in ("8", "15") else []
    marks += [f"{run.nodes} nodes"] if table == "10" else []
    marks += [run.split] if table == "labels" else []
    return ", ".join([run.name, *marks])


def _over_seeds(seeds: Seeds, times: int, digits: int) -> str:
    """Format the mean, the standard deviation if there is one, and the number of seeds."""
    shown = [f"{times * value:.{digits}f}" for value in (seeds.mean, seeds.deviation) if not math.isnan(value)]
    return f"{' ± '.join(shown)} ({len(seeds.values)})"


def _p(seeds: Seeds, parallel: Seeds | None) -> str:
    p = None if parallel is None else compare.p_value(seeds, parallel)
    return "-" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _to_target(seeds: Seeds, target: float) -> str:
    """Format the epochs and hours to the target, and the number of seeds that reach it unless all do."""
    (epochs, reached), of = compare.epochs_to(target, seeds), len(seeds.values)
    if not reached:
        return "not reached"
    some = [f"{reached} of {of}"] if reached < of else []
    median = [] if math.isinf(epochs) else [f"{epochs:.0f} / {seeds.hours * epochs / len(seeds.curves[0]):.2f}"]
    return ", ".join(median + some)


def text_table(name: str, table: Table, store: Store) -> str:
    """Losses on held-out text beside the paper's training loss."""

    def row_of(seeds: Seeds, parallel: Seeds | None, paper: Reported | None) -> tables.Row:
        return {
            "method": seeds.run.name,
            "held-out loss": _over_seeds(seeds, 1, 3),
            "paper: loss": f"{paper.value:.2f}" if paper else "-",
            "p": _p(seeds, parallel),
            **_hours(name, table, seeds, paper, 1),
        }

    return _table(name, table, store, row_of)


def bits_table(store: Store, *of: Table) -> str:
    """Runs with codes, and how far they are from the same runs with float32: in the value at the end, and in the training loss."""
    rows = [row for table in of for row in _bits_rows(compare.of_table(table, store))]
    return tables.as_text(rows) if rows else NOT_YET


def _bits_rows(found: list[Seeds]) -> list[tables.Row]:
    float32 = {seeds.run: seeds for seeds in found if seeds.run.bits == 32}
    rows: list[tables.Row] = []
    for seeds in (each for each in found if each.run.bits < 32):
        run, plain = seeds.run, float32[replace(seeds.run, bits=32)]
        marks = [f"{run.nodes} nodes"] if run.nodes != 32 else []
        marks += [run.split] if run.split != "iid" else []
        value, times, digits = ("accuracy, %", 100, 2) if seeds.is_accuracy else ("held-out loss", 1, 3)
        rows.append(
            {
                "method": ", ".join([run.method, *marks]),
                "bits (seeds)": f"{run.bits} ({len(seeds.values)})",
                value: _away(seeds, plain, times, digits),
                "training loss": _away(seeds.in_training(), plain.in_training(), 1, 4),
            }
        )
    return rows


def _away(seeds: Seeds, plain: Seeds, times: int, digits: int) -> str:
    """Format the difference to the run with float32, and its p."""
    return f"{times * compare.difference(seeds, plain):+.{digits}f}, p = {_p(seeds, plain)}"


def rates_table(by_rate: Mapping[float, Store]) -> str:
    """Methods of Table 11 at each learning rate that was tried, and the best of each method beside the best of Parallel SGD."""
    by_run = runs_by_rate(by_rate)
    rows: list[tables.Row] = []
    best = [seeds for _, seeds in at_best(by_run)]
    for seeds in best:
        at, parallel = by_run[seeds.run], _parallel(seeds, best)
        if len(at) > 1 and parallel is not None:
            shown = {f"{lr:g}": _over_seeds(at[lr], 1, 3) if lr in at else "-" for lr in by_rate}
            behind = "-" if seeds is parallel else f"{compare.difference(seeds, parallel):+.3f}"
            rows.append({"method": seeds.run.name, **shown, "best - Parallel SGD's": behind, "p": _p(seeds, parallel)})
    return tables.as_text(rows) if rows else NOT_YET


def steps_table(tried: Store) -> str:
    """Methods of Table 11 in the trials, each at its best rate: how long the mean model's steps are, and how far the nodes are apart."""
    rows: list[tables.Row] = []
    for seeds in compare.of_table(TEXT["11"], tried):
        row, curve = tried.find(replace(seeds.run, seed=seeds.seeds[0])), seeds.curves[0]
        moved = [point.moved for point in curve[len(curve) // 2 :] if point.moved is not None]
        apart = max(point.spread or 0.0 for point in curve)
        rows.append(
            {
                "method": seeds.run.name,
                "learning rate": row["lr"] if row else "-",
                "held-out loss": f"{seeds.mean:.3f}",
                "step of the mean model": f"{statistics.mean(moved):.2f}",
                "distance between nodes": f"{math.sqrt(apart):.3f}",
            }
        )
    return tables.as_text(rows) if rows else NOT_YET


def runs_by_rate(by_rate: Mapping[float, Store]) -> dict[Run, dict[float, Seeds]]:
    by_run: dict[Run, dict[float, Seeds]] = {}
    for lr, store in by_rate.items():
        for seeds in compare.of_table(TEXT["11 earlier"], store):
            by_run.setdefault(seeds.run, {})[lr] = seeds
    return by_run


def at_best(by_run: dict[Run, dict[float, Seeds]]) -> list[tuple[float, Seeds]]:
    """Find the learning rate with the lowest loss for each run, among the rates with the most seeds."""
    return [min(at.items(), key=lambda tried: (-len(tried[1].values), tried[1].mean)) for at in by_run.values()]


def time_line(stores: list[tuple[dict[str, Table], Store]]) -> str:
    """The GPU minutes of all runs. A run in several tables counts once."""
    runs, minutes = 0, 0.0
    for of_study, store in stores:
        counted: set[object] = set()
        for table in of_study.values():
            found = [seeds for seeds in compare.of_table(table, store) if store.key(seeds.run) not in counted]
            counted |= {store.key(seeds.run) for seeds in found}
            runs, minutes = runs + sum(len(seeds.values) for seeds in found), minutes + sum(seeds.seconds for seeds in found) / 60
    return f"All {runs} runs took {minutes:.0f} minutes of one GPU, with an evaluation after each epoch."


def step_line() -> str:
    """Milliseconds of a simulated step beside one big batch, and beside a loop."""
    if not STEP_TIMES.exists():
        return NOT_YET
    seconds = json.loads(STEP_TIMES.read_text())["seconds"]
    ours, big, graph, loop = (next(name for name in seconds if part in name) for part in ("Gossip-PGA", "big batch", "graph", "loop"))
    took = seconds[ours]
    return (
        f"A simulated step of 32 nodes with Gossip-PGA takes {1e3 * took:.1f} ms: {took / seconds[big]:.2f} times as long as the same\n"
        f"images in one big batch, compiled, and {took / seconds[graph]:.2f} times as long as that in a CUDA graph. "
        f"A loop over 32 modules takes {1e3 * seconds[loop]:.0f} ms."
    )


def filled_in(text: str, images: Store, words: Store, by_rate: Mapping[float, Store]) -> str:
    """Return the page with every table rebuilt from the results. `by_rate` has the earlier text results by learning rate."""
    of_images = {_word(name): name for name in IMAGES}
    of_text = {_word(name): name for name in TEXT}
    others = [({f"11 earlier, rate {lr:g}": TEXT["11 earlier"]}, store) for lr, store in by_rate.items() if lr != LR]
    whole: dict[str, Callable[[], str]] = {
        "headline": lambda: verdicts.headline(images),
        "headline-table": lambda: verdicts.headline_table(images),
        "long": lambda: verdicts.long_runs(images),
        "short": lambda: verdicts.short_runs(images),
        "order": lambda: verdicts.counted(images, words),
        "order-differs": lambda: verdicts.differing(words),
        "10": lambda: nodes_table(IMAGES["10"], images),
        "bits": lambda: bits_table(images, IMAGES["bits"], IMAGES["bits again"]),
        "11-bits": lambda: bits_table(words, TEXT["11 bits"]),
        "rates": lambda: rates_table(by_rate),
        "11-steps": lambda: steps_table(trials_of_text()),
        "gpu-minutes": lambda: time_line([(IMAGES, images), (TEXT, words), *others]),
        "simulated-step": step_line,
    }

    def make(word: str) -> str:
        if word in whole:
            return whole[word]()
        if word in of_images:
            return image_table(of_images[word], IMAGES[of_images[word]], images)
        return text_table(of_text[word], TEXT[of_text[word]], words)

    return tables.filled_in(text, make)


def _word(table: str) -> str:
    """
    >>> _word("7 at n = 50")
    '7-at-n-50'
    """
    return "-".join(part for part in table.split() if part != "=")


def image_store(path: Path) -> Store:
    return Store(path, IMAGES, lambda run: image_settings(run, IMAGE_RECIPES[run.recipe], *CIFAR, path))


def stores() -> tuple[Store, Store, dict[float, Store]]:
    """Return the results of images, the results of text, and the earlier results of text by learning rate."""
    path = RESULTS / "language_modeling.csv"
    rows = rows_of(path)
    data = Counter(row["data"] for row in rows).most_common(1)[0][0]

    def settings(run: Run, lr: float | None = None) -> Settings:
        recipe = TEXT_RECIPES[run.recipe]
        return text_settings(run, recipe if lr is None else recipe._replace(lr=lr), data, TEXT_SIZE, path)

    earlier = {float(row["lr"]) for row in rows if row["optimizer"] == TEXT_RECIPES["earlier"].optimizer}
    by_rate = {lr: Store(path, TEXT, partial(settings, lr=lr)) for lr in sorted(earlier)}
    return image_store(RESULTS / "image_classification.csv"), Store(path, TEXT, settings), by_rate


def trials_of_text() -> Store:
    """Return the trials of learning rates on text. Each method has its best rate."""
    path = RESULTS / "language_modeling.csv"
    file = trials.file_of(path)
    data = next((row["data"] for row in rows_of(file)), "1 sequence")
    return Store(file, TEXT, lambda run: text_settings(run, TEXT_RECIPES[run.recipe], data, TEXT_SIZE, path))


def _recorded_periods(images: Store) -> dict[str, Seeds]:
    """Find the runs of Gossip-AGA whose curves have the share of global rounds, with and without label smoothing."""
    found = {}
    for name in ("7 at 120 epochs", "7 without smoothing"):
        for seeds in compare.of_table(IMAGES[name], images):
            if seeds.run.method == "Gossip-AGA" and all(point.global_rounds is not None for curve in seeds.curves for point in curve):
                found["label smoothing 0.2" if name == "7 at 120 epochs" else "no label smoothing"] = seeds
    return found


def main() -> None:
    page, (images, words, by_rate) = ROOT / "docs" / "networks.md", stores()
    tables.write(page, filled_in(page.read_text(), images, words, by_rate))
    pictures, bands = page.with_suffix(""), "one-peer exponential graph\nMean of the seeds; bands: one standard deviation"
    title = "Accuracy minus Parallel SGD's, with our 95 % interval"
    draw_first(verdicts.against_parallel(images), title, pictures / "first.png")
    everything = verdicts.of_images(images)
    names = [f"T{found.pair.table}: {found.name}" for found in everything]
    title = "All differences on images, with our 95 % interval (T7: Table 7 of the paper)"
    draw_order(everything, names, title, pictures / "order.png")
    if found := compare.of_table(IMAGES[verdicts.LONG], images):
        title, measures = f"CIFAR-10, 32 nodes, {bands}", ["training loss", "test accuracy, %"]
        if all(point.trained is not None for seeds in found for curve in seeds.curves for point in curve):
            measures.append("training accuracy, %")  # the paper's figure 8
        draw_curves(found, measures, title, pictures / "figure-2.png")
    if periods := _recorded_periods(images):
        draw_periods(periods, "Gossip-AGA on CIFAR-10, 32 nodes: mean of the seeds, in each epoch", pictures / "periods.png")
    if found := compare.of_table(TEXT["11"], trials_of_text()):
        draw_steps(found, "BERT, 8 nodes: one trial of each method", pictures / "steps.png")
    runs = [compare.of_table(TEXT[name], words) for name in ("11", "11 earlier")]
    if found := max(runs, key=len):  # the earlier runs until those of today's LAMB are made
        title = f"BERT, 8 nodes, {'earlier ' if found is runs[1] else ''}LAMB, {bands}"
        draw_curves(found, ("training loss", "held-out loss"), title, pictures / "figure-3.png")


if __name__ == "__main__":
    main()
