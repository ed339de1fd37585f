"""The demo's processes: started once, watched all the time, and never left behind.

What a process sees comes through its pipe; the pipe's end, before it has said that it is done, tells that it is gone.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process, resource_tracker
from typing import Any

import torch

from rumor.demo.digits import Digits
from rumor.demo.methods import Method
from rumor.demo.training import Point, train
from rumor.process_group import joined

TIMEOUT = 300.0  # seconds that a process waits for another: a busy machine takes minutes to start them all, and a death is noticed at once
SILENCE = TIMEOUT + 15.0  # after which nobody will say anything any more


class ProcessError(Exception):
    """A process of the demo died, failed or hangs."""


@dataclass(frozen=True)
class Task:
    """What all processes do: train with each method in turn."""

    methods: Sequence[Method]
    steps: int
    watched: set[int]
    seed: int


@dataclass(frozen=True)
class _Failure:
    """What went wrong, in the words of the process."""

    text: str


def _work(rank: int, n: int, rendezvous: str, pipe: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        task, digits = pipe.recv()
        with joined("gloo", TIMEOUT, init_method=f"file://{rendezvous}", rank=rank, world_size=n):
            for i, method in enumerate(task.methods):
                train(method, digits, rank, task.steps, task.watched, task.seed, lambda point, i=i: pipe.send((i, point)))  # type: ignore[misc]
        pipe.send(None)
    except (EOFError, BrokenPipeError):
        pass  # the command has ended
    except Exception as error:
        pipe.send(_Failure(f"{type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


class Processes:
    """n processes with a gloo group between them. They end with the block, however it ends."""

    def __init__(self, n: int):
        self.n = n
        self._folder = tempfile.TemporaryDirectory(prefix="rumor-demo-")
        spawn = get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(n)]
        self._pipes = [ours for ours, _ in pipes]
        self._theirs = [theirs for _, theirs in pipes]
        rendezvous = os.path.join(self._folder.name, "rendezvous")
        self._processes = [
            spawn.Process(target=_work, args=(rank, n, rendezvous, theirs), daemon=True, name=f"rumor demo {rank}")
            for rank, theirs in enumerate(self._theirs)
        ]

    def __enter__(self) -> Processes:
        # Ctrl-C is for the command alone, which ends its processes: they inherit that it is blocked. The tracker, which comes with the
        # first process, would unblock it
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for process, theirs in zip(self._processes, self._theirs, strict=True):
                process.start()
                theirs.close()  # the process has the other end now, and holds it alone
        except BaseException:
            self._stop()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join(10)
        self._folder.cleanup()

    def points(self, task: Task, digits: Sequence[Digits]) -> Iterator[tuple[int, int, Point]]:
        """(number of the method, rank, what it sees), as they come, until all processes are done."""
        for pipe, part in zip(self._pipes, digits, strict=True):
            try:
                pipe.send((task, part))
            except OSError:
                continue  # it is gone, which will be found below
        rank_of = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while rank_of:
            ready: list[Any] = connection.wait(list(rank_of), SILENCE)
            if not ready:
                raise ProcessError(f"no process has said anything for {SILENCE:.0f} seconds: is the machine asleep or out of memory?")
            for their in ready:
                rank = rank_of[their]
                try:
                    said = their.recv()
                except (EOFError, OSError):
                    said = _Failure("it ended before it was done")
                if said is None:
                    del rank_of[their]
                elif isinstance(said, _Failure):
                    raise self._error(rank, said)
                else:
                    yield (said[0], rank, said[1])

    def _error(self, rank: int, failure: _Failure) -> ProcessError:
        """Where a process was killed, that is what happened, whoever noticed first."""
        time.sleep(0.3)  # until the system has it on record; and a signal to all of us may be on its way to this process, too
        for victim, process in enumerate(self._processes):
            if process.exitcode is not None and process.exitcode < 0:
                name = signal.Signals(-process.exitcode).name
                return ProcessError(f"process {victim} of {self.n} was ended by {name}, so the others were stopped: run it again")
        return ProcessError(f"process {rank} of {self.n} failed: {failure.text}")
