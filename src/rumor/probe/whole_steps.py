"""Times whole training steps: computing alone, DDP, and Gossip-PGA in float32 and with 4 bits, with delay=1, and in an elastic group.

All of them take turns, so that a change in the cluster's load meets them all. The topologies and periods of Gossip-PGA are those that
`rumor plan` would compare with DDP, so that its recommendation is a step that was measured.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rumor.averager import Averager
from rumor.cost import TOPOLOGIES, recommend
from rumor.cost.network import method_text
from rumor.cost.recommendation import FEWEST_BITS, LONGEST_TIMED, gossip_to_compare
from rumor.ddp import DDPHookState, ddp_hook, ddp_hook_state
from rumor.methods.gossip_pga import GossipPGA, gossip_pga
from rumor.probe.elastic_group import ElasticError, elastic_averager, leaving_after
from rumor.probe.results import Probe
from rumor.probe.timer import Contestant, Timer, in_turns

ENOUGH = 100  # steps: a turn has fewer, so an elastic group that takes longer than so many is stuck
DDP, CODED_DDP = "DDP", f"DDP, {FEWEST_BITS} bits"

Step = Callable[..., object]  # step() or step(model) runs one forward, backward and optimizer step


NO_MODEL = "step() takes no model. Let build() return a step(model), which trains the model that it is given, and probe again"


def takes_model(step: Step) -> bool:
    """Whether `step` can be called as step(model)."""
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in inspect.signature(step).parameters.values())


def time_whole_steps(timer: Timer, model: nn.Module, step: Step, probe: Probe, timeout: float) -> Probe:
    """Adds the whole steps to what was measured so far. All ranks must call it."""
    contestants = {"compute": Contestant(partial(_alone, step)), **_in_ddp(timer, model, step)}
    planned = _planned(probe)
    for bits, (topology, H) in planned.items():
        for delay in (0, 1):
            make = partial(_averaged, model, _method(topology, H, bits, delay), step)
            contestants[method_text(topology, H, bits, delay)] = Contestant(make, H)
    elastic, problem = _time(timer, model, step, probe, planned, contestants, timeout)
    timings = timer.timings
    return replace(
        probe,
        compute=timings["compute"],
        ddp=timings.get(DDP),
        coded_ddp={FEWEST_BITS: timings[CODED_DDP]} if CODED_DDP in timings else {},
        steps={name: timings[name] for name in contestants if name.startswith("gossip_pga")},
        elastic={} if problem else {elastic: timings[_elastic(elastic)]},
        left_out=({} if DDP in timings else {"DDP": NO_MODEL}) | ({"the elastic group": problem} if problem else {}),
    )


def _time(
    timer: Timer,
    model: nn.Module,
    step: Step,
    probe: Probe,
    planned: dict[int, tuple[str, int]],
    contestants: dict[str, Contestant],
    timeout: float,
) -> tuple[str, str | None]:
    """Times the contestants, with an elastic group among them. Returns its method, and what was wrong with it, if anything was."""
    bits = recommend(probe.n, probe.workload(steps=1), probe.measured()).bits
    (topology, H), text = planned[bits], method_text(*planned[bits], bits)
    try:
        with elastic_averager(timer.engine, model, _method(topology, H, bits), timeout) as averager:
            enough = timeout + ENOUGH * (probe.compute.median + probe.all_reduce.median)
            in_turns(timer, {**contestants, _elastic(text): Contestant(partial(_among_members, averager, step, enough), H)})
    except ElasticError as error:
        if not contestants.keys() <= timer.timings.keys():  # there was no group, so nobody has taken a turn
            in_turns(timer, contestants)
        return text, str(error)
    return text, None


def _elastic(text: str) -> str:
    return f"{text}, elastic"


def _planned(probe: Probe) -> dict[int, tuple[str, int]]:
    """The topology and the period of Gossip-PGA, by the number of bits."""
    found = {bits: gossip_to_compare(probe.n, probe.workload(steps=1), probe.measured(), bits) for bits in (32, FEWEST_BITS)}
    return {bits: (topology, min(H, LONGEST_TIMED)) for bits, (topology, H) in found.items()}


def _in_ddp(timer: Timer, model: nn.Module, step: Step) -> dict[str, Contestant]:
    if not takes_model(step):
        return {}
    codes = ddp_hook_state(bits=FEWEST_BITS, group=timer.engine.group)
    return {name: Contestant(partial(_wrapped, timer, model, step, state)) for name, state in ((DDP, None), (CODED_DDP, codes))}


def _method(topology: str, H: int, bits: int, delay: int = 0) -> GossipPGA:
    return gossip_pga(TOPOLOGIES[topology], H, bits=bits, delay=delay)


# ---- contestants -------------------------------------------------------------------------------------------------------------------


@contextmanager
def _alone(step: Step) -> Iterator[Step]:
    yield step


@contextmanager
def _wrapped(timer: Timer, model: nn.Module, step: Step, codes: DDPHookState | None) -> Iterator[Step]:
    """The step in DDP, which must be gone afterwards: neither another DDP nor an Averager may share its model."""
    ddp = [DistributedDataParallel(model, process_group=timer.engine.group)]
    if codes is not None:
        ddp[0].register_comm_hook(codes, ddp_hook)
    try:
        yield lambda: step(ddp[0])
    finally:
        ddp.clear()
        gc.collect()


@contextmanager
def _averaged(model: nn.Module, algorithm: GossipPGA, step: Step) -> Iterator[Step]:
    yield partial(_both, Averager(model, algorithm), step)


@contextmanager
def _among_members(averager: Averager, step: Step, within: float) -> Iterator[Step]:
    with leaving_after(averager, within):
        yield partial(_both, averager, step)


def _both(averager: Averager, step: Step) -> None:
    step()
    averager.step()
