"""Measures a cluster with the real engine: the seconds of computing, of a gossip step on each topology and of an all-reduce.

Every process calls `measure` at the same time. A sample is the time of the slowest process, from a common start. The result is the median
of the samples, with the fastest and the slowest one.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rumor.averager import Averager
from rumor.checkpoint.files import replacing
from rumor.cost import TOPOLOGIES, Link, Measured, Workload
from rumor.cost.network import CODING, coded_bytes
from rumor.engines.processes.process_group import ProcessGroup
from rumor.methods.gossip_pga import GossipPGA, gossip_pga, gossip_sgd, parallel_sgd
from rumor.schedule import check_whole
from rumor.topology import one_peer_exponential

FORMAT = 1  # version of the file format
WARM_UP = 3  # rounds that are not measured: the first ones open connections and allocate memory
LARGE = 1_000_000  # minimum number of parameters in the message that gives the bandwidth
SMALL_BYTES = 8  # size of the tiny model, which has two parameters
SMALL_STEPS = 10  # steps in a sample of the tiny model: a single one is too short to be timed
CODED_BITS = (8, 4)
NEVER = 10**9  # a period that is not reached: gossip alone

Step = Callable[..., object]  # step() or step(model) runs one forward, backward and optimizer step


@dataclass(frozen=True)
class Timing:
    """The median, the fastest and the slowest of several samples, in seconds."""

    median: float
    fastest: float
    slowest: float


@dataclass(frozen=True)
class Coded:
    """The times of one gossip step with one peer, and of one global average, with codes of a few bits."""

    gossip: Timing
    all_reduce: Timing


@dataclass(frozen=True)
class Probe:
    """The measured times, and where they were measured.

    Attributes:
        n: number of processes.
        parameters: number of parameters that were averaged.
        bytes_per_parameter: their mean size.
        model: a description of the model.
        is_stand_in: whether the model is the stand-in, not the user's own.
        backend: gloo or nccl.
        device: type of the model's device.
        torch: version of torch.
        repeats: samples of each time.
        compute: time of one forward, backward and optimizer step, on all processes at once.
        ddp: time of one such step with DistributedDataParallel, including its all-reduce; None if `step` takes no model.
        all_reduce: time of one all-reduce.
        gossip: time of one gossip step, by topology.
        small_gossip: time of one gossip step of a model with two parameters, which is the latency.
        small_all_reduce: time of one all-reduce of a model with two parameters.
        large_gossip: time of one gossip step with one peer of a model with `large_bytes`. This is the model itself unless that is small.
        large_bytes: size of that model.
        coded: times with messages of 8 and 4 bits. Empty in the files of older versions.
    """

    n: int
    parameters: int
    bytes_per_parameter: float
    model: str
    is_stand_in: bool
    backend: str
    device: str
    torch: str
    repeats: int
    compute: Timing
    ddp: Timing | None
    all_reduce: Timing
    gossip: Mapping[str, Timing]
    small_gossip: Timing
    small_all_reduce: Timing
    large_gossip: Timing
    large_bytes: float
    coded: Mapping[int, Coded] = field(default_factory=dict)

    def workload(self, steps: int) -> Workload:
        return Workload(self.parameters, self.compute.median, self.bytes_per_parameter, steps)

    def measured(self) -> Measured:
        ddp = None if self.ddp is None else max(0.0, self.ddp.median - self.compute.median)
        coded = {bits: (times.gossip.median, times.all_reduce.median) for bits, times in self.coded.items()}
        return Measured(self.all_reduce.median, {name: timing.median for name, timing in self.gossip.items()}, ddp, coded)

    def link(self) -> Link:
        """Computes the link. The latency is the time of a tiny gossip step; the bandwidth comes from the extra time of a large one."""
        transfer = self.large_gossip.median - self.small_gossip.median
        if transfer <= 0:
            raise ValueError(
                f"a message of {self.large_bytes:.0f} bytes took no longer than one of {SMALL_BYTES} bytes, so the bandwidth can't be "
                "computed: probe again with nothing else running, with more --repeats, or with a larger model"
            )
        bandwidth, latency = (self.large_bytes - SMALL_BYTES) / transfer, self.small_gossip.median
        return Link(bandwidth, latency, self._coding(bandwidth, latency))

    def _coding(self, bandwidth: float, latency: float) -> float:
        """Computes the seconds to encode, decode and mix a number: what a gossip step of the smallest codes takes beyond its message."""
        if not self.coded:
            return CODING
        bits = min(self.coded)
        travels = coded_bytes(self.parameters, bits) / bandwidth + latency
        return max(0.0, self.coded[bits].gossip.median - travels) / self.parameters

    def as_dict(self) -> dict[str, Any]:
        """All measurements, with the bandwidth (bytes/s) and latency of the link; both are None if the times are too noisy."""
        try:
            link: Link | None = self.link()
        except ValueError:
            link = None
        return {"format": FORMAT, **asdict(self), "bandwidth": link and link.bandwidth, "latency": link and link.latency}

    def write(self, path: str | os.PathLike[str]) -> None:
        with replacing(path) as aside:
            aside.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Probe:
        if not Path(path).is_file():
            raise ValueError(f"there is no file {os.fspath(path)}: run `rumor probe` to write it")
        try:
            found = json.loads(Path(path).read_text())
            if found.pop("format") != FORMAT:
                raise ValueError
            del found["bandwidth"], found["latency"]  # link() computes them again
            for name in ("compute", "ddp", "all_reduce", "small_gossip", "small_all_reduce", "large_gossip"):
                found[name] = None if name == "ddp" and found[name] is None else Timing(**found[name])
            found["gossip"] = {name: Timing(**timing) for name, timing in found["gossip"].items()}
            coded = found.get("coded", {}).items()
            found["coded"] = {int(bits): Coded(*(Timing(**times[name]) for name in ("gossip", "all_reduce"))) for bits, times in coded}
            probe = cls(**found)
            probe._check()
            return probe
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)} is not a file that this version's `rumor probe` wrote: run it again") from error

    def _check(self) -> None:
        """Raises an error on numbers that can't have been measured, because they would lead to a wrong plan."""
        timings = [self.compute, self.all_reduce, self.small_gossip, self.small_all_reduce, self.large_gossip, *self.gossip.values()]
        timings += [timing for times in self.coded.values() for timing in (times.gossip, times.all_reduce)]
        seconds = [s for timing in (*timings, *([self.ddp] if self.ddp else [])) for s in asdict(timing).values()]
        for number in (self.n, self.parameters, self.bytes_per_parameter, self.large_bytes, *seconds):
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
                raise ValueError(f"{number!r} is not a positive number")
        check_whole("n", self.n, 2)
        check_whole("parameters", self.parameters, 1)


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
) -> Probe:
    """Times the training `step` of `model`, and one averaging of the model on every topology. All ranks must call it.

    If `step` takes an argument, it is also called with the model in DistributedDataParallel, to time DDP including its overlap.
    """
    timer = _Timer(engine, repeats, show)
    timer.time("compute", step)
    if takes_model(step):
        _time_ddp(timer, model, step)
    _time_averaging(timer, model)
    workload = Workload.of(model, timer.timings["compute"].median)
    large, large_bytes = _time_large_gossip(timer, model, workload)
    timings = timer.timings
    return Probe(
        engine.n,
        workload.parameters,
        workload.bytes_per_parameter,
        name,
        is_stand_in,
        engine.transport.backend,
        _device(model).type,
        torch.__version__,
        repeats,
        compute=timings["compute"],
        ddp=timings.get("DDP"),
        all_reduce=timings["all-reduce"],
        gossip={topology: timings[topology] for topology in TOPOLOGIES},
        small_gossip=timings["gossip of 2 parameters"],
        small_all_reduce=timings["all-reduce of 2 parameters"],
        large_gossip=large,
        large_bytes=large_bytes,
        coded={bits: Coded(timings[f"gossip, {bits} bits"], timings[f"all-reduce, {bits} bits"]) for bits in CODED_BITS},
    )


