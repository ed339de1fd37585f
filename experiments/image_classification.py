"""The paper's image tables (1, 7, 8, 9, 10, 15, 16) on CIFAR-10, and our own table with uneven labels.

Expect Gossip-PGA and Gossip-AGA to end near Parallel SGD. Expect Gossip SGD (most of all on a ring), OSGP, Local SGD and long periods to
end below it. All nodes are simulated exactly on one GPU.

    python experiments/image_classification.py --data FOLDER                   # binary files of CIFAR-10
    python experiments/image_classification.py --data FOLDER --table 7 9       # some tables
    python experiments/image_classification.py --data FOLDER --table "7 at 120 epochs" --epochs 40 --tune 0.25 0.5 1      # keeps the trials
    python experiments/image_classification.py --data FOLDER --quick           # Fashion-MNIST, 8 nodes: 3 minutes on two cores
    torchrun ... experiments/image_classification.py --data FOLDER --engine processes --net resnet50      # train/ and val/ of ImageNet

Every finished run is a row of --out and is not run again, so you can stop the command at any time and start it again.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import nn

from images.data import Data, Scale, load
from images.networks import NETWORKS
from images.split import split_of
from images.study import OF_NETWORK, PARALLEL, RECIPES, SHORT, TABLES, USUAL, Recipe, settings_of
from images.train import loss_of, optimizer, train
from networks import command
from networks.engines import OneOfMany, Simulated, Trainer, TrainerCache, as_first_says, device_name
from networks.hours import hours
from networks.runs import Run
from networks.store import Finished, Settings
from rumor.cost.paper import RESNET50

RESULTS = Path(__file__).parent / "results" / "image_classification.csv"


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    with command.processes(options) as is_first:
        with command.refusing():
            data = load(options.data, torch.device(options.device), options.side)
            data = data.for_trials() if options.tune else data
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
        done = train(trainer, run, data, self.scale, split, as_first_says(self.settings(run)))  # ranks may have different files of trials
        return Finished(
            accuracy=done.curve[-1].value,
            worst_node=min(done.nodes),
            loss=done.curve[-1].loss,
            global_share=done.global_share,
            hours=hours(run, done.global_share, RESNET50),
            gpu_seconds=done.seconds,
            device=device_name(data.device),
            curve=done.curve,
        )

    def settings(self, run: Run) -> Settings:
        net, images = NETWORKS[self.options.net].__name__, len(self.data.labels)
        return settings_of(run, self.recipe(run), self.data.name, images, net, self.options.out)

    def recipe(self, run: Run) -> Recipe:
        special = {**(SHORT if self.options.quick else {}), **OF_NETWORK.get(self.options.net, {})}
        recipe = command.changed_by(self.options, RECIPES[run.recipe]._replace(**special))
        return recipe if self.options.lr is None else recipe._replace(is_tuned=False)

    def trainer_key(self, run: Run) -> tuple[object, ...]:
        recipe = self.recipe(run)
        return run.nodes, run.momentum, recipe.batch, recipe.label_smoothing, recipe.weight_decay

    def _new_trainer(self, run: Run) -> tuple[Trainer, nn.Module]:
        sample, recipe = self.scale(self.data.sample()), self.recipe(run)
        model = NETWORKS[self.options.net](self.data.classes, sample.shape[-1]).to(self.data.device)
        model.start(sample)  # type: ignore[operator]
        make = partial(optimizer, momentum=run.momentum or 0.0, weight_decay=recipe.weight_decay)
        loss = partial(loss_of, smoothing=recipe.label_smoothing)
        if self.options.engine == "processes":
            return OneOfMany(model, self.data.device, loss, make), model
        order = torch.zeros(1, run.nodes, recipe.batch, dtype=torch.long)
        x, y = next(iter(self.data.take(order, range(run.nodes), 0)))
        return Simulated(model, run.nodes, (self.scale(x), y), loss, make), model


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10, Fashion-MNIST, or train/ and val/ by class")
    parser.add_argument("--net", choices=list(NETWORKS), help="network; small if not given, with --quick tiny")
    options_of_recipe = {
        "epochs": (command.at_least_one, "epochs of a run that is not stretched"),
        "batch": (command.at_least_one, "images per node and step"),
        "lr": (command.above_zero, "highest learning rate for 256 images of all nodes together; it grows with their number"),
        "weight_decay": (command.share, "weight decay, not for norms and biases"),
        "label_smoothing": (command.share, "label smoothing, >= 0 and < 1"),
    }
    ways = {"--quick": SHORT, **{f"--net {net}": values for net, values in OF_NETWORK.items()}}
    for name, (kind, what) in options_of_recipe.items():
        others = [f", with {way} {values[name]:g}" for way, values in ways.items() if name in values]
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            help=f"{what}; that of the table, mostly {getattr(USUAL, name):g}, if not given{''.join(others)}",
        )
    parser.add_argument("--side", type=command.at_least_one, default=224, help="width and height of an image in pixels, for folders")
    command.add_options(parser, TABLES, RESULTS)
    options = parser.parse_args(arguments)
    options.net = options.net or ("tiny" if options.quick else "small")
    command.complete(options, parser, TABLES, RESULTS)
    if options.batch == 1:
        parser.error("--batch 1: BatchNorm needs at least 2 images per node")
    if options.tune and not options.method:
        options.method = [PARALLEL.name]  # all methods have its learning rate
    return options


if __name__ == "__main__":
    main()
