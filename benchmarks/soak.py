"""A soak test: random nodes of a job of 8 are killed again and again, each is started again, and the others go on, or restart.

    OMP_NUM_THREADS=1 python benchmarks/soak.py --out benchmarks/results/soak.json          # 2,000 steps, a kill every 100 to 200 steps

Three contestants train the same model on the same digits with H = 6, each once undisturbed and once with the same kills:

- rumor.elastic: `rumor coordinator`, and examples/elastic.py as a plain process on each node;
- torchrun --max-restarts with examples/restart.py, which restarts all nodes from a checkpoint;
- torchft's LocalSGD with its Lighthouse (benchmarks/soak_torchft.py).

Two cores serve all nodes here, and a new Python needs seconds of them to import torch. So each step sleeps for --pause seconds, in the
place of a larger model.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from measure import machine, save
from soak_notes import Kill, findings, read_lives, read_note

ROOT = Path(__file__).parents[1]
H = 6  # of all contestants' job scripts
DONE = "accuracy of the mean model:"  # what a node prints at the end
LAST_MINUTE = 30.0  # seconds for the other nodes to end after the first one has


class Plan(NamedTuple):
    """Kill this node soon after this step: `part` of a period later."""

    step: int
    node: int
    part: float


@dataclass(frozen=True)
class Options:
    """What all contestants are told."""

    processes: int
    steps: int
    pause: float
    least: int  # nodes that must be there
    deadline: float


def plans(steps: int, processes: int, seed: int, apart: tuple[int, int] = (100, 200)) -> list[Plan]:
    """The same kills for each contestant."""
    chosen, found, step = random.Random(seed), [], 0
    while (step := step + chosen.randint(*apart)) <= steps - apart[0]:
        found.append(Plan(step, chosen.randrange(processes), chosen.random()))
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def popen(command: list[str], folder: Path, name: str, **env: str) -> subprocess.Popen[bytes]:
    """Start a process. What it prints goes to folder/NAME.out, its errors to folder/NAME.err."""
    with (folder / f"{name}.out").open("ab") as out, (folder / f"{name}.err").open("ab") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "error", **env})


class Nodes:
    """A server, and one plain process for each node. A node that ends early is started again at once."""

    def __init__(self, folder: Path, options: Options, kills: int, server: list[str], node: list[str]):
        self._folder, self._node = folder, node
        self._starts, self._most = 0, 10 + 2 * kills  # a node may fail on its own, but not for ever
        self._server = popen(server, folder, "server")
        self._processes = [self._start(i) for i in range(options.processes)]

    def _start(self, i: int) -> subprocess.Popen[bytes]:
        return popen(self._node, self._folder, f"node{i}")

    def pid(self, node: int) -> int | None:
        return self._processes[node].pid

    def is_over(self) -> bool:
        """Whether a node has reached the end. Starts nodes again that were lost before."""
        for i, process in enumerate(self._processes):
            if process.poll() is None:
                continue
            if DONE in said(self._folder, "out"):
                return True
            self._starts += 1
            if self._starts > self._most:
                raise RuntimeError(f"node {i} ends again and again, code {process.returncode}:\n{said(self._folder, 'err')[-2000:]}")
            self._processes[i] = self._start(i)
        return False

    def end(self) -> None:
        ends = time.monotonic() + LAST_MINUTE
        for process in self._processes:
            try:
                process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # it was not in yet, or waits for those that have ended

    def kill(self) -> None:
        for process in (*self._processes, self._server):
            process.kill()
            process.wait()


class Torchrun:
    """`torchrun --max-restarts`, which restarts all nodes if one is lost."""

    def __init__(self, folder: Path, options: Options, kills: int):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.processes)]
        command += ["--max-restarts", str(kills), str(ROOT / "examples" / "restart.py"), "--folder", str(folder / "checkpoints")]
        command += ["--timeout", "30", *job(folder, options)]
        self._folder, self._processes = folder, options.processes
        self._torchrun = popen(command, folder, "torchrun", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    def pid(self, node: int) -> int | None:
        children = Path(f"/proc/{self._torchrun.pid}/task/{self._torchrun.pid}/children")
        workers = sorted(map(int, children.read_text().split())) if children.exists() else []
        return workers[node] if len(workers) == self._processes else None  # else it is restarting

    def is_over(self) -> bool:
        if self._torchrun.poll() not in (None, 0):
            raise RuntimeError(f"torchrun ended with exit code {self._torchrun.returncode}:\n{said(self._folder, 'err')[-2000:]}")
        return self._torchrun.poll() == 0

    def end(self) -> None: ...

    def kill(self) -> None:
        self._torchrun.terminate()  # it ends its workers
        self._torchrun.wait()


def job(folder: Path, options: Options) -> list[str]:
    return ["--steps", str(options.steps), "--pause", str(options.pause), "--notes", str(folder)]


def elastic(folder: Path, options: Options, kills: int) -> Nodes:
    where, least = f"127.0.0.1:{free_port()}", ["--min-nodes", str(options.least)]
    server = [sys.executable, "-m", "rumor", "coordinator", "--bind", where, *least]
    return Nodes(
        folder,
        options,
        kills,
        server,
        [sys.executable, str(ROOT / "examples" / "elastic.py"), "--coordinator", where, *job(folder, options)],
    )


def torchft(folder: Path, options: Options, kills: int) -> Nodes:
    """With shorter time-outs than its own: with those (a minute for `join_timeout_ms`), every kill would cost a minute."""
    port = free_port()
    lighthouse = shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent)) or "torchft_lighthouse"
    server = [lighthouse, "--bind", f"[::]:{port}", "--min_replicas", str(options.least)]
    server += ["--join_timeout_ms", "1000", "--quorum_tick_ms", "50", "--heartbeat_timeout_ms", "1000"]
    node = [sys.executable, str(ROOT / "benchmarks" / "soak_torchft.py"), "--lighthouse", f"http://127.0.0.1:{port}"]
    return Nodes(folder, options, kills, server, [*node, "--min-nodes", str(options.least), "--H", str(H), *job(folder, options)])


CONTESTANTS: dict[str, Callable[[Path, Options, int], Nodes | Torchrun]] = {
    "rumor.elastic": elastic,
    "torchrun --max-restarts": Torchrun,
    "torchft LocalSGD": torchft,
}


def said(folder: Path, kind: str) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob(f"*.{kind}")))


def step_of(folder: Path, pid: int | None) -> int:
    """The last step that a process has noted."""
    path = folder / f"{pid}.txt"
    if not path.exists():
        return -1
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 200))
        whole = file.read().decode().rpartition("\n")[0].splitlines()
    return read_note(whole[-1]).step if whole else -1


def disturb(what: str, nodes: Nodes | Torchrun, folder: Path, options: Options, planned: list[Plan]) -> list[Kill]:
    """Carry out the plan, until the job is over."""
    kills: list[Kill] = []
    shown = 0
    while not nodes.is_over():
        if time.monotonic() > options.deadline:
            raise TimeoutError(f"{what} has not ended in time:\n{said(folder, 'err')[-2000:]}")
        time.sleep(0.05)
        plan = planned[len(kills)] if len(kills) < len(planned) else None
        step, node = furthest(nodes, folder, options.processes, 0 if plan is None else plan.node)
        if plan is not None and step >= plan.step:
            time.sleep(plan.part * H * options.pause)  # so that it hits anywhere in a period
            if (pid := nodes.pid(node)) is not None:
                kills.append(Kill(time.time(), node, pid, step_of(folder, pid)))
                os.kill(pid, signal.SIGKILL)
        if step >= shown:
            print(f"\r{what:40} step {step:5}, {len(kills):2} kills", end="", file=sys.stderr, flush=True)
            shown = step + options.steps // 20
    return kills


def furthest(nodes: Nodes | Torchrun, folder: Path, processes: int, first: int) -> tuple[int, int]:
    """The step of a node, and which it is: the one asked for, or the next one if that one is not back yet."""
    order = [(first + i) % processes for i in range(processes)]
    steps = {node: step_of(folder, nodes.pid(node)) for node in order}
    top = max(steps.values())
    return next((step, node) for node, step in steps.items() if step >= top - H)


def run(what: str, folder: Path, options: Options, planned: list[Plan]) -> dict[str, Any]:
    folder.mkdir()
    nodes = CONTESTANTS[what](folder, options, len(planned))
    try:
        kills = disturb(f"{what}, {'killed' if planned else 'undisturbed'}", nodes, folder, options, planned)
        nodes.end()
    finally:
        nodes.kill()
    found = findings(read_lives(folder), kills, options.processes, options.steps, H)
    accuracies = re.findall(rf"{DONE} ([\d.]+)%", said(folder, "out"))
    if not accuracies:
        raise RuntimeError(f"{what} printed no accuracy:\n{said(folder, 'err')[-2000:]}")
    found["accuracy"] = statistics.median(float(percent) / 100 for percent in accuracies)
    print(f"\r{what:24} {found['seconds']:5.0f} s, accuracy {found['accuracy']:.1%}, {len(kills)} kills, ", end="", file=sys.stderr)
    print(f"{found['restarts_of_survivors']} restarts of survivors", file=sys.stderr)
    return found


def compared(undisturbed: dict[str, Any], killed: dict[str, Any]) -> dict[str, Any]:
    """Both jobs of a contestant, and how much of its speed remains with the kills."""
    kept = {
        "throughput_kept": killed["steps_a_second_of_node_life"] / undisturbed["steps_a_second_of_node_life"],
        "job_speed_kept": killed["job_steps_a_second"] / undisturbed["job_steps_a_second"],
    }
    return {**kept, "undisturbed": undisturbed, "killed": killed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file for the results")
    parser.add_argument("--processes", type=int, default=8, help="number of nodes")
    parser.add_argument("--steps", type=int, default=2_000, help="number of steps")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds that each step sleeps, in the place of a larger model")
    parser.add_argument("--apart", type=int, nargs=2, default=(100, 200), metavar="STEPS", help="fewest and most steps between kills")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--only", choices=CONTESTANTS, action="append", help="contestant; repeat it for several (default: all)")
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit of the whole test")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))  # and end the nodes
    deadline = time.monotonic() + 60 * given.minutes
    options = Options(given.processes, given.steps, given.pause, given.processes // 2 + 1, deadline)
    planned = plans(given.steps, given.processes, given.seed, tuple(given.apart))
    of_run = {key: value for key, value in asdict(options).items() if key != "deadline"}
    results = {"machine": machine(), **of_run, "H": H, "seed": given.seed, "plan": [list(p) for p in planned], "found": {}}
    with tempfile.TemporaryDirectory() as folder:
        for i, what in enumerate(given.only or CONTESTANTS):
            jobs = [run(what, Path(folder) / f"{i}-{len(plan)}", options, plan) for plan in ([], planned)]
            results["found"][what] = compared(*jobs)
            save(given.out, results)


if __name__ == "__main__":
    main()
