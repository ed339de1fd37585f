"""Measures a cluster with the real engine: seconds of computing, of a gossip step over each topology and of an all-reduce.

Every process calls `measure` at the same time. A sample is the time of the slowest process, from a common start; what is kept of them is
the median, and the fastest and slowest beside it.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rumor.algorithm import GossipPGA, gossip_sgd, parallel_sgd
from rumor.averager import Averager
from rumor.cost import TOPOLOGIES, Link, Measured, Workload
from rumor.files import replacing
from rumor.process_group import ProcessGroup
from rumor.schedule import check_whole

FORMAT = 1  # of the file
WARM_UP = 3  # unmeasured rounds: the first ones open connections and touch fresh memory
LARGE = 1_000_000  # parameters, at least, of the message that gives the bandwidth
SMALL_BYTES = 8  # of the tiny model: two parameters
SMALL_STEPS = 10  # steps in a sample of the tiny model, which are too short to be timed one by one

Step = Callable[..., object]  # step() or step(model): one forward, backward and optimizer step


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of several samples, the fastest and the slowest of them."""

    median: float
    fastest: float
    slowest: float


@dataclass(frozen=True)
class Probe:
    """What was measured, and where.

    Attributes:
        model: what was trained; `is_stand_in` where that was not the user's own.
        compute: of one forward, backward and optimizer step, all processes at once.
        ddp: of one such step in DistributedDataParallel, its all-reduce included; None where `step` takes no model.
        gossip: of one step, by topology.
        small_gossip, small_all_reduce: of a model of two parameters: the latency.
        large_gossip: with one peer, of a model of `large_bytes`, which is the model itself unless that is small.
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

    def workload(self, steps: int) -> Workload:
        return Workload(self.parameters, self.compute.median, self.bytes_per_parameter, steps)

    def measured(self) -> Measured:
        ddp = None if self.ddp is None else max(0.0, self.ddp.median - self.compute.median)
        return Measured(self.all_reduce.median, {name: timing.median for name, timing in self.gossip.items()}, ddp)

    def link(self) -> Link:
        """Latency alpha from the tiny model's gossip with one peer, bandwidth from what a large one takes longer."""
        transfer = self.large_gossip.median - self.small_gossip.median
        if transfer <= 0:
            raise ValueError(
                f"a message of {self.large_bytes:.0f} bytes took no longer than one of {SMALL_BYTES}, so there is no bandwidth to be had: "
                "probe again with nothing else running, more --repeats or a larger model"
            )
        return Link((self.large_bytes - SMALL_BYTES) / transfer, self.small_gossip.median)

    def as_dict(self) -> dict[str, Any]:
        """With bandwidth (bytes/s) and latency beside what was measured; None where that was too noisy to tell."""
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
            raise ValueError(f"there is no file {os.fspath(path)}: `rumor probe` writes it")
        try:
            found = json.loads(Path(path).read_text())
            if found.pop("format") != FORMAT:
                raise ValueError
            del found["bandwidth"], found["latency"]  # for readers; derived anew here
            for name in ("compute", "ddp", "all_reduce", "small_gossip", "small_all_reduce", "large_gossip"):
                found[name] = None if name == "ddp" and found[name] is None else Timing(**found[name])
            found["gossip"] = {name: Timing(**timing) for name, timing in found["gossip"].items()}
            probe = cls(**found)
            probe._check()
            return probe
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)} is not a file that this version's `rumor probe` wrote: run it again") from error

    def _check(self) -> None:
        """Raises on numbers that no probe could have found: they would make a plan, and a wrong one."""
        timings = [self.compute, self.all_reduce, self.small_gossip, self.small_all_reduce, self.large_gossip, *self.gossip.values()]
        seconds = [s for timing in (*timings, *([self.ddp] if self.ddp else [])) for s in asdict(timing).values()]
        for number in (self.n, self.parameters, self.bytes_per_parameter, self.large_bytes, *seconds):
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
                raise ValueError(f"{number!r} is not a positive number")
        check_whole("n", self.n, 2)
        check_whole("parameters", self.parameters, 1)


