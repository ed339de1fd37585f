"""Processes that start at once: they are forked from a process that has already imported torch and rumor.

A new Python needs about two seconds of a core to import torch. The fork server of the standard library imports it once, and every
process of a test starts as a copy of the fork server. `run` and `torchrun` take the arguments of the commands `python` and `torchrun`.
Libraries in `preload` are imported once in a session, too. With `fresh=True` a new Python starts, as it does for a user.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
CLONE_NEWNET = 0x40000000  # from Linux's sched.h
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
DEADLINE = 600.0  # seconds; long, because a deadline costs nothing while things work, and a busy machine may let a process wait

both_ways = pytest.mark.parametrize("as_typed", [False, pytest.param(True, marks=pytest.mark.long)], ids=["forked", "as typed"])

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.preload"])


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that runs the code of this repository."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **more}


def run(
    arguments: Sequence[str | Path],
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
    fresh: bool = False,
    deadline: float = DEADLINE,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in `folder` and return its exit code and output.

    Args:
        arguments: A script, or -m and a module, or -c and code, then its own arguments.
        folder: Working directory. The default is the root of the repository.
        env: Environment variables to add to those of this process.
        preload: Modules that the process it is forked from has imported.
        fresh: Start a new Python instead of forking.
        deadline: Seconds after which the process is killed and TimeoutExpired is raised.
    """
    return _launched(arguments, [dict(env or {})], folder, preload, fresh, deadline)


