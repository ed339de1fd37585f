"""A Triton kernel that mixes the models of all nodes on a GPU in one pass over memory, also in place."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rumor.engines.code_kernels import why_not_built

TILE = 4096  # numbers of each program: some columns of all nodes

SUMS = {torch.float64: tl.float64, torch.float32: tl.float32}


def mix(x: Tensor, columns: Tensor, weights: Tensor, out: Tensor) -> None:
    """out_i <- sum over s of weights[i, s] x[columns[i, s]], for contiguous [..., n, d]. `out` may be `x` itself.

    Args:
        x: the models of all nodes, for each trial.
        columns: [n, degree], the nodes that each node hears from.
        weights: [n, degree], in the dtype of the sums.
        out: where to write the mixed models.
    """
    n, d = x.shape[-2:]
    if not x.numel():
        return
    rows = triton.next_power_of_2(n)
    block = TILE // rows
    grid = (triton.cdiv(d, block), x.shape[:-2].numel())  # at most 65,535 trials
    with torch.cuda.device(x.device):  # Triton launches on the current device, which may be another one
        _mix[grid](x, columns, weights, out, d, n, columns.shape[1], SUMS[weights.dtype], rows, block)


@cache
def why_not(device: torch.device) -> str | None:
    """Return why this machine can't build the kernel (a missing C compiler, say), or None if it can. Warns once."""
    x = torch.zeros(1, 1, device=device)
    return why_not_built(lambda: mix(x, torch.zeros(1, 1, dtype=torch.int64, device=device), x, x), "mixing")


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mix(  # type: ignore[no-untyped-def]
    x, columns, weights, out, d, n: tl.constexpr, degree: tl.constexpr, wide: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    trial = tl.program_id(1).to(tl.int64) * n * d
    i = tl.arange(0, ROWS)
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    here = (i < n)[:, None] & (j < d)
    total = tl.zeros((ROWS, BLOCK), wide)
    for s in range(degree):
        column = tl.load(columns + i * degree + s, mask=i < n, other=0)[:, None]
        weight = tl.load(weights + i * degree + s, mask=i < n, other=0.0)[:, None]
        total += weight * tl.load(x + trial + column * d + j, mask=here, other=0.0).to(wide)
    tl.debug_barrier()  # all rows are read before any is overwritten
    tl.store(out + trial + i.to(tl.int64)[:, None] * d + j, total.to(out.dtype.element_ty), mask=here)
