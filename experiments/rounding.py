"""Nearest or stochastic rounding? Gossip-PGA with messages of 4 bits on handwritten digits, 16 nodes, with even and with uneven labels.

Stochastic rounding has no bias, but twice the squared error of rounding to the nearest level. Expect nodes to be further apart with it, and
no gain in the loss. It takes four minutes on one core.

    python experiments/rounding.py                  # all seeds; then writes its table in docs/algorithms.md
    python experiments/rounding.py --seeds 1 --steps 20 --out FILE      # a part; leaves the page as it is
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import rumor
from logistic import tables
from networks.command import at_least_one
from networks.compare import with_interval
from rumor.demo.digits import split_by_label
from rumor.engines import stacked
from rumor.engines.code_kernels import BLOCK
from rumor.engines.codes import CODES, Code, as_blocks

RESULTS, PAGE = Path(__file__).parent / "results" / "rounding.csv", Path(__file__).parents[1] / "docs" / "algorithms.md"
NODES, BATCH, WIDTH, H, BITS = 16, 16, 128, 6, 4
SEEDS, STEPS, LR, MOMENTUM = 10, 600, 0.1, 0.9
ROUNDING = ("none (float32)", "nearest", "stochastic")
LABELS = ("even", "uneven")  # uneven: each node has one or two of the ten digits


class Stochastic:
    """The levels of a code, but a number is rounded up with the probability of its distance to the level below."""

    def __init__(self, code: Code, seed: int):
        self._code, self._random = code, torch.Generator().manual_seed(seed)

    def nbytes(self, d: int) -> int:
        return self._code.nbytes(d)

    def round_trip(self, x: Tensor) -> Tensor:
        blocks = as_blocks(x)  # [N, 256]
        low, high = blocks.aminmax(dim=-1, keepdim=True)
        step = ((high - low) / (2**self._code.bits - 1)).clamp(min=torch.finfo(x.dtype).tiny)
        codes = ((blocks - low) / step + torch.rand(blocks.shape, generator=self._random)).floor()
        return x.copy_((codes * step + low).minimum(high).view(*x.shape[:-1], -1)[..., : x.shape[-1]])


@contextmanager
def rounding(name: str, seed: int) -> Iterator[None]:
    """Makes the Simulator round in this way. The library itself rounds to the nearest level."""
    if name == "stochastic":
        stacked.CODES = {**CODES, BITS: Stochastic(CODES[BITS], seed)}  # type: ignore[dict-item]
    try:
        yield
    finally:
        stacked.CODES = CODES


def data_of(labels: str, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """The images and the labels of each node."""
    parts = split_by_label(NODES, seed)
    x, y = (torch.from_numpy(np.concatenate([getattr(part, name) for part in parts])) for name in "xy")
    order = torch.arange(len(y)) if labels == "uneven" else torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return [list(t[order].tensor_split(NODES)) for t in (x, y)]  # type: ignore[return-value]


def train(how: str, labels: str, seed: int, steps: int) -> dict[str, float]:
    """Trains one run. Returns the mean model's loss, and the consensus distance over its squared norm before global averages."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    images, digits = data_of(labels, seed)
    bits = 32 if how == ROUNDING[0] else BITS
    sim = rumor.Simulator(model, rumor.gossip_pga(rumor.one_peer_exponential(NODES), H, bits=bits))
    opt = torch.optim.SGD(sim.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True)
    draw, apart = torch.Generator().manual_seed(1_000 + seed), []
    with rounding(how, seed):
        for k in range(steps):
            opt.param_groups[0]["lr"] = LR * (1 - k / steps)
            rows = [torch.randint(len(y), (BATCH,), generator=draw) for y in digits]
            batch = [torch.stack([t[i] for t, i in zip(of_nodes, rows, strict=True)]) for of_nodes in (images, digits)]
            losses = sim(lambda m, x, y: nn.functional.cross_entropy(m(x), y), *batch)
            losses.sum().backward()
            opt.step()
            opt.zero_grad()
            sim.step(losses)
            if k % H == H - 2:
                apart.append(sim.consensus_distance() / float(sim.X.mean(0).square().sum()))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(sim.mean_model()(torch.cat(images)), torch.cat(digits))
    return {"loss": float(loss), "apart": statistics.mean(apart)}


def error(how: str) -> float:
    """The error of one message of normally distributed numbers, relative to them."""
    x = torch.randn(1_000, BLOCK, generator=torch.Generator().manual_seed(0))
    code = Stochastic(CODES[BITS], 0) if how == "stochastic" else CODES[BITS]
    return float((code.round_trip(x.clone()) - x).norm() / x.norm())


def table(rows: list[tables.Row]) -> str:
    """For each rounding the error of a message, and both kinds of labels: how far nodes are apart, and the loss minus float32's."""
    shown: list[tables.Row] = []
    for how in ROUNDING:
        cells: tables.Row = {"rounding": how, "error of a message": "0" if how == ROUNDING[0] else f"{100 * error(how):.1f} %"}
        for labels in LABELS:
            found = {
                name: {row["seed"]: row for row in rows if row["rounding"] == name and row["labels"] == labels}
                for name in (how, ROUNDING[0])
            }
            ours, float32 = found[how], found[ROUNDING[0]]
            apart = statistics.mean(float(str(row["apart"])) for row in ours.values())
            away = [float(str(ours[seed]["loss"])) - float(str(float32[seed]["loss"])) for seed in ours if seed in float32]
            cells[f"{labels} labels: distance"] = f"{apart:.2e}"
            cells[f"{labels}: loss - float32's"] = "-" if how == ROUNDING[0] else with_interval(away, 4)
        shown.append(cells)
    return tables.as_text(shown)


def filled_in(text: str) -> str:
    """Return docs/algorithms.md with its table rebuilt from the results."""
    return tables.filled_in(text, lambda _: table(tables.read(RESULTS)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seeds", type=at_least_one, default=SEEDS, help="number of seeds")
    parser.add_argument("--steps", type=at_least_one, default=STEPS, help="steps of a run")
    parser.add_argument("--out", type=Path, help="file for the results, instead of the one in the repository")
    options = parser.parse_args()
    rows: list[tables.Row] = []
    runs = list(product(range(options.seeds), LABELS, ROUNDING))
    for seed, labels, how in tqdm(runs, unit=" runs"):
        found = train(how, labels, seed, options.steps)
        rows.append({"rounding": how, "labels": labels, "seed": str(seed), **{name: f"{value:.6g}" for name, value in found.items()}})
    tables.write(options.out or RESULTS, tables.as_csv(rows))
    print(table(rows))
    if options.out is None:
        tables.write(PAGE, filled_in(PAGE.read_text()))


if __name__ == "__main__":
    main()
