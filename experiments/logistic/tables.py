"""Tables of the study, as CSV files and as text."""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from pathlib import Path

import numpy as np

from logistic.figures import Curve, Panel, curves_of, parallel
from logistic.run import GAP_EVERY
from logistic.store import Store
from logistic.transient import EVERY, WINDOW, moving_mean
from rumor.checkpoint.files import replacing

Row = dict[str, object]

assert WINDOW == 2 * GAP_EVERY  # the smoothed error of `curves` is centred where the objective was taken


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        aside.write_text(text)


def as_csv(rows: Sequence[Row]) -> str:
    text = StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [dict(row) for row in csv.DictReader(file)]


def of(curve: Curve, rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a curve in a table, as written or as read back."""
    return [row for row in rows if all(str(row[name]) == str(value) for name, value in curve.row.items())]


def stages(store: Store, panels: list[Panel], objective: bool = False) -> list[Row]:
    """One row per curve: where it meets Parallel SGD, and its ratio to it at the end; for the objective also the share of global rounds."""
    rows = []
    for curve in curves_of(panels):
        ours, theirs = store.load(curve), store.load(parallel(curve.setting))
        if objective:
            rows.append(curve.row | ours.objective_versus(theirs) | {"global_rounds": round(ours.global_rounds, 4)})
        else:
            rows.append(curve.row | ours.versus(theirs))
    return rows


def curves(store: Store, panels: list[Panel]) -> list[Row]:
    """Data of the picture, every 110 steps: mean and deviation over the trials of the node error and of the objective.

    The node error is smoothed over 220 steps. Otherwise the records would beat with the periods.
    """
    rows: list[Row] = []
    for curve in curves_of(panels):
        numbers = store.load(curve)
        errors = moving_mean(numbers.error)[::GAP_EVERY]  # the first is centred at record GAP_EVERY
        for r, (error, gap) in enumerate(zip(errors, numbers.gap[1:], strict=False), start=1):
            values = {"error_mean": error.mean(), "error_std": error.std(ddof=1), "gap_mean": gap.mean(), "gap_std": gap.std(ddof=1)}
            rows.append(curve.row | {"k": r * GAP_EVERY * EVERY} | {name: f"{value:.5g}" for name, value in values.items()})
    return rows


def over_seeds(stores: Sequence[Store], panels: list[Panel]) -> list[Row]:
    """One row per curve: the median over data sets of the columns of `stages`, and T_tr(1) of each. "" counts as later than all."""
    tables = [stages(store, panels) for store in stores]
    rows = []
    for curve, *per_seed in zip(curves_of(panels), *tables, strict=True):
        row = curve.row
        for column in ("T_tr_1", "T_tr_025", "ratio_9500"):
            row[column] = median(entry[column] for entry in per_seed)
        row["T_tr_1_by_data"] = " ".join(str(entry["T_tr_1"] if entry["T_tr_1"] != "" else "-") for entry in per_seed)
        row["ratio_9500_by_data"] = " ".join(f"{entry['ratio_9500']:.4g}" for entry in per_seed)
        rows.append(row)
    return rows


def median(values: Iterable[object]) -> object:
    numbers = [float("inf") if value == "" else float(str(value)) for value in values]
    middle = statistics.median_high(numbers)
    return "" if np.isinf(middle) else (int(middle) if middle == int(middle) and middle > 1 else middle)


def as_text(rows: Sequence[Row]) -> str:
    """Format a Markdown table that is also readable in a terminal."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[c]) for row in cells) for c in range(len(cells[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return "\n".join([lines[0], rule, *lines[1:]])


def filled_in(text: str, make: Callable[[str], str]) -> str:
    """Return the page with the text between each <!-- table X --> and <!-- end --> rebuilt by make(X)."""

    def table(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n{make(match[1])}\n<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value) if value != "" else "not reached"
