"""AdamW on a GPT: which methods that average models come close to DDP, and with how many bytes?

Each node's second moment is that of its own noisy gradient, so at one learning rate its steps are shorter than DDP's. Expect methods that
average models to need a higher learning rate than DDP, or a second moment that is corrected for the noise. Nodes can also mix their
gradients before the optimizer's step. All nodes are simulated in one process, and DDP itself is a step with the mean gradient of all nodes.

    python experiments/adamw.py --data FOLDER                                   # FOLDER/enwik8; all methods at all learning rates
    python experiments/adamw.py --data FOLDER --methods DDP Gossip-PGA --lr 0.001 0.002 --seeds 3
    python experiments/adamw.py --data FOLDER --optimizer lamb --methods DDP Gossip-PGA "Gossip-PGA, 32 bits"       # results/lamb.csv
    python experiments/adamw.py --data FOLDER --nodes 8 --width 256 --layers 4 --batch 32 --length 128 --steps 1500 --seeds 3 --best   # GPU

Every finished run is a row of --out and is not run again, so you can stop the command at any time and start it again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import rumor
from logistic.tables import Row, as_text
from networks.command import above_zero, at_least_one
from networks.compare import with_interval
from networks.engines import captured, device_name, restart
from rumor.ddp import REFRESHED, limit_left_out, scales_of
from rumor.methods import Algorithm
from rumor.model.optimizer_state import AverageState
from text.gpt import EVALUATED, GPT, check_text, held_out_loss, last_start, load_text, loss_of, lr_at, read, sequences, write
from text.lamb import Lamb
from text.train import optimizer as lamb

RESULTS = Path(__file__).parent / "results" / "adamw.csv"
OPTIMIZERS = {"adamw": "AdamW", "lamb": "LAMB"}  # each has a results file of its own
KEY = ("method", "lr", "seed", "nodes", "steps", "batch", "length", "width", "layers")
COLUMNS = (*KEY, "loss", "megabytes", "seconds", "device")
H, BITS, CLIP, BETAS = 6, 4, 1.0, (0.9, 0.95)
PERIODS = (H, 4 * H, 16 * H)  # of methods without gossip
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
LEAST = 3  # seeds of a mean in the table
PEERS = 2  # nodes in the mean that a gossip step of one_peer_exponential takes

Mixing = Literal["own", "mean", "coded mean", "scaled coded mean", "gossip"]


class Method(NamedTuple):
    """How the nodes of a run work together.

    Attributes:
        build: the method for n nodes.
        state: how the optimizer's state is averaged.
        gradients: what a node's optimizer is given: the node's own gradient, the mean of all nodes (DDP), that mean with codes of 4 bits
            (DDP with our hook), the same with scales that follow second moments (the hook with `optimizer=`), or the mean of two nodes by a
            gossip step of 4 bits.
        corrects_noise: whether second moments are those that the mean gradient would have (`SecondMoments`).
        models_from: from this share of the steps on, nodes average models instead of gradients, with sqrt(n) times the learning rate.
            Until then they mix gradients as `gradients` says.
    """

    build: Callable[[int], Algorithm]
    state: AverageState | None = None
    gradients: Mixing = "own"
    corrects_noise: bool = False
    models_from: float = 0.0


def pga(n: int, H: int = H) -> Algorithm:
    return rumor.gossip_pga(rumor.one_peer_exponential(n), H, bits=BITS)


def alone(n: int) -> Algorithm:
    return rumor.local_sgd(n, 2**30)


def local(n: int, H: int = H) -> Algorithm:
    return rumor.local_sgd(n, H, bits=BITS)


def few_averages(H: int) -> dict[str, Method]:
    """Methods without gossip, with a global average every H steps. DiLoCo with its paper's outer step, and with less outer momentum."""
    return {
        f"Local SGD, H = {H}": Method(partial(local, H=H)),
        f"DiLoCo, H = {H}": Method(lambda n: rumor.diloco(n, H, bits=BITS)),
        f"DiLoCo, H = {H}, outer 0.7, 0.5": Method(lambda n: rumor.diloco(n, H, outer_momentum=0.5, bits=BITS)),
    }


