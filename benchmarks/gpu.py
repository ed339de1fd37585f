"""Mixing on a GPU against the bandwidth of a plain copy, and what a step costs the host.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json

One GPU is enough: NCCL's path runs with a neighbour that echoes, gloo's with processes that share the GPU.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import rumor
import rumor.averager
from measure import machine, save
from models import bert_large, resnet50
from rumor.engine import Pull
from rumor.flat import Flat
from rumor.process_group import ProcessGroup

MODELS: dict[str, Callable[[], nn.Module]] = {"ResNet-50, 25.6 M in 161 tensors": resnet50, "BERT-large, 333 M in 289 tensors": bert_large}
DTYPES = (torch.float32, torch.bfloat16)


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Of the device, the median. As in training, it has something else to do until the host has launched it all."""
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


def room(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def mixing(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """Packing, and both ways of mixing, over all buckets of a model; each beside a copy of as many bytes."""
    tensors = [p.detach().to("cuda", dtype) for p in model.parameters()]
    x = Flat(tensors, room)
    sent = [x.read(b) for b in range(len(x))]
    received = [torch.randn_like(s) for s in sent]
    finite = torch.ones(1, dtype=torch.bool, device="cuda")  # as the head of a message tells
    d = sum(t.numel() for t in tensors)
    flat, other = (torch.empty(d, dtype=dtype, device="cuda") for _ in range(2))
    copy = 2 * d * dtype.itemsize / seconds(lambda: other.copy_(flat))
    ways: dict[str, tuple[int, Callable[[int], object]]] = {  # and how often each number is read or written
        "pack": (2, x.read),
        "mix, delay=0": (3, lambda b: x.pull(b, Pull(received[b], 0.5, finite))),
        "mix, delay=1": (4, lambda b: x.pull(b, Pull(received[b], 0.5, finite), sent[b])),
    }
    found: dict[str, Any] = {"parameters": d, "tensors": len(tensors), "buckets": len(x), "copy_bytes_per_second": copy}
    for name, (times, way) in ways.items():
        took = seconds(lambda way=way: [way(b) for b in range(len(x))])
        found[name] = {"seconds": took, "share_of_copy": times * dtype.itemsize * d / took / copy}
    return found


class Echo(ProcessGroup):
    """NCCL's path with a neighbour that sends back what it hears: all work stays on the device."""

    def __init__(self, *groups: Any):
        super().__init__(*groups)
        self.n = 4

    def agree(self, setup: object, problem: object = None, inside: object = ()) -> None:
        pass

    def _post(self, channel: Any, links: Any, inbox: list[Any], works: list[Any]) -> None:
        inbox.extend(channel.inbox(len(links.receive)))
        for message in inbox:
            message.whole.copy_(channel.out.whole)


def host_time(model: nn.Module, algorithm: Any) -> dict[str, float]:
    """Of averager.step(): what the host spends, and what the device does, when nobody has to wait."""
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
    real, rumor.averager.ProcessGroup = rumor.averager.ProcessGroup, Echo  # type: ignore[misc]
    peers = rumor.one_peer_exponential(4)
    found = {
        name: {f"delay={delay}": host_time(build(), rumor.gossip_sgd(peers, delay=delay)) for delay in (0, 1)}
        for name, build in MODELS.items()
    }
    rumor.averager.ProcessGroup = real  # type: ignore[misc]
    dist.destroy_process_group()
    return found


def one_of_several(out: Path) -> None:
    """A rank of a gloo group whose processes share the GPU: training steps of ResNet-50 on small images, and what step() takes of them."""
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
