"""Checks before an Averager is built, and what all ranks compare. Each error names the value, the rule and the fix."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rumor.engines.processes.process_group import ProcessGroup
from rumor.methods.algorithm import Algorithm, check_algorithm, describe
from rumor.model.checks import check_module, check_shards, description, is_compiled, layouts, reshard, trained_and_frozen
from rumor.model.optimizer_state import AverageState, OptimizerState
from rumor.model.tensors import is_sharded
from rumor.schedule import Never
from rumor.topology import Topology
from rumor.version import VERSION

P = ParamSpec("P")
T = TypeVar("T")


def rest_by_name(call: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function show the right `call` if it is given an argument by position that must have its name."""

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        most = sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in inspect.signature(function).parameters.values())

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if len(args) > most:
                raise TypeError(f"{type(args[most]).__name__} was given without the name of its argument: call {call}")
            return function(*args, **kwargs)

        return checked

    return decorated


def check_model(model: nn.Module, engine: ProcessGroup) -> None:
    """Refuse what can't be averaged, such as a module whose gradients DDP averages over all nodes already."""
    check_module(model)
    local_ranks = None if engine.local is None else engine.local.ranks
    _check_ddp(model, engine, local_ranks or [engine.transport.ranks[engine.rank]])
    reshard(model)
    check_shards(model, local_ranks)
    trained_and_frozen(model)


def check_member(model: nn.Module, algorithm: Algorithm, lazy: bool, rescue: object, local_ranks: list[int]) -> None:
    """Refuse what does not go with members that come and go, or can't be averaged there: nodes have whole models."""
    check_module(model)
    _check_elastic(algorithm, lazy, rescue)
    for inner in (m for m in model.modules() if isinstance(m, DistributedDataParallel)):
        _refuse_ddp_across(inner, local_ranks)
    if sharded := [name for name, p in model.named_parameters() if is_sharded(p)]:
        raise ValueError(f"rumor.elastic does not go with parameters that FSDP2 shards, such as {sharded[0]}: use DDP inside the node")
    trained_and_frozen(model)


def check_group(group: object) -> None:
    if isinstance(group, str):
        raise TypeError(f"group={group!r} is a string: pass group=rumor.elastic({group!r})")


def _check_elastic(algorithm: Algorithm, lazy: bool, rescue: object) -> None:
    check_algorithm(algorithm)
    for name, given in (("lazy=True", lazy), ("rescue=", rescue is not None)):
        if given:
            raise ValueError(f"{name} does not go with rumor.elastic: leave one of them out")
    if isinstance(algorithm.topology, Topology):
        raise ValueError(
            f"{algorithm.topology} is for {algorithm.topology.n} nodes, but the number of members changes: pass a builder such as "
            "rumor.one_peer_exponential, or leave out n"
        )
    if isinstance(algorithm.schedule, Never) or getattr(algorithm, "average_rounds", None) is not None:
        raise ValueError(f"{algorithm!r} has no global averages of all nodes, where members could change: use gossip_pga or the like")


def _check_ddp(model: nn.Module, engine: ProcessGroup, local_ranks: list[int]) -> None:
    inner = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    if inner is None:
        return
    _refuse_ddp_across(inner, local_ranks)


def _refuse_ddp_across(ddp: DistributedDataParallel, local_ranks: list[int]) -> None:
    ranks = ProcessGroup(ddp.process_group).transport.ranks
    if not set(ranks) <= set(local_ranks):
        raise ValueError(
            f"the model is already in DistributedDataParallel over ranks {ranks}, which averages their gradients at every step: take it "
            "out, train the plain module and hand that to the Averager. Only inside a node of several GPUs may DDP stay, with local_group= "
            "the group that it is over"
        )


def check_no_ddp_around(model: nn.Module, local_ranks: list[int], algorithm: Algorithm) -> None:
    """Refuse a DDP that shares parameters with the model: it was left in place, or put around the model after the Averager was built.

    Every rank of the DDP has it, so all of them refuse it by themselves.
    """
    if sends_nothing(algorithm):
        return
    parameters = set(map(id, model.parameters()))
    if _wrappers_of(parameters):
        gc.collect()  # one that is no longer used may be part of a cycle
    for ddp in _wrappers_of(parameters):
        _refuse_ddp_across(ddp, local_ranks)


def _wrappers_of(parameters: set[int]) -> list[DistributedDataParallel]:
    """Find the DDPs with some of these parameters. DDP leaves no trace on a module that it wraps, so they are searched in memory."""
    objects = gc.get_objects()
    # There are some 300,000 objects, but only a few thousand types. Unlike isinstance(), type() does not wake up lazy proxies of other
    # libraries. __mro__ is far faster than issubclass(), which DDP's metaclass slows down.
    kinds = {id(kind): kind for kind in map(type, objects)}  # by id, as not every class can be hashed
    wanted = {one for one, kind in kinds.items() if DistributedDataParallel in kind.__mro__}
    wrappers = [one for one in objects if id(type(one)) in wanted] if wanted else []
    return [one for one in wrappers if not parameters.isdisjoint(map(id, one.parameters()))]


def sends_nothing(algorithm: Algorithm) -> bool:
    """Whether nodes never exchange their models. Such a method only counts steps, and DDP may train beside it."""
    return not algorithm.topology.has_links and isinstance(algorithm.schedule, Never)


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
