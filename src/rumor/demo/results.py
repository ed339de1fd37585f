"""Collects the results of the processes, one Result for each method, and writes them to a file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rumor.checkpoint.files import replacing
from rumor.demo import training
from rumor.demo.methods import Method
from rumor.demo.training import AT_THE_END, Point

FORMAT = 1  # version of the file format


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of all nodes after `step` steps."""

    step: int
    mean_accuracy: float
    node_accuracies: list[float]
    consensus_distance: float
    bytes_per_node: float
    seconds: float

    @property
    def worst_accuracy(self) -> float:
        return min(self.node_accuracies)


@dataclass
class Result:
    """The learning curve of one method. It grows while the processes train."""

    method: Method
    n: int
    curve: list[Evaluation] = field(default_factory=list)
    _waiting: dict[int, dict[int, Point]] = field(default_factory=dict, repr=False)

    def add(self, rank: int, point: Point) -> bool:
        """Adds the point of one rank. Returns True if all ranks have now reported this step."""
        points = self._waiting.setdefault(point.step, {})
        points[rank] = point
        if len(points) < self.n:
            return False
        del self._waiting[point.step]
        ordered = [points[r] for r in range(self.n)]
        self.curve.append(
            Evaluation(
                point.step,
                ordered[0].mean_accuracy,
                [p.own_accuracy for p in ordered],
                ordered[0].consensus_distance,
                sum(p.bytes_sent for p in ordered) / self.n,
                max(p.seconds for p in ordered),
            )
        )
        return True

    @property
    def end(self) -> Evaluation:
        """The average over the last steps; bytes and seconds are totals of the whole run."""
        last = self.curve[-1]
        last_ones = [each for each in self.curve if each.step > last.step - AT_THE_END]
        return replace(
            last,
            mean_accuracy=fmean(each.mean_accuracy for each in last_ones),
            node_accuracies=[fmean(of_node) for of_node in zip(*(each.node_accuracies for each in last_ones), strict=True)],
            consensus_distance=fmean(each.consensus_distance for each in last_ones),
        )

    def as_dict(self) -> dict[str, Any]:
        end = self.end
        return {
            "method": self.method.name,
            "label": self.method.label,
            "call": self.method.call,
            "mean_accuracy": end.mean_accuracy,
            "worst_accuracy": end.worst_accuracy,
            "consensus_distance": end.consensus_distance,
            "node_accuracies": end.node_accuracies,
            "bytes_per_node": end.bytes_per_node,
            "seconds": end.seconds,
            "curve": [{**asdict(each), "worst_accuracy": each.worst_accuracy} for each in self.curve],
        }


def write(path: Path, settings: dict[str, Any], results: Sequence[Result]) -> None:
    model = training.build_model(0)
    found = {
        "format": FORMAT,
        "settings": {
            **settings,
            "lr": training.LR,
            "last_lr": training.LAST_LR,
            "momentum": training.MOMENTUM,
            "batch": training.BATCH,
            "averaged_over_last_steps": AT_THE_END,
            "model": " ".join(str(model).split()),
            "parameters": sum(p.numel() for p in model.parameters()),
        },
        "machine": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "results": [result.as_dict() for result in results],
    }
    with replacing(path) as aside:
        aside.write_text(json.dumps(found, indent=1) + "\n")
