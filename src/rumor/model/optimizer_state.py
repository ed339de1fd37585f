"""OptimizerState: the tensors of an optimizer's state that nodes can average, such as SGD's momentum and Adam's two moments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from rumor.methods.algorithm import Algorithm
from rumor.schedule import Never

AverageState = Literal["global", "always"]

SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf")  # means and sums of squares, and magnitudes
AVERAGED = ("momentum_buffer", "exp_avg", "grad_avg", *SQUARES)  # as torch's optimizers name them; LAMB and Lion have the same names


class OptimizerState:
    """The state that `optimizer` keeps for `parameters`, as far as nodes can average it: tensors like the parameter, by known names.

    An optimizer creates its state at its first step, but nodes have to agree on what they exchange before that, also if GradScaler skips
    the first step of one of them. So missing state is created here, as zeros.

    >>> model = torch.nn.Linear(3, 1)
    >>> state = OptimizerState(torch.optim.Adam(model.parameters()), list(model.parameters()))
    >>> state.names, len(state.tensors())
    (['exp_avg', 'exp_avg_sq'], 2)
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]):
        in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.optimizer, self._parameters = optimizer, [p for p in parameters if id(p) in in_groups]
        if not self._parameters:
            raise ValueError("optimizer= has none of the model's parameters: build it from model.parameters() (in a Simulator, sim's)")
        self._create_missing()
        self._places = [(p, name) for name in AVERAGED for p in self._parameters if self._get(p, name) is not None]
        self._check()
        self._remembered = [self._get(p, name) for p, name in self._places]

    def _check(self) -> None:
        kind = type(self.optimizer).__name__
        own = {
            name for p in self._parameters for name, t in self.optimizer.state[p].items() if isinstance(t, Tensor) and t.shape == p.shape
        }
        scalars = {"step"} if any(p.dim() == 0 for p in self._parameters) else set()
        if unknown := sorted(own - set(AVERAGED) - scalars):
            raise ValueError(f"average_state does not know {', '.join(unknown)} of {kind}: it averages {', '.join(AVERAGED)}")
        if not self._places:
            raise ValueError(f"{kind} keeps no state that nodes could average: leave out average_state")

    @property
    def names(self) -> list[str]:
        """The names of what is averaged."""
        return list(dict.fromkeys(name for _, name in self._places))

    def tensors(self) -> list[Tensor]:
        """Return momentum and the like as it is now: all of one name in the order of the parameters, then those of the next."""
        return [t for p, name in self._places if name not in SQUARES and (t := self._get(p, name)) is not None]

    def squares(self) -> list[Tensor]:
        """Return means of squares likewise. The error of a code can be larger than the square itself, which must not get near 0."""
        return [t for p, name in self._places if name in SQUARES and (t := self._get(p, name)) is not None]

    def _get(self, p: Tensor, name: str) -> Tensor | None:
        found = self.optimizer.state[p].get(name) if p in self.optimizer.state else None
        return found if isinstance(found, Tensor) else None

    # ---- tensors that are replaced, as optimizer.load_state_dict() does -----------------------------------------------------------

    def has_changed(self) -> bool:
        """Return whether a tensor has been replaced since this was last asked. Creates what is missing."""
        if all(self._get(p, name) is was for (p, name), was in zip(self._places, self._remembered, strict=True)):
            return False
        self._create_missing()
        self._remembered = [self._get(p, name) for p, name in self._places]
        return True

    def _create_missing(self) -> None:
        """Let the optimizer create the state of parameters that have none, then set it to what it is before the first step: zeros."""
        missing = [p for p in self._parameters if not any(isinstance(t, Tensor) and t.dim() for t in self._state(p).values())]
        if not missing:
            return
        with torch.no_grad(), _step_of_zero(self.optimizer, missing):
            self.optimizer.step()
        for p in missing:
            for name, value in self._state(p).items():
                if isinstance(value, Tensor):
                    value.zero_()
                elif isinstance(value, int | float):
                    self.optimizer.state[p][name] = type(value)(0)

    def _state(self, p: Tensor) -> dict[str, object]:
        return dict(self.optimizer.state.get(p, {}))


def check_average_state(algorithm: Algorithm, optimizer: object, average_state: object) -> None:
    """Refuse what can't be done with the optimizer's state."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer takes the model's torch.optim.Optimizer, got {type(optimizer).__name__}")
    if average_state is None:
        return
    if average_state not in ("global", "always"):
        raise ValueError(f'average_state must be "global" (at global averages) or "always" (gossip, too), got {average_state!r}')
    if optimizer is None:
        raise ValueError(f"average_state={average_state!r} needs the optimizer whose state it is: Averager(..., optimizer=opt)")
    if not algorithm.averages_state:
        raise ValueError(f"{type(algorithm).__name__} does not average the optimizer's state: leave out average_state")
    if average_state == "global" and isinstance(algorithm.schedule, Never):
        raise ValueError('average_state="global" has no effect here, because there are no global averages: use "always"')


@contextmanager
def _step_of_zero(optimizer: torch.optim.Optimizer, only: Sequence[Tensor]) -> Iterator[None]:
    """Let a step of `optimizer` inside the block see gradients of zero for `only` these parameters, and change none of them."""
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    grads, values, rates = (
        [p.grad for p in everything],
        [p.detach().clone() for p in only],
        [group["lr"] for group in optimizer.param_groups],
    )
    chosen = {id(p) for p in only}
    try:
        for p in everything:
            p.grad = torch.zeros_like(p) if id(p) in chosen else None
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        yield
    finally:
        for p, grad in zip(everything, grads, strict=True):
            p.grad = grad
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for p, value in zip(only, values, strict=True):
            p.copy_(value)
