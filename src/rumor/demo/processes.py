"""Starts the processes of the demo, gives them their jobs, reads what they send, and stops them at the end.

Each process sends what it finds through a pipe. If the pipe closes before the process has finished, the process has died.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process, resource_tracker
from typing import Any

import torch

from rumor.demo import network

TIMEOUT = 300.0  # seconds that a process waits for another. A busy machine takes minutes to start them; a death is noticed at once anyway
SILENCE = TIMEOUT + 15.0  # seconds without any message after which the processes hang

Job = Callable[[Callable[[Any], None]], object]  # what a process does; it gets a function that sends a value


class ProcessError(Exception):
    """A process of the demo died, failed or hangs."""


@dataclass(frozen=True)
class _Failure:
    """The error message of a process."""

    text: str


class _Ready:
    """Says that a process has started."""


class _Done:
    """Says that a process has finished its job."""


def _work(pipe: Any, is_isolated: bool) -> None:
    try:
        if is_isolated:  # before there are other threads, which would stay outside
            network.isolate()
        threading.Thread(target=_end_with_parent, daemon=True).start()
        torch.set_num_threads(1)
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # torch imports what its optimizers need, which takes a second
        pipe.send(_Ready())
        job: Job = pipe.recv()
        job(pipe.send)
        pipe.send(_Done())
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
    """Processes that wait for a job. They are stopped at the end of the `with` block, however it ends.

    Args:
        n: how many.
        rate: bytes per second of each one's link; None for no limit.

    Attributes:
        folder: a folder that they share until the end.
    """

    def __init__(self, n: int, rate: float | None = None):
        self.n, self._rate = n, rate
        self._temporary = tempfile.TemporaryDirectory(prefix="rumor-demo-")
        self.folder = self._temporary.name
        self._working: set[int] = set()
        spawn = get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(n)]
        self._pipes = [ours for ours, _ in pipes]
        self._theirs = [theirs for _, theirs in pipes]
        self._processes = [
            spawn.Process(target=_work, args=(theirs, rate is not None), daemon=True, name=f"rumor demo {i}")
            for i, theirs in enumerate(self._theirs)
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
        self._temporary.cleanup()

    def wait_until_ready(self) -> None:
        """Wait until all processes have started, and connect them if their links have a rate."""
        self._working = set(range(self.n))
        while self._working:
            for i, message in self._next_messages():
                assert isinstance(message, _Ready)
                self._working.remove(i)
        if self._rate is not None:
            network.connect([process.pid or 0 for process in self._processes], self._rate)

    def give(self, i: int, job: Job) -> None:
        """Let process i do a job."""
        self._working.add(i)
        with suppress(OSError):  # if the process has died, messages() says so
            self._pipes[i].send(job)

    def kill(self, i: int) -> None:
        """End process i by SIGKILL. The others go on."""
        self._processes[i].kill()
        self._working.discard(i)

    def messages(self) -> Iterator[tuple[int, Any]]:
        """Yield (process, value) as the processes send values, until all jobs are done."""
        while self._working:
            for i, message in self._next_messages():
                if i not in self._working:
                    continue  # it was killed meanwhile
                if isinstance(message, _Done):
                    self._working.remove(i)
                else:
                    yield i, message

    def _next_messages(self) -> list[tuple[int, Any]]:
        """Wait for messages of processes that are at work. If one has died or failed, raise an error."""
        of_pipe = {self._pipes[i]: i for i in self._working}
        ready: list[Any] = connection.wait(list(of_pipe), SILENCE)
        if not ready:
            raise ProcessError(f"no process sent anything for {SILENCE:.0f} seconds: check whether the machine sleeps or is out of memory")
        found = []
        for pipe in ready:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                message = _Failure("it ended before it had finished")
            if isinstance(message, _Failure):
                raise self._error(of_pipe[pipe], message)
            found.append((of_pipe[pipe], message))
        return found

    def _error(self, i: int, failure: _Failure) -> ProcessError:
        """Names the process that was killed, if there is one. Otherwise reports the failure of process i."""
        time.sleep(0.3)  # until exit codes are known, and until a signal to the whole group has reached this process, too
        for victim in sorted(self._working):
            code = self._processes[victim].exitcode
            if code is not None and code < 0:
                name = signal.Signals(-code).name
                return ProcessError(f"process {victim} of {self.n} was ended by {name}, so the others were stopped: run the demo again")
        return ProcessError(f"process {i} of {self.n} failed: {failure.text}")