METHODS: dict[str, Method] = {
    "DDP": Method(alone, gradients="mean"),
    "DDP, 4 bits": Method(alone, gradients="coded mean"),
    "DDP, 4 bits, optimizer=": Method(alone, gradients="scaled coded mean"),
    "Parallel SGD": Method(lambda n: rumor.parallel_sgd(n, bits=BITS)),
    "DDP, 4 bits, then Gossip-PGA from 1/2": Method(pga, gradients="scaled coded mean", models_from=0.5),
    "DDP, 4 bits, then Gossip-PGA from 3/4": Method(pga, gradients="scaled coded mean", models_from=0.75),
    "Gossip-PGA": Method(pga),
    "Gossip-PGA, 32 bits": Method(lambda n: rumor.gossip_pga(rumor.one_peer_exponential(n), H)),
    "Gossip-PGA, state at global rounds": Method(pga, "global"),
    "Gossip-PGA, corrected": Method(pga, corrects_noise=True),
    "Gossip-PGA, corrected, state at global rounds": Method(pga, "global", corrects_noise=True),
    "Gossip-PGA, H = 2": Method(lambda n: pga(n, 2)),
    "Gossip-PGA, H = 2, corrected": Method(lambda n: pga(n, 2), corrects_noise=True),
    "Local SGD, gossiped gradients": Method(local, gradients="gossip"),
    "Local SGD, gossiped gradients, corrected": Method(local, gradients="gossip", corrects_noise=True),
    "Gossip-PGA, gossiped gradients": Method(pga, gradients="gossip"),
    **{name: method for H in PERIODS for name, method in few_averages(H).items()},
}


class Gradients:
    """Mixes the gradients of all nodes before the optimizer's step. The simulator's engine carries them, and counts their bytes."""

    def __init__(self, sim: rumor.Simulator, mixing: Mixing, opt: torch.optim.Optimizer):
        self._engine, self._leaves, self._mixing, self._opt = sim.engine, list(sim.parameters()), mixing, opt
        self._topology = rumor.one_peer_exponential(sim.n)
        self._left_out = torch.zeros_like(sim.X)
        self._scales = torch.ones_like(sim.X[0])

    @torch.no_grad()
    def mix(self, k: int) -> None:
        grads = [leaf.grad for leaf in self._leaves if leaf.grad is not None]
        x = torch.cat([g.flatten(1) for g in grads], dim=1)  # [n, d]
        if self._mixing == "mean":
            pending = self._engine.mean([x], k)[0]
        elif self._mixing == "gossip":
            pending = self._engine.gossip(x, self._topology, k, bits=BITS)
        else:  # what `rumor.ddp_hook` does; its scales stay 1 without second moments
            if self._mixing == "scaled coded mean" and (k in (1, 2, 4, 8) or k % REFRESHED == REFRESHED - 1):
                self._refresh_scales()
            x = x / self._scales
            for own, left_out in zip(x, self._left_out, strict=True):
                limit_left_out(left_out, float(own.norm()), len(x), BITS)
            pending = self._engine.mean([x], k, bits=BITS, left_out=[self._left_out])[0]
        mixed = (pending.wait().x * self._scales).expand_as(x).split([g[0].numel() for g in grads], dim=1)
        for g, part in zip(grads, mixed, strict=True):
            g.copy_(part.view_as(g))

    def _refresh_scales(self) -> None:
        """Do what `rumor.ddp_hook` does. Second moments are the same on all nodes."""
        name = "v" if isinstance(self._opt, Lamb) else "exp_avg_sq"
        scales = scales_of(torch.cat([self._opt.state[leaf][name][0].flatten() for leaf in self._leaves]))
        self._left_out.mul_(self._scales / scales)
        self._scales = scales


