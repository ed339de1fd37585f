"""Splits the images over the nodes: which node sees which images at which step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from networks.runs import IID


class Split(Protocol):
    def epoch(self, batch: int, random: torch.Generator) -> Tensor:
        """Returns the numbers of the images that each node sees at each step of an epoch, [steps, n, batch]."""
        ...


@dataclass(frozen=True)
class Shuffled:
    """Shuffles all images each epoch and distributes them to the nodes, as a loader with a distributed sampler does."""

    images: int
    n: int

    def epoch(self, batch: int, random: torch.Generator) -> Tensor:
        steps = self.images // (self.n * batch)
        return torch.randperm(self.images, generator=random)[: steps * self.n * batch].view(steps, self.n, batch)


class ByLabel:
    """Gives each node its own images. The images of a label are divided by Dirichlet(alpha); a smaller alpha is less even.

    An epoch has as many steps as with `Shuffled`. A node goes through its own images again and again, each time in a new order.
    """

    def __init__(self, labels: Tensor, n: int, alpha: float, random: torch.Generator, least: int = 32):
        self.images, self.n = len(labels), n
        for _ in range(1_000):
            self.owned = _divided(labels, n, alpha, random)
            if min(len(own) for own in self.owned) >= least:
                break
        else:
            raise ValueError(f"Dirichlet({alpha}) leaves some of {n} nodes fewer than {least} images: use a larger alpha or fewer nodes")
        self._rest = [own[:0] for own in self.owned]

    def epoch(self, batch: int, random: torch.Generator) -> Tensor:
        steps = self.images // (self.n * batch)
        rows = []
        for node, own in enumerate(self.owned):
            order = self._rest[node]
            while len(order) < steps * batch:
                order = torch.cat([order, own[torch.randperm(len(own), generator=random)]])
            rows.append(order[: steps * batch].view(steps, batch))
            self._rest[node] = order[steps * batch :]
        return torch.stack(rows, dim=1)


def _divided(labels: Tensor, n: int, alpha: float, random: torch.Generator) -> list[Tensor]:
    shares: list[list[Tensor]] = [[] for _ in range(n)]
    for label in labels.unique():
        images = (labels == label).nonzero()[:, 0]
        images = images[torch.randperm(len(images), generator=random)]
        gamma = torch._standard_gamma(torch.full((n,), alpha, dtype=torch.float64), generator=random)
        ends = (gamma.cumsum(0) / gamma.sum() * len(images)).round().long().tolist()
        for node, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            shares[node].append(images[start:end])
    return [torch.cat(own) for own in shares]


def split_of(name: str, labels: Tensor, n: int, seed: int) -> Split:
    """Builds a split by its name, "iid" or "dirichlet(0.3)"."""
    if name == IID:
        return Shuffled(len(labels), n)
    alpha = float(name.removeprefix("dirichlet(").removesuffix(")"))
    return ByLabel(labels, n, alpha, torch.Generator().manual_seed(seed))
