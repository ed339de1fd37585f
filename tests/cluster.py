"""Real processes for tests: started once, given many tasks, each with a deadline."""

from __future__ import annotations

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
import torch.multiprocessing as mp

import rumor.arrivals
import rumor.flat


def _serve(rank: int, n: int, rendezvous: str, timeout: float, pipe: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    rumor.flat.SMALLEST_BYTES = rumor.flat.SMALLEST_BYTES_ON_GPU = 160  # so that small models, too, are cut into several buckets
    rumor.arrivals.SUM_BYTES = 400  # and summed in several messages, of one or two buckets
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


class Cluster:
    """n processes with a gloo group between them. `run(f, *args)` calls f(rank, *args) on each and returns what each returned."""

    def __init__(self, n: int, timeout: float = 60.0):
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = os.path.join(self._folder.name, "rendezvous")
        spawn = mp.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(n)]
        self._pipes = [ours for ours, _ in pipes]
        self.processes = [
            spawn.Process(target=_serve, args=(rank, n, rendezvous, timeout, theirs), daemon=True) for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any, deadline: float = 90.0) -> list[Any]:
        answers = self._answers(function, arguments, deadline)
        for rank, (kind, value) in enumerate(answers):
            assert kind == "result", f"rank {rank} raised\n{value[2]}"
        return [value for _, value in answers]

    def errors(self, function: Callable[..., Any], *arguments: Any, deadline: float = 90.0) -> list[tuple[type, str]]:
        """For a task that must fail on every rank: (type, text) of each rank's error."""
        answers = self._answers(function, arguments, deadline)
        assert all(kind == "error" for kind, _ in answers), f"some ranks did not raise: {answers}"
        return [(value[0], value[1]) for _, value in answers]

    def survivors(self, victim: int, function: Callable[..., Any], *arguments: Any, deadline: float = 90.0) -> dict[int, Any]:
        """For a task in which the process of rank `victim` dies: what the others return."""
        answers = self._answers(function, arguments, deadline, without=victim)
        self.processes[victim].join(10)
        assert not self.processes[victim].is_alive()
        assert all(kind == "result" for kind, _ in answers), answers
        ranks = [rank for rank in range(len(self.processes)) if rank != victim]
        return {rank: value for rank, (_, value) in zip(ranks, answers, strict=True)}

    def _answers(self, function: Callable[..., Any], arguments: tuple[Any, ...], deadline: float, without: int | None = None) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, arguments))
        ends = time.monotonic() + deadline
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if rank == without:
                continue
            if not pipe.poll(max(0.0, ends - time.monotonic())):
                self.stop(kill=True)
                raise TimeoutError(f"rank {rank} did not answer within {deadline:.0f} s: {function.__name__} hangs")
            answers.append(pipe.recv())
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
