"""Averages with codes of the models of all nodes in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rumor.engines.codes import CODES
from rumor.engines.owners import owned_by_each


def coded_means(xs: Sequence[Tensor], left_out: Sequence[Tensor], bits: int) -> list[Tensor]:
    """Average `xs` + `left_out` [..., n, d] as real processes do with codes.

    Each node sends its code of every block to the owner of that block. The owner averages, and sends its code of the mean to all.
    What this rounds off the mean, the owner has left out, n times because the next average divides it by n.
    """
    code, means, n = CODES[bits], [], xs[0].shape[-2]
    shares = owned_by_each([x.shape[-1] for x in xs], n)
    for b, (x, rest) in enumerate(zip(xs, left_out, strict=True)):
        rest += x
        sent = code.round_trip(rest.clone())
        rest -= sent
        exact = _mean_in_order(sent) if x.dtype == torch.float64 else sent.mean(dim=-2, keepdim=True)  # [..., 1, d]
        mean = code.round_trip(exact.clone())
        means.append(mean)
        rounded_off = exact.sub_(mean).mul_(n)
        for owner, share in enumerate(shares):
            for _, start, end in (owned for owned in share if owned.bucket == b):
                rest[..., owner, start:end] += rounded_off[..., 0, start:end]
    return means


def _mean_in_order(x: Tensor) -> Tensor:
    """Average x [..., n, d] node by node, as real processes do: in float64, both engines then round alike."""
    total, n = torch.zeros_like(x[..., :1, :]), x.shape[-2]
    for i in range(n):
        total.add_(x[..., i : i + 1, :], alpha=1 / n)
    return total
