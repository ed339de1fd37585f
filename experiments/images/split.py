"""Who sees which images at which step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from networks.runs import IID


class Split(Protocol):
    def epoch(self, batch: int, random: torch.Generator) -> Tensor:
        """Numbers of images, [steps, n, batch]: what each node sees at each step of an epoch."""
        ...


@dataclass(frozen=True)
class Shuffled:
    """All images in a new order each epoch, dealt out to the nodes, as a loader with a distributed sampler does."""

    images: int
    n: int

    def epoch(self, batch: int, random: torch.Generator) -> Tensor:
        steps = self.images // (self.n * batch)
        return torch.randperm(self.images, generator=random)[: steps * self.n * batch].view(steps, self.n, batch)


class ByLabel:
    """Each node has images of its own: those of a label are divided by Dirichlet(alpha), the more unevenly the smaller alpha is.

    An epoch has as many steps as that of `Shuffled`; a node goes through its own images over and over, each time in a new order.
    """

    def __init__(self, labels: Tensor, n: int, alpha: float, random: torch.Generator, least: int = 32):
        self.images, self.n = len(labels), n
        for _ in range(1_000):
            self.owned = _divided(labels, n, alpha, random)
            if min(len(own) for own in self.owned) >= least:
                break
        else:
            raise ValueError(f"Dirichlet({alpha}) leaves some of {n} nodes fewer than {least} images: take a larger alpha or fewer nodes")
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
    """ "iid", or "dirichlet(0.3)"."""
    if name == IID:
        return Shuffled(len(labels), n)
    alpha = float(name.removeprefix("dirichlet(").removesuffix(")"))
    return ByLabel(labels, n, alpha, torch.Generator().manual_seed(seed))
