"""Handwritten digits on 4 real processes: Gossip-PGA beside the methods that it lies between.

Expect Gossip-PGA to end where Parallel SGD does, with fewer bytes; Local SGD sends least, and its nodes drift furthest apart.
Each node holds the digits of a few classes only, which is what makes averaging matter. About half a minute on 2 cores.

    make demo          or          torchrun --standalone --nproc-per-node 4 examples/digits.py
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn

import rumor


def shards(rank: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This node's training images and labels, sorted by label and cut into n parts; then the test set, the same for all."""
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = shuffled[:1400], shuffled[1400:]
    mine = train[y[train].argsort(stable=True)].chunk(n)[rank]
    return x[mine], y[mine], x[test], y[test]


def progress(label: str, steps: int, show: bool) -> Iterator[int]:
    """Counts to `steps`, with a bar where there is a terminal to show it on."""
    began = time.monotonic()
    for k in range(steps):
        yield k
        if show and sys.stderr.isatty() and (k + 1) % 10 == 0:
            left = (time.monotonic() - began) / (k + 1) * (steps - k - 1)
            bar = ("#" * (30 * (k + 1) // steps)).ljust(30)
            print(f"\r{label:<12} [{bar}] step {k + 1}/{steps}, {left:3.0f} s left ", end="", file=sys.stderr, flush=True)
    if show and sys.stderr.isatty():
        print("\r" + " " * 78 + "\r", end="", file=sys.stderr)


def train(name: str, algorithm: rumor.GossipPGA, steps: int) -> dict[str, float]:
    rank, n = dist.get_rank(), dist.get_world_size()
    x, y, test_x, test_y = shards(rank, n)
    torch.manual_seed(rank)  # initialisations differ on purpose: the Averager starts everyone from rank 0's
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    averager = rumor.Averager(model, algorithm)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    def accuracy() -> float:
        return (model(test_x).argmax(dim=1) == test_y).float().mean().item()

    dist.barrier()
    began = time.monotonic()
    for _ in progress(name, steps, rank == 0):
        batch = torch.randint(len(x), (32,))
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        opt.zero_grad()
        loss.backward()
        opt.step()
        averager.step(loss)
    seconds = time.monotonic() - began
    sent = averager.metrics.bytes_sent
    distance = averager.consensus_distance()
    worst = torch.tensor(accuracy())
    dist.all_reduce(worst, dist.ReduceOp.MIN)
    with averager.averaged():
        mean = accuracy()
    averager.finish()
    return {"mean": mean, "worst": worst.item(), "distance": distance, "megabytes": sent / 1e6, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    steps: int = parser.parse_args().steps
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    peers = rumor.one_peer_exponential(n)
    if rank == 0:
        print(f"{n} processes, digits split by label, {steps} steps over {peers}\n")
        print(f"{'method':<14} {'mean model':>10} {'worst node':>10} {'consensus distance':>19} {'MB sent per node':>17} {'seconds':>8}")
    methods = {
        "Parallel SGD": rumor.parallel_sgd(n),
        "Local SGD": rumor.local_sgd(n, H=6),
        "Gossip SGD": rumor.gossip_sgd(peers),
        "Gossip-PGA": rumor.gossip_pga(peers, H=6),
        "Gossip-AGA": rumor.gossip_aga(peers, warmup=steps // 10),
    }
    for name, algorithm in methods.items():
        row = train(name, algorithm, steps)
        if rank == 0:
            accuracies = f"{row['mean']:10.1%} {row['worst']:10.1%}"
            print(f"{name:<14} {accuracies} {row['distance']:19.2e} {row['megabytes']:17.1f} {row['seconds']:8.1f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    # with scikit-learn loaded, torch 2.13 now and then aborts while the interpreter shuts down ("terminate called ..."): skip that
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
