"""Checks before an Averager is built, and what all ranks compare. Each error names the value, the rule and the fix."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rumor.engines.processes.process_group import ProcessGroup
from rumor.methods.algorithm import Algorithm, check_algorithm, describe
from rumor.model.checks import check_shards, description, is_compiled, layouts, reshard, trained_and_frozen
from rumor.model.optimizer_state import AverageState, OptimizerState
from rumor.version import VERSION


def check_model(model: nn.Module, engine: ProcessGroup) -> None:
    """Refuse what can't be averaged, such as a module whose gradients DDP averages over all nodes already."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model comes first and must be a torch.nn.Module, got {type(model).__name__}")
    local_ranks = None if engine.local is None else engine.local.ranks
    _check_ddp(model, engine, local_ranks or [engine.transport.ranks[engine.rank]])
    reshard(model)
    check_shards(model, local_ranks)
    trained_and_frozen(model)


def _check_ddp(model: nn.Module, engine: ProcessGroup, local_ranks: list[int]) -> None:
    inner = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    if inner is None:
        return
    ranks = ProcessGroup(inner.process_group).transport.ranks
    if not set(ranks) <= set(local_ranks):
        raise ValueError(
            f"the model is already in DistributedDataParallel over ranks {ranks}, which averages their gradients at every step: take it "
            "out, train the plain module and hand that to the Averager. Only inside a node of several GPUs may DDP stay, with local_group= "
            "the group that it is over"
        )


def bound_algorithm(algorithm: Algorithm, n: int) -> Algorithm:
    """Return the method for n nodes."""
    check_algorithm(algorithm)
    return algorithm.bind(n)


def check_options(
    model: nn.Module,
    algorithm: Algorithm,
    lazy: bool,
    rescue: torch.optim.Optimizer | None,
    average_state: AverageState | None,
    has_local_group: bool,
) -> None:
    if lazy:
        check_lazy(model)
    if lazy and algorithm.delay:
        raise ValueError("lazy=True has nothing to gain with delay=1, whose messages have a whole step to arrive: leave one of them out")
    if lazy and has_local_group:
        raise ValueError(
            "lazy=True does not go with local_group=, whose ranks share results only when all of them have arrived: leave one of them out"
        )
    if lazy and average_state is not None:
        raise ValueError(
            f"lazy=True does not go with average_state={average_state!r}, whose messages must arrive before the optimizer's next step: "
            "leave one of them out"
        )
    if rescue is not None and not isinstance(rescue, torch.optim.Optimizer):
        raise TypeError(f"rescue takes the optimizer whose state is to start again, got {type(rescue).__name__}")
    if rescue is not None and (lazy or has_local_group):
        raise ValueError(f"rescue= does not go with {'lazy=True' if lazy else 'local_group='}: leave one of them out")


def check_lazy(model: nn.Module) -> None:
    if is_compiled(model):
        raise ValueError(
            "lazy=True does not go with torch.compile: compiled code does not wait for its parameters module by module. Leave out lazy, or "
            "use a method with delay=1"
        )


def what_ranks_compare(
    model: nn.Module,
    algorithm: Algorithm,
    rescue: object,
    average_state: AverageState | None,
    state: OptimizerState | None,
    has_local_group: bool,
) -> dict[str, str]:
    """Return what must be the same on all ranks, by name."""
    setup = {"version of Rumor": VERSION, "algorithm": describe(algorithm), "model": description(model)}
    setup["average_state"] = str(average_state) if state is None else f"{average_state} ({state.description})"
    setup["use of rescue="] = str(rescue is not None)
    return {**setup, "layout in memory": layouts(model)} if has_local_group else setup
