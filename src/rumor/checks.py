"""What an Averager can't be built from, said before it is: each error names the value, the rule and the fix."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from rumor.algorithm import Algorithm
from rumor.flat import held
from rumor.process_group import ProcessGroup


def check_model(model: nn.Module, engine: ProcessGroup) -> None:
    """Refuses what can't be averaged, such as a module whose gradients DDP already averages over all nodes."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model comes first and must be a torch.nn.Module, got {type(model).__name__}")
    inner = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    if inner is None:
        return
    inside = [engine.ranks[engine.rank]] if engine.inside is None else engine.inside.ranks
    ddp = ProcessGroup(inner.process_group).ranks
    if not set(ddp) <= set(inside):
        raise ValueError(
            f"the model is already in DistributedDataParallel over ranks {ddp}, which averages their gradients at every step: take it out, "
            "train the plain module and hand that to the Averager. Only inside a node of several GPUs may DDP stay, with local_group= the "
            "group that it is over"
        )


def check_options(algorithm: Algorithm, n: int, lazy: bool, rescue: torch.optim.Optimizer | None, is_shared: bool) -> None:
    """`is_shared`: a node is several ranks."""
    _check_size(algorithm, n)
    _check_lazy(lazy, algorithm, is_shared)
    _check_rescue(rescue, lazy, is_shared)


def _check_size(algorithm: Algorithm, n: int) -> None:
    topology = algorithm.topology
    if topology.n != n:
        how = topology.name.split("(")[0]
        special = {"isolated": f"use local_sgd({n}, H)", "complete": f"use parallel_sgd({n}) or complete({n})"}
        fix = special.get(how, f"build it with {how}({n})" if "<" not in topology.name else f"build it for {n} nodes")
        raise ValueError(f"this topology is for n={topology.n} nodes, but the group has {n}: {fix}")


def _check_lazy(lazy: bool, algorithm: Algorithm, is_shared: bool) -> None:
    if lazy and algorithm.delay:
        raise ValueError("lazy=True has nothing to gain with delay=1, whose messages have a whole step to arrive: leave one of them out")
    if lazy and is_shared:
        raise ValueError(
            "lazy=True can't wait for what the ranks of a node share when all of it has arrived: leave out lazy or local_group"
        )


def _check_rescue(rescue: torch.optim.Optimizer | None, lazy: bool, is_shared: bool) -> None:
    if rescue is not None and not isinstance(rescue, torch.optim.Optimizer):
        raise TypeError(f"rescue takes the optimizer whose state is to start anew, got {type(rescue).__name__}")
    if rescue is not None and (lazy or is_shared):
        raise ValueError(f"rescue= does not go with {'lazy=True' if lazy else 'local_group='}: leave one of them out")


def described(module: nn.Module) -> str:
    """What must be alike on all ranks."""
    parameters = [f"{name} {list(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}" for name, p in module.named_parameters()]
    return ", ".join([*parameters, *(f"{name} {list(b.shape)} {b.dtype}" for name, b in module.named_buffers())])


def is_averaged(buffer: Tensor) -> bool:
    """Floats are; integers (counts, masks) stay each node's own."""
    return buffer.is_floating_point() or buffer.is_complex()


def trained_and_frozen(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that are averaged, and those that are left alone because they don't train."""
    parameters = list(module.parameters())
    memory: dict[int, str] = {}
    for name, p in module.named_parameters():
        if isinstance(p, UninitializedParameter) or p.is_meta:
            raise ValueError(f"parameter {name} has no values yet (lazy, or on the meta device): initialise the model first")
        here = held(p)
        if here.numel() and memory.setdefault(here.data_ptr(), name) != name:
            other = memory[here.data_ptr()]
            raise ValueError(
                f"parameters {other} and {name} share memory but are two Parameters: tie them by assigning the Parameter itself"
            )
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        raise ValueError(f"{type(module).__name__} has no parameters that train (of {len(parameters)}): there is nothing to average")
    return trained, [p for p in parameters if not p.requires_grad]