def stand_in(parameters: int, batch: int, device: torch.device) -> tuple[nn.Module, Step]:
    """An MLP of about so many parameters, and its training step on random data."""
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
    """Times the training `step` of `model`, and the averaging of it over every topology. A collective, as are all steps of an Averager.

    Where step takes an argument, it is called with the model in DistributedDataParallel too, to time DDP with the overlap that it has.
    """
    clock = _Clock(engine, repeats)
    of: dict[str, Timing] = {}

    def timed(what: str, action: Callable[[], object], steps: int = 1) -> None:
        of[what] = clock.time(action, steps)
        show(what, of[what])

    device = next(model.parameters()).device
    tiny = nn.Linear(1, 1).to(device)
    peers = TOPOLOGIES["one-peer-exponential"](engine.n)
    timed("compute", step)
    if takes_model(step):
        wrapped = DistributedDataParallel(model, process_group=engine.group)
        timed("DDP", lambda: step(wrapped))
    for topology in TOPOLOGIES:
        algorithm = gossip_sgd(TOPOLOGIES[topology](engine.n))
        timed(topology, _averaging(model, algorithm), algorithm.topology.period)  # whole cycles: its phases may differ
    timed("all-reduce", _averaging(model, parallel_sgd(engine.n)))
    timed("gossip of 2 parameters", _averaging(tiny, gossip_sgd(peers)), SMALL_STEPS * peers.period)
    timed("all-reduce of 2 parameters", _averaging(tiny, parallel_sgd(engine.n)), SMALL_STEPS)
    workload = Workload.of(model, of["compute"].median)
    large = of["one-peer-exponential"], workload.bytes
    if workload.parameters < LARGE:
        timed("gossip of 1M parameters", _averaging(nn.Linear(1000, LARGE // 1000, bias=False).to(device), gossip_sgd(peers)), peers.period)
        large = of["gossip of 1M parameters"], 4.0 * LARGE
    return Probe(
        engine.n,
        workload.parameters,
        workload.bytes_per_parameter,
        name,
        is_stand_in,
        engine.backend,
        device.type,
        torch.__version__,
        repeats,
        compute=of["compute"],
        ddp=of.get("DDP"),
        all_reduce=of["all-reduce"],
        gossip={topology: of[topology] for topology in TOPOLOGIES},
        small_gossip=of["gossip of 2 parameters"],
        small_all_reduce=of["all-reduce of 2 parameters"],
        large_gossip=large[0],
        large_bytes=large[1],
    )


def takes_model(step: Step) -> bool:
    """step(model), and not step() alone."""
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in inspect.signature(step).parameters.values())


def _averaging(model: nn.Module, algorithm: GossipPGA) -> Callable[[], object]:
    return Averager(model, algorithm).step


def _let_gpu_finish() -> None:
    """The host only queues work there; a model may be on a GPU whatever the backend."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


class _Clock:
    """Times what all processes do at once."""

    def __init__(self, engine: ProcessGroup, repeats: int):
        self.engine, self.repeats, self._k = engine, repeats, 0

    def time(self, action: Callable[[], object], steps: int) -> Timing:
        """Seconds of one of `steps` calls in a row, the slowest process's, `repeats` times over."""
        for _ in range(WARM_UP * min(steps, SMALL_STEPS)):
            action()
        samples = [self._sample(action, steps) for _ in range(self.repeats)]
        slowest = [max(of_ranks) for of_ranks in zip(*self._gather(samples), strict=True)]
        return Timing(statistics.median(slowest), min(slowest), max(slowest))

    def _sample(self, action: Callable[[], object], steps: int) -> float:
        _let_gpu_finish()
        self._gather([0.0])  # all start together
        began = time.perf_counter()
        for _ in range(steps):
            action()
        _let_gpu_finish()
        return (time.perf_counter() - began) / steps

    def _gather(self, mine: list[float]) -> list[list[float]]:
        """Every rank's numbers: the mean over ranks of a table in which each has filled its own row, n-fold."""
        everyone = torch.zeros(self.engine.n, len(mine), dtype=torch.float64, device=self.engine.device)
        everyone[self.engine.rank] = self.engine.n * torch.tensor(mine, dtype=torch.float64)
        self._k += 1
        means: list[list[float]] = self.engine.mean([everyone.view(-1)], self._k)[0].wait().x.view(everyone.shape).tolist()
        return means
