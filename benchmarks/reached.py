"""When a run has reached the target, and what many runs say together. Runs are rows as train_on_host.py writes them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
PARALLEL = "DDP"  # Parallel SGD as users run it; the target is set by it, and all are compared to it


def target_of(finals: Sequence[float]) -> float:
    """Mean minus two standard errors.

    >>> target_of([0.88, 0.89, 0.90])
    0.8784529946162075
    """
    return statistics.mean(finals) - 2 * statistics.stdev(finals) / math.sqrt(len(finals))


def finals_of(runs: Sequence[Row], hosts: int) -> list[float]:
    """Parallel SGD's. A seed is one sample, at however many rates it was run: its trajectory is the same at all of them."""
    by_seed: dict[int, list[float]] = {}
    for run in pick(runs, hosts=hosts, method=PARALLEL):
        by_seed.setdefault(run["seed"], []).append(run["accuracy"][-1])
    return [statistics.mean(values) for values in by_seed.values()]


def target(runs: Sequence[Row], hosts: int) -> float:
    """Of one number of hosts."""
    finals = finals_of(runs, hosts)
    if len(finals) < 2:
        raise ValueError(f"the target needs {PARALLEL} with two seeds at least on {hosts} hosts, and there are {len(finals)}")
    return target_of(finals)


def first(run: Row, what: str, target: float) -> float:
    """run["seconds"] or run["steps"] at the first evaluation that is at the target or above, without interpolation; inf if none is."""
    return next((float(value) for value, accuracy in zip(run[what], run["accuracy"], strict=True) if accuracy >= target), math.inf)


def middle(values: Sequence[float]) -> float:
    """The median; a run that has never reached the target counts as later than all (median_high, since inf has no half)."""
    return statistics.median_high(values) if math.inf in values else statistics.median(values)


def pick(rows: Sequence[Row], **wanted: object) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def summary(runs: Sequence[Row], hosts: int, ratio: float | None) -> list[dict[str, Any]]:
    """One row a method, in the order of the runs: what it reached, when, and how many times as fast as Parallel SGD it was there."""
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
    """The name of DDP at the bucket size that suits it best."""
    return min((name for name in seconds if name.startswith("DDP, bucket")), key=lambda name: seconds[name]["median"])


def over_bandwidth(runs: Sequence[Row], curve: Sequence[Row]) -> list[dict[str, Any]]:
    """Seconds to the target at each rate: steps to it (measured, the median of seeds) times seconds of a step at that rate (measured)."""
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
