"""Real processes for tests. They are forked (see warm.py), started once, and run many tasks, each with a deadline."""

from __future__ import annotations

import ctypes
import datetime
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import rumor.engines.processes.pending
import rumor.model.buckets
from tests import warm


def _serve(rank: int, n: int, rendezvous: str, timeout: float, pipe: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    rumor.model.buckets.SMALLEST_BYTES = rumor.model.buckets.SMALLEST_BYTES_ON_GPU = (
        160  # so that small models, too, are cut into several buckets
    )
    rumor.engines.processes.pending.SUM_BYTES = 400  # and summed in several messages, of one or two buckets
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=n, timeout=limit)
    while (task := pipe.recv()) is not None:
        function, arguments = task
        torch.manual_seed(0)
        try:
            pipe.send(("result", function(rank, *arguments)))
        except BaseException as error:
            pipe.send(("error", (type(error), str(error), traceback.format_exc())))
    dist.destroy_process_group()


def bytes_in_use() -> int:
    """Return the bytes that malloc has handed out and not taken back. Unlike the size of the process, this leaves out gaps in the heap."""
    libc = ctypes.CDLL(None)
    name, number = ("mallinfo2", ctypes.c_size_t) if hasattr(libc, "mallinfo2") else ("mallinfo", ctypes.c_int)  # before glibc 2.33
    call = getattr(libc, name)
    call.restype = type("mallinfo", (ctypes.Structure,), {"_fields_": [("sizes", number * 10)]})
    sizes = call().sizes
    return int(sizes[4] + sizes[7])  # hblkhd and uordblks: outside and inside the heap


class Cluster:
    """n processes with a gloo group between them."""

    def __init__(self, n: int, timeout: float = 60.0):
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = os.path.join(self._folder.name, "rendezvous")
        pipes = [warm.context.Pipe() for _ in range(n)]
        self._pipes = [ours for ours, _ in pipes]
        self.processes = [
            warm.context.Process(target=_serve, args=(rank, n, rendezvous, timeout, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()  # the process alone holds it now, so its death ends the pipe

    def run(self, function: Callable[..., Any], *arguments: Any, deadline: float = warm.DEADLINE) -> list[Any]:
        """Call function(rank, *arguments) in every process and return the results, by rank."""
        answers = self._answers(function, arguments, deadline)
        for rank, (kind, value) in enumerate(answers):
            assert kind == "result", f"rank {rank} raised\n{value[2]}"
        return [value for _, value in answers]

    def errors(self, function: Callable[..., Any], *arguments: Any, deadline: float = warm.DEADLINE) -> list[tuple[type, str]]:
        """Run a task that must fail on every rank, and return the type and text of each rank's error."""
        answers = self._answers(function, arguments, deadline)
        assert all(kind == "error" for kind, _ in answers), f"some ranks did not raise: {answers}"
        return [(value[0], value[1]) for _, value in answers]

    def survivors(self, victim: int, function: Callable[..., Any], *arguments: Any, deadline: float = warm.DEADLINE) -> dict[int, Any]:
        """Run a task in which the process of rank `victim` dies, and return the results of the others."""
        answers = self._answers(function, arguments, deadline, without=victim)
        self.processes[victim].join(10)
        assert not self.processes[victim].is_alive()
        assert all(kind == "result" for kind, _ in answers), answers
        ranks = [rank for rank in range(len(self.processes)) if rank != victim]
        return {rank: value for rank, (_, value) in zip(ranks, answers, strict=True)}

    def _answers(self, function: Callable[..., Any], arguments: tuple[Any, ...], deadline: float, without: int | None = None) -> list[Any]:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((function, arguments))
            except BrokenPipeError:
                raise RuntimeError(f"the process of rank {rank} has died before {function.__name__}") from None
        ends = time.monotonic() + deadline
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if rank == without:
                continue
            if not pipe.poll(max(0.0, ends - time.monotonic())):
                self.stop(kill=True)
                raise TimeoutError(f"rank {rank} did not answer within {deadline:.0f} s: {function.__name__} hangs")
            try:
                answers.append(pipe.recv())
            except EOFError:
                self.stop(kill=True)
                raise RuntimeError(f"the process of rank {rank} is gone: {function.__name__} has ended it") from None
        return answers

    def stop(self, kill: bool = False) -> None:
        for pipe, process in zip(self._pipes, self.processes, strict=True):
            if kill:
                process.kill()
            elif process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
