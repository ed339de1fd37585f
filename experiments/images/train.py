"""Trains one run of the image study on either engine: loss, optimizer, schedule and loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from images.data import Data, Scale
from images.split import Split
from networks.engines import Trainer, all_of_ranks, mean_over_ranks, step_bar
from networks.runs import Run
from networks.store import Settings

WARM_UP = 0.04  # share of all steps, as in the paper
DECAYS = (0.25, 0.5, 0.75)  # shares of the run after which the learning rate falls to a tenth
SMOOTHING = 0.2  # label smoothing; this and the weight decay are for the small network
WEIGHT_DECAY = 5e-4


def lr_at(step: int, steps: int, peak: float) -> float:
    """The learning rate: linear warm-up, then a tenth at each of DECAYS.

    >>> [round(lr_at(k, 100, 1.0), 3) for k in (0, 2, 4, 24, 25, 50, 75)]
    [0.1, 0.55, 1.0, 1.0, 0.1, 0.01, 0.001]
    """
    done = step / steps
    if done < WARM_UP:
        return peak * (0.1 + 0.9 * done / WARM_UP)
    return float(peak * 0.1 ** sum(done >= decay for decay in DECAYS))


def loss_of(model: nn.Module, x: Tensor, y: Tensor, smoothing: float = SMOOTHING) -> Tensor:
    """The loss of one node's batch."""
    return nn.functional.cross_entropy(model(x).float(), y, label_smoothing=smoothing)


def optimizer(
    named: Iterator[tuple[str, nn.Parameter]], of_one: nn.Module, lr: Tensor, *, momentum: float, weight_decay: float = WEIGHT_DECAY
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
    """A finished run. `curve` holds the mean training loss and the accuracy of the mean model after each epoch."""

    curve: list[tuple[float, float]]
    nodes: list[float]  # accuracy of each node at the end
    global_share: float
    seconds: float  # including evaluations


def train(trainer: Trainer, run: Run, data: Data, scale: Scale, split: Split, settings: Settings) -> Trained:
    """Trains a whole run from the current model."""
    steps = settings.steps
    trainer.start(run.algorithm(steps), run.state)
    k, curve, began = 0, [], time.perf_counter()
    with step_bar(steps) as bar:
        for epoch in range(settings.epochs):
            random = torch.Generator().manual_seed(1_000_003 * run.seed + epoch)  # the same order for all engines and ranks
            losses = []
            for x, y in data.take(split.epoch(settings.batch, random), trainer.nodes, random.initial_seed()):
                losses.append(trainer.step((scale(x), y), lr_at(k, steps, settings.lr)).mean())
                k += 1
                bar.update()
            curve.append((mean_over_ranks(torch.stack(losses).mean()), accuracy(trainer.mean_model(), data, scale)))
            bar.set_postfix(loss=f"{curve[-1][0]:.3f}", accuracy=f"{curve[-1][1]:.2%}")
    seconds = time.perf_counter() - began
    nodes = [accuracy(model, data, scale) for model in trainer.node_models()]
    return Trained(curve, all_of_ranks(nodes), trainer.global_rounds() / steps, seconds)


@torch.no_grad()
def accuracy(model: nn.Module, data: Data, scale: Scale) -> float:
    """The accuracy on the test images."""
    was_training, correct, count = model.training, 0, 0
    model.eval()
    for x, y in data.test():
        correct += int((model(scale(x)).argmax(1) == y).sum())
        count += len(y)
    model.train(was_training)
    return correct / count
