"""What `rumor probe` has measured, and its file."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rumor.checkpoint.files import replacing
from rumor.cost import Link, Measured, Workload
from rumor.cost.network import CODING, coded_bytes, in_python, same_as
from rumor.schedule import check_whole

FORMAT = 1  # version of the file format
SMALL_BYTES = 8  # size of the tiny model, which has two parameters


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
        coded: times with messages of 8 and 4 bits. Empty in the files of older versions, as are the next four.
        coded_ddp: time of one training step with DDP and `rumor.ddp_hook`, by its number of bits. Empty if `step` takes no model.
        steps: time of one training step of Gossip-PGA, by the method as text, such as "gossip_pga(ring, H=6, bits=4, delay=1)".
        elastic: the same in an elastic group.
        left_out: what was not timed, and why.
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
    coded_ddp: Mapping[int, Timing] = field(default_factory=dict)
    steps: Mapping[str, Timing] = field(default_factory=dict)
    elastic: Mapping[str, Timing] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The processes that were measured, in words."""
        return f"{self.n} processes, {self.backend} on {self.device}, torch {self.torch}"

    def workload(self, steps: int) -> Workload:
        return Workload(self.parameters, self.compute.median, self.bytes_per_parameter, steps)

    def measured(self, has_whole_steps: bool = True) -> Measured:
        """The network as it was measured; without its whole steps if the plan is for another compute time."""

        def added(ddp: Timing) -> float:
            return max(0.0, ddp.median - self.compute.median)

        return Measured(
            self.all_reduce.median,
            _medians(self.gossip),
            None if self.ddp is None else added(self.ddp),
            coded_seconds={bits: (times.gossip.median, times.all_reduce.median) for bits, times in self.coded.items()},
            coded_ddp_seconds={bits: added(timing) for bits, timing in self.coded_ddp.items()},
            step_seconds=_medians(self.steps) if has_whole_steps else {},
            elastic_seconds=_medians(self.elastic) if has_whole_steps else {},
        )

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
        if Path(path).is_dir():
            raise ValueError(
                f"{os.fspath(path)} is a folder: name the file that `rumor probe` wrote, for example {Path(path, 'probe.json')}"
            )
        if not Path(path).is_file():
            raise ValueError(f"there is no file {os.fspath(path)}: run `rumor probe` to write it")
        try:
            found = json.loads(Path(path).read_text())
            if found.pop("format") != FORMAT:
                raise ValueError
            del found["bandwidth"], found["latency"]  # link() computes them again
            for name in ("compute", "ddp", "all_reduce", "small_gossip", "small_all_reduce", "large_gossip"):
                found[name] = None if name == "ddp" and found[name] is None else Timing(**found[name])
            for name in ("gossip", "steps", "elastic"):
                found[name] = {key: Timing(**timing) for key, timing in found.get(name, {}).items()}
            found["coded_ddp"] = {int(bits): Timing(**timing) for bits, timing in found.get("coded_ddp", {}).items()}
            coded = found.get("coded", {}).items()
            found["coded"] = {int(bits): Coded(*(Timing(**times[name]) for name in ("gossip", "all_reduce"))) for bits, times in coded}
            probe = cls(**found)
            probe._check()
            return probe._with_distinct_topologies()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)} is not a file that this version's `rumor probe` wrote: run it again") from error

    def _with_distinct_topologies(self) -> Probe:
        """Older versions timed topologies that are the same for n nodes, and noise chose between them. Names them as this version does."""
        first, gossip = same_as(self.n), dict[str, Timing]()
        for name, timing in self.gossip.items():
            gossip.setdefault(first.get(name, name), timing)

        def named(text: str) -> str:  # gossip_pga(ring, H=3)
            return re.sub(r"(?<=\()\w+", lambda name: in_python(first.get(name[0].replace("_", "-"), name[0])), text, count=1)

        steps, elastic = ({named(text): timing for text, timing in timings.items()} for timings in (self.steps, self.elastic))
        return replace(self, gossip=gossip, steps=steps, elastic=elastic)

    def _check(self) -> None:
        """Raises an error on numbers that can't have been measured, because they would lead to a wrong plan."""
        timings = [self.compute, self.all_reduce, self.small_gossip, self.small_all_reduce, self.large_gossip, *self.gossip.values()]
        timings += [timing for times in self.coded.values() for timing in (times.gossip, times.all_reduce)]
        timings += [*self.coded_ddp.values(), *self.steps.values(), *self.elastic.values()]
        seconds = [s for timing in (*timings, *([self.ddp] if self.ddp else [])) for s in asdict(timing).values()]
        for number in (self.n, self.parameters, self.bytes_per_parameter, self.large_bytes, *seconds):
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
                raise ValueError(f"{number!r} is not a positive number")
        check_whole("n", self.n, 2)
        check_whole("parameters", self.parameters, 1)


def _medians(timings: Mapping[str, Timing]) -> dict[str, float]:
    return {name: timing.median for name, timing in timings.items()}
