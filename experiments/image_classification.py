"""The paper's image tables (1, 7, 8, 9, 10, 15, 16) on CIFAR-10, and our own table with uneven labels.

Expect Gossip-PGA and Gossip-AGA to end near Parallel SGD. Expect Gossip SGD (most of all on a ring), OSGP, Local SGD and long periods to
end below it. All nodes are simulated exactly on one GPU.

    python experiments/image_classification.py --data FOLDER                   # binary files of CIFAR-10
    python experiments/image_classification.py --data FOLDER --table 7 9       # some tables
    python experiments/image_classification.py --data FOLDER --quick           # Fashion-MNIST, 8 nodes: 3 minutes on two cores
    torchrun ... experiments/image_classification.py --data FOLDER --engine processes --net resnet50      # train/ and val/ of ImageNet

Every finished run is a row of --out and is not run again, so you can stop the command at any time and start it again.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from images.data import Data, Scale, load
from images.networks import NETWORKS
from images.split import split_of
from images.study import TABLES
from images.train import SMOOTHING, WEIGHT_DECAY, loss_of, optimizer, train
from networks import command
from networks.engines import OneOfMany, Simulated, Trainer, TrainerCache, device_name
from networks.hours import hours
from networks.runs import Run
from networks.store import Finished, Settings
from rumor.cost.paper import RESNET50

RESULTS = Path(__file__).parent / "results" / "image_classification.csv"
EPOCHS, QUICK_EPOCHS, BATCH = 40, 2, 32
IMAGES = 256  # --lr is for this many images per step; it grows with the total batch of all nodes (linear scaling)


class Recipe(NamedTuple):
    """Default values of options."""

    lr: float  # the highest learning rate, for 256 images per step
    weight_decay: float
    label_smoothing: float


USUAL = Recipe(0.5, WEIGHT_DECAY, SMOOTHING)  # the learning rate was tuned once, for Parallel SGD with 32 nodes x 32 images
SHORT = Recipe(4.0, WEIGHT_DECAY, SMOOTHING)  # for --quick, which has smaller batches and shorter runs
RESNET = Recipe(0.1, 1e-4, 0.1)  # the usual values on ImageNet
PERCEPTRON = Recipe(0.2, 1e-4, 0.0)  # tuned like USUAL, on Fashion-MNIST with 16 nodes x 32 images


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    with command.processes(options) as is_first:
        with command.refusing():
            data = load(options.data, torch.device(options.device), options.side)
        command.run_missing(options, TABLES, Runner(data, options), is_first)


class Runner:
    """Trains one run after another."""

    def __init__(self, data: Data, options: argparse.Namespace):
        self.data, self.options, self.scale, self.examples = data, options, Scale(data), len(data.labels)
        self._trainers = TrainerCache()

    def __call__(self, run: Run) -> Finished:
        data = self.data
        trainer, model = self._trainers.get(self.trainer_key(run), partial(self._new_trainer, run))
        torch.manual_seed(run.seed)
        model.start(self.scale(data.sample()))  # type: ignore[operator]
        split = split_of(run.split, data.labels, run.nodes, run.seed)
        done = train(trainer, run, data, self.scale, split, self.settings(run))
        return Finished(
            accuracy=done.curve[-1][1],
            worst_node=min(done.nodes),
            loss=done.curve[-1][0],
            global_share=done.global_share,
            hours=hours(run, done.global_share, RESNET50),
            gpu_seconds=done.seconds,
            device=device_name(data.device),
            curve=done.curve,
        )

    def settings(self, run: Run) -> Settings:
        options, together = self.options, run.nodes * self.options.batch
        once = Settings(
            data=self.data.name,
            net=NETWORKS[options.net].__name__,
            epochs=options.epochs,
            steps=options.epochs * (len(self.data.labels) // together),
            batch=options.batch,
            lr=options.lr * together / IMAGES,
            weight_decay=options.weight_decay,
            smoothing=options.label_smoothing,
        )
        return once.stretched(run.stretch)

    def trainer_key(self, run: Run) -> tuple[int, float]:
        return run.nodes, run.momentum or 0.0

    def _new_trainer(self, run: Run) -> tuple[Trainer, nn.Module]:
        sample = self.scale(self.data.sample())
        model = NETWORKS[self.options.net](self.data.classes, sample.shape[-1]).to(self.data.device)
        model.start(sample)  # type: ignore[operator]
        make = partial(optimizer, momentum=run.momentum or 0.0, weight_decay=self.options.weight_decay)
        loss = partial(loss_of, smoothing=self.options.label_smoothing)
        if self.options.engine == "processes":
            return OneOfMany(model, self.data.device, loss, make), model
        order = torch.zeros(1, run.nodes, self.options.batch, dtype=torch.long)
        x, y = next(iter(self.data.take(order, range(run.nodes), 0)))
        return Simulated(model, run.nodes, (self.scale(x), y), loss, make), model


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10, Fashion-MNIST, or train/ and val/ by class")
    parser.add_argument(
        "--epochs",
        type=command.at_least_one,
        help=f"epochs of a run that is not stretched; {EPOCHS} if not given, with --quick {QUICK_EPOCHS}",
    )
    parser.add_argument("--batch", type=command.at_least_one, default=BATCH, help="images per node and step")
    parser.add_argument("--net", choices=list(NETWORKS), help="network; small if not given, with --quick tiny")
    about = (
        "highest learning rate for 256 images of all nodes together; it grows with their number",
        "weight decay, not for norms and biases",
        "label smoothing, >= 0 and < 1",
    )
    types = (command.above_zero, command.share, command.share)
    for name, what, kind, *values in zip(Recipe._fields, about, types, USUAL, SHORT, RESNET, PERCEPTRON, strict=True):
        usual = "{:g} if not given, with --quick {:g}, with --net resnet50 {:g}, with --net mlp {:g}".format(*values)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"{what}; {usual}")
    parser.add_argument("--side", type=command.at_least_one, default=224, help="width and height of an image in pixels, for folders")
    command.add_options(parser, TABLES, RESULTS)
    options = parser.parse_args(arguments)
    options.net = options.net or ("tiny" if options.quick else "small")
    options.epochs = options.epochs or (QUICK_EPOCHS if options.quick else EPOCHS)
    recipe = {"resnet50": RESNET, "mlp": PERCEPTRON}.get(options.net, SHORT if options.quick else USUAL)
    for name, value in recipe._asdict().items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    command.complete(options, parser, TABLES, RESULTS)
    if options.batch < 2:
        parser.error("--batch 1: BatchNorm needs at least 2 images per node")
    return options


if __name__ == "__main__":
    main()
