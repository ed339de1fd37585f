"""An elastic group for the time of a probe: rank 0 runs its coordinator, and all processes are its members. Every wait is bounded."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn

from rumor.averager import Averager
from rumor.engines.processes.process_group import ProcessGroup
from rumor.membership.coordinator import Coordinator
from rumor.membership.group import elastic
from rumor.membership.protocol import Address
from rumor.methods.algorithm import Algorithm

ENDS_WITHIN = 5.0  # seconds
DOING = "preparing an elastic group"


class ElasticError(Exception):
    """Why there is no elastic group. It is the same on all ranks."""


@contextmanager
def elastic_averager(engine: ProcessGroup, model: nn.Module, algorithm: Algorithm, timeout: float) -> Iterator[Averager]:
    """An Averager in an elastic group of all ranks. A collective; raises ElasticError on all ranks if there is none.

    Args:
        engine: the ranks.
        model: the model to average.
        algorithm: the method, for any number of nodes.
        timeout: seconds that a rank waits for another.
    """
    if engine.transport.backend != "gloo":
        raise ElasticError(f"members that come and go exchange over gloo, and this probe is of {engine.transport.backend}")
    with _quiet(), _coordinator(engine, timeout / 2) as address:
        averager = _joined(engine, model, algorithm, address, timeout)
        try:
            yield averager
            is_whole = averager.metrics.membership_changes == 1 and len(averager.members) == engine.n
            _agree(engine, None if is_whole else "its members changed while it was timed")
        finally:
            if not averager.has_left:  # in leaving_after()
                averager.leave()


@contextmanager
def leaving_after(averager: Averager, seconds: float) -> Iterator[None]:
    """Lets the node leave its group if the block takes longer. Its step() then raises an error instead of waiting."""
    timer = threading.Timer(seconds, averager.leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if averager.has_left:  # whatever step() made of it
            raise ConnectionError(
                f"lost touch with the others in an elastic group: one of them has not taken its steps within {seconds:.0f} s"
            ) from error
        raise
    finally:
        timer.cancel()


def _agree(engine: ProcessGroup, problem: str | None) -> None:
    """Raises the first problem of any rank on all ranks."""
    if problems := [said for said in engine.transport.gather_objects(problem, DOING) if said]:
        raise ElasticError(problems[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out the log of members that come and go."""
    log = logging.getLogger("rumor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _coordinator(engine: ProcessGroup, within: float) -> Iterator[str]:
    """Runs a coordinator in a thread of rank 0. Yields its address on all ranks."""
    server = _CoordinatorThread(engine.n) if engine.rank == 0 else None
    try:
        _agree(engine, server.start(within) if server else None)
        port = engine.transport.gather_objects(server.port if server else 0, DOING)[0]
        yield str(Address(os.environ.get("MASTER_ADDR", "127.0.0.1"), port))
    finally:
        if server:
            server.stop()


class _CoordinatorThread:
    def __init__(self, n: int):
        self._coordinator = Coordinator(Address("0.0.0.0", 0), n, log=lambda line: None)
        self._started, self._problem = threading.Event(), "its coordinator did not start in time"
        self._stop: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._thread = threading.Thread(target=self._run, name="rumor-probe-coordinator", daemon=True)
        self.port = 0

    def start(self, within: float) -> str | None:
        """Returns what is wrong, if anything is."""
        self._thread.start()
        return None if self._started.wait(within) and self.port else self._problem

    def stop(self) -> None:
        if self._stop is not None:
            loop, task = self._stop
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(task.cancel)
        self._thread.join(ENDS_WITHIN)

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            try:
                asyncio.run(self._serve())
            except OSError as error:
                self._problem = f"its coordinator can't listen ({error})"
                self._started.set()

    async def _serve(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._stop = asyncio.get_running_loop(), task
        await self._coordinator.serve(self._is_listening)

    def _is_listening(self, address: Address) -> None:
        self.port = address.port
        self._started.set()


def _joined(engine: ProcessGroup, model: nn.Module, algorithm: Algorithm, address: str, timeout: float) -> Averager:
    """Joins in a thread, since a node that joins would wait for the others for ever."""
    group = elastic(address, f"rank {engine.rank}", min_nodes=engine.n, timeout=timeout)
    within = timeout / 2  # a rank that has failed at once still waits for the others then
    device = next(model.parameters()).device
    lock, is_done, made, said, given_up = threading.Lock(), threading.Event(), list[Averager](), list[str](), False

    def join() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            averager = Averager(model, algorithm, group=group)
            with lock:
                if not given_up:
                    made.append(averager)
            if not made:
                averager.leave()
        except (Exception, SystemExit) as error:
            said.append(f"rank {engine.rank}: {' '.join(str(error).split())}")
        is_done.set()

    threading.Thread(target=join, name="rumor-probe-join", daemon=True).start()
    is_done.wait(within)
    with lock:
        given_up = not made
    problem = None if made else said[0] if said else f"not all ranks came to it at {address} within {within:g} s"
    try:
        _agree(engine, problem)
    except ElasticError:
        for averager in made:
            averager.leave()
        raise
    return made[0]
