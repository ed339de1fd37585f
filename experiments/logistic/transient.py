"""Measures the transient stage, after which a method is as good as Parallel SGD, on curves recorded every EVERY steps.

T_tr(eps) is the first k at which the smoothed ratio to Parallel SGD is at most 1 + eps, and from which on 95 % of the ratios are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.float64]  # [records, ...], one value every EVERY steps

EVERY = 11  # steps between records: it does not divide a period, so that all phases of a period are recorded
WINDOW = 20  # records in a moving mean: 220 steps
LATEST = 500  # a crossing in the last LATEST steps is not reliable and counts as "not reached"


def moving_mean(curve: Curve, window: int = WINDOW) -> Curve:
    """Computes a moving mean. Entry r is the mean of `window` records, centred at record r + window // 2."""
    return np.lib.stride_tricks.sliding_window_view(curve, window, axis=0).mean(-1)


def smoothed_ratio(curve: Curve, parallel: Curve, window: int = WINDOW) -> Curve:
    return moving_mean(curve, window) / moving_mean(parallel, window)


def transient_stage(curve: Curve, parallel: Curve, eps: float, every: int = EVERY, window: int = WINDOW) -> int | None:
    """Returns T_tr(eps) in steps, or None if it is not reached."""
    late = smoothed_ratio(curve, parallel, window) > 1 + eps
    share_late = late[::-1].cumsum()[::-1] / np.arange(len(late), 0, -1)  # share of all ratios from r on
    settled = np.flatnonzero(~late & (share_late <= 0.05))
    if not len(settled):
        return None
    k = int(settled[0] + window // 2) * every if settled[0] else 0  # 0: as good as Parallel SGD from the first ratio on
    return k if k <= (len(curve) - 1) * every - LATEST else None


def ratio_at(k: int, curve: Curve, parallel: Curve, every: int = EVERY, window: int = WINDOW) -> float:
    ratios = smoothed_ratio(curve, parallel, window)
    return float(ratios[min(max(k // every - window // 2, 0), len(ratios) - 1)])
