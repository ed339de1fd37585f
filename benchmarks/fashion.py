"""The task of accuracy.py: Fashion-MNIST, two small networks, and one schedule of learning rates and evaluations for all methods."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

from images.idx import find, read_idx  # noqa: F401 (used by accuracy.py)

NETWORKS = {"small": (784, 320, 160, 10), "large": (784, 800, 400, 10)}  # widths of the layers: 0.30 M and 0.95 M parameters
BATCH = 1024  # total batch of all hosts, so that a step is the same work on 4 hosts and on 8
EPOCHS, IMAGES = 6, 60_000
STEPS = EPOCHS * IMAGES // BATCH
LR, WARM_UP = 0.2, 0.15  # the highest learning rate, and the share of steps until it is reached
H = 6
AGA_WARM_UP = 0.04  # share of the steps
MEAN, DEVIATION = 0.286, 0.353  # of the pixels of the training images, scaled to 0..1


def load(folder: Path, part: str, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Loads normalised images [m, 784] and labels [m]: all of "train" or "t10k", or only `rows`."""
    images = torch.tensor(read_idx(folder / f"{part}-images-idx3-ubyte")).flatten(1)
    labels = torch.tensor(read_idx(folder / f"{part}-labels-idx1-ubyte"))
    if rows is not None:
        images, labels = images[rows], labels[rows]
    return images.float().div_(255).sub_(MEAN).div_(DEVIATION), labels.long()


def shard(folder: Path, rank: int, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Loads the training images of one host: every n-th image of a permutation that is the same on all hosts."""
    count = len(read_idx(folder / "train-labels-idx1-ubyte"))
    return load(folder, "train", torch.randperm(count, generator=torch.Generator().manual_seed(seed))[rank::n])


def batches(data: tuple[Tensor, Tensor], size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields batches forever, with a new order of the images for every pass."""
    images, labels = data
    random = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    while True:
        while len(order) < size:
            order = torch.cat([order, torch.randperm(len(labels), generator=random)])
        yield images[order[:size]], labels[order[:size]]
        order = order[size:]


def network(seed: int, widths: Sequence[int]) -> nn.Module:
    """Builds a network, the same on every host."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def parameters_of(widths: Sequence[int]) -> int:
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(widths))


def lr_at(k: int, steps: int) -> float:
    """The learning rate: linear warm-up, then cosine decay to zero."""
    warm_up = WARM_UP * steps
    if k < warm_up:
        return LR * (k + 1) / (warm_up + 1)
    return LR * (1 + math.cos(math.pi * (k - warm_up) / (steps - warm_up))) / 2


def marks(steps: int) -> list[int]:
    """The steps after which the mean model is evaluated: every 20 % of the run, and every 3 % of its last 30 %."""
    shares = [20, 40, 60, *range(70, 101, 3)]
    return sorted({max(1, round(steps * share / 100)) for share in shares})
