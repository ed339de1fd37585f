"""The loop of `averager.join`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from rumor.engines.processes.local_group import LocalGroup
from rumor.methods.runner import Runner

Batch = TypeVar("Batch")


def batches_that_all_have(node: LocalGroup, runner: Runner, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield `batches` for as long as every node has one. The next vote travels while this batch trains."""
    end, ahead, vote = object(), iter(batches), node.vote()
    following: Any = next(ahead, end)
    try:
        vote.ask(node.all_of(following is not end), runner.steps_begun)
        while vote.is_unanimous():
            batch, following = following, next(ahead, end)
            vote.ask(node.all_of(following is not end), runner.steps_begun)
            yield batch
    finally:
        vote.leave()
