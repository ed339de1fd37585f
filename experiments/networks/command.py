"""The shared parts of both studies' commands: options, processes, and the loop over the missing runs."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

from logistic.tables import Row, as_text
from networks import trials
from networks.engines import as_first_says
from networks.runs import ON_REQUEST, QUICK, Run, Tables
from networks.store import Finished, Settings, Store

SHOWN = ("topology", "H", "nodes", "split", "momentum")  # the settings of a run that are printed


def at_least_one(text: str) -> int:
    """Parses a whole number >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text}")
    return int(text)


def above_zero(text: str) -> float:
    """Parses a number > 0.

    >>> above_zero("1e-3")
    0.001
    >>> above_zero("nan")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: must be a number > 0, got nan
    """
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text}")
    return value


def share(text: str) -> float:
    """Parses a number >= 0 and < 1.

    >>> share("0.00"), share("0.2")
    (0.0, 0.2)
    """
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be a number >= 0 and < 1, got {text}")
    return value


def _number(text: str) -> float:
    """Parses a number; returns NaN if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def add_options(parser: argparse.ArgumentParser, tables: Tables, results: Path) -> None:
    """Adds the options that both studies have."""
    parser.add_argument("--table", nargs="+", choices=list(tables), help="tables of the paper, or ours; all if none is given")
    parser.add_argument("--method", nargs="+", metavar="NAME", help='methods of the tables, such as "Local SGD x3"; all if none is given')
    parser.add_argument(
        "--tune",
        nargs="+",
        type=above_zero,
        metavar="LR",
        help="try these learning rates on examples held out from training, not the test set, with one seed unless --seeds is given",
    )
    parser.add_argument("--seeds", type=at_least_one, help="number of seeds; as many as each table needs if not given")
    parser.add_argument(
        "--engine",
        choices=("simulated", "processes"),
        default="simulated",
        help="simulated: all nodes in this process; processes: one node per rank, started by torchrun",
    )
    parser.add_argument(
        "--nodes",
        type=at_least_one,
        help="number of nodes, instead of that of the tables; with --engine processes it is the number of ranks",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--minutes", type=above_zero, help="start no new run after this many minutes")
    parser.add_argument("--timeout", type=above_zero, default=600.0, help="seconds that processes wait for each other")
    parser.add_argument("--quick", action="store_true", help="run a small table with one seed and short runs")
    parser.add_argument("--out", type=Path, help=f"file for the results; {results} if not given, with --quick a file in the current folder")


def complete(options: argparse.Namespace, parser: argparse.ArgumentParser, tables: Tables, results: Path) -> None:
    """Fills in the defaults that depend on other options, and reports wrong options."""
    options.began = time.monotonic()
    options.seeds = options.seeds or (1 if options.quick or options.tune else None)
    options.table = options.table or ([QUICK] if options.quick else [name for name in tables if name not in ON_REQUEST])
    options.out = options.out or (Path(f"{results.stem}-quick.csv") if options.quick else results)
    if options.tune and options.lr is not None:
        parser.error(f"--tune tries its own learning rates: leave out --lr {options.lr:g}")
    names = list(dict.fromkeys(run.name for name in options.table for run in tables[name].runs))
    if unknown := [name for name in options.method or () if name not in names]:
        parser.error(f"--method {', '.join(unknown)}: not in table {', '.join(options.table)}, which has {', '.join(names)}")
    if options.engine == "simulated" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("every rank would simulate all nodes: use --engine processes, or start it without torchrun")
    if options.engine == "processes" and "RANK" not in os.environ:
        parser.error("--engine processes needs torchrun: run torchrun --nproc-per-node N, followed by this command")
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch can't use that here; --device cpu works everywhere")
    with suppress(OSError):
        options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.out.is_dir() or not options.out.parent.is_dir() or not os.access(options.out.parent, os.W_OK):
        parser.error(f"--out {options.out}: give a file in a folder that you can write to")


@contextmanager
def refusing() -> Iterator[None]:
    """Reports errors in the input files in one line, without a traceback."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error


@contextmanager
def processes(options: argparse.Namespace) -> Iterator[bool]:
    """Joins the process group with --engine processes. Yields whether this is the first rank."""
    if options.engine == "simulated":
        yield True
        return
    if options.device != "cpu":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # Plain "nccl": with "cpu:gloo,cuda:nccl" the Averager would send from host memory.
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl", timeout=datetime.timedelta(seconds=options.timeout))
    try:
        yield dist.get_rank() == 0
        dist.barrier()
    finally:
        dist.destroy_process_group()


