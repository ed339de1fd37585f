"""Starts the processes of the demo, reads their results, and stops them at the end.

Each process sends its results through a pipe. If the pipe closes before the process has finished, the process has died.
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
from rumor.engines.processes.process_group import joined

TIMEOUT = 300.0  # seconds that a process waits for another. A busy machine takes minutes to start them; a death is noticed at once anyway
SILENCE = TIMEOUT + 15.0  # seconds without any message after which the processes hang


class ProcessError(Exception):
    """A process of the demo died, failed or hangs."""


@dataclass(frozen=True)
class Task:
    """The task of all processes: train with one method after the other, and evaluate after the `watched` steps."""

    methods: Sequence[Method]
    steps: int
    watched: set[int]
    seed: int


@dataclass(frozen=True)
class _Failure:
    """The error message of a process."""

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
        pass  # the parent has ended
    except Exception as error:
        pipe.send(_Failure(f"{type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    """Waits until the parent process ends, then ends this one."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


class Processes:
    """n processes in one gloo group. They are stopped at the end of the `with` block, however it ends."""

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
        # Only this process handles Ctrl-C, and stops the others, which inherit a blocked SIGINT. The resource tracker would unblock it, so
        # start the tracker first.
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for process, theirs in zip(self._processes, self._theirs, strict=True):
                process.start()
                theirs.close()  # now only the new process holds this end
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
        """Yields (number of the method, rank, point) as the processes send them, until all processes have finished."""
        for pipe, part in zip(self._pipes, digits, strict=True):
            try:
                pipe.send((task, part))
            except OSError:
                continue  # the process has died, which the loop below reports
        rank_of = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while rank_of:
            ready: list[Any] = connection.wait(list(rank_of), SILENCE)
            if not ready:
                raise ProcessError(
                    f"no process sent anything for {SILENCE:.0f} seconds: check whether the machine sleeps or is out of memory"
                )
            for pipe in ready:
                rank = rank_of[pipe]
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    message = _Failure("it ended before it had finished")
                if message is None:
                    del rank_of[pipe]
                elif isinstance(message, _Failure):
                    raise self._error(rank, message)
                else:
                    yield (message[0], rank, message[1])

    def _error(self, rank: int, failure: _Failure) -> ProcessError:
        """Names the process that was killed, if there is one. Otherwise reports the failure of `rank`."""
        time.sleep(0.3)  # until exit codes are known, and until a signal to the whole group has reached this process, too
        for victim, process in enumerate(self._processes):
            if process.exitcode is not None and process.exitcode < 0:
                name = signal.Signals(-process.exitcode).name
                return ProcessError(f"process {victim} of {self.n} was ended by {name}, so the others were stopped: run the demo again")
        return ProcessError(f"process {rank} of {self.n} failed: {failure.text}")