class SecondMoments:
    """Adam's second moments, corrected as if each gradient were the mean of n nodes' gradients.

    A node's gradient is g + noise of variance s^2, and that of the mean of n nodes is g + noise of variance s^2 / n. So DDP's second moment
    is about g^2 + s^2 / n, where a node's own is g^2 + s^2. The first moment m is a mean over about 20 gradients, so m^2 is close to g^2:

        v <- b2 v + (1 - b2) (g_i^2 / n + (1 - 1/n) m^2)          in the place of          v <- b2 v + (1 - b2) g_i^2

    This needs no communication. It keeps one more copy of v: what the optimizer's step started from.
    """

    def __init__(self, opt: torch.optim.Optimizer, leaves: list[Tensor], n: float):
        self._opt, self._leaves, self._n = opt, leaves, n
        self._before = [torch.zeros_like(leaf) for leaf in leaves]

    @torch.no_grad()
    def correct(self, steps: int) -> None:
        """Call it after the optimizer's step."""
        rest = 1 - 1 / self._n
        for leaf, before in zip(self._leaves, self._before, strict=True):
            state = self._opt.state[leaf]
            m = state["exp_avg"] / (1 - BETAS[0] ** steps)
            state["exp_avg_sq"].div_(self._n).add_(before, alpha=BETAS[1] * rest).addcmul_(m, m, value=(1 - BETAS[1]) * rest)

    @torch.no_grad()
    def remember(self) -> None:
        """Call it after nodes have averaged."""
        for leaf, before in zip(self._leaves, self._before, strict=True):
            before.copy_(self._opt.state[leaf]["exp_avg_sq"])


def clip(leaves: list[Tensor]) -> None:
    """Scales each node's gradients [n, ...] to a norm of at most CLIP."""
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    norm = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()  # [n]
    factor = (CLIP / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(factor.view(-1, *[1] * (g.dim() - 1)))


def optimizer(kind: str, sim: rumor.Simulator, model: GPT, lr: Tensor) -> torch.optim.Optimizer:
    """Builds the optimizer of all nodes. LAMB clips each node's gradients itself."""
    if kind == "lamb":
        return lamb(sim.named_parameters(), model, lr)
    return torch.optim.AdamW(sim.parameters(), lr=lr, weight_decay=0.1, betas=BETAS, fused=True, capturable=lr.is_cuda)


def loss_in_bfloat16(model: torch.nn.Module, rows: Tensor) -> Tensor:
    with torch.autocast(rows.device.type, torch.bfloat16):
        return loss_of(model, rows)


class Nodes:
    """All nodes, their optimizer, and the two parts of a step between which gradients can be mixed.

    On a GPU both parts are captured as graphs, once for all runs. Forward and backward are compiled, and compute in bfloat16.
    """

    def __init__(self, text: Tensor, options: argparse.Namespace):
        device = text.device
        self.model = GPT(options.length, options.width, options.layers).to(device)
        self.sim = rumor.Simulator(self.model, rumor.parallel_sgd(options.nodes))
        self.leaves = list(self.sim.parameters())
        self.lr, self._clips = torch.zeros((), device=device), options.optimizer != "lamb"
        self.opt = optimizer(options.optimizer, self.sim, self.model, self.lr)
        self.rows = torch.zeros(options.nodes, options.batch, options.length + 1, dtype=torch.long, device=device)
        compiles = device.type == "cuda"
        self._losses_of = self.sim.compiled(loss_in_bfloat16) if compiles else partial(self.sim, loss_of)
        self.backward = captured(self._backward) if compiles else self._backward
        self.advance = captured(self._advance) if compiles else self._advance

    def _backward(self) -> Tensor:
        """Sets the gradients of all nodes for `rows`, and returns the losses."""
        self.opt.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):  # vmap would run the others node by node
            losses = self._losses_of(self.rows)
        losses.sum().backward()
        return losses.detach()

    def _advance(self) -> Tensor:
        """Takes a step of the optimizer."""
        if self._clips:
            clip(self.leaves)
        self.opt.step()
        return self.lr

    @torch.no_grad()
    def start(self, seed: int, algorithm: Algorithm, state: AverageState | None) -> None:
        """Starts a run from new weights."""
        torch.manual_seed(seed)
        fresh = GPT(self.model.length, self.model.width, len(self.model.layers.layers))
        self.model.load_state_dict(fresh.state_dict())
        restart(self.sim, self.opt, algorithm, state)

    def go_on(self, algorithm: Algorithm) -> None:
        """Goes on with another method. All nodes must have the same model."""
        self.model.load_state_dict(self.sim.node_model(0).state_dict())
        self.sim.restart(algorithm)


