"""`rumor probe`: measures this cluster and writes a file that `rumor plan --probe` reads."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rumor.cli import model as users_model
from rumor.cli.table import paragraph, table
from rumor.cli.units import count, seconds, show_bytes, show_count, show_seconds
from rumor.cost import Workload
from rumor.probe import Probe, Step, Timing, measure, stand_in, takes_model
from rumor.process_group import ProcessGroup, joined
from rumor.schedule import check_whole

TORCHRUN = "torchrun --standalone --nproc-per-node 4 -m rumor probe"


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "probe",
        help="measure computing, gossip and all-reduce on your own cluster",
        description="Measures computing, gossip over each topology and all-reduce with the real engine, and writes what `rumor plan "
        f"--probe` reads. Start it with torchrun, on the cluster that you plan for: {TORCHRUN}",
    )
    parser.add_argument("--model", metavar="FILE.py:FUNCTION", help=f"your own model: {users_model.FORM}")
    parser.add_argument("--parameters", type=count, default=1_000_000, help="of the stand-in, an MLP, without --model (default 1M)")
    parser.add_argument("--batch", type=count, default=32, help="of the stand-in (default 32)")
    parser.add_argument("--repeats", type=count, default=10, help="samples of each time (default 10)")
    parser.add_argument("--backend", default="nccl" if torch.cuda.is_available() else "gloo", help="gloo or nccl (default: nccl on GPUs)")
    parser.add_argument("--timeout", type=seconds, default=60.0, help="the longest that a process waits for another (default 60s)")
    parser.add_argument("--out", default="probe.json", metavar="FILE", help="where to write (default probe.json)")
    parser.add_argument("--json", action="store_true", help="print what is written")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    n = int(os.environ.get("WORLD_SIZE", 0))
    if n < 2:
        found = f"torchrun started {n}" if n else "this one was not started by torchrun"
        raise ValueError(f"probe measures between at least 2 processes, but {found}: type {TORCHRUN}")
    for name in ("parameters", "batch", "repeats"):
        check_whole(f"--{name}", getattr(options, name), 1)
    if options.backend not in ("gloo", "nccl"):
        raise ValueError(f"--backend must be gloo or nccl, got {options.backend!r}")
    if not options.timeout > 0:
        raise ValueError(f"--timeout must be positive, got {options.timeout:g} s")
    if options.backend == "nccl" and not torch.cuda.is_available():
        raise ValueError("--backend nccl needs GPUs, and this machine shows none: use --backend gloo")
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    with joined(options.backend, options.timeout) as engine:
        is_first = engine.rank == 0
        made, problem = _prepared(options, device)
        try:
            engine.agree({} if made is None else _described(*made), problem)
        except (ValueError, RuntimeError):
            if is_first:
                raise
            raise SystemExit(2) from None  # all ranks have the same to say, and one line is enough
        assert made is not None
        probe = _measured(engine, options, *made)
        if is_first:
            probe.write(options.out)
            print(json.dumps(probe.as_dict(), indent=1) if options.json else _page(probe, options.out))
    return 0


def _prepared(options: argparse.Namespace, device: torch.device) -> tuple[tuple[nn.Module, Step] | None, ValueError | None]:
    """Model and step, tried once; or the problem, to be told to the others before they wait for this rank."""
    try:
        _check_writable(options.out)
        if not options.model:
            return stand_in(options.parameters, options.batch, device), None
        model, step = users_model.load(options.model)
        if step is None:
            raise ValueError(f"--model takes {users_model.FORM}; it returned a model alone, and without step there is nothing to time")
        step()
        Workload.of(model, compute=0.0)  # refuses a model without parameters
        return (model, _named(step, options.model)), None
    except (Exception, SystemExit) as error:  # step() is the user's code, and may raise anything
        return None, error if isinstance(error, ValueError) else ValueError(f"--model {options.model}: {type(error).__name__}: {error}")


def _described(model: nn.Module, step: Step) -> dict[str, str]:
    """What must be alike on all ranks, or their collectives would cross."""
    return {"model": ", ".join(str(list(p.shape)) for p in model.parameters()), "arguments of step": str(int(takes_model(step)))}


def _check_writable(out: str) -> None:
    """Before anything is measured."""
    folder = Path(out).absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--out {out}: there is no folder {folder} to write it to")
    if Path(out).is_dir():
        raise ValueError(f"--out {out} is a folder: name a file")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--out {out}: {folder} can't be written to ({error.strerror})") from None


def _named(step: Step, place: str) -> Step:
    """`step`, whose errors say whose they are; it takes a model if and only if `step` does."""

    @functools.wraps(step)
    def named(*model: nn.Module) -> object:
        try:
            return step(*model)
        except Exception as error:
            raise RuntimeError(f"step() of --model {place}: {type(error).__name__}: {error}") from error

    return named


def _measured(engine: ProcessGroup, options: argparse.Namespace, model: nn.Module, step: Step) -> Probe:
    def show(what: str, timing: Timing) -> None:
        if engine.rank == 0:
            print(f"{what:<28} {show_seconds(timing.median):>9}", file=sys.stderr, flush=True)

    size = show_count(options.parameters)
    name = options.model or f"an MLP of about {size} parameters, batch {options.batch}"
    return measure(engine, model, step, name, not options.model, options.repeats, show)


def _page(probe: Probe, path: str) -> str:
    named = {
        "compute": probe.compute,
        **({"DDP, computing included": probe.ddp} if probe.ddp else {}),
        **{f"gossip, {name}": timing for name, timing in probe.gossip.items()},
        "all-reduce": probe.all_reduce,
    }
    rows = [(what, *(show_seconds(t) for t in (timing.median, timing.fastest, timing.slowest))) for what, timing in named.items()]
    lines = [
        f"{probe.n} processes, {probe.backend} on {probe.device}, torch {probe.torch}: {probe.model}"
        f"{' (a stand-in: --model times your own)' if probe.is_stand_in else ''}, {show_count(probe.parameters)} parameters\n",
        table(("a step's", "median", "fastest", "slowest"), rows),
        f"\n{_link(probe)}",
        f"\nwritten to {path}; next: rumor plan --probe {path}",
    ]
    return "\n".join(lines)


def _link(probe: Probe) -> str:
    try:
        link = probe.link()
    except ValueError as error:
        return paragraph(str(error))
    predicted = link.all_reduce(probe.n, probe.parameters * probe.bytes_per_parameter)
    return "\n".join(
        [
            f"bandwidth {show_bytes(link.bandwidth)}/s ({link.bandwidth * 8 / 1e9:.3g} Gbit/s), latency {show_seconds(link.latency)}",
            paragraph(
                f"From these the time model makes {show_seconds(predicted)} of the all-reduce that took "
                f"{show_seconds(probe.all_reduce.median)}; the plan uses what was measured wherever it can."
            ),
        ]
    )
