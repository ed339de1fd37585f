"""Keeps finished runs on disk, one file each, so that a study that was stopped can continue. Files are replaced atomically."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from logistic.figures import AGA, Curve
from logistic.run import GAP_EVERY, HALVED_EVERY, LR, STEPS, Result
from logistic.transient import EVERY, ratio_at, transient_stage
from rumor.checkpoint.files import replacing

# Runs with other settings are not read. Increase the first number when the meaning of a file changes.
VERSION = f"{zlib.crc32(repr((2, STEPS, LR, HALVED_EVERY, EVERY, AGA)).encode()):08x}"
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Numbers:
    """The numbers of one curve: errors [records, trials] and objective [records / GAP_EVERY, trials]."""

    error: Array
    gap: Array
    global_rounds: float

    def versus(self, parallel: Numbers) -> dict[str, object]:
        """T_tr(1), T_tr(0.25) and the ratio at k = 9,500 of the node error, averaged over trials; "" if a stage is not reached."""
        ours, theirs = self.error.mean(1), parallel.error.mean(1)
        return _columns([transient_stage(ours, theirs, eps) for eps in (1, 0.25)], ratio_at(9_500, ours, theirs))

    def objective_versus(self, parallel: Numbers) -> dict[str, object]:
        """The same numbers for f(xbar) - f*."""
        ours, theirs, scale = self.gap.mean(1), parallel.gap.mean(1), {"every": EVERY * GAP_EVERY, "window": 2}
        return _columns([transient_stage(ours, theirs, eps, **scale) for eps in (1, 0.25)], ratio_at(9_500, ours, theirs, **scale))


def _columns(stages: list[int | None], ratio: float) -> dict[str, object]:
    one, quarter = ("" if stage is None else stage for stage in stages)
    return {"T_tr_1": one, "T_tr_025": quarter, "ratio_9500": round(ratio, 4)}


@dataclass(frozen=True)
class Store:
    """The runs of one study: `trials` trials, data drawn with `seed`, on one kind of device (samples differ between devices)."""

    folder: Path
    trials: int
    seed: int
    device: str
    sources: Mapping[str, str] = field(default_factory=dict)  # for real data: a tag of the file

    def path(self, curve: Curve) -> Path:
        columns = "-".join(str(value) for value in curve.run.row.values())
        data = curve.setting.data + self.sources.get(curve.setting.data, "")
        return self.folder / "runs" / f"{data}-{columns}-seed{self.seed}-trials{self.trials}-{self.device}-{VERSION}.npz"

    def has(self, curve: Curve) -> bool:
        """Whether the run is on disk and can be read. A truncated file counts as missing."""
        try:
            self.load(curve)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return False
        return True

    def save(self, curve: Curve, result: Result) -> None:
        path = self.path(curve)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as aside:
            np.savez(aside, **{name: np.asarray(value) for name, value in vars(result).items()})

    def load(self, curve: Curve) -> Numbers:
        with np.load(self.path(curve)) as file:
            error = file["mean_error" if curve.final_average else "node_error"]
            return Numbers(error, file["gap"], float(file["global_rounds"]))