def train(nodes: Nodes, name: str, lr: float, seed: int, text: Tensor, options: argparse.Namespace) -> tuple[float, float, float]:
    """Trains one run. Returns the held-out loss of the mean model, the megabytes that a node has sent, and the seconds."""
    n, method, sim = options.nodes, METHODS[name], nodes.sim
    changes_at = round(method.models_from * options.steps)
    nodes.start(seed, alone(n) if changes_at else method.build(n), method.state)
    gradients = None if method.gradients == "own" else Gradients(sim, method.gradients, nodes.opt)
    peers = n / PEERS if method.gradients == "gossip" else n
    moments = SecondMoments(nodes.opt, nodes.leaves, peers) if method.corrects_noise else None
    draw = torch.Generator().manual_seed(1_000 + seed)
    last, began, peak, sent = last_start(text, options.length), time.perf_counter(), lr, 0
    for step in tqdm(range(options.steps), desc=f"{name}, lr {lr:g}, seed {seed}", leave=False, disable=None):
        if changes_at and step == changes_at:
            sent, gradients, peak = sim.metrics.bytes_sent, None, lr * n**0.5
            nodes.go_on(method.build(n))
        nodes.lr.fill_(lr_at(step, options.steps, peak))
        starts = torch.randint(last, (n, options.batch), generator=draw)
        nodes.rows.copy_(sequences(text, starts.to(text.device), options.length))
        losses = nodes.backward()
        if gradients is not None:
            gradients.mix(step)
        nodes.advance()
        if moments is not None:
            moments.correct(step + 1)
        sim.step(losses)
        if moments is not None:
            moments.remember()
    sent, seconds = sent + sim.metrics.bytes_sent, time.perf_counter() - began
    return held_out_loss(sim.mean_model(), text, options.evaluated), sent / 1e6, seconds  # type: ignore[arg-type]


def at_best(rows: list[dict[str, str]]) -> dict[str, tuple[float, dict[int, float]]]:
    """For each method its best learning rate, among the rates with the most seeds, and the loss by seed there."""
    losses: dict[str, dict[float, dict[int, float]]] = {}
    for row in rows:
        losses.setdefault(row["method"], {}).setdefault(float(row["lr"]), {})[int(row["seed"])] = float(row["loss"])
    return {
        method: min(rates.items(), key=lambda tried: (-len(tried[1]), np.mean(list(tried[1].values())))) for method, rates in losses.items()
    }


def table(rows: list[dict[str, str]], least: int = LEAST) -> str:
    """For each method the mean held-out loss at each learning rate, and at its best one the difference to DDP's best and the bytes.

    The differences are seed by seed, with the 95 % interval of their mean. Trials of fewer seeds than `least` are left out, if there are
    others.
    """
    seeds = Counter((row["method"], row["lr"]) for row in rows)
    least = min(least, max(seeds.values()))
    rows = [row for row in rows if seeds[row["method"], row["lr"]] >= least]
    rates = sorted({float(row["lr"]) for row in rows})
    sent, best = {row["method"]: float(row["megabytes"]) for row in rows}, at_best(rows)
    ddp = best.get("DDP", (0.0, {}))[1]
    shown: list[Row] = []
    for method in (name for name in METHODS if name in best):
        cells: Row = {"method": method}
        for lr in rates:
            losses = [float(row["loss"]) for row in rows if row["method"] == method and float(row["lr"]) == lr]
            cells[f"{lr:g}"] = f"{np.mean(losses):.3f}" if losses else "-"
        away = [loss - ddp[seed] for seed, loss in best[method][1].items() if seed in ddp]
        cells["best minus DDP's best"] = "-" if method == "DDP" else with_interval(away, 3)
        cells["bytes"] = f"1/{sent['DDP'] / sent[method]:.1f}" if "DDP" in sent and sent[method] and method != "DDP" else "1"
        shown.append(cells)
    return as_text(shown)


