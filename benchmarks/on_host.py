"""The program that network.py starts on every host of the test bed. Rank 0 writes the results."""

from __future__ import annotations

import argparse
import atexit
import datetime
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rumor
from contestants import consensus, ours, take_turns
from measure import machine, save
from peers import peers, send_bf16
from trace_steps import trace

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from model_to_plan import build

from models import bert_base, resnet50

T = TypeVar("T")
Step = Callable[[], object]
Build = Callable[[], tuple[nn.Module, Callable[..., None]]]  # returns a model and its training step, which also takes the model in DDP
BUCKETS_MB = (1, 4, 25)  # values of DDP's bucket_cap_mb; the fastest one counts
H = 6
TURN = 2 * H  # steps
NEVER = 1_000_000  # a period that is never reached
WITH_PEERS = ("computing alone", "DDP", "Local SGD", "Gossip SGD", "OSGP", "SlowMo", "Gossip-PGA")  # no Gossip-AGA: its period is not H


def exchange(sizes: list[int], repeats: int) -> dict[str, Any]:
    """Times one gossip step and one global average of a model with a single tensor, for each size in bytes."""
    n = dist.get_world_size()
    found = {}
    for size in sizes:
        contestants: dict[str, Step] = {}
        for algorithm in (rumor.gossip_sgd(graph(n)) for graph in (rumor.one_peer_exponential, rumor.ring, rumor.exponential)):
            contestants[algorithm.topology.name.split("(")[0]] = rumor.Averager(_flat_model(size), algorithm).step
        contestants["mean"] = rumor.Averager(_flat_model(size), rumor.parallel_sgd(n)).step
        plain = torch.randn(size // 4)
        contestants["gloo all_reduce"] = lambda plain=plain: dist.all_reduce(plain)  # type: ignore[misc]
        found[str(size)] = take_turns(contestants, 1, repeats)
    return found


def _flat_model(size: int) -> nn.Module:
    model = nn.Module()
    model.x = nn.Parameter(torch.randn(size // 4))
    return model


def build_resnet() -> tuple[nn.Module, Callable[..., None]]:
    """Builds ResNet-50 and a training step on a few small images: many tensors, and little computing for their size."""
    model = resnet50(1000)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))

    def train(model: nn.Module = model) -> None:
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()

    return model, train


BUILDS = {"mlp": build, "resnet50": build_resnet}


def with_ddp(build: Build, register_hook: Callable[[DistributedDataParallel], None] | None = None, **options: Any) -> Step:
    """Builds a training step with DDP, and with a hook if one is given."""
    model, train = build()
    ddp = DistributedDataParallel(model, **options)
    if register_hook is not None:
        register_hook(ddp)
    return lambda: train(ddp)


def send_4_bits(ddp: DistributedDataParallel) -> None:
    """Registers Rumor's hook."""
    ddp.register_comm_hook(rumor.ddp_hook_state(bits=4), rumor.ddp_hook)


def with_averager(build: Build, algorithm: rumor.GossipPGA, lazy: bool = False) -> Step:
    """Builds a training step with an Averager."""
    model, train = build()
    averager = rumor.Averager(model, algorithm, lazy=lazy)
    return lambda: (train(), averager.step())


def with_members(build: Build, algorithm: rumor.GossipPGA) -> Step:
    """Builds a training step with an Averager whose members may come and go. Rank 0 starts the coordinator."""
    model, train = build()
    address = [""]
    if dist.get_rank() == 0:
        command = [sys.executable, "-m", "rumor", "coordinator", "--bind", f"{os.environ['MASTER_ADDR']}:0"]
        coordinator = subprocess.Popen([*command, "--min-nodes", str(dist.get_world_size())], stdout=subprocess.PIPE, text=True)
        atexit.register(coordinator.kill)
        assert coordinator.stdout is not None
        address[0] = coordinator.stdout.readline().split()[-1]
        threading.Thread(target=coordinator.stdout.read, daemon=True).start()
    dist.broadcast_object_list(address)
    group = rumor.elastic(address[0], min_nodes=dist.get_world_size())
    averager = rumor.Averager(model, algorithm, group=group)
    return lambda: (train(), averager.step())


def elastic(repeats: int, build: Build) -> dict[str, Any]:
    """Times a training step in a fixed group, and in one whose members may come and go while nothing happens."""
    makers: dict[str, Step] = {}
    for name, bits in (("Gossip-PGA", 32), ("Gossip-PGA, 4 bits", 4)):
        algorithm = rumor.gossip_pga(rumor.one_peer_exponential, H, bits=bits)
        makers[name] = with_averager(build, algorithm)
        makers[f"{name}, elastic"] = with_members(build, algorithm)
    return take_turns(makers, TURN, repeats, H)


def crude(build: Build, n: int, chunks: int = 8) -> Step:
    """Builds a training step with a simple Gossip-PGA: pack everything, exchange everything, mix everything, unpack everything."""
    model, train = build()
    x = nn.utils.parameters_to_vector(model.parameters()).detach()
    received, k = torch.empty_like(x), 0

    def step() -> None:
        nonlocal k
        train()
        x.copy_(nn.utils.parameters_to_vector(model.parameters()).detach())
        k += 1
        if k % H == 0:
            dist.all_reduce(x)
            x.div_(n)
        else:
            hop = 2 ** ((k - 1) % math.ceil(math.log2(n)))
            source, target = ((dist.get_rank() + sign * hop) % n for sign in (-1, 1))
            works = [dist.irecv(part, source, tag=tag) for tag, part in enumerate(received.chunk(chunks))]
            works += [dist.isend(part, target, tag=tag) for tag, part in enumerate(x.chunk(chunks))]
            for work in works:
                assert work is not None
                work.wait()
            x.lerp_(received, 0.5)
        nn.utils.vector_to_parameters(x.clone(), model.parameters())

    return step


def step(repeats: int, build: Build, without: list[str]) -> dict[str, Any]:
    """Times a whole training step of each contestant."""
    n = dist.get_world_size()
    graph = rumor.one_peer_exponential(n)
    makers: dict[str, Callable[[], Step]] = {"computing alone": lambda: build()[1]}
    for size in BUCKETS_MB:
        makers[f"DDP, bucket_cap_mb={size}"] = partial(with_ddp, build, bucket_cap_mb=size)
    makers["DDP, bf16 hook"] = partial(with_ddp, build, send_bf16, bucket_cap_mb=4)
    makers["DDP, 4 bits"] = partial(with_ddp, build, send_4_bits, bucket_cap_mb=4)
    for name, algorithm in {"Gossip": rumor.gossip_sgd, "Gossip-PGA": partial(rumor.gossip_pga, H=H)}.items():
        makers[f"{name}, delay=0"] = partial(with_averager, build, algorithm(graph))
        makers[f"{name}, delay=0, lazy"] = partial(with_averager, build, algorithm(graph), lazy=True)
        makers[f"{name}, delay=1"] = partial(with_averager, build, algorithm(graph, delay=1))
    for bits in (8, 4):
        makers[f"Gossip-PGA, {bits} bits"] = partial(with_averager, build, rumor.gossip_pga(graph, H, bits=bits))
    makers["Gossip-PGA, 4 bits, delay=1"] = partial(with_averager, build, rumor.gossip_pga(graph, H, bits=4, delay=1))
    makers["Parallel SGD, 4 bits"] = partial(with_averager, build, rumor.parallel_sgd(n, bits=4))
    makers["Gossip-PGA, crude"] = partial(crude, build, n)
    return take_turns({name: make() for name, make in _chosen(makers, without).items()}, TURN, repeats, H)


def _chosen(contestants: dict[str, T], without: list[str]) -> dict[str, T]:
    return {name: contestant for name, contestant in contestants.items() if not any(word in name for word in without)}


def with_peers(repeats: int, without: list[str]) -> dict[str, Any]:
    """Times the same step in other libraries and in Rumor: same model, optimizer and data. A turn ends with the global round of all."""
    n = dist.get_world_size()
    makers = {name: make for name, make in ours(n, H, H, BUCKETS_MB).items() if name.startswith(WITH_PEERS)}
    chosen = _chosen({**makers, **peers(n, H)}, without)
    contestants = {name: make(_same_model) for name, make in chosen.items()}
    torch.manual_seed(1 + dist.get_rank())
    x, y = torch.randn(256, 784), torch.randint(10, (256,))
    times = take_turns({name: partial(contestant.step, x, y) for name, contestant in contestants.items()}, TURN, repeats, H)
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


SHAPES: dict[str, Callable[[], nn.Module]] = {"resnet50": resnet50, "bert_base": bert_base, "tiny": partial(nn.Linear, 100, 10)}


def overhead(repeats: int, shapes: Callable[[], nn.Module], compute: float) -> dict[str, Any]:
    """Times a step that sleeps for `compute` seconds and then communicates, for each way to communicate.

    They run one after the other and not in turns, because the buffers of all of them would not fit into the memory of one machine.
    """
    n, found = dist.get_world_size(), {}
    graph = rumor.one_peer_exponential(n)
    methods = {
        "no communication": None,
        "all-reduce": rumor.parallel_sgd(n),
        "gossip": rumor.gossip_sgd(graph),
        "all-reduce, 4 bits": rumor.parallel_sgd(n, bits=4),
        "gossip, 4 bits": rumor.gossip_pga(graph, NEVER, bits=4),
    }
    for name, algorithm in methods.items():
        averaging = None if algorithm is None else rumor.Averager(shapes(), algorithm).step
        steps = {name: partial(_sleep_then, compute, averaging)}
        found |= take_turns(steps, 2 * graph.period, repeats, lead_in=1)  # whole cycles: the steps of a cycle may differ
    return found


def _sleep_then(seconds: float, communicate: Step | None) -> None:
    time.sleep(seconds)
    if communicate is not None:
        communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("exchange", "step", "peers", "trace", "overhead", "elastic"), help="what to measure")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8_000_000, 100_000_000], help="sizes in bytes, for exchange")
    parser.add_argument("--model", choices=BUILDS, default="mlp", help="model, for step")
    parser.add_argument("--shapes", choices=SHAPES, default="resnet50", help="parameters, for overhead")
    parser.add_argument("--compute", type=float, default=0.146, help="seconds of computing, for overhead: it sleeps for so long")
    parser.add_argument(
        "--without", nargs="*", default=[], help="leave out contestants with one of these words in their name, for step and peers"
    )
    parser.add_argument("--repeats", type=int, default=5, help="number of turns")
    parser.add_argument("--out", type=Path, required=True, help="file for the results")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    if options.what == "exchange":
        found = exchange(options.sizes, options.repeats)
    elif options.what == "step":
        found = step(options.repeats, BUILDS[options.model], options.without)
    elif options.what == "elastic":
        found = elastic(options.repeats, BUILDS[options.model])
    elif options.what == "overhead":
        found = overhead(options.repeats, SHAPES[options.shapes], options.compute)
    else:
        found = with_peers(options.repeats, options.without) if options.what == "peers" else trace(_same_model)
    if dist.get_rank() == 0:
        save(options.out, {"machine": machine(), "bed": os.environ.get("RUMOR_BED", ""), "n": dist.get_world_size(), "seconds": found})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
