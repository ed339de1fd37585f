"""What happens with `rescue=` if a node's model is no longer finite: all nodes go on from the mean of the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from rumor.averager.replica import Replica

T = TypeVar("T")


def or_rescue(replica: Replica, optimizer: torch.optim.Optimizer | None, do: Callable[[], T]) -> T:
    """Call `do`. With an optimizer, if some node's model is not finite, go on from the mean of the others and call it again."""
    try:
        return do()
    except FloatingPointError as error:
        rescue_or_raise(replica, optimizer, error, stacklevel=6)  # below contextlib
        return do()


def rescue_or_raise(replica: Replica, optimizer: torch.optim.Optimizer | None, error: FloatingPointError, stacklevel: int) -> None:
    """Replace all models by the mean of those that are finite. Every rank comes here at the same step."""
    if optimizer is None:
        raise error
    runner, engine = replica.runner, replica.engine
    runner.abandon()
    is_finite = runner.is_finite()
    engine.forget_alarm()
    if runner.take_mean_of(is_finite) == 0:
        raise error
    if not is_finite:
        optimizer.state.clear()
        optimizer.zero_grad()
        engine.metrics.rescues += 1
    why = str(error).split(";")[0]  # the rest is for runs without rescue
    replica.check_tensors()  # the optimizer's state may be new
    if not is_finite:
        warnings.warn(f"node {engine.rank} goes on from the mean of the others at step {runner.k}: {why}", stacklevel=stacklevel)
