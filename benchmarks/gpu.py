"""Compares mixing on a GPU with the bandwidth of a plain copy, and measures the host's time in a step.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json

One GPU is enough: the NCCL path runs with a neighbour that echoes messages, and the gloo path with processes that share the GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import rumor
import rumor.engines.processes.process_group as engine_of_processes
from measure import machine, save
from models import bert_large, resnet50
from rumor.engines import Buffer, Lerp
from rumor.engines.processes.transport import Transport
from rumor.model.buckets import FlatBuckets

MODELS: dict[str, Callable[[], nn.Module]] = {"ResNet-50, 25.6 M in 161 tensors": resnet50, "BERT-large, 333 M in 289 tensors": bert_large}
DTYPES = (torch.float32, torch.bfloat16)


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """The median device time. As in training, the device is busy with other work until the host has launched everything."""
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(50_000_000)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


def allocate(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Buffer:
    return Buffer(torch.randn(shape, device=device).to(dtype))


def mixing(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """Times packing and both ways of mixing over all buckets of a model, and compares each with a copy of as many bytes."""
    tensors = [p.detach().to("cuda", dtype) for p in model.parameters()]
    x = FlatBuckets(tensors, allocate)
    sent = [x.read(b).tensor for b in range(len(x))]
    received = [torch.randn_like(s) for s in sent]
    finite = torch.ones(1, dtype=torch.bool, device="cuda")  # the finite flag of a message
    d = sum(t.numel() for t in tensors)
    flat, other = (torch.empty(d, dtype=dtype, device="cuda") for _ in range(2))
    copy = 2 * d * dtype.itemsize / seconds(lambda: other.copy_(flat))
    ways: dict[str, tuple[int, Callable[[int], object]]] = {  # the number of reads and writes of each element, and the action
        "pack": (2, x.read),
        "mix, delay=0": (3, lambda b: x.lerp(b, Lerp(received[b], 0.5, finite))),
        "mix, delay=1": (4, lambda b: x.lerp(b, Lerp(received[b], 0.5, finite), sent[b])),
    }
    found: dict[str, Any] = {"parameters": d, "tensors": len(tensors), "buckets": len(x), "copy_bytes_per_second": copy}
    for name, (times, way) in ways.items():
        took = seconds(lambda way=way: [way(b) for b in range(len(x))])
        found[name] = {"seconds": took, "share_of_copy": times * dtype.itemsize * d / took / copy}
    return found


class Echo(Transport):
    """NCCL's path with three neighbours that send back what they receive: all work stays on the device."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.n = 1 if "called" in options else 4  # the ranks inside a node are as they are

    def gather_objects(self, value: Any, doing: str) -> list[Any]:
        return [value] * self.n

    def global_rank(self, member: int) -> int:
        return 0

    def exchange(self, outbox: Iterable[tuple[Tensor, int]], inbox: Iterable[tuple[Tensor, int]], tag: int) -> list[Any]:
        sent = [message for message, _ in outbox]
        for message, _ in inbox:
            message.copy_(sent[0])
        return []


def host_time(model: nn.Module, algorithm: Any) -> dict[str, float]:
    """Times averager.step() on the host and on the device, when nothing has to wait."""
    averager = rumor.Averager(model.cuda(), algorithm)
    for _ in range(3):
        averager.step()
    torch.cuda.synchronize()
    times = []
    for _ in range(20):
        began = time.perf_counter()
        averager.step()
        times.append(time.perf_counter() - began)
        torch.cuda.synchronize()
    return {"host": statistics.median(times), "device": seconds(averager.step)}


def over_nccl() -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    dist.init_process_group("nccl", rank=0, world_size=1)
    real, engine_of_processes.Transport = engine_of_processes.Transport, Echo  # type: ignore[misc]
    peers = rumor.one_peer_exponential(4)
    found = {
        name: {f"delay={delay}": host_time(build(), rumor.gossip_sgd(peers, delay=delay)) for delay in (0, 1)}
        for name, build in MODELS.items()
    }
    engine_of_processes.Transport = real  # type: ignore[misc]
    dist.destroy_process_group()
    return found


def one_of_several(out: Path) -> None:
    """Runs one rank of a gloo group whose processes share the GPU. Times training steps of ResNet-50, and step() in them."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    n = dist.get_world_size()
    x, y = torch.randn(32, 3, 64, 64, device="cuda"), torch.randint(10, (32,), device="cuda")
    found = {}
    for delay in (0, 1):
        model = resnet50(10).cuda()
        averager = rumor.Averager(model, rumor.gossip_sgd(rumor.one_peer_exponential(n), delay=delay))
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        whole, ours = [], []
        for _ in range(15):
            torch.cuda.synchronize()
            dist.barrier()
            began = time.perf_counter()
            for _ in range(4):
                nn.functional.cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()
                called = time.perf_counter()
                averager.step()
                ours.append(time.perf_counter() - called)
            torch.cuda.synchronize()
            whole.append((time.perf_counter() - began) / 4)
        averager.finish()
        found[f"delay={delay}"] = {"step": statistics.median(whole[3:]), "host in averager.step": statistics.median(ours[12:])}
    if dist.get_rank() == 0:
        save(out, found)
    dist.destroy_process_group()


def over_gloo(n: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = ["torchrun", "--standalone", "--nproc-per-node", str(n), __file__, "--one-of-several", "--out", str(out)]
        subprocess.run([sys.executable, "-m", "torch.distributed.run", *command[1:]], check=True, timeout=300)
        found: dict[str, Any] = json.loads(out.read_text())
    return {"processes": n, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one-of-several", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu: this benchmark needs a GPU")
    if options.one_of_several:
        return one_of_several(options.out)
    results: dict[str, Any] = {"machine": machine(), "mixing": {}}
    for name, build in MODELS.items():
        model = build()
        results["mixing"][name] = {str(dtype).removeprefix("torch."): mixing(model, dtype) for dtype in DTYPES}
        print(json.dumps({name: results["mixing"][name]}, indent=1), flush=True)
        save(options.out, results)
    for part, run in {"step, alone": over_nccl, "step, gloo": lambda: over_gloo(4)}.items():
        results[part] = run()
        print(json.dumps({part: results[part]}, indent=1), flush=True)
        save(options.out, results)


if __name__ == "__main__":
    main()
