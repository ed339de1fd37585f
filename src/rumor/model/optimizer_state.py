"""OptimizerState: the tensors of an optimizer's state that nodes can average, such as SGD's momentum and Adam's two moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from rumor.methods.algorithm import Algorithm, WhenMixed
from rumor.schedule import Never

AverageState = Literal["global", "always"]

SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf")  # means and sums of squares, and magnitudes
AVERAGED = ("momentum_buffer", "exp_avg", "grad_avg", *SQUARES)  # as torch's optimizers name them; LAMB and Lion have the same names


class OptimizerState:
    """The state that `optimizer` keeps for `parameters`, as far as nodes can average it: tensors like the parameter, by known names.

    An optimizer creates its state at its first step, but nodes have to agree on what they exchange before that, also if GradScaler skips
    the first step of one of them. So missing state is created here, as zeros.

    Some optimizers divide by the root of a mean of squares. The error of a code can be larger than such a mean, and momentum that is mixed
    without the squares can be large where they are small: then a step is huge. So the state of these optimizers is mixed all together and
    without codes: at global rounds, or at every step if messages have 32 bits.

    Attributes:
        in_full: whether global rounds average it without codes, instead of mixing it like the model.

    >>> import rumor
    >>> model = torch.nn.Linear(3, 1)
    >>> state = OptimizerState(torch.optim.Adam(model.parameters()), list(model.parameters()), rumor.local_sgd(4, 6), "global")
    >>> state.description, state.in_full
    ('exp_avg, exp_avg_sq: 8 numbers in 4 tensors', True)
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], algorithm: Algorithm, average_state: AverageState):
        in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.optimizer, self._parameters = optimizer, [p for p in parameters if id(p) in in_groups]
        self._average_state = average_state
        self._create_missing()
        self._places = [(p, name) for name in AVERAGED for p in self._parameters if self._get(p, name) is not None]
        if not self._places:
            raise ValueError(f"{self._kind} keeps no state that nodes could average: leave out average_state")
        self._has_squares = any(name in SQUARES for _, name in self._places)
        self.in_full = self._has_squares and average_state == "global"
        self.check_method(algorithm)
        self._remembered = [self._get(p, name) for p, name in self._places]

    @property
    def mixed(self) -> WhenMixed:
        """When the state is mixed.

        As long as every step averages the models, averaging SGD's momentum, too, would not change them: its step is linear, so the mean
        model moves by the mean of the momenta either way. Sending it would only cost bytes, and add the errors of codes.
        """
        if self._average_state == "always":
            return "always"
        return "global, H > 1" if isinstance(self.optimizer, torch.optim.SGD) else "global"

    @property
    def _kind(self) -> str:
        return type(self.optimizer).__name__

    def check_method(self, algorithm: Algorithm) -> None:
        """Refuse a method whose messages could make a mean of squares negative, or much smaller than it is."""
        if self._has_squares and algorithm.delay:
            raise ValueError(
                f"{self._kind} keeps means of squares, which messages of a step ago could make negative: use delay=0, or leave out "
                "average_state"
            )
        if self._has_squares and algorithm.bits < 32 and self._average_state == "always":
            raise ValueError(
                f"{self._kind} divides by means of squares, and the error of a code of {algorithm.bits} bits can be larger than they are: "
                'use average_state="global", which sends them in full, or bits=32'
            )

    @property
    def description(self) -> str:
        """What is averaged, for all nodes to compare."""
        names, tensors = dict.fromkeys(name for _, name in self._places), self.tensors()
        return f"{', '.join(names)}: {sum(t.numel() for t in tensors)} numbers in {len(tensors)} tensors"

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are there now: all of one name in the order of the parameters, then those of the next."""
        return [t for p, name in self._places if (t := self._get(p, name)) is not None]

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
        missing = [p for p in self._parameters if not any(self._get(p, name) is not None for name in AVERAGED)]
        if not missing:
            return
        with torch.no_grad(), _step_of_zero(self.optimizer, missing):
            self.optimizer.step()
        for p in missing:
            self._check_known(p, missing)
            for name, value in dict(self.optimizer.state[p]).items():
                if isinstance(value, Tensor):
                    value.zero_()
                elif value is not None:
                    self.optimizer.state[p][name] = type(value)(0)

    def _check_known(self, p: Tensor, created: Sequence[Tensor]) -> None:
        """Raise if there is state that may not begin as zeros, such as NAdam's mu_product, and forget all that was created."""
        unknown = [name for name, value in self.optimizer.state[p].items() if value is not None and name not in (*AVERAGED, "step")]
        if unknown:
            for other in created:
                del self.optimizer.state[other]
            raise ValueError(f"average_state does not know {', '.join(unknown)} of {self._kind}: it averages {', '.join(AVERAGED)}")


def check_average_state(algorithm: Algorithm, optimizer: object, average_state: object, parameters: Iterable[Tensor]) -> None:
    """Refuse the optimizer of another model, and what can't be done with its state."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer takes the model's torch.optim.Optimizer, got {type(optimizer).__name__}")
    if optimizer is not None:
        in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if in_groups.isdisjoint(map(id, parameters)):
            raise ValueError("optimizer= has none of the model's parameters: build it from model.parameters() (in a Simulator, sim's)")
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
