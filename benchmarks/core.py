"""Compares the cost of the core with the minimum possible cost, in one run.

1. The stacked engine's gossip step on a ring, d = 1,000, as a share of the machine's copy bandwidth. The step must read X and write X once,
   as a copy does. The dense product W X is timed as well, if W fits.
2. The Averager's own cost per step for 25 M parameters in 161 tensors (the shapes of a ResNet-50), relative to plain copies of the
   parameters. There are two ranks, and the transport is stubbed out: only packing, mixing and writing back are left.
3. What messages of a few bits add to a gossip step, on one thread, for the 1.86 M parameters of docs/performance.md.

    make bench            writes benchmarks/results/core.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import rumor
import rumor.engines.processes.process_group as engine_of_processes
from measure import interleaved, machine, save
from rumor.engines.codes import CODES
from rumor.engines.processes.message import HEAD
from rumor.engines.processes.transport import Transport


def stacked_ring(n: int, d: int = 1000, repeats: int = 60) -> dict[str, Any]:
    x = torch.randn(n, d)
    other = torch.empty_like(x)
    engine, topology = rumor.Stacked(n), rumor.ring(n)
    contestants: dict[str, Callable[[], object]] = {
        "copy": lambda: other.copy_(x),
        "gossip": lambda: engine.gossip(x, topology, 0).wait(),
    }
    if n <= 1000:
        W = topology.W().float()
        contestants["dense"] = lambda: torch.mm(W, x, out=other)
    seconds = interleaved(contestants, repeats)
    row = {"n": n, "d": d, **{f"{name}_ms": 1e3 * s for name, s in seconds.items()}}
    return {**row, "share_of_copy_bandwidth": seconds["copy"] / seconds["gossip"], "copy_GB_per_s": 2 * x.nbytes / seconds["copy"] / 1e9}


def resnet50_shapes() -> list[torch.Size]:
    """The 161 parameter tensors of a ResNet-50: 25.6 M numbers."""
    shapes = [[64, 3, 7, 7], [64], [64]]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ([width, channels, 1, 1], [width, width, 3, 3], [4 * width, width, 1, 1]):
                shapes += [shape, [shape[0]], [shape[0]]]
            if block == 0:
                shapes += [[4 * width, channels, 1, 1], [4 * width], [4 * width]]
            channels = 4 * width
    return [torch.Size(shape) for shape in [*shapes, [1000, 2048], [1000]]]


class Answered:
    """A message that has arrived."""

    def wait(self) -> None:
        pass


class NoTransport(Transport):
    """Two ranks. The other one answers at once, with this rank's head and a model that stays as it is."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._inbox: dict[int, Tensor] = {}  # by tag

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Answered:
        self._inbox[tag] = tensor
        return Answered()

    def send(self, tensor: Tensor, peers: Any, tag: int) -> list[Any]:
        received, head = self._inbox[tag], HEAD * 8 // tensor.element_size()
        if not received[:head].any():
            received.copy_(tensor)
        received[:head].copy_(tensor[:head])
        return []

    def sum(self, tensor: Tensor, doing: str) -> list[Any]:
        tensor[:HEAD].mul_(self.n)
        return []

    def gather_objects(self, value: Any, doing: str) -> list[Any]:
        return [value] * self.n

    def broadcast(self, tensors: Any) -> None:
        pass


def averager_cost(repeats: int = 30) -> list[dict[str, Any]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    engine_of_processes.Transport = NoTransport  # type: ignore[misc]
    model = nn.Module()
    for i, shape in enumerate(resnet50_shapes()):
        model.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape) * 0.01))
    count = sum(p.numel() for p in model.parameters())
    tensors = [p.detach() for p in model.parameters()]
    copies = [torch.empty_like(p) for p in tensors]
    source, target = torch.randn(count), torch.empty(count)
    ring = rumor.ring(2)
    averagers = {
        "gossip": rumor.Averager(model, rumor.gossip_sgd(ring)),
        "gossip, delay=1": rumor.Averager(model, rumor.gossip_sgd(ring, delay=1)),
        "global average": rumor.Averager(model, rumor.parallel_sgd(2)),
    }
    contestants: dict[str, Callable[[], object]] = {
        "copy": lambda: torch._foreach_copy_(copies, tensors),
        "flat copy": lambda: target.copy_(source),
    }
    contestants |= {name: averager.step for name, averager in averagers.items()}
    seconds = interleaved(contestants, repeats)
    dist.destroy_process_group()
    return [
        {"step": name, "ms": 1e3 * seconds[name], "copy_ms": 1e3 * seconds["copy"], "copies": seconds[name] / seconds["copy"]}
        | {"flat_copy_ms": 1e3 * seconds["flat copy"], "flat_copies": seconds[name] / seconds["flat copy"]}
        | {"parameters": count, "tensors": len(tensors)}
        for name in averagers
    ]


def code_cost(bits: int, d: int = 1_863_690, repeats: int = 40) -> dict[str, Any]:
    """The milliseconds of one thread for each part of a gossip step with codes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    code, x, x_ref, difference = CODES[bits], torch.randn(d), torch.randn(d), torch.empty(d)
    sent, received = (code.places(torch.zeros(code.nbytes(d), dtype=torch.uint8)) for _ in range(2))
    code.encode(x, received)
    parts: dict[str, Callable[[], object]] = {
        "difference to the last global average": lambda: torch.sub(x, x_ref, out=difference),
        "encode": lambda: code.encode(difference, sent),
        "decode and mix": lambda: code.weighted_sum([received, sent], [0.5, -0.5], x),
        "add to the model": lambda: x.add_(difference, alpha=1e-6),
    }
    seconds = interleaved(parts, repeats)
    torch.set_num_threads(threads)
    return {
        "bits": bits,
        "parameters": d,
        "ms": {name: 1e3 * each for name, each in seconds.items()},
        "total_ms": 1e3 * sum(seconds.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("core.json"), help="JSON file for the results")
    out: Path = parser.parse_args().out
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32\n")
    print(f"{'ring of n':>10} {'copy ms':>9} {'gossip ms':>10} {'dense ms':>9} {'share of copy bandwidth':>24}")
    rings = []
    for n in (100, 1_000, 10_000):
        rings.append(row := stacked_ring(n))
        dense = f"{row['dense_ms']:9.3f}" if "dense_ms" in row else f"{'-':>9}"
        print(f"{n:10,} {row['copy_ms']:9.3f} {row['gossip_ms']:10.3f} {dense} {row['share_of_copy_bandwidth']:24.0%}")
    costs = averager_cost()
    print(f"\n{costs[0]['parameters']:,} parameters in {costs[0]['tensors']} tensors, transport stubbed out")
    print(f"a plain copy of them takes {costs[0]['copy_ms']:.1f} ms; one tensor of this size takes {costs[0]['flat_copy_ms']:.1f} ms")
    print(f"{'step':>16} {'ms':>7} {'copies':>7} {'flat copies':>12}")
    for row in costs:
        print(f"{row['step']:>16} {row['ms']:7.1f} {row['copies']:7.2f} {row['flat_copies']:12.2f}")
    codes = [code_cost(bits) for bits in (8, 4)]
    print(f"\na gossip step with codes, {codes[0]['parameters']:,} parameters, one thread")
    for row in codes:
        print(f"{row['bits']} bits: {row['total_ms']:.2f} ms; " + ", ".join(f"{name} {ms:.2f}" for name, ms in row["ms"].items()))
    save(out, {"machine": machine(), "stacked_ring": rings, "averager": costs, "codes": codes})


if __name__ == "__main__":
    main()
