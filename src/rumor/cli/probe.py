"""`rumor probe`: measures this cluster and writes a file for `rumor plan --probe`."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rumor.cli.plan_page import same_topologies
from rumor.cli.table import paragraph, table
from rumor.cli.units import count, seconds, show_bytes, show_count, show_seconds
from rumor.cli.user_model import FORM, load_model
from rumor.cost import TOPOLOGIES, Workload
from rumor.cost.network import in_python
from rumor.engines.processes.handshake import agree
from rumor.engines.processes.process_group import ProcessGroup, joined
from rumor.probe import Probe, Step, Timing, measure, stand_in, takes_model
from rumor.schedule import check_whole

TORCHRUN = "torchrun --standalone --nproc-per-node 4 -m rumor probe"


def add_probe(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "probe",
        help="measure computing, gossip, all-reduce and whole steps on your own cluster",
        description="Measures computing, DDP, gossip on each topology, all-reduce, and whole steps of Gossip-PGA (with 4 bits, with "
        "delay=1, in an elastic group) with the real engine, and writes a file for `rumor plan --probe`. Start it with torchrun on the "
        "cluster that you plan for.",
        epilog=f"example:\n  {TORCHRUN} --model train.py:build\n  rumor plan --probe probe.json",
    )
    parser.add_argument("--model", metavar="FILE.py:FUNCTION", help=f"your own model: {FORM}")
    parser.add_argument(
        "--parameters", type=count, default=1_000_000, help="size of the stand-in, an MLP that is used without --model (default 1M)"
    )
    parser.add_argument("--batch", type=count, default=32, help="batch size of the stand-in (default 32)")
    parser.add_argument("--repeats", type=count, default=10, help="number of samples of each time (default 10)")
    parser.add_argument("--backend", default="nccl" if torch.cuda.is_available() else "gloo", help="gloo or nccl (default: nccl on GPUs)")
    parser.add_argument("--timeout", type=seconds, default=60.0, help="longest time that a process waits for another (default 60s)")
    parser.add_argument("--out", default="probe.json", metavar="FILE", help="file to write (default probe.json)")
    parser.add_argument("--json", action="store_true", help="print the content of the file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    _check(options)
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    with joined(options.backend, options.timeout) as engine:
        is_first = engine.rank == 0
        prepared, problem = _prepare(options, device)
        try:
            agree(engine.transport, {} if prepared is None else _describe(*prepared), problem)
        except (ValueError, RuntimeError):
            if is_first:
                raise
            raise SystemExit(2) from None  # all ranks have the same error: print it once
        assert prepared is not None
        probe = _measure(engine, options, *prepared)
        if is_first:
            probe.write(options.out)
            print(json.dumps(probe.as_dict(), indent=1) if options.json else probe_page(probe, options.out))
    return 0


def _check(options: argparse.Namespace) -> None:
    n = int(os.environ.get("WORLD_SIZE", 0))
    if n < 2:
        found = f"torchrun started {n}" if n else "it was not started by torchrun"
        raise ValueError(f"rumor probe needs at least 2 processes, but {found}: run {TORCHRUN}")
    for name in ("parameters", "batch", "repeats"):
        check_whole(f"--{name}", getattr(options, name), 1)
    if options.backend not in ("gloo", "nccl"):
        raise ValueError(f"--backend must be gloo or nccl, got {options.backend!r}")
    if not options.timeout > 0:
        raise ValueError(f"--timeout must be positive, got {options.timeout:g} s")
    if options.backend == "nccl" and not torch.cuda.is_available():
        raise ValueError("--backend nccl needs GPUs, but torch finds none on this machine: use --backend gloo")


def _prepare(options: argparse.Namespace, device: torch.device) -> tuple[tuple[nn.Module, Step] | None, ValueError | None]:
    """Builds the model and runs its step once. Returns both, or the error, so that the other ranks learn about it and do not wait."""
    try:
        _check_writable(options.out)
        if not options.model:
            return stand_in(options.parameters, options.batch, device), None
        model, step = load_model(options.model)
        if step is None:
            raise ValueError(f"--model takes {FORM}; it returned a model without a step, so there is nothing to time")
        step()
        Workload.of(model, compute=0.0)  # raises if the model has no parameters
        return (model, _with_named_errors(step, options.model)), None
    except (Exception, SystemExit) as error:  # step() is the user's code and may raise anything
        return None, error if isinstance(error, ValueError) else ValueError(f"--model {options.model}: {type(error).__name__}: {error}")


def _describe(model: nn.Module, step: Step) -> dict[str, str]:
    """The properties that must be equal on all ranks. Otherwise their collectives would not match."""
    return {"model": ", ".join(str(list(p.shape)) for p in model.parameters()), "arguments of step": str(int(takes_model(step)))}


def _check_writable(out: str) -> None:
    """Raises an error if the file can't be written, before anything is measured."""
    folder = Path(out).absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--out {out}: there is no folder {folder}")
    if Path(out).is_dir():
        raise ValueError(f"--out {out} is a folder: name a file")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--out {out}: can't write to {folder} ({error.strerror})") from None


