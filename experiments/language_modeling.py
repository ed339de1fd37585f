"""The paper's Table 11 (BERT): masked language modelling with LAMB on Wikipedia and novels, 8 nodes.

In the paper the loss of Gossip-PGA and Gossip-AGA ends near that of Parallel SGD; Gossip SGD ends higher, and Local SGD highest. With the
learning rate that is best for Parallel SGD, expect all four to end higher than it. With twice that rate, expect the methods that gossip to
end near it. All nodes are simulated exactly on one GPU. `--size large` is the paper's model with 330 M parameters.

    python experiments/language_modeling.py --data FOLDER --vocabulary FILE          # enwik8 and .txt files, also in subfolders
    python experiments/language_modeling.py --data FOLDER --vocabulary FILE --quick  # a tiny model, 4 nodes, 60 steps: a smoke test
    python experiments/language_modeling.py ... --lr 0.016 --method "Gossip-PGA" "Gossip SGD"      # part of the table, another rate
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
from networks.engines import OneOfMany, Simulated, Trainer, TrainerCache, device_name
from networks.hours import hours
from networks.runs import Run
from networks.store import Finished, Settings
from rumor.cost.paper import BERT
from text.data import LENGTH, Sequences, Special, masked, tokens
from text.model import SIZES, MaskedBert, loss_of
from text.study import LR, TABLES
from text.train import WEIGHT_DECAY, optimizer, train

RESULTS = Path(__file__).parent / "results" / "language_modeling.csv"
STEPS, QUICK_STEPS, BATCH = 6_000, 60, 32
QUICK_HELD_OUT = 64  # sequences


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    with command.processes(options) as is_first:
        with command.refusing():
            special = Special.of(options.vocabulary)
            text = Sequences.of(tokens(options.data, options.vocabulary, options.cache), special).to(torch.device(options.device))
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
        done = train(trainer, run, self.text, self.options.batch, self.settings(run).steps, self.options.lr)
        return Finished(
            accuracy=None,
            worst_node=max(done.nodes),
            loss=done.curve[-1][1],
            global_share=done.global_share,
            hours=hours(run, done.global_share, BERT),
            gpu_seconds=done.seconds,
            device=device_name(self.text.train.device),
            curve=done.curve,
        )

    def settings(self, run: Run) -> Settings:
        options = self.options
        epochs = max(1, round(options.steps * options.batch * run.nodes / len(self.text.train)))
        once = Settings(
            data=f"{len(self.text.train)} + {len(self.text.held_out)} sequences",  # identifies a folder: two rarely have the same numbers
            net=f"BERT {options.size}",
            epochs=epochs,
            steps=options.steps,
            batch=options.batch,
            lr=options.lr,
            weight_decay=WEIGHT_DECAY,
            smoothing=None,
        )
        return once.stretched(run.stretch)

    def trainer_key(self, run: Run) -> tuple[int, float]:
        return run.nodes, self._averages_gradients(run)

    @staticmethod
    def _averages_gradients(run: Run) -> bool:
        """Whether the run averages gradients. LAMB is not linear, so Parallel SGD averages gradients, not models."""
        return run.method == "Parallel SGD"

    def _new_trainer(self, run: Run) -> tuple[Trainer, nn.Module]:
        device, averages_gradients = self.text.train.device, self._averages_gradients(run)
        model = MaskedBert(self.options.size, self.text.special.size, LENGTH).to(device)
        if self.options.engine == "processes":
            return OneOfMany(model, device, loss_of, optimizer, averages_gradients), model
        rows = self.text.train[: run.nodes * self.options.batch].view(run.nodes, self.options.batch, LENGTH)
        like = masked(rows, self.text.special, torch.Generator(device).manual_seed(0))
        return Simulated(model, run.nodes, like, loss_of, optimizer, averages_gradients), model


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with text: enwik8 or .txt files")
    parser.add_argument("--vocabulary", type=Path, required=True, help="file with BERT's WordPieces, one per line")
    parser.add_argument("--cache", type=Path, default=Path("runs"), help="folder for the tokens")
    parser.add_argument("--size", choices=list(SIZES), help="size of the model; small if not given, with --quick tiny")
    parser.add_argument(
        "--steps",
        type=command.at_least_one,
        help=f"steps of a run that is not stretched; {STEPS} if not given, with --quick {QUICK_STEPS}",
    )
    parser.add_argument("--batch", type=command.at_least_one, default=BATCH, help="sequences per node and step")
    parser.add_argument("--lr", type=command.above_zero, default=LR, help="highest learning rate")
    command.add_options(parser, TABLES, RESULTS)
    options = parser.parse_args(arguments)
    options.steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    options.size = options.size or ("tiny" if options.quick else "small")
    command.complete(options, parser, TABLES, RESULTS)
    for name in ("data", "vocabulary"):
        if not getattr(options, name).exists():
            parser.error(f"--{name} {getattr(options, name)} does not exist")
    return options


if __name__ == "__main__":
    main()