@contextmanager
def stoppable(out: Path) -> Iterator[None]:
    """Reports Ctrl-C in one line, without a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(f"stopped: the finished runs are in {out}, and are not run again") from None


class Runner(Protocol):
    """Trains one run of a study."""

    examples: int  # number of training examples

    def __call__(self, run: Run) -> Finished: ...
    def settings(self, run: Run) -> Settings: ...
    def trainer_key(self, run: Run) -> tuple[object, ...]: ...  # runs with the same key share a trainer and its compiled code


RecipeT = TypeVar("RecipeT", bound=tuple[Any, ...])


def changed_by(options: argparse.Namespace, recipe: RecipeT) -> RecipeT:
    """Replaces what an option of the same name gives."""
    given = {name: getattr(options, name, None) for name in recipe._fields}  # type: ignore[attr-defined]
    return recipe._replace(**{name: value for name, value in given.items() if value is not None})  # type: ignore[attr-defined,no-any-return]


def run_missing(options: argparse.Namespace, tables: Tables, run_one: Runner, is_first: bool) -> None:
    """Trains all runs of the tables that are not in the results file yet. With --tune, once with each learning rate, into the trials."""
    for lr in options.tune or [options.lr]:
        options.lr = lr
        _run_missing(options, tables, run_one, is_first)


def _run_missing(options: argparse.Namespace, tables: Tables, run_one: Runner, is_first: bool) -> None:
    """Trains all runs that are not in the file yet. Runs that share a trainer come together, seed by seed.

    The first rank decides for all ranks which runs are missing and when to stop. Otherwise ranks with different files or clocks would
    wait for each other forever.
    """
    wanted = _wanted(options, tables)
    with refusing():
        _check_size(wanted, run_one)
        store = Store(trials.file_of(options.out) if options.tune else options.out, tables, run_one.settings)
    missing = [run for run in wanted if store.find(run) is None]
    missing = as_first_says(_grouped(missing, run_one))
    bars = tqdm(total=len(wanted), initial=len(wanted) - len(missing), unit=" runs", disable=not is_first)
    with stoppable(store.path), bars as bar:
        for run in missing:
            if as_first_says(options.minutes is not None and time.monotonic() - options.began > 60 * options.minutes):
                break
            bar.set_description(f"{run.name}, {run.topology}, {run.nodes} nodes, seed {run.seed}")
            finished = run_one(run)
            if is_first:
                store.add(run, finished)
            bar.update()
    rows = [_shown(run, row) for run in wanted if (row := store.find(run)) is not None]
    if is_first and rows:
        rate = f", learning rate {options.lr:g}" if options.tune else ""
        print(f"data: {run_one.settings(wanted[0]).data}{rate}\n{as_text(_telling_apart(rows))}")


def _grouped(runs: list[Run], run_one: Runner) -> list[Run]:
    """Puts runs that share a trainer together, seed by seed, in the order in which the tables first need the trainers."""
    first = {key: place for place, key in reversed(list(enumerate(map(run_one.trainer_key, runs))))}
    return sorted(runs, key=lambda run: (first[run_one.trainer_key(run)], run.seed))


def _check_size(wanted: list[Run], run_one: Runner) -> None:
    nodes, batch = max(((run.nodes, run_one.settings(run).batch) for run in wanted), key=math.prod)
    if nodes * batch > run_one.examples:
        raise ValueError(
            f"{nodes} nodes x --batch {batch} are more than the {run_one.examples} training examples: use fewer nodes or a smaller --batch"
        )


def _wanted(options: argparse.Namespace, tables: Tables) -> list[Run]:
    runs = [run for name in options.table for run in tables[name].all_runs(options.seeds)]
    if options.method:
        runs = [run for run in runs if run.name in options.method]
    if options.tune:  # a stretched run has the learning rate of the plain one
        runs = [run for run in runs if run.stretch == 1]
    nodes = dist.get_world_size() if dist.is_initialized() else options.nodes
    return list(dict.fromkeys(run if nodes is None else replace(run, nodes=nodes) for run in runs))


def _shown(run: Run, row: dict[str, str]) -> Row:
    """Formats a finished run for printing."""
    settings = {"method": run.name, **{name: "-" if (value := getattr(run, name)) is None else value for name in SHOWN}, "seed": run.seed}
    value = f"{100 * float(row['accuracy']):.2f} %" if row["accuracy"] else "-"
    return {**settings, "accuracy": value, "loss": f"{float(row['loss']):.4f}", "hours, modelled": f"{float(row['hours']):.2f}"}


def _telling_apart(rows: list[Row]) -> list[Row]:
    """Leaves out the settings that are the same in all rows.

    >>> _telling_apart([{"H": 3, "split": "iid", "loss": 1.0}, {"H": 6, "split": "iid", "loss": 1.0}])
    [{'H': 3, 'loss': 1.0}, {'H': 6, 'loss': 1.0}]
    """
    alike = {name for name in SHOWN if len({row.get(name) for row in rows}) == 1}
    return [{name: value for name, value in row.items() if name not in alike} for row in rows]
