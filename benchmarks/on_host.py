"""What every host of the test bed runs: see network.py, which starts it. Rank 0 writes what was measured."""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rumor
from contestants import consensus, ours
from measure import machine, save
from peers import peers

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from model_to_plan import build

Step = Callable[[], object]
BUCKETS_MB = (1, 4, 25)  # DDP's bucket_cap_mb: it is always given the one that suits it best
H = 6
BESIDE_PEERS = ("computing alone", "DDP", "Local SGD", "Gossip SGD", "OSGP", "SlowMo", "Gossip-PGA")  # without AGA, whose period is not H


def timed(contestants: dict[str, Step], calls: int, repeats: int, warm_up: int = 1) -> dict[str, dict[str, float]]:
    """Seconds of a call: all contestants take turns of `calls` calls in a row, all hosts start together and the slowest counts."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warm_up + repeats):
        for name, step in contestants.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                step()
            dist.barrier()
            if turn >= warm_up:
                times[name].append((time.perf_counter() - began) / calls)
    return {name: {"median": statistics.median(t), "fastest": min(t), "slowest": max(t)} for name, t in times.items()}


def exchange(sizes: list[int], repeats: int) -> dict[str, Any]:
    """One gossip step of a model that is one tensor, and one average of all, for each size in bytes."""
    n = dist.get_world_size()
    found = {}
    for size in sizes:
        contestants: dict[str, Step] = {}
        for algorithm in (rumor.gossip_sgd(graph(n)) for graph in (rumor.one_peer_exponential, rumor.ring, rumor.exponential)):
            contestants[algorithm.topology.name.split("(")[0]] = rumor.Averager(_flat_model(size), algorithm).step
        contestants["mean"] = rumor.Averager(_flat_model(size), rumor.parallel_sgd(n)).step
        plain = torch.randn(size // 4)
        contestants["gloo all_reduce"] = lambda plain=plain: dist.all_reduce(plain)  # type: ignore[misc]
        found[str(size)] = timed(contestants, 1, repeats)
    return found


def _flat_model(size: int) -> nn.Module:
    model = nn.Module()
    model.x = nn.Parameter(torch.randn(size // 4))
    return model


def with_ddp(**options: Any) -> Step:
    """A training step of examples/model_to_plan.py in DDP."""
    model, train = build()
    ddp = DistributedDataParallel(model, **options)
    return lambda: train(ddp)


def with_averager(algorithm: rumor.GossipPGA) -> Step:
    """The same with an Averager."""
    model, train = build()
    averager = rumor.Averager(model, algorithm)
    return lambda: (train(), averager.step())


def step(repeats: int) -> dict[str, Any]:
    """A whole training step of examples/model_to_plan.py."""
    n = dist.get_world_size()
    graph = rumor.one_peer_exponential(n)
    contestants: dict[str, Step] = {"computing alone": build()[1]}
    for size in BUCKETS_MB:
        contestants[f"DDP, bucket_cap_mb={size}"] = with_ddp(bucket_cap_mb=size)
    for delay in (0, 1):
        contestants[f"Gossip, delay={delay}"] = with_averager(rumor.gossip_sgd(graph, delay=delay))
    for delay in (0, 1):
        contestants[f"Gossip-PGA, delay={delay}"] = with_averager(rumor.gossip_pga(graph, H, delay=delay))
    return timed(contestants, 2 * H, repeats)


def beside_peers(repeats: int) -> dict[str, Any]:
    """The same step of other libraries and of ours: one model, one optimizer, the same data. A turn ends with everyone's global round."""
    n = dist.get_world_size()
    makers = {name: make for name, make in ours(n, H, H, BUCKETS_MB).items() if name.startswith(BESIDE_PEERS)}
    contestants = {name: make(_same_model) for name, make in {**makers, **peers(n, H)}.items()}
    torch.manual_seed(1 + dist.get_rank())
    x, y = torch.randn(256, 784), torch.randint(10, (256,))
    times = timed({name: partial(contestant.step, x, y) for name, contestant in contestants.items()}, 2 * H, repeats)
    found = {}
    for name, contestant in contestants.items():
        found[name] = {"description": contestant.description, **times[name], "consensus": consensus(contestant)}
        contestant.finish()
        found[name]["consensus_finished"] = consensus(contestant)
        contestant.close()
    return found


def _same_model() -> nn.Module:
    torch.manual_seed(0)
    return build()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("exchange", "step", "peers"))
    parser.add_argument("--sizes", type=int, nargs="+", default=[8_000_000, 100_000_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    if options.what == "exchange":
        found = exchange(options.sizes, options.repeats)
    else:
        found = {"step": step, "peers": beside_peers}[options.what](options.repeats)
    if dist.get_rank() == 0:
        save(options.out, {"machine": machine(), "bed": os.environ.get("RUMOR_BED", ""), "n": dist.get_world_size(), "seconds": found})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