def takes_model(step: Step) -> bool:
    """Whether `step` can be called as step(model)."""
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in inspect.signature(step).parameters.values())


def _time_ddp(timer: _Timer, model: nn.Module, step: Step) -> None:
    """Times the step in DDP, which must be gone afterwards: an Averager refuses a model that is still in DDP."""
    wrapped = DistributedDataParallel(model, process_group=timer.engine.group)
    timer.time("DDP", lambda: step(wrapped))


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _time_averaging(timer: _Timer, model: nn.Module) -> None:
    """Times gossip on every topology and an all-reduce, of the model, of its codes, and of a model with two parameters."""
    n, tiny = timer.engine.n, nn.Linear(1, 1).to(_device(model))
    for name, build in TOPOLOGIES.items():
        topology = build(n)
        timer.time(name, _averaging(model, gossip_sgd(topology)), topology.period)  # whole cycles: their steps may differ
    timer.time("all-reduce", _averaging(model, parallel_sgd(n)))
    peers = one_peer_exponential(n)
    for bits in CODED_BITS:
        timer.time(f"gossip, {bits} bits", _averaging(model, gossip_pga(peers, NEVER, bits=bits)), peers.period)
        timer.time(f"all-reduce, {bits} bits", _averaging(model, parallel_sgd(n, bits=bits)))
    timer.time("gossip of 2 parameters", _averaging(tiny, gossip_sgd(peers)), SMALL_STEPS * peers.period)
    timer.time("all-reduce of 2 parameters", _averaging(tiny, parallel_sgd(n)), SMALL_STEPS)


