"""Traces a few training steps: the work of a host, from torch's profiler, and the traffic of its link, from the kernel's counters."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import rumor
from contestants import Contestant, InDDP, WithRumor

PARTS = ("forward", "backward", "optimizer", "rumor::wait", "rumor::pack", "rumor::mix")
LEAD_IN, STEPS, LEAD_OUT = 3, 4, 2  # only the steps in the middle are shown, so that the links are busy at their start and end
LOOK_EVERY = 0.002  # seconds between two readings of the link's counter


class Link(threading.Thread):
    """Records the number of bytes that the host has sent, over time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        devices = [line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
        self._device = "eth0" if "eth0" in devices else "lo"  # eth0 on a host of the bed, lo on this machine
        self.seen: list[tuple[float, int]] = []
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(LOOK_EVERY):
            line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith(self._device + ":"))
            self.seen.append((time.perf_counter(), int(line.split(":")[1].split()[8])))

    def stop(self) -> None:
        self._end.set()
        self.join()


def named_parts(contestant: Contestant) -> None:
    """Gives forward, backward and optimizer names for the profiler."""

    def backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        contestant.opt.zero_grad()
        with record_function("forward"):
            loss = nn.functional.cross_entropy(model(x), y)
        with record_function("backward"):
            loss.backward()
        return loss

    contestant.backward = backward  # type: ignore[method-assign]
    step = contestant.opt.step

    def optimizer(*arguments: Any) -> Any:
        with record_function("optimizer"):
            return step(*arguments)

    contestant.opt.step = optimizer  # type: ignore[method-assign]


def recorded(contestant: Contestant, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Returns when each part of STEPS steps began and ended, and the bytes sent over time, both from the first of these steps."""
    named_parts(contestant)
    dist.barrier()
    link = Link()
    link.start()
    starts = []
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(LEAD_IN + STEPS + LEAD_OUT):
            starts.append(time.perf_counter())
            with record_function("start"):
                pass
            contestant.step(x, y)
    link.stop()
    began, took = starts[LEAD_IN], starts[LEAD_IN + STEPS] - starts[LEAD_IN]
    events = profiler.events()
    zero = sorted(e.time_range.start for e in events if e.name == "start")[LEAD_IN]
    seen = [
        (e.name, (e.time_range.start - zero) / 1e6, (e.time_range.end - zero) / 1e6) for e in events if e.name in PARTS and not e.is_async
    ]
    parts = [(name, max(0.0, start), min(took, end)) for name, start, end in seen if end > 0 and start < took]
    sent = [(t - began, count) for t, count in link.seen if 0 <= t - began <= took]
    return {"seconds": took, "parts": sorted(parts, key=lambda part: part[1]), "sent": sent}


def trace(build: Any) -> dict[str, Any]:
    n = dist.get_world_size()
    graph = rumor.one_peer_exponential(n)
    contestants = {
        "DDP": InDDP(build),
        "Gossip SGD": WithRumor(build, rumor.gossip_sgd(graph)),
        "Gossip SGD, lazy": WithRumor(build, rumor.gossip_sgd(graph), lazy=True),
        "Gossip SGD, delay=1": WithRumor(build, rumor.gossip_sgd(graph, delay=1)),
    }
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(256, 784), torch.randint(10, (256,))
    return {name: recorded(contestant, x, y) for name, contestant in contestants.items()}
