"""Handshake: all ranks compare their set-up before the first step, so that each disagreement is one clear error on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from rumor.engines.processes import liveness
from rumor.engines.processes.transport import Transport, last_engine

LONG = 400  # characters of a value that is shown as it is


def agree(
    transport: Transport, setup: dict[str, str], problem: Exception | None = None, own: Sequence[liveness.Address | None] = ()
) -> None:
    """Raise on every rank unless all have the same set-up and no rank has a problem.

    This is also the first collective, which NCCL needs before any message. It settles the tags of this engine, and the addresses where
    processes listen (see liveness.py).

    Args:
        transport: the ranks.
        setup: values that must be the same on all ranks, by name.
        problem: why this rank can't go on, if it can't.
        own: the addresses of all processes of this node, if it is several.
    """
    doing = "comparing the set-up of all ranks"
    mine = (setup, str(problem) if problem else None, last_engine(), own or [liveness.address()])
    setups, problems, engines, addresses = zip(*transport.gather_objects(mine, doing), strict=True)
    transport.addresses = liveness.by_name(addresses)
    transport.agree_on_tags(engines, "receiving the messages of an Averager that was dropped before finish()")
    if problem:
        raise problem
    for rank, their_problem in enumerate(problems):
        if their_problem:
            raise RuntimeError(f"rank {rank} could not set up its Averager: {their_problem}")
    check_same(setups)


def compare(transport: Transport, values: dict[str, str], doing: str) -> None:
    """Raise on every rank, with both values, unless all have the same. Every rank waits until all have called it."""
    check_same(transport.gather_objects(values, doing))


def check_same(values: Sequence[dict[str, str]]) -> None:
    for rank, theirs in enumerate(values):
        for what, value in theirs.items():
            if value != (first := values[0].get(what)):
                here, there = _shortened(str(first), value)
                raise ValueError(f"ranks disagree on the {what}: rank 0 has {here}, rank {rank} has {there}")


def _shortened(one: str, other: str) -> tuple[str, str]:
    """Return two texts as they are, or, if they are long, the part around the place where they begin to differ."""
    if max(len(one), len(other)) <= LONG:
        return one, other
    differs = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start, end = max(0, differs - LONG // 8), differs + LONG // 4
    here, there = ("... " * (start > 0) + text[start:end] + " ..." * (end < len(text)) for text in (one, other))
    return here, there
