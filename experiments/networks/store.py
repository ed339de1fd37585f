"""Stores finished runs: one line each in a results file, and their curves in a second file. Both files are replaced atomically."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from io import StringIO
from itertools import chain
from pathlib import Path

from networks.runs import Run, Tables, tables_of
from rumor.checkpoint.files import replacing

Row = dict[str, str]
Key = tuple[str, ...]
KEY = (  # the columns that identify a run
    *("method", "topology", "H", "nodes", "stretch", "epochs", "steps", "seed", "split", "momentum", "bits", "state"),
    *("lr", "batch", "weight_decay", "smoothing", "net", "data"),
)
COLUMNS = ("table", *KEY, "accuracy", "worst_node", "loss", "global_share", "hours", "gpu_seconds", "device")
CURVE_COLUMNS = (*KEY, "point", "loss", "value")
ADDED = {"state": ""}  # columns that older files do not have, with the value that their runs had


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

    def stretched(self, times: int) -> Settings:
        return replace(self, epochs=times * self.epochs, steps=times * self.steps)


SettingsOf = Callable[[Run], Settings | None]  # returns None if there are no such runs


@dataclass
class Finished:
    """The results of one run. `curve` holds the mean training loss and the test accuracy of the mean model after each epoch."""

    accuracy: float | None
    worst_node: float
    loss: float
    global_share: float
    hours: float
    gpu_seconds: float
    device: str
    curve: list[tuple[float, float]]


class Store:
    """The results file and the curves file of a study."""

    def __init__(self, path: Path, tables: Tables, settings: SettingsOf):
        self.path, self.tables, self._settings = path, tables, settings
        self._rows: dict[Key, Row] = {}
        self._points: dict[Key, list[Row]] = {}
        self._read_again()

    def _read_again(self) -> None:
        """Reads the files again, because another command may have added to them."""
        self._rows = {_key_in(row): row for row in _read(self.path, COLUMNS)}
        self._points = {}
        for point in _read(self._curves, CURVE_COLUMNS):
            self._points.setdefault(_key_in(point), []).append(point)

    @classmethod
    def as_written(cls, path: Path, tables: Tables, lr: float | None = None) -> Store:
        """Opens a file with the settings of its own runs (with that learning rate).

        For each number of nodes it takes the settings that most runs have, without stretched runs. So a few trial runs in the same file
        change nothing.
        """
        runs: dict[int, Counter[Settings]] = {}
        for row in _read(path, COLUMNS):
            settings = _settings_in(row)
            if row["stretch"] == "1" and lr in (None, settings.lr):
                runs.setdefault(int(row["nodes"]), Counter())[settings] += 1
        found = {nodes: counted.most_common(1)[0][0] for nodes, counted in runs.items()}
        return cls(path, tables, lambda run: found[run.nodes].stretched(run.stretch) if run.nodes in found else None)

    def learning_rates(self) -> list[float]:
        return sorted({float(row["lr"]) for row in self._rows.values()})

    @property
    def _curves(self) -> Path:
        return self.path.with_name(f"{self.path.stem}-curves.csv")

    def _key(self, run: Run) -> Key | None:
        settings = self._settings(run)
        if settings is None:
            return None
        values = {**asdict(run), **asdict(settings)}
        return tuple(_short(values[name]) for name in KEY)

    def find(self, run: Run) -> Row | None:
        key = self._key(run)
        return None if key is None else self._rows.get(key)

    def curve(self, run: Run) -> tuple[tuple[float, float], ...]:
        """The training loss and the mean model's accuracy or loss, after each epoch or at each evaluation."""
        key = self._key(run)
        points = [] if key is None else self._points.get(key, [])
        return tuple((float(point["loss"]), float(point["value"])) for point in points)

    def add(self, run: Run, found: Finished) -> None:
        key, columns = self._key(run), {name: value for name, value in asdict(found).items() if name != "curve"}
        if key is None:
            raise ValueError(f"there are no settings for {run}")
        self._read_again()
        named = dict(zip(KEY, key, strict=True))
        self._points[key] = [
            {**named, "point": str(point), "loss": _short(loss), "value": _short(value)}
            for point, (loss, value) in enumerate(found.curve, 1)
        ]
        tables = "; ".join(tables_of(run, self.tables))
        self._rows[key] = {"table": tables, **named, **{name: _short(value) for name, value in columns.items()}}
        _write(self._curves, chain.from_iterable(self._points.values()), CURVE_COLUMNS)
        _write(self.path, self._rows.values(), COLUMNS)  # last, because a run in this file counts as finished


def _settings_in(row: Row) -> Settings:
    epochs, steps, batch = (int(row[name]) for name in ("epochs", "steps", "batch"))
    smoothing = float(row["smoothing"]) if row["smoothing"] else None
    return Settings(row["data"], row["net"], epochs, steps, batch, float(row["lr"]), float(row["weight_decay"]), smoothing)


def _key_in(row: Row) -> Key:
    return tuple(row[name] for name in KEY)


def _short(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _read(path: Path, columns: tuple[str, ...]) -> list[Row]:
    """Reads a file. Raises an error if it is damaged or from another version, because rewriting it would lose some of its runs."""
    if not path.exists():
        return []
    text = path.read_text("utf-8", errors="replace")
    reader = csv.DictReader(StringIO(text, newline=""), restkey="more")
    there = set(reader.fieldnames or ())
    rows, other = [{**ADDED, **row} for row in reader], (there | ADDED.keys()) ^ set(columns)
    if other:
        raise ValueError(f"{path} has missing or unknown columns, {', '.join(sorted(other))}: give another file with --out")
    broken = next((at for at, row in enumerate(rows, 2) if "more" in row or None in row.values()), None)
    if broken is not None or not text.endswith("\n"):
        raise ValueError(f"{path}, line {broken or len(rows) + 1} is damaged: remove the line, or give another file with --out")
    return rows


def _write(path: Path, rows: Iterable[Row], columns: tuple[str, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside, aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
