"""The paper's Table 11 (BERT): masked language modelling with LAMB on Wikipedia and novels, 8 nodes.

In the paper the loss of Gossip-PGA and Gossip-AGA ends near that of Parallel SGD; Gossip SGD ends higher, and Local SGD highest. All nodes
are simulated exactly on one GPU. `--size large` is the paper's model with 330 M parameters. First find the best learning rate of each
method, on text that is neither trained on nor tested on. Then run the tables, which take these rates.

    python experiments/language_modeling.py --data FOLDER --vocabulary FILE --table 11 --tune 0.004 0.008 0.016      # keeps the trials
    python experiments/language_modeling.py --data FOLDER --vocabulary FILE          # enwik8 and .txt files, also in subfolders
    python experiments/language_modeling.py --data FOLDER --vocabulary FILE --quick  # a tiny model, 4 nodes, 60 steps: a smoke test
    python experiments/language_modeling.py ... --table 11 --batch 256 --method "Gossip-PGA" "Gossip SGD"      # part of a table
    torchrun ... experiments/language_modeling.py --data FOLDER --vocabulary FILE --engine processes

Every finished run is a row of --out and is not run again, so you can stop the command at any time and start it again.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import nn

from networks import command
from networks.engines import OneOfMany, Simulated, Trainer, TrainerCache, as_first_says, device_name
from networks.hours import hours
from networks.runs import Run
from networks.store import Finished, Settings
from rumor.cost.paper import BERT
from text.data import LENGTH, Sequences, Special, masked, tokens
from text.model import SIZES, MaskedBert, loss_of
from text.study import RECIPES, SHORT, TABLES, Recipe, settings_of
from text.train import optimizer, train

RESULTS = Path(__file__).parent / "results" / "language_modeling.csv"
QUICK_HELD_OUT = 64  # sequences


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    with command.processes(options) as is_first:
        with command.refusing():
            special = Special.of(options.vocabulary)
            text = Sequences.of(tokens(options.data, options.vocabulary, options.cache), special).to(torch.device(options.device))
        text = text.for_trials() if options.tune else text
        text = text.evaluated_on(QUICK_HELD_OUT) if options.quick else text
        command.run_missing(options, TABLES, Runner(text, options), is_first)


class Runner:
    """Trains one run after another."""

    def __init__(self, text: Sequences, options: argparse.Namespace):
        self.text, self.options, self.examples = text, options, len(text.train)
        self._trainers = TrainerCache()

    def __call__(self, run: Run) -> Finished:
        trainer, model = self._trainers.get(self.trainer_key(run), partial(self._new_trainer, run))
        torch.manual_seed(run.seed)
        model.start()  # type: ignore[operator]
        settings = as_first_says(self.settings(run))  # ranks may have different files of trials
        done = train(trainer, run, self.text, settings.batch, settings.steps, settings.lr)
        return Finished(
            accuracy=None,
            worst_node=max(done.nodes),
            loss=done.curve[-1].value,
            global_share=done.global_share,
            hours=hours(run, done.global_share, BERT),
            gpu_seconds=done.seconds,
            device=device_name(self.text.train.device),
            curve=done.curve,
        )

    def settings(self, run: Run) -> Settings:
        # identifies a folder: two rarely have the same numbers
        data = f"{len(self.text.train)} + {len(self.text.held_out)} sequences"
        return settings_of(run, self.recipe(run), data, self.options.size, self.options.out)

    def recipe(self, run: Run) -> Recipe:
        recipe = command.changed_by(self.options, RECIPES[run.recipe]._replace(**SHORT if self.options.quick else {}))
        return recipe if self.options.lr is None else recipe._replace(is_tuned=False)

    def trainer_key(self, run: Run) -> tuple[object, ...]:
        recipe = self.recipe(run)
        return run.nodes, self._averages_gradients(run), recipe.batch, recipe.optimizer

    @staticmethod
    def _averages_gradients(run: Run) -> bool:
        """Whether the run averages gradients. LAMB is not linear, so Parallel SGD averages gradients, not models."""
        return run.method == "Parallel SGD"

    def _new_trainer(self, run: Run) -> tuple[Trainer, nn.Module]:
        device, averages_gradients, recipe = self.text.train.device, self._averages_gradients(run), self.recipe(run)
        make = partial(optimizer, kind=recipe.optimizer)
        model = MaskedBert(self.options.size, self.text.special.size, LENGTH).to(device)
        if self.options.engine == "processes":
            return OneOfMany(model, device, loss_of, make, averages_gradients), model
        rows = self.text.train[: run.nodes * recipe.batch].view(run.nodes, recipe.batch, LENGTH)
        like = masked(rows, self.text.special, torch.Generator(device).manual_seed(0))
        return Simulated(model, run.nodes, like, loss_of, make, averages_gradients), model


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with text: enwik8 or .txt files")
    parser.add_argument("--vocabulary", type=Path, required=True, help="file with BERT's WordPieces, one per line")
    parser.add_argument("--cache", type=Path, default=Path("runs"), help="folder for the tokens")
    parser.add_argument("--size", choices=list(SIZES), help="size of the model; small if not given, with --quick tiny")
    usual, short = RECIPES[""], SHORT
    parser.add_argument(
        "--steps", type=command.at_least_one, help=f"steps of a run that is not stretched; {usual.steps}, with --quick {short['steps']}"
    )
    parser.add_argument(
        "--batch", type=command.at_least_one, help=f"sequences per node and step; that of the table, mostly {usual.batch}, if not given"
    )
    parser.add_argument(
        "--lr", type=command.above_zero, help=f"highest learning rate; each method's best of the trials, or {usual.lr:g}, if not given"
    )
    command.add_options(parser, TABLES, RESULTS)
    options = parser.parse_args(arguments)
    options.size = options.size or ("tiny" if options.quick else "small")
    command.complete(options, parser, TABLES, RESULTS)
    for name in ("data", "vocabulary"):
        if not getattr(options, name).exists():
            parser.error(f"--{name} {getattr(options, name)} does not exist")
    return options


if __name__ == "__main__":
    main()
