"""Stores finished runs: one line each in a results file, and their curves in a second file. Both files are replaced atomically."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from networks.runs import Run, Tables, tables_of
from rumor.checkpoint.files import replacing

Row = dict[str, str]
Key = tuple[str, ...]
KEY = (  # the columns that identify a run
    *("method", "topology", "H", "nodes", "stretch", "epochs", "steps", "seed", "split", "momentum", "bits", "state", "outer"),
    *("lr", "decay", "batch", "weight_decay", "smoothing", "net", "data", "optimizer"),
)


USUAL_DECAY = "usual"  # how the study's learning rate falls


class Point(NamedTuple):
    """One evaluation during a run: after an epoch, or after a twentieth of the steps."""

    loss: float  # mean training loss since the last evaluation
    value: float  # of the mean model: test accuracy, or held-out loss
    trained: float | None = None  # accuracy of the mean model on training images
    global_rounds: float | None = None  # share of global rounds since the last evaluation; its inverse is the period
    spread: float | None = None  # consensus distance over ||x_bar||^2
    moved: float | None = None  # ||x_bar after - x_bar before|| / (lr ||x_bar||) in the last step: the length of a step of the mean model


COLUMNS = ("table", *KEY, "accuracy", "worst_node", "loss", "global_share", "hours", "gpu_seconds", "device")
CURVE_COLUMNS = (*KEY, "point", *Point._fields)
ADDED = {
    "optimizer": "SGD",
    "decay": USUAL_DECAY,
    "state": "",
    "outer": "",
    **dict.fromkeys(Point._fields[2:], ""),
}  # columns that older files lack, and what their runs had


@dataclass(frozen=True)
class Settings:
    """The settings of a run that are not in its table."""

    data: str
    net: str
    epochs: int  # of the whole run
    steps: int  # of the whole run
    batch: int  # of one node
    lr: float  # the highest learning rate
    weight_decay: float
    smoothing: float | None  # label smoothing; None if there are no labels
    optimizer: str = "SGD"
    decay: str = USUAL_DECAY  # or cosine

    def stretched(self, times: int) -> Settings:
        return replace(self, epochs=times * self.epochs, steps=times * self.steps)


SettingsOf = Callable[[Run], Settings | None]  # returns None if there are no such runs


@dataclass
class Finished:
    """The results of one run, with its evaluations."""

    accuracy: float | None
    worst_node: float
    loss: float
    global_share: float
    hours: float
    gpu_seconds: float
    device: str
    curve: list[Point]


class Store:
    """The results file and the curves file of a study."""

    def __init__(self, path: Path, tables: Tables, settings: SettingsOf):
        self.path, self.tables, self._settings = path, tables, settings
        self._rows: dict[Key, Row] = {}
        self._points: dict[Key, list[Row]] = {}
        self._read_again()

    def _read_again(self) -> None:
        """Reads the files again, because another command may have added to them."""
        self._rows = {_key_in(row): row for row in rows_of(self.path, COLUMNS)}
        self._points = {}
        for point in rows_of(self._curves, CURVE_COLUMNS):
            self._points.setdefault(_key_in(point), []).append(point)

    def rows(self) -> list[Row]:
        """All rows of the results file, also those of other settings."""
        return list(self._rows.values())

    @property
    def _curves(self) -> Path:
        return self.path.with_name(f"{self.path.stem}-curves.csv")

    def key(self, run: Run) -> Key | None:
        settings = self._settings(run)
        if settings is None:
            return None
        values = {**asdict(run), **asdict(settings)}
        return tuple(shortened(values[name]) for name in KEY)

    def find(self, run: Run) -> Row | None:
        key = self.key(run)
        return None if key is None else self._rows.get(key)

    def curve(self, run: Run) -> tuple[Point, ...]:
        """The evaluations of a run, in their order."""
        key = self.key(run)
        points = [] if key is None else self._points.get(key, [])
        return tuple(Point(*(float(point[name]) if point[name] else None for name in Point._fields)) for point in points)  # type: ignore[arg-type]

    def add(self, run: Run, found: Finished) -> None:
        key, columns = self.key(run), {name: value for name, value in asdict(found).items() if name != "curve"}
        if key is None:
            raise ValueError(f"there are no settings for {run}")
        self._read_again()
        named = dict(zip(KEY, key, strict=True))
        self._points[key] = [
            {**named, "point": str(number), **{name: shortened(value) for name, value in point._asdict().items()}}
            for number, point in enumerate(found.curve, 1)
        ]
        tables = "; ".join(tables_of(run, self.tables))
        self._rows[key] = {"table": tables, **named, **{name: shortened(value) for name, value in columns.items()}}
        _write(self._curves, chain.from_iterable(self._points.values()), CURVE_COLUMNS)
        _write(self.path, self._rows.values(), COLUMNS)  # last, because a run in this file counts as finished


def _key_in(row: Row) -> Key:
    return tuple(row[name] for name in KEY)


def shortened(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def rows_of(path: Path, columns: tuple[str, ...] = COLUMNS) -> list[Row]:
    """Reads a file. Raises an error if it is damaged or from another version, because rewriting it would lose some of its runs."""
    if not path.exists():
        return []
    text = path.read_text("utf-8", errors="replace")
    reader = csv.DictReader(StringIO(text, newline=""), restkey="more")
    rows, found = list(reader), set(reader.fieldnames or ())
    other = (found ^ set(columns)) - (ADDED.keys() - found)
    if other:
        raise ValueError(f"{path} has missing or unknown columns, {', '.join(sorted(other))}: give another file with --out")
    broken = next((at for at, row in enumerate(rows, 2) if "more" in row or None in row.values()), None)
    if broken is not None or not text.endswith("\n"):
        raise ValueError(f"{path}, line {broken or len(rows) + 1} is damaged: remove the line, or give another file with --out")
    return [{**{name: ADDED[name] for name in columns if name in ADDED}, **row} for row in rows]


def _write(path: Path, rows: Iterable[Row], columns: tuple[str, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside, aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