def _with_named_errors(step: Step, place: str) -> Step:
    """Wraps `step` so that its errors say where they come from. The wrapper takes a model if `step` does."""

    @functools.wraps(step)
    def named(*model: nn.Module) -> object:
        try:
            return step(*model)
        except Exception as error:
            raise RuntimeError(f"step() of --model {place}: {type(error).__name__}: {error}") from error

    return named


def _measure(engine: ProcessGroup, options: argparse.Namespace, model: nn.Module, step: Step) -> Probe:
    def show(what: str, timing: Timing) -> None:
        if engine.rank == 0:
            name = in_python(what) if what in TOPOLOGIES else what
            print(f"{show_seconds(timing.median):>8}  {name}", file=sys.stderr, flush=True)

    size = show_count(options.parameters)
    name = options.model or f"an MLP of about {size} parameters, batch {options.batch}"
    return measure(engine, model, step, name, not options.model, options.repeats, show, options.timeout)


def probe_page(probe: Probe, path: str) -> str:
    """Returns what `rumor probe` prints."""
    stand_in = " (a stand-in: use --model for your own)" if probe.is_stand_in else ""
    head = f"{probe.where}: {probe.model}{stand_in}, {show_count(probe.parameters)} parameters"
    lines = [paragraph(head), "", table(("time per step", "median", "fastest", "slowest"), _rows(probe)), "", _link(probe)]
    lines += [paragraph(same) for same in (same_topologies(probe.n),) if same]
    lines += [paragraph(f"left out: {what}: {why}") for what, why in probe.left_out.items()]
    return "\n".join([*lines, "", f"wrote {path}", f"next: rumor plan --probe {path}"])


def _rows(probe: Probe) -> list[tuple[str, ...]]:
    parts = {
        "computing": probe.compute,
        "all-reduce": probe.all_reduce,
        **{f"gossip, {in_python(name)}": t for name, t in probe.gossip.items()},
    }
    for bits, times in probe.coded.items():
        parts |= {f"all-reduce, {bits} bits": times.all_reduce, f"gossip, one peer, {bits} bits": times.gossip}
    whole = {"DDP": probe.ddp} if probe.ddp else {}
    whole |= {f"DDP, {bits} bits": timing for bits, timing in probe.coded_ddp.items()}
    blocks = {"parts of a step": parts, "whole steps": whole}
    for timings, extra in ((probe.steps, []), (probe.elastic, ["elastic"])):
        for text, timing in timings.items():
            method, *more = re.split(r", (?=bits=|delay=)", text.removesuffix(")"))
            blocks.setdefault(f"whole steps, {method})", {})[", ".join([*more, *extra]) or "float32"] = timing
    rows: list[tuple[str, ...]] = []
    for title, named in blocks.items():
        if named:
            rows += [(), (title,)]
        rows += [(f"  {what}", *(show_seconds(s) for s in (t.median, t.fastest, t.slowest))) for what, t in named.items()]
    return rows


def _link(probe: Probe) -> str:
    try:
        link = probe.link()
    except ValueError as error:
        return paragraph(str(error))
    predicted = link.all_reduce(probe.n, probe.parameters * probe.bytes_per_parameter)
    return "\n".join(
        [
            paragraph(
                f"bandwidth {show_bytes(link.bandwidth)}/s ({link.bandwidth * 8 / 1e9:.3g} Gbit/s), latency {show_seconds(link.latency)}"
            ),
            paragraph(
                f"With these two numbers the time model predicts {show_seconds(predicted)} for the all-reduce, which took "
                f"{show_seconds(probe.all_reduce.median)}. The plan uses measured times wherever it can."
            ),
        ]
    )
