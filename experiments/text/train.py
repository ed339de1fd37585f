"""Trains one run of the text study."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import rumor
from networks.engines import Tensors, Trainer, all_of_ranks, mean_over_ranks, step_bar
from networks.runs import Run
from networks.store import Point
from rumor.methods.gossip_pga import Algorithm
from text.data import Sequences, masked
from text.lamb import Lamb
from text.model import loss_of
from text.study import EARLIER_LAMB, LAMB, WEIGHT_DECAY

WARM_UP = 0.1  # share of all steps
POWER = 0.5  # of the polynomial decay, as in BERT's large-batch recipe
EVALUATIONS = 20  # in a run that is not stretched
AT_ONCE = 256  # held-out sequences per batch


def lr_at(step: int, steps: int, peak: float) -> float:
    """The learning rate: linear warm-up, then polynomial decay.

    >>> [round(lr_at(k, 100, 1.0), 3) for k in (0, 4, 9, 10, 55, 99)]
    [0.1, 0.5, 1.0, 1.0, 0.707, 0.105]
    """
    warm_up = WARM_UP * steps
    if step < warm_up:
        return float(peak * (step + 1) / warm_up)
    return float(peak * ((steps - step) / (steps - warm_up)) ** POWER)


def optimizer(named: Iterator[tuple[str, nn.Parameter]], of_one: nn.Module, lr: Tensor, kind: str = LAMB) -> Lamb:
    """Builds LAMB without weight decay on norms and biases. Parameters with one more dimension than one node's are stacked."""
    how: dict[str, Any] = {LAMB: {}, EARLIER_LAMB: {"always_adapt": True, "max_norm": None}}[kind]
    dims = {name: p.dim() for name, p in of_one.named_parameters()}
    trained = [(name, p) for name, p in named if p.requires_grad]
    stacked = any(p.dim() > dims[name] for name, p in trained)
    groups = [
        {"params": [p for name, p in trained if dims[name] > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for name, p in trained if dims[name] == 1], "weight_decay": 0.0},
    ]
    return Lamb(groups, lr=lr, stacked=stacked, compiled=lr.is_cuda, **how)


def algorithm_of(run: Run, steps: int) -> Algorithm:
    """The algorithm of a run. LAMB is not linear, so Parallel SGD averages gradients, as DDP does, and no models."""
    return rumor.gossip_sgd(rumor.isolated(run.nodes)) if run.method == "Parallel SGD" else run.algorithm(steps)


@dataclass
class Trained:
    """A finished run."""

    curve: list[Point]
    nodes: list[float]  # held-out loss of each node at the end
    global_share: float
    seconds: float


def batches(text: Sequences, nodes: list[int], n: int, batch: int, steps: int, seed: int) -> Iterator[Tensors]:
    """Yields the batches of `nodes`. Each pass over the text has a new order, and each batch new masked positions.

    The masks are drawn for all n nodes, even if only some are needed, so that a node gets the same ones from both engines.
    """
    device = text.train.device
    random, on_device = torch.Generator().manual_seed(seed), torch.Generator(device).manual_seed(1_000 * seed)
    order = torch.empty(0, dtype=torch.long, device=device)  # on the device, so that no step waits for a copy
    here = torch.tensor(nodes, device=device)
    for _ in range(steps):
        if len(order) < n * batch:
            order = torch.cat([order, torch.randperm(len(text.train), generator=random).to(device)])
        now, order = order[: n * batch].view(n, batch), order[n * batch :]
        seen, places, there = masked(text.train[now], text.special, on_device)
        yield seen[here], places[here], there[here]


def train(trainer: Trainer, run: Run, text: Sequences, batch: int, steps: int, peak: float) -> Trained:
    """Trains a whole run from the current model."""
    trainer.start(algorithm_of(run, steps))
    marks = {round(steps * (i + 1) / (EVALUATIONS * run.stretch)) for i in range(EVALUATIONS * run.stretch)}
    curve: list[Point] = []
    losses, rounds, began = [], 0, time.perf_counter()
    is_parallel = run.method == "Parallel SGD"  # averages gradients, so it has no global rounds of models
    with step_bar(steps) as bar:
        for k, tensors in enumerate(batches(text, trainer.nodes, run.nodes, batch, steps, run.seed), 1):
            lr, before = lr_at(k - 1, steps, peak), vector(trainer.mean_model()) if k in marks else None
            losses.append(trainer.step(tensors, lr).mean())
            bar.update()
            if before is not None:
                mean, share = trainer.mean_model(), 1.0 if is_parallel else (trainer.global_rounds() - rounds) / len(losses)
                after, loss = vector(mean), mean_over_ranks(torch.stack(losses).mean())
                spread, moved = trainer.consensus_distance() / after.square().sum(), (after - before).norm() / (lr * before.norm())
                curve.append(Point(loss, held_out_loss(mean, text), None, share, float(spread), float(moved)))
                bar.set_postfix(loss=f"{loss:.3f}", held_out=f"{curve[-1].value:.3f}")
                losses, rounds = [], trainer.global_rounds()
    seconds = time.perf_counter() - began
    nodes = [held_out_loss(model, text) for model in trainer.node_models()]
    share = 1.0 if is_parallel else trainer.global_rounds() / steps
    return Trained(curve, all_of_ranks(nodes), share, seconds)


def vector(model: nn.Module) -> Tensor:
    """A copy of all trained parameters in a row."""
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Sequences) -> float:
    """The loss on the held-out sequences, with the same masks for every model."""
    was_training, total = model.training, 0.0
    model.eval()
    random = torch.Generator(text.held_out.device).manual_seed(0)
    for x in text.held_out.split(AT_ONCE):
        total += float(loss_of(model, *masked(x, text.special, random))) * len(x)
    model.train(was_training)
    return total / len(text.held_out)
