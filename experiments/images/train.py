"""Trains one run of the image study on either engine: loss, optimizer, schedule and loop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from images.data import Batch, Data, Scale
from images.split import Split
from images.study import USUAL
from networks.engines import Trainer, all_of_ranks, mean_over_ranks, step_bar
from networks.runs import Run
from networks.store import USUAL_DECAY, Point, Settings

WARM_UP = 0.04  # share of all steps, as in the paper
DECAYS = (0.25, 0.5, 0.75)  # shares of the run after which the learning rate falls to a tenth


def lr_at(step: int, steps: int, peak: float, decay: str = USUAL_DECAY) -> float:
    """The learning rate: linear warm-up, then a tenth at each of DECAYS, or half a cosine.

    >>> [round(lr_at(k, 100, 1.0), 3) for k in (0, 2, 4, 24, 25, 50, 75)]
    [0.1, 0.55, 1.0, 1.0, 0.1, 0.01, 0.001]
    >>> [round(lr_at(k, 100, 1.0, "cosine"), 3) for k in (2, 4, 52, 99)]
    [0.55, 1.0, 0.5, 0.0]
    """
    done = step / steps
    if done < WARM_UP:
        return peak * (0.1 + 0.9 * done / WARM_UP)
    if decay == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))
    return float(peak * 0.1 ** sum(done >= decay for decay in DECAYS))


def loss_of(model: nn.Module, x: Tensor, y: Tensor, smoothing: float = USUAL.label_smoothing) -> Tensor:
    """The loss of one node's batch."""
    return nn.functional.cross_entropy(model(x).float(), y, label_smoothing=smoothing)


def optimizer(
    named: Iterator[tuple[str, nn.Parameter]], of_one: nn.Module, lr: Tensor, *, momentum: float, weight_decay: float = USUAL.weight_decay
) -> torch.optim.SGD:
    """Builds SGD without weight decay on norms and biases, which have a single dimension in the model of one node."""
    dims = {name: p.dim() for name, p in of_one.named_parameters()}
    trained = [(name, p) for name, p in named if p.requires_grad]
    groups = [
        {"params": [p for name, p in trained if dims[name] > 1], "weight_decay": weight_decay},
        {"params": [p for name, p in trained if dims[name] == 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=lr.is_cuda or None)


@dataclass
class Trained:
    """A finished run, with an evaluation after each epoch."""

    curve: list[Point]
    nodes: list[float]  # accuracy of each node at the end
    global_share: float
    seconds: float  # including evaluations


def train(trainer: Trainer, run: Run, data: Data, scale: Scale, split: Split, settings: Settings) -> Trained:
    """Trains a whole run from the current model."""
    steps = settings.steps
    trainer.start(run.algorithm(steps), run.state)
    curve: list[Point] = []
    k, rounds, began = 0, 0, time.perf_counter()
    with step_bar(steps) as bar:
        for epoch in range(settings.epochs):
            random = torch.Generator().manual_seed(1_000_003 * run.seed + epoch)  # the same order for all engines and ranks
            order = split.epoch(settings.batch, random)[: steps // settings.epochs]
            losses = []
            for x, y in data.take(order, trainer.nodes, random.initial_seed()):
                losses.append(trainer.step((scale(x), y), lr_at(k, steps, settings.lr, settings.decay)).mean())
                k += 1
                bar.update()
            mean, share, rounds = trainer.mean_model(), (trainer.global_rounds() - rounds) / len(losses), trainer.global_rounds()
            accuracies = [accuracy(mean, images, scale) for images in (data.test(), data.trained())]
            curve.append(Point(mean_over_ranks(torch.stack(losses).mean()), *accuracies, share))
            bar.set_postfix(loss=f"{curve[-1].loss:.3f}", accuracy=f"{curve[-1].value:.2%}")
    seconds = time.perf_counter() - began
    nodes = [accuracy(model, data.test(), scale) for model in trainer.node_models()]
    return Trained(curve, all_of_ranks(nodes), trainer.global_rounds() / steps, seconds)


@torch.no_grad()
def accuracy(model: nn.Module, images: Iterator[Batch], scale: Scale) -> float:
    """The accuracy on these images."""
    was_training = model.training
    model.eval()
    right = torch.cat([model(scale(x)).argmax(1) == y for x, y in images])  # a GPU need not be waited for until the end
    model.train(was_training)
    return float(right.double().mean())
