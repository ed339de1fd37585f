"""Finished runs: one line each in a results file, and their curves in another beside it. Both are written anew, aside, and renamed."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass
from pathlib import Path

from networks.runs import Run, Tables, tables_of
from rumor.files import replacing

COLUMNS = (
    *("table", "method", "topology", "H", "nodes", "epochs", "seed", "split", "momentum", "lr", "accuracy", "worst_node", "loss"),
    *("global_share", "hours", "gpu_seconds", "data", "device"),
)
KEY = ("method", "topology", "H", "nodes", "epochs", "seed", "split", "momentum", "data")


@dataclass
class Finished:
    """What one run gave. `curve`: after each epoch the mean training loss and the test accuracy of the mean model."""

    lr: float
    accuracy: float | None
    worst_node: float
    loss: float
    global_share: float
    hours: float
    gpu_seconds: float
    device: str
    curve: list[tuple[float, float]]


class Store:
    def __init__(self, path: Path, tables: Tables, data: str, epochs: int):
        self.path, self.tables, self.data, self.epochs = path, tables, data, epochs
        self.rows = _read(path)
        self.curves = _read(self._curves)

    @classmethod
    def as_written(cls, path: Path, tables: Tables) -> Store:
        """With the data and the epochs that the file's own runs had."""
        rows = _read(path)
        return cls(path, tables, rows[0]["data"] if rows else "", min((int(row["epochs"]) for row in rows), default=1))

    @property
    def _curves(self) -> Path:
        return self.path.with_name(f"{self.path.stem}-curves.csv")

    def key(self, run: Run) -> dict[str, str]:
        values = {**asdict(run), "epochs": run.stretch * self.epochs, "data": self.data}
        return {name: "" if values[name] is None else str(values[name]) for name in KEY}

    def find(self, run: Run) -> dict[str, str] | None:
        key = self.key(run)
        return next((row for row in self.rows if all(row[name] == value for name, value in key.items())), None)

    def curve(self, run: Run) -> tuple[tuple[float, float], ...]:
        """After each epoch, or at each evaluation: the training loss, and the mean model's accuracy or loss."""
        key = self.key(run)
        rows = [row for row in self.curves if all(row[name] == value for name, value in key.items())]
        return tuple((float(row["loss"]), float(row["value"])) for row in rows)

    def add(self, run: Run, found: Finished) -> None:
        key, columns = self.key(run), {name: value for name, value in asdict(found).items() if name != "curve"}
        self.rows.append(
            {"table": "; ".join(tables_of(run, self.tables)), **key, **{name: _short(value) for name, value in columns.items()}}
        )
        for point, (loss, value) in enumerate(found.curve, 1):
            self.curves.append({**key, "point": str(point), "loss": _short(loss), "value": _short(value)})
        _write(self._curves, self.curves, (*KEY, "point", "loss", "value"))
        _write(self.path, self.rows, COLUMNS)  # last: a run is finished when it is in here


def _short(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, rows: list[dict[str, str]], columns: tuple[str, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside, aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
