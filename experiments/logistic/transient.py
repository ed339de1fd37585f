"""When does a method run as Parallel SGD does? The transient stage of DECISIONS, measured: from curves recorded every EVERY steps.

T_tr(eps) is the first k from which 95 % of the smoothed ratios to Parallel SGD stay at or below 1 + eps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.float64]  # [records, ...], one value every EVERY steps

EVERY = 11  # steps between records: no divisor of a period, so that all phases of a period are seen
WINDOW = 20  # records in a moving mean: 220 steps
LATEST = 500  # a crossing in the last LATEST steps proves nothing: "not reached"


def moving_mean(curve: Curve, window: int = WINDOW) -> Curve:
    """Entry r is the mean of the `window` records up to record r + window - 1."""
    return np.lib.stride_tricks.sliding_window_view(curve, window, axis=0).mean(-1)


def smoothed_ratio(curve: Curve, parallel: Curve, window: int = WINDOW) -> Curve:
    return moving_mean(curve / parallel, window)


def transient_stage(curve: Curve, parallel: Curve, eps: float, every: int = EVERY, window: int = WINDOW) -> int | None:
    """T_tr(eps) in steps, None where it is not reached."""
    late = smoothed_ratio(curve, parallel, window) > 1 + eps
    share_late = late[::-1].cumsum()[::-1] / np.arange(len(late), 0, -1)  # of all ratios from r on
    settled = np.flatnonzero(share_late <= 0.05)
    if not len(settled):
        return None
    k = int(settled[0] + window - 1) * every if settled[0] else 0  # 0: as Parallel SGD from the first ratio on
    return k if k <= len(curve) * every - LATEST else None


def ratio_at(k: int, curve: Curve, parallel: Curve, every: int = EVERY, window: int = WINDOW) -> float:
    ratios = smoothed_ratio(curve, parallel, window)
    return float(ratios[min(max(k // every - window + 1, 0), len(ratios) - 1)])