def torchrun(
    n: int,
    arguments: Sequence[str | Path],
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
    fresh: bool = False,
    deadline: float = DEADLINE,
) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --standalone --nproc-per-node N ARGUMENTS` in `folder` and return its exit code and output.

    The processes have torchrun's environment variables. They find each other through a store in this process, as they do with torchrun,
    so nobody has to guess a free port. If one of them fails, the others are ended. With `fresh=True`, torchrun itself starts them.
    """
    if fresh:
        return run([*TORCHRUN, str(n), *arguments], folder, env, fresh=True, deadline=deadline)
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **(env or {}),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    of_ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n)]
    return _launched(arguments, of_ranks, folder, preload, False, deadline)


def default_signals() -> None:
    """Make this process react to signals, even if the tests run under nohup. Use it as the preexec_fn of a process that gets signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Job:
    """`python ARGUMENTS` in the background, ended at the end of the `with` block.

    Args:
        arguments: As for `run`.
        env: As for `run`.
        network: Network namespace to run in.
        fresh: As for `run`.

    Attributes:
        pid: Process id of that Python.
    """

    def __init__(self, arguments: Sequence[str | Path], env: Mapping[str, str], network: str | None = None, fresh: bool = False):
        self._folder = tempfile.TemporaryDirectory()
        self._output = Path(self._folder.name, "output")
        command, environments = [str(argument) for argument in arguments], [environment(**env)]
        self._process = context.Process(
            target=_launch, args=(command, environments, str(ROOT), str(self._output), os.devnull, network, fresh)
        )
        self._process.start()
        self.pid = self._first_child()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _first_child(self) -> int:
        ends = time.monotonic() + DEADLINE
        while time.monotonic() < ends and self._process.is_alive():
            if found := children(self._process.pid):
                return found[0]
            time.sleep(0.01)
        raise RuntimeError(f"it has not started, exit code {self._process.exitcode}")

    def wait(self, deadline: float = DEADLINE) -> int:
        """Wait for its end and return its exit code."""
        self._process.join(deadline)
        assert self._process.exitcode is not None, f"it is still running after {deadline:.0f} s"
        return self._process.exitcode

    def output(self) -> str:
        return self._output.read_text()

    def kill(self) -> None:
        """Kill it and all processes that it has started."""
        assert self._process.pid is not None
        _kill_group(self._process.pid)
        self._process.join(30)
        self._folder.cleanup()


def children(pid: int | None) -> list[int]:
    """Return the ids of the processes that process `pid` has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _launched(
    arguments: Sequence[str | Path],
    of_ranks: list[dict[str, str]],
    folder: Path | None,
    preload: Sequence[str],
    fresh: bool,
    deadline: float,
) -> subprocess.CompletedProcess[str]:
    command = [str(argument) for argument in arguments]
    server = _server(tuple(preload))
    with tempfile.TemporaryDirectory() as kept:
        out, err = Path(kept, "out"), Path(kept, "err")
        server.send((command, [environment(**own) for own in of_ranks], str(folder or ROOT), str(out), str(err), None, fresh))
        pid = server.recv()
        try:
            late = not server.poll(deadline)
        except BaseException:  # such as the end of the test's time
            _servers.pop(tuple(preload)).close()
            raise
        finally:
            _kill_group(pid)  # also if it has ended, because of what it may have left behind
        code = server.recv()
        said, complained = (path.read_text() if path.exists() else "" for path in (out, err))
    if late:
        raise subprocess.TimeoutExpired(command, deadline, said, complained)
    return subprocess.CompletedProcess(command, code, said, complained)


def _kill_group(pid: int) -> None:
    """Kill all processes of a group. They get 5 s to end by themselves, so that torchrun can end its processes, which it puts into other
    groups."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
        for _ in range(100):
            os.killpg(pid, 0)
            time.sleep(0.05)
        os.killpg(pid, signal.SIGKILL)


_servers: dict[tuple[str, ...], Connection] = {}


def _server(preload: tuple[str, ...]) -> Connection:
    """Return the pipe to the process that has imported `preload`. Start that process first if there is none."""
    if preload not in _servers:
        ours, theirs = context.Pipe()
        context.Process(target=_serve, args=(preload, theirs)).start()
        theirs.close()
        _servers[preload] = ours
    return _servers[preload]


@atexit.register
def _end_servers() -> None:
    for pipe in _servers.values():
        pipe.close()
    _servers.clear()


def _serve(preload: tuple[str, ...], pipe: Connection) -> None:
    """Fork a process for each task that comes through the pipe; answer with its process id, and with its exit code when it has ended."""
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        try:
            task = pipe.recv()
        except EOFError:  # the session has ended
            return
        if (pid := os.fork()) == 0:
            pipe.close()
            _launch(*task)
        pipe.send(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        pipe.send(code if code >= 0 else 128 - code)


def _launch(
    command: list[str],
    environments: list[dict[str, str]],
    folder: str,
    out: str,
    err: str,
    network: str | None,
    fresh: bool,
) -> None:
    """Fork one process for each environment and end with the first exit code that is not 0, or with 0."""
    os.setsid()
    if network is not None:
        with open(f"/var/run/netns/{network}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {network}")
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    running = {}
    for own in environments:
        if (pid := os.fork()) == 0:
            _become(command, own, folder, fresh)
        running[pid] = own
    code = 0
    while running:
        pid, status = os.wait()
        running.pop(pid, None)
        if code == 0 and (code := os.waitstatus_to_exitcode(status)) != 0:
            for other in running:
                os.kill(other, signal.SIGTERM)
            ends = time.monotonic() + 10
            while running and time.monotonic() < ends:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                running.pop(pid, None)
                time.sleep(0.02)
            break
    os._exit(code if code >= 0 else 128 - code)


def _become(command: list[str], own: dict[str, str], folder: str, fresh: bool) -> None:
    """Turn this process into the one that `python COMMAND` would start. Never returns."""
    code: Any = 0
    try:
        default_signals()
        os.chdir(folder)
        if fresh:
            os.execve(sys.executable, [sys.executable, *command], own)
        import numpy

        numpy.random.seed()  # otherwise all copies would draw the same numbers
        atexit._clear()  # they belong to the fork server
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(own)
        sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
        sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
        mine = {str(ROOT), ""}
        sys.path[:] = [*own["PYTHONPATH"].split(os.pathsep), *(path for path in sys.path if path not in mine)]
        try:
            _run(command)
        except SystemExit as end:
            code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    try:
        import threading

        threading._shutdown()  # type: ignore[attr-defined]  # Python, too, waits for threads at its end
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code or 0)


def _run(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path.insert(0, "")
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = list(command)
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")
