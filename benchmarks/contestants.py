"""Ways to train one model on all hosts, behind one interface: computing alone, DDP and Rumor's methods. peers.py has other libraries."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rumor
from rumor.methods.gossip_pga import Algorithm

Build = Callable[[], nn.Module]  # builds the same model on every host


def take_turns(steps: Mapping[str, Callable[[], object]], calls: int, repeats: int, lead_in: int = 0) -> dict[str, dict[str, float]]:
    """Times a step of each contestant, in turns of `calls` steps. All hosts start together, and the slowest host counts.

    Each turn begins with `lead_in` steps that are not timed. The clock stops before the hosts synchronize. With delay=1 or lazy a message
    is in flight when a step returns; one was also in flight at the start, so it counts once. The first turn only warms up.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(1 + repeats):
        for name, step in steps.items():
            dist.barrier()
            for _ in range(max(lead_in, turn == 0)):
                step()
            began = time.perf_counter()
            for _ in range(calls if turn else 0):
                step()
            took = torch.tensor((time.perf_counter() - began) / calls, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn:
                times[name].append(took.item())
    return {name: {"median": statistics.median(t), "fastest": min(t), "slowest": max(t)} for name, t in times.items()}


class Contestant:
    """A model, its optimizer, and a training step. This base class computes without communication."""

    description = "no communication"

    def __init__(self, build: Build, lr: float = 0.05, momentum: float = 0.9):
        self.model = build()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)

    def set_lr(self, lr: float) -> None:
        for group in self.opt.param_groups:
            group["lr"] = lr

    def backward(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        self.opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    def step(self, x: Tensor, y: Tensor) -> None:
        self.backward(self.model, x, y)
        self.opt.step()

    @torch.no_grad()
    def mean_model(self) -> nn.Module:
        """Returns the mean of all hosts' models. All hosts must call it."""
        mean = copy.deepcopy(self.model)
        for tensor in (*mean.parameters(), *(b for b in mean.buffers() if b.is_floating_point())):
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()
        return mean

    def finish(self) -> None:
        """Ends the training, as a user would."""

    def close(self) -> None:
        """Stops the threads and servers that it has started."""


@torch.no_grad()
def consensus(contestant: Contestant) -> float:
    """The largest distance of a host's model from the mean, relative to the norm of the mean. All hosts must call it."""
    mean = nn.utils.parameters_to_vector(contestant.mean_model().parameters())
    distance = (nn.utils.parameters_to_vector(contestant.model.parameters()) - mean).norm() / mean.norm()
    dist.all_reduce(distance, op=dist.ReduceOp.MAX)
    return distance.item()


class InDDP(Contestant):
    """Training with DistributedDataParallel."""

    description = "gradients averaged in float32"

    def __init__(self, build: Build, bucket_cap_mb: float = 4, **options: float):
        super().__init__(build, **options)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=bucket_cap_mb)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.backward(self.ddp, x, y)
        self.opt.step()


class InDDPWithCodes(InDDP):
    """DDP with Rumor's hook."""

    def __init__(self, build: Build, bits: int, bucket_cap_mb: float = 4, **options: float):
        super().__init__(build, bucket_cap_mb, **options)
        self.description = f"Rumor's hook: gradients of {bits} bits with error feedback, bucket_cap_mb={bucket_cap_mb:g}"
        self.ddp.register_comm_hook(rumor.ddp_hook_state(bits=bits), rumor.ddp_hook)


class WithRumor(Contestant):
    """Training with a rumor.Averager."""

    def __init__(self, build: Build, algorithm: Algorithm, lazy: bool = False, **options: float):
        super().__init__(build, **options)
        self.averager = rumor.Averager(self.model, algorithm, lazy=lazy)
        self.description = f"on {algorithm.topology.name}"

    def step(self, x: Tensor, y: Tensor) -> None:
        loss = self.backward(self.model, x, y)
        self.opt.step()
        self.averager.step(loss, lr=self.opt.param_groups[0]["lr"])

    def finish(self) -> None:
        self.averager.finish()


def methods(n: int, H: int, warmup: int) -> dict[str, Algorithm]:
    """All methods of the paper on the one-peer exponential graph, by their names in the tables."""
    peers = rumor.one_peer_exponential(n)
    return {
        "Parallel SGD": rumor.parallel_sgd(n),
        "Local SGD": rumor.local_sgd(n, H),
        "Gossip SGD": rumor.gossip_sgd(peers),
        "Gossip SGD, delay=1": rumor.gossip_sgd(peers, delay=1),
        "OSGP": rumor.osgp(peers),
        "SlowMo": rumor.slowmo(peers, H),
        "Gossip-PGA": rumor.gossip_pga(peers, H),
        "Gossip-PGA, delay=1": rumor.gossip_pga(peers, H, delay=1),
        "Gossip-PGA, 8 bits": rumor.gossip_pga(peers, H, bits=8),
        "Gossip-PGA, 4 bits": rumor.gossip_pga(peers, H, bits=4),
        "Gossip-AGA": rumor.gossip_aga(peers, warmup),
        "Gossip-AGA, delay=1": rumor.gossip_aga(peers, warmup, delay=1),
    }


def ours(n: int, H: int, warmup: int, bucket_caps_mb: Iterable[float] = (1, 4, 25)) -> dict[str, Callable[..., Contestant]]:
    """Functions that build the contestants of this file: `ours(...)[name](build, lr=..., momentum=...)`."""
    found: dict[str, Callable[..., Contestant]] = {"computing alone": Contestant}
    for cap in bucket_caps_mb:
        found[f"DDP, bucket_cap_mb={cap:g}"] = lambda build, cap=cap, **options: InDDP(build, cap, **options)
    found["DDP, 4 bits"] = lambda build, **options: InDDPWithCodes(build, 4, **options)
    for name, algorithm in methods(n, H, warmup).items():
        found[name] = lambda build, algorithm=algorithm, **options: WithRumor(build, algorithm, **options)
    return found
