"""Collects the results of the processes, one Result for each method, and writes them to a file."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rumor.checkpoint.files import replacing
from rumor.demo import training
from rumor.demo.methods import Method
from rumor.demo.training import AT_THE_END, Point

FORMAT = 2  # version of the file format


@dataclass(frozen=True)
class Link:
    """The link through which each process sends.

    Attributes:
        rate: bytes per second.
        unshaped: why the links are not shaped; None if they are.
    """

    rate: float
    unshaped: str | None

    @property
    def kind(self) -> str:
        return "measured" if self.unshaped is None else "modelled"

    def seconds(self, measured: float, sent: float) -> float:
        """The time on this link: as measured if the link is shaped, else with the time that the bytes would take added."""
        return measured if self.unshaped is None else measured + sent / self.rate


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of all nodes after `step` steps. `seconds` are those on the link, `seconds_measured` those of this machine."""

    step: int
    mean_accuracy: float
    node_accuracies: list[float]
    consensus_distance: float
    bytes_per_node: float
    seconds_measured: float
    seconds: float

    @property
    def worst_accuracy(self) -> float:
        return min(self.node_accuracies)


@dataclass
class Result:
    """The learning curve of one method. It grows while the processes train."""

    method: Method
    n: int
    link: Link
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
        sent, seconds = fmean(p.bytes_sent for p in ordered), max(p.seconds for p in ordered)
        self.curve.append(
            Evaluation(
                point.step,
                ordered[0].mean_accuracy,
                [p.own_accuracy for p in ordered],
                fmean(p.squared_distance for p in ordered),
                sent,
                seconds,
                self.link.seconds(seconds, sent),
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

    @property
    def seconds_a_step(self) -> float:
        return self.end.seconds / self.end.step

    def seconds_to(self, accuracy: float) -> float | None:
        """The time until the mean model was first seen to have this accuracy; None if it never had."""
        return next((each.seconds for each in self.curve if each.mean_accuracy >= accuracy), None)

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
            "seconds_measured": end.seconds_measured,
            "seconds_a_step": self.seconds_a_step,
            "curve": [{**asdict(each), "worst_accuracy": each.worst_accuracy} for each in self.curve],
        }


def write(path: Path, settings: dict[str, Any], found: dict[str, Any]) -> None:
    """Write what was found to a file, with the settings of the training and the machine."""
    model = training.build_model(0)
    everything = {
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
        **found,
    }
    with replacing(path) as aside:
        aside.write_text(json.dumps(everything, indent=1) + "\n")
