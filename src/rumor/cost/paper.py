"""The paper's run times, and the time model's predictions from the step times that the paper measured (Table 17).

Every `reported` number is copied from the paper; every prediction is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rumor.cost.network import Measured, Workload
from rumor.cost.prediction import Prediction, predict
from rumor.topology import one_peer_exponential

H = 6  # the period of Local SGD and Gossip-PGA in all of these runs
PEERS = "one-peer-exponential"  # the topology of all of these runs


@dataclass(frozen=True)
class Training:
    """One of the paper's trainings: the step times of Table 17, and the reported hours.

    Attributes:
        averaging: the share of steps at which Gossip-AGA averages globally, according to the paper.
        hours: reported hours by method; "x2" and "x3" are runs with two and three times the steps.
    """

    title: str
    table: int
    n: int
    workload: Workload
    measured: Measured
    averaging: float
    hours: Mapping[str, float] = field(hash=False)


RESNET50 = Training(
    "ResNet-50 on ImageNet, 32 nodes, 25 Gbit/s TCP",
    table=7,
    n=32,
    workload=Workload(25_500_000, compute=0.146, steps=18_768),  # 120 epochs of 1,281,167 images in batches of 8,192
    measured=Measured(0.278, {PEERS: 0.150}, ddp_seconds=0.278),  # the overlap is already subtracted: time that communication adds
    averaging=0.09,
    hours={
        "Parallel SGD": 2.22,
        "Local SGD": 1.05,
        "Local SGD x3": 3.0,
        "Gossip SGD": 1.55,
        "Gossip SGD x2": 3.0,
        "OSGP": 1.32,
        "OSGP x2": 2.59,
        "Gossip-PGA": 1.66,
        "Gossip-AGA": 1.57,
    },
)

BERT = Training(
    "BERT-Large, 8 nodes",
    table=11,
    n=8,
    workload=Workload(330_000_000, compute=0.445, steps=112_608),
    measured=Measured(1.4688, {PEERS: 0.5665}, ddp_seconds=1.4688),
    averaging=0.096,
    hours={
        "Parallel SGD": 59.02,
        "Local SGD": 20.93,
        "Local SGD x3": 60.0,
        "Gossip SGD": 29.7,
        "Gossip SGD x2": 59.7,
        "Gossip-PGA": 35.4,
        "Gossip-AGA": 30.4,
    },
)

TRAININGS = {"resnet50": RESNET50, "bert": BERT}

SCALING_NODES = (4, 8, 16, 32)
SCALING_HOURS = {
    "Parallel SGD": (11.6, 6.3, 3.7, 2.2),
    "Gossip SGD": (11.1, 5.7, 2.8, 1.5),
    "Gossip-PGA": (11.2, 5.9, 3.0, 1.6),
}  # Table 10


class Row(NamedTuple):
    """Predicted and reported hours. If the model can't predict them, `predicted` is None and `why` is the reason."""

    method: str
    predicted: float | None
    reported: float
    why: str | None = None

    @property
    def deviation(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.reported - 1


def reproduce(training: Training) -> list[Row]:
    """Predicts the hours of Table 7 or 11.

    >>> {row.method: round(row.predicted, 2) for row in reproduce(RESNET50) if row.predicted and "x" not in row.method}
    {'Parallel SGD': 2.21, 'Local SGD': 1.0, 'Gossip SGD': 1.54, 'Gossip-PGA': 1.65}
    """
    rows = predict(training.n, training.workload, training.measured, H=H, topologies=[one_peer_exponential(training.n)])
    by_method = {row.method: row for row in rows}
    return [_row(training, method, reported, by_method) for method, reported in training.hours.items()]


def _row(training: Training, method: str, reported: float, by_method: dict[str, Prediction]) -> Row:
    base, _, factor = method.partition(" x")
    times = int(factor or 1)
    if base == "OSGP":
        osgp = by_method["OSGP"]
        overlapped = osgp.seconds_overlapped * training.workload.steps * times / 3600
        why = f"its overlap was not measured; full overlap gives {overlapped:.2f} h, no overlap {osgp.hours * times:.2f} h"
        return Row(method, None, reported, why)
    if base == "Gossip-AGA":
        return Row(method, None, reported, _why_not_aga(training))
    return Row(method, by_method[base].hours * times, reported)


def averaging_share(training: Training) -> float:
    """The share of global steps that Gossip-AGA's reported hours imply, from their place between Gossip SGD's and Parallel SGD's.

    >>> [f"{averaging_share(training):.1%}" for training in (RESNET50, BERT)]
    ['3.0%', '2.4%']
    """
    gossip, parallel = training.hours["Gossip SGD"], training.hours["Parallel SGD"]
    return (training.hours["Gossip-AGA"] - gossip) / (parallel - gossip)


def _why_not_aga(training: Training) -> str:
    gossip, parallel = training.hours["Gossip SGD"], training.hours["Parallel SGD"]
    stated = gossip + training.averaging * (parallel - gossip)
    return (
        f"its hours imply {averaging_share(training):.1%} of global steps, but the paper states {training.averaging:.1%}, "
        f"which would take {stated:.2f} h"
    )


class Scaling(NamedTuple):
    """Table 10: the fitted alpha-theta model (in seconds), and the hours by number of nodes, for each of `SCALING_NODES`."""

    transfer: float  # d theta of the all-reduce
    latency: float  # alpha of the all-reduce
    gossip: float  # d theta + alpha of one-peer gossip
    all_reduce_seconds: list[float]  # computed from the reported hours
    gossip_seconds: list[float]
    rows: dict[int, list[Row]]


def reproduce_scaling() -> Scaling:
    """Predicts Table 10 from a least-squares fit of 2 (n - 1)/n d theta + 2 (n - 1) alpha and of d theta + alpha to its times.

    Table 17 has the step times of 32 nodes only. For fewer nodes, the communication time is Table 10's time per step minus 146 ms of
    computing.
    """
    n, compute = np.array(SCALING_NODES), RESNET50.workload.compute
    steps = RESNET50.workload.steps * RESNET50.n / n  # fewer nodes: the same epochs with a smaller total batch
    mean, gossip = (np.array(SCALING_HOURS[method]) * 3600 / steps - compute for method in ("Parallel SGD", "Gossip SGD"))
    (transfer, latency), *_ = np.linalg.lstsq(np.stack([2 * (n - 1) / n, 2.0 * (n - 1)], axis=1), mean, rcond=None)
    fitted = {"Parallel SGD": 2 * (n - 1) / n * transfer + 2 * (n - 1) * latency, "Gossip SGD": np.full(len(n), gossip.mean())}
    fitted["Gossip-PGA"] = (1 - 1 / H) * fitted["Gossip SGD"] + fitted["Parallel SGD"] / H
    hours = {method: (compute + seconds) * steps / 3600 for method, seconds in fitted.items()}
    rows = {
        nodes: [Row(method, float(hours[method][i]), SCALING_HOURS[method][i]) for method in hours] for i, nodes in enumerate(SCALING_NODES)
    }
    return Scaling(float(transfer), float(latency), float(gossip.mean()), mean.tolist(), gossip.tolist(), rows)
