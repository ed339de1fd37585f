"""Finds when runs reached the target accuracy, and summarizes many runs. Runs are the rows that train_on_host.py writes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
PARALLEL = "DDP"  # Parallel SGD as users run it. It sets the target, and all methods are compared with it


def target_of(finals: Sequence[float]) -> float:
    """The mean minus two standard errors.

    >>> target_of([0.88, 0.89, 0.90])
    0.8784529946162075
    """
    return statistics.mean(finals) - 2 * statistics.stdev(finals) / math.sqrt(len(finals))


def finals_of(runs: Sequence[Row], hosts: int) -> list[float]:
    """The final accuracies of Parallel SGD. A seed is one sample at any number of rates, because its trajectory is the same at all."""
    by_seed: dict[int, list[float]] = {}
    for run in pick(runs, hosts=hosts, method=PARALLEL):
        by_seed.setdefault(run["seed"], []).append(run["accuracy"][-1])
    return [statistics.mean(values) for values in by_seed.values()]


def target(runs: Sequence[Row], hosts: int) -> float:
    """The target accuracy for one number of hosts."""
    finals = finals_of(runs, hosts)
    if len(finals) < 2:
        raise ValueError(f"the target needs runs of {PARALLEL} with at least 2 seeds on {hosts} hosts, got {len(finals)}: run more seeds")
    return target_of(finals)


def first(run: Row, what: str, target: float) -> float:
    """run["seconds"] or run["steps"] at the first evaluation that reaches the target, without interpolation; inf if none does."""
    return next((float(value) for value, accuracy in zip(run[what], run["accuracy"], strict=True) if accuracy >= target), math.inf)


def middle(values: Sequence[float]) -> float:
    """The median. A run that never reaches the target counts as infinity (median_high, because inf can't be averaged)."""
    return statistics.median_high(values) if math.inf in values else statistics.median(values)


def pick(rows: Sequence[Row], **wanted: object) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def summary(runs: Sequence[Row], hosts: int, ratio: float | None) -> list[dict[str, Any]]:
    """One row per method, in the order of the runs: final accuracy, time to the target, and speed-up over Parallel SGD."""
    goal = target(runs, hosts)
    here = pick(runs, hosts=hosts, ratio=ratio)
    rows = []
    for method in dict.fromkeys(run["method"] for run in here):
        own = pick(here, method=method)
        finals, reached = [run["accuracy"][-1] for run in own], [first(run, "seconds", goal) for run in own]
        rows.append(
            {
                "method": method,
                "seeds": len(own),
                "final": statistics.mean(finals),
                "error": statistics.stdev(finals) / math.sqrt(len(finals)) if len(finals) > 1 else 0.0,
                "seconds": statistics.median(run["seconds"][-1] for run in own),
                "steps to target": middle([first(run, "steps", goal) for run in own]),
                "to target": reached,
                "not reached": reached.count(math.inf),
            }
        )
    parallel = next(row for row in rows if row["method"] == PARALLEL)
    for row in rows:
        row["times as fast, whole run"] = parallel["seconds"] / row["seconds"]
        row["times as fast, to target"] = middle(parallel["to target"]) / middle(row["to target"])
    return rows


def best_ddp(seconds: Mapping[str, Row]) -> str:
    """The name of DDP with the fastest bucket size."""
    return min((name for name in seconds if name.startswith("DDP, bucket")), key=lambda name: seconds[name]["median"])


def over_bandwidth(runs: Sequence[Row], curve: Sequence[Row]) -> list[dict[str, Any]]:
    """Seconds to the target at each rate: measured steps to the target (median of the seeds) times the measured seconds of a step."""
    rows = []
    for timing in curve:
        goal = target(runs, timing["hosts"])
        own = pick(runs, hosts=timing["hosts"])
        for name, spread in timing["seconds"].items():
            method = PARALLEL if name == best_ddp(timing["seconds"]) else name
            steps = [first(run, "steps", goal) for run in pick(own, method=method)]
            if steps:
                seconds = middle(steps) * spread["median"]
                rows.append({"hosts": timing["hosts"], "rate": timing["rate"], "method": method, "seconds": seconds})
    return rows
