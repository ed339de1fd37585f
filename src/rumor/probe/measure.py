"""Measures a cluster with the real engine: computing, DDP, gossip on each topology, all-reduce, and whole steps of Gossip-PGA.

Every process calls `measure` at the same time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from rumor.averager import Averager
from rumor.cost import TOPOLOGIES, Workload
from rumor.cost.network import distinct
from rumor.engines.processes.process_group import ProcessGroup
from rumor.methods.gossip_pga import GossipPGA, gossip_pga, gossip_sgd, parallel_sgd
from rumor.probe.results import Coded, Probe, Timing
from rumor.probe.timer import SMALL_STEPS, Timer
from rumor.probe.whole_steps import Step, time_whole_steps
from rumor.topology import one_peer_exponential

LARGE = 1_000_000  # minimum number of parameters in the message that gives the bandwidth
CODED_BITS = (8, 4)
NEVER = 10**9  # a period that is not reached: gossip alone


def stand_in(parameters: int, batch: int, device: torch.device) -> tuple[nn.Module, Step]:
    """Builds an MLP of about so many parameters, and its training step on random data."""
    width = max(1, round((parameters / 4) ** 0.5))
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU()))).to(device)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(batch, width, device=device)

    def step(model: nn.Module = model) -> None:
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()

    return model, step


def measure(
    engine: ProcessGroup,
    model: nn.Module,
    step: Step,
    name: str,
    is_stand_in: bool,
    repeats: int = 10,
    show: Callable[[str, Timing], object] = lambda what, timing: None,
    timeout: float = 60.0,
) -> Probe:
    """Times the training `step` of `model`, one averaging of the model on every topology, and whole steps. All ranks must call it.

    If `step` takes an argument, it is also called with the model in DistributedDataParallel, to time DDP including its overlap.
    """
    timer = Timer(engine, repeats, show)
    timer.time("computing", step)
    _time_averaging(timer, model)
    workload = Workload.of(model, timer.timings["computing"].median)
    large, large_bytes = _time_large_gossip(timer, model, workload)
    timings = timer.timings
    probe = Probe(
        engine.n,
        workload.parameters,
        workload.bytes_per_parameter,
        name,
        is_stand_in,
        engine.transport.backend,
        _device(model).type,
        torch.__version__,
        repeats,
        compute=timings["computing"],  # which is timed again in turns with the other whole steps
        ddp=None,
        all_reduce=timings["all-reduce"],
        gossip={topology: timings[topology] for topology in distinct(engine.n)},
        small_gossip=timings["gossip of 2 parameters"],
        small_all_reduce=timings["all-reduce of 2 parameters"],
        large_gossip=large,
        large_bytes=large_bytes,
        coded={bits: Coded(timings[f"gossip, {bits} bits"], timings[f"all-reduce, {bits} bits"]) for bits in CODED_BITS},
    )
    return time_whole_steps(timer, model, step, probe, timeout)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _time_averaging(timer: Timer, model: nn.Module) -> None:
    """Times gossip on every topology and an all-reduce, of the model, of its codes, and of a model with two parameters."""
    n, tiny = timer.engine.n, nn.Linear(1, 1).to(_device(model))
    for name in distinct(n):
        topology = TOPOLOGIES[name](n)
        timer.time(name, _averaging(model, gossip_sgd(topology)), topology.period)  # whole cycles: their steps may differ
    timer.time("all-reduce", _averaging(model, parallel_sgd(n)))
    peers = one_peer_exponential(n)
    for bits in CODED_BITS:
        timer.time(f"gossip, {bits} bits", _averaging(model, gossip_pga(peers, NEVER, bits=bits)), peers.period)
        timer.time(f"all-reduce, {bits} bits", _averaging(model, parallel_sgd(n, bits=bits)))
    timer.time("gossip of 2 parameters", _averaging(tiny, gossip_sgd(peers)), SMALL_STEPS * peers.period)
    timer.time("all-reduce of 2 parameters", _averaging(tiny, parallel_sgd(n)), SMALL_STEPS)


def _time_large_gossip(timer: Timer, model: nn.Module, workload: Workload) -> tuple[Timing, float]:
    """The time and the bytes of a large message to one peer: the model's, or that of a model with 1M parameters if the model is small."""
    if workload.parameters >= LARGE:
        return timer.timings["one-peer-exponential"], workload.bytes
    large, peers = nn.Linear(1000, LARGE // 1000, bias=False).to(_device(model)), one_peer_exponential(timer.engine.n)
    timer.time("gossip of 1M parameters", _averaging(large, gossip_sgd(peers)), peers.period)
    return timer.timings["gossip of 1M parameters"], 4.0 * LARGE


def _averaging(model: nn.Module, algorithm: GossipPGA) -> Callable[[], object]:
    return Averager(model, algorithm).step
