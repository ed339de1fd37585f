"""Statistics over several seeds: means, deviations, a paired test against Parallel SGD, and the time to a target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from networks.runs import Run, Table
from networks.store import Point, Store


@dataclass(frozen=True)
class Seeds:
    """One run of a table over its seeds. `values` holds accuracies, or losses if there is no accuracy."""

    run: Run
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    steps: int  # per seed
    worst_node: float
    global_share: float
    hours: float
    seconds: float  # on the device, for all seeds together
    is_accuracy: bool
    curves: tuple[tuple[Point, ...], ...]  # for each seed, for each epoch

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan

    def in_training(self) -> Seeds:
        """The same with the training loss of the last epoch as values."""
        return replace(self, values=tuple(curve[-1].loss for curve in self.curves), is_accuracy=False)


def of_table(table: Table, store: Store) -> list[Seeds]:
    """Return the runs with at least one finished seed, in the order of the table."""
    found = []
    for run in table.runs:
        rows = [(seed, row) for seed, row in ((s.seed, store.find(s)) for s in _seeded(table, run)) if row is not None]
        if rows:
            found.append(_together(run, rows, store))
    return found


def _seeded(table: Table, run: Run) -> list[Run]:
    return [replace(run, seed=seed) for seed in range(table.seeds_of(run))]


def _together(run: Run, rows: list[tuple[int, dict[str, str]]], store: Store) -> Seeds:
    values = tuple(float(row["accuracy"] or row["loss"]) for _, row in rows)
    worst = [float(row["worst_node"]) for _, row in rows]
    curves = tuple(store.curve(replace(run, seed=seed)) for seed, _ in rows)
    share, hours = (statistics.mean(float(row[name]) for _, row in rows) for name in ("global_share", "hours"))
    is_accuracy = bool(rows[0][1]["accuracy"])
    return Seeds(
        run,
        tuple(seed for seed, _ in rows),
        values,
        int(rows[0][1]["steps"]),
        min(worst) if is_accuracy else max(worst),
        share,
        hours,
        sum(float(row["gpu_seconds"]) for _, row in rows),
        is_accuracy,
        curves,
    )


def _pairs(ours: Seeds, theirs: Seeds) -> tuple[list[float], list[float]]:
    """Return the values of the seeds that both have."""
    both = sorted(set(ours.seeds) & set(theirs.seeds))
    first, second = ([one.values[one.seeds.index(seed)] for seed in both] for one in (ours, theirs))
    return first, second


def difference(ours: Seeds, theirs: Seeds) -> float:
    """Return the difference of the means over the seeds that both have."""
    first, second = _pairs(ours, theirs)
    return statistics.mean(first) - statistics.mean(second)


def interval(ours: Seeds, theirs: Seeds) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean difference over the seeds that both have (on pairs), or None with fewer than three."""
    differences = [a - b for a, b in zip(*_pairs(ours, theirs), strict=True)]
    if len(differences) < 3 or ours.run == theirs.run:
        return None
    mean, half = statistics.mean(differences), half_interval(differences)
    return mean - half, mean + half


def p_value(ours: Seeds, theirs: Seeds) -> float | None:
    """Return p of a paired t-test over the seeds that both have, or None with fewer than three."""
    from scipy.stats import ttest_rel

    pairs = _pairs(ours, theirs)
    if len(pairs[0]) < 3 or ours.run == theirs.run:
        return None
    if pairs[0] == pairs[1]:
        return 1.0
    return float(ttest_rel(*pairs).pvalue)


def half_interval(values: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of the mean (Student's t), NaN for fewer than two values.

    >>> round(half_interval([1.0, 2.0, 3.0]), 2)
    2.48
    """
    from scipy.stats import t

    if len(values) < 2:
        return math.nan
    return float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def with_interval(values: Sequence[float], digits: int) -> str:
    """Format the mean with its sign, and the 95 % confidence interval if there are at least two values.

    >>> with_interval([0.1, 0.2, 0.3], 2), with_interval([0.1], 2)
    ('+0.20 ± 0.25', '+0.10')
    """
    if not values:
        return "-"
    half = half_interval(values)
    return f"{statistics.mean(values):+.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def first_epoch(curve: Sequence[Point], target: float) -> float:
    """Return the first epoch that ends at the target accuracy or above, or infinity.

    >>> first_epoch([Point(2.0, 0.5), Point(1.0, 0.8), Point(0.9, 0.9)], 0.8), first_epoch([Point(2.0, 0.5)], 0.8)
    (2.0, inf)
    """
    return next((float(epoch) for epoch, point in enumerate(curve, 1) if point.value >= target), math.inf)


def epochs_to(target: float, seeds: Seeds) -> tuple[float, int]:
    """Return the median epoch over seeds, and how many seeds reach the target. A seed that does not counts as later than all."""
    first = [first_epoch(curve, target) for curve in seeds.curves]
    return statistics.median_high(first), sum(map(math.isfinite, first))