def bits_table(rows: dict[str, list[dict[str, str]]]) -> str:
    """For each optimizer and learning rate the loss of Gossip-PGA with 32 and with 4 bits, and the difference, seed by seed."""
    shown: list[Row] = []
    for optimizer, found in rows.items():
        losses: dict[float, dict[str, dict[str, float]]] = {}
        for row in found:
            if row["method"] in ("Gossip-PGA", "Gossip-PGA, 32 bits"):
                losses.setdefault(float(row["lr"]), {}).setdefault(row["method"], {})[row["seed"]] = float(row["loss"])
        for lr, both in sorted(losses.items()):
            few, many = both.get("Gossip-PGA", {}), both.get("Gossip-PGA, 32 bits", {})
            seeds = sorted(set(few) & set(many))
            if len(seeds) < LEAST:
                continue
            cells: Row = {"optimizer": OPTIMIZERS[optimizer], "learning rate": f"{lr:g}", "seeds": str(len(seeds))}
            cells |= {bits: f"{np.mean([of[seed] for seed in seeds]):.4f}" for bits, of in (("32 bits", many), ("4 bits", few))}
            shown.append({**cells, "4 bits - 32 bits": with_interval([few[seed] - many[seed] for seed in seeds], 4)})
    return as_text(shown)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with enwik8")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), help="methods to compare")
    parser.add_argument("--lr", type=above_zero, nargs="+", default=list(RATES), help="highest learning rates to try")
    parser.add_argument("--seeds", type=at_least_one, default=1, help="number of seeds")
    parser.add_argument("--best", action="store_true", help="train seeds after the first only at each method's best rate with the first")
    parser.add_argument("--minutes", type=above_zero, help="start no new run after this many minutes")
    parser.add_argument("--nodes", type=at_least_one, default=4, help="number of nodes")
    parser.add_argument("--steps", type=at_least_one, default=400, help="steps of a run")
    parser.add_argument("--batch", type=at_least_one, default=4, help="sequences per node and step")
    parser.add_argument("--length", type=at_least_one, default=64, help="characters of a sequence")
    parser.add_argument("--width", type=at_least_one, default=96, help="width of the GPT")
    parser.add_argument("--layers", type=at_least_one, default=2, help="layers of the GPT")
    parser.add_argument("--evaluated", type=at_least_one, default=EVALUATED, help="held-out sequences to evaluate on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device of all nodes")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="optimizer of the nodes")
    parser.add_argument("--out", type=Path, help="results file (default: results/OPTIMIZER.csv beside this file)")
    options = parser.parse_args()
    options.out = options.out or RESULTS.with_stem(options.optimizer)
    if options.optimizer == "lamb" and (wrong := [name for name in options.methods if METHODS[name].corrects_noise]):
        parser.error(f"--optimizer lamb: {wrong[0]!r} is for AdamW's second moments; choose other --methods")
    check_text(parser, options.data)
    return options


def main() -> None:
    options = parse()
    text, began = load_text(options.data, options.device), time.monotonic()
    nodes: Nodes | None = None  # built only if a run is missing
    sizes = dict(zip(KEY[3:], map(str, (getattr(options, name) for name in KEY[3:])), strict=True))
    for seed in range(options.seeds):
        for lr, name in itertools.product(options.lr, options.methods):
            if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
                break
            rows = with_values(read(options.out), sizes)
            key = {"method": name, "lr": str(lr), "seed": str(seed)}
            if with_values(rows, key) or (options.best and seed and lr != best_rate(rows, name, options.lr)):
                continue
            nodes = nodes or Nodes(text, options)
            loss, megabytes, seconds = train(nodes, name, lr, seed, text, options)
            found = {"loss": f"{loss:.6f}", "megabytes": f"{megabytes:.3f}", "seconds": f"{seconds:.1f}"}
            write(options.out, [*read(options.out), {**key, **sizes, **found, "device": device_name(text.device)}], COLUMNS)
            print(f"{name}, lr {lr:g}, seed {seed}: {loss:.4f}, {seconds:.0f} s", flush=True)
    print(table(with_values(read(options.out), sizes)))


def with_values(rows: list[dict[str, str]], wanted: dict[str, str]) -> list[dict[str, str]]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row[column] == value for column, value in wanted.items())]


def best_rate(rows: list[dict[str, str]], method: str, rates: Sequence[float]) -> float:
    """Return the one of these learning rates at which the method has the lowest loss with seed 0. A run that diverged is the worst."""
    losses = {float(row["lr"]): float(row["loss"]) for row in with_values(rows, {"method": method, "seed": "0"})}
    return min(rates, key=lambda lr: math.inf if math.isnan(losses[lr]) else losses[lr])


if __name__ == "__main__":
    sys.exit(main())
