"""The cost of simulating n nodes: a step of 32 nodes x 32 images on one GPU, compared with one model on all images in one big batch.

    python benchmarks/simulated_step.py --out benchmarks/results/simulated-step.json       # on a machine with a GPU; 3 minutes

The big batch uses the same network with cuDNN's convolutions, compiled. It is launched as usual, and also captured in a CUDA graph, as the
simulator's step is. A loop over 32 modules is the simple way to simulate. All run in turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

import rumor
from images import networks
from images.train import loss_of, optimizer
from measure import interleaved, machine, save
from networks.engines import Simulated, captured

NODES, BATCH, SIDE, CLASSES, LR = 32, 32, 32, 10, 0.01
STEPS = 24  # per turn, a multiple of Gossip-PGA's period of 6
MAKE = partial(optimizer, momentum=0.9)


def by_cudnn(x: Tensor, w: Tensor, padding: int) -> Tensor:
    return functional.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), padding=padding).permute(0, 2, 3, 1)


def built(images: Tensor) -> nn.Module:
    model = networks.SmallResNet(CLASSES).to(images.device)
    model.start(images.flatten(0, 1).float())
    return model


def big_batch(x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    """One model on all images: launched as usual, and captured in a CUDA graph."""
    model, lr = built(x), torch.tensor(LR, device=x.device)
    images, labels = x.flatten(0, 1), y.flatten()
    opt = MAKE(model.named_parameters(), model, lr)
    compiled = torch.compile(lambda: loss_of(model, images, labels))

    def step() -> Tensor:
        opt.zero_grad()
        loss = compiled()
        loss.backward()
        opt.step()
        return loss.detach()

    return {"one big batch, compiled": step, "the same in a CUDA graph": captured(step)}


def one_by_one(x: Tensor, y: Tensor) -> Callable[[], object]:
    """A loop over modules, each with its own optimizer."""
    models = [built(x) for _ in range(NODES)]
    opts = [MAKE(model.named_parameters(), model, torch.tensor(LR, device=x.device)) for model in models]

    def step() -> None:
        for model, opt, images, labels in zip(models, opts, x, y, strict=True):
            loss_of(model, images, labels).backward()
            opt.step()
            opt.zero_grad()

    return step


def simulated(x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    """One simulator for each method, because all run in turns."""
    peers = rumor.one_peer_exponential(NODES)
    methods = {
        "Parallel SGD": rumor.parallel_sgd(NODES),
        "Gossip SGD": rumor.gossip_sgd(peers),
        "Gossip-PGA (6)": rumor.gossip_pga(peers, 6),
        "OSGP": rumor.osgp(peers),
    }
    steps: dict[str, Callable[[], object]] = {}
    for name, algorithm in methods.items():
        trainer = Simulated(built(x), NODES, (x, y), loss_of, MAKE)
        trainer.start(algorithm)
        steps[f"{NODES} nodes, {name}"] = partial(trainer.step, (x, y), LR)
    return steps


def many(step: Callable[[], object]) -> None:
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file for the results")
    parser.add_argument("--turns", type=int, default=7, help="number of turns")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    device = torch.device("cuda")
    torch.manual_seed(0)
    x = torch.randn(NODES, BATCH, SIDE, SIDE, 3, device=device).bfloat16()
    y = torch.randint(CLASSES, (NODES, BATCH), device=device)
    steps: dict[str, Any] = simulated(x, y)
    ours, networks.convolution = networks.convolution, by_cudnn  # type: ignore[assignment]
    steps |= big_batch(x, y) | {f"a loop over {NODES} modules": one_by_one(x, y)}
    found = interleaved({name: partial(many, step) for name, step in steps.items()}, options.turns)
    found = {name: seconds / STEPS for name, seconds in found.items()}
    networks.convolution = ours
    for name, seconds in found.items():
        print(f"{name:28} {1e3 * seconds:7.2f} ms")
    save(options.out, {"machine": machine(), "device": torch.cuda.get_device_name(), "nodes": NODES, "batch": BATCH, "seconds": found})


if __name__ == "__main__":
    main()
