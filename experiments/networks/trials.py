"""Learning rates that were tried on part of the training data (--tune), and the best of them. The trials are kept beside the results."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from pathlib import Path

from networks.store import Row, rows_of, shortened


def file_of(results: Path) -> Path:
    """
    >>> file_of(Path("results/text.csv")).name
    'text-trials.csv'
    """
    return results.with_name(f"{results.stem}-trials.csv")


def best(results: Path, **wanted: object) -> Row | None:
    """Returns one row of the trials with the best learning rate, or None if there are no trials with the wanted settings.

    Only the longest trials count, and of those the rates with the most seeds. The best rate has the best mean over its seeds.
    """
    texts = {name: shortened(value) for name, value in wanted.items()}
    rows = [row for row in rows_of(file_of(results)) if all(row[name] == text for name, text in texts.items())]
    longest = max((int(row["steps"]) for row in rows), default=0)
    by_rate: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if int(row["steps"]) == longest:
            by_rate[row["lr"]].append(row)
    if not by_rate:
        return None
    return max(by_rate.values(), key=lambda tried: (len(tried), statistics.mean(map(_worth, tried))))[0]


def _worth(row: Row) -> float:
    """The accuracy, or minus the loss. A run that diverged is worth least."""
    worth = float(row["accuracy"]) if row["accuracy"] else -float(row["loss"])
    return -math.inf if math.isnan(worth) else worth