def _time_large_gossip(timer: _Timer, model: nn.Module, workload: Workload) -> tuple[Timing, float]:
    """The time and the bytes of a large message to one peer: the model's, or that of a model with 1M parameters if the model is small."""
    if workload.parameters >= LARGE:
        return timer.timings["one-peer-exponential"], workload.bytes
    large, peers = nn.Linear(1000, LARGE // 1000, bias=False).to(_device(model)), one_peer_exponential(timer.engine.n)
    timer.time("gossip of 1M parameters", _averaging(large, gossip_sgd(peers)), peers.period)
    return timer.timings["gossip of 1M parameters"], 4.0 * LARGE


def _averaging(model: nn.Module, algorithm: GossipPGA) -> Callable[[], object]:
    return Averager(model, algorithm).step


def _wait_for_gpu() -> None:
    """Waits until the GPU has finished its queued work. The model may be on a GPU with any backend."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


class _Timer:
    """Times actions that all processes run at the same time.

    Attributes:
        timings: the results, by name.
    """

    def __init__(self, engine: ProcessGroup, repeats: int, show: Callable[[str, Timing], object]):
        self.engine, self.repeats, self.show, self._k = engine, repeats, show, 0
        self.timings: dict[str, Timing] = {}

    def time(self, name: str, action: Callable[[], object], steps: int = 1) -> None:
        """Times one of `steps` calls in a row on the slowest process, `repeats` times."""
        for _ in range(WARM_UP * min(steps, SMALL_STEPS)):
            action()
        samples = [self._sample(action, steps) for _ in range(self.repeats)]
        slowest = [max(of_ranks) for of_ranks in zip(*self._gather(samples), strict=True)]
        self.timings[name] = Timing(statistics.median(slowest), min(slowest), max(slowest))
        self.show(name, self.timings[name])

    def _sample(self, action: Callable[[], object], steps: int) -> float:
        _wait_for_gpu()
        self._gather([0.0])  # all processes start together
        began = time.perf_counter()
        for _ in range(steps):
            action()
        _wait_for_gpu()
        return (time.perf_counter() - began) / steps

    def _gather(self, mine: list[float]) -> list[list[float]]:
        """Returns the numbers of every rank. Each rank fills its own row of a table with n times its numbers; the mean is the table."""
        everyone = torch.zeros(self.engine.n, len(mine), dtype=torch.float64, device=self.engine.device)
        everyone[self.engine.rank] = self.engine.n * torch.tensor(mine, dtype=torch.float64)
        self._k += 1
        means: list[list[float]] = self.engine.mean([everyone.view(-1)], self._k)[0].wait().x.view(everyone.shape).tolist()
        return means
