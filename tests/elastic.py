"""Jobs of real processes whose nodes die, hang, leave and join, and a check of every global average that they make.

Each node adds a number of its own to its model in every step, and writes what it had before and after each global average. `check_means`
then recomputes every average from the members that took part.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import math
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rumor
from rumor.averager.elastic import Elastic
from rumor.averager.job_state import JobState
from rumor.engines.processes import gloo_group
from rumor.engines.processes.transport import Transport
from rumor.membership import limits
from rumor.membership.coordinator import Coordinator
from rumor.membership.protocol import Address
from rumor.methods.runner import Runner
from tests import warm

METHODS = {
    "pga": lambda: rumor.gossip_pga(rumor.one_peer_exponential, H=4),
    "ring": lambda: rumor.gossip_pga(rumor.ring, H=4),
    "delay": lambda: rumor.gossip_pga(rumor.one_peer_exponential, H=4, delay=1),
    "4 bits, delay": lambda: rumor.gossip_pga(rumor.one_peer_exponential, H=4, bits=4, delay=1),
    "8 bits": lambda: rumor.gossip_pga(rumor.one_peer_exponential, H=4, bits=8),
    "aga": lambda: rumor.gossip_aga(rumor.one_peer_exponential, warmup=8, H_init=3, H_max=6),
    "local": lambda: rumor.local_sgd(H=4),
    "parallel": lambda: rumor.parallel_sgd(),
    "slowmo": lambda: rumor.slowmo(rumor.one_peer_exponential, H=4),
    "diloco": lambda: rumor.diloco(H=4),
}


class Model(torch.nn.Module):
    """A few numbers in several tensors, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.b = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
        self.register_buffer("c", torch.zeros(2, dtype=torch.float64))

    def flat(self) -> list[float]:
        return torch.cat([self.a.detach(), self.b.detach().reshape(-1), self.c]).tolist()


def node(address: str, name: str, folder: str, options: dict[str, Any]) -> None:
    """One node, or one rank of it under torchrun. It writes a line for each step to folder/NAME."""
    if rank := int(os.environ.get("LOCAL_RANK", 0)):
        name = f"{name}.{rank}"
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    limits.ALONE_AFTER = options.get("alone_after", limits.ALONE_AFTER)
    limits.SILENCE = options.get("silence", limits.SILENCE)
    output = os.open(f"{folder}/{name}.err", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 2)
    model = Model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    averaged_by: list[list[str]] = []
    _record_members(averaged_by)
    _plan_death(options.get("die"))
    slow_from, hangs_at = options.get("slow_from", math.inf), options.get("hangs_at")
    method = METHODS[options.get("method", "pga")]()
    local_group, wrapped = None, model
    if "local_timeout" in options or "local_rank" in options:  # a node of several ranks, under torchrun or of two
        within = datetime.timedelta(seconds=options.get("local_timeout", 60))
        meeting = {"init_method": f"file://{folder}/{name.split('.')[0]}.meeting", "rank": options.get("local_rank"), "world_size": 2}
        dist.init_process_group("gloo", timeout=within, **(meeting if "local_rank" in options else {}))
        local_group = dist.group.WORLD
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    group = rumor.elastic(address, name, options.get("min_nodes", 1), options.get("timeout"), drop_slow=options.get("drop_slow"))
    try:
        state = options.get("average_state")
        averager = rumor.Averager(wrapped, method, group=group, local_group=local_group, optimizer=opt, average_state=state)
    except (rumor.RefusedError, rumor.JobEndedError) as error:
        Path(folder, f"{name}.refused").write_text(str(error))
        raise
    own = 1.0 + sum(map(ord, name.split(".")[0])) % 97
    ends_at = Path(folder, "ends_at")
    with open(f"{folder}/{name}", "a", buffering=1) as file:
        file.write(json.dumps({"joined": averager.steps, "after": model.flat(), "momentum": _momentum(opt)}) + "\n")
        while averager.steps < (int(ends_at.read_text()) if ends_at.exists() else options["steps"]):
            k = averager.steps
            for p in model.parameters():
                p.grad = torch.full_like(p, own * (1 + k % 3))
            opt.step()
            model.c += own
            time.sleep(options.get("pause", 0.01) * (10 if k >= slow_from else 1))
            if k == options.get("nan_at"):
                model.a.data.fill_(math.nan)
            if k == hangs_at:
                time.sleep(600)  # the thread of its link goes on
            is_global = averager.replica.runner.is_next_global
            if is_global:
                file.write(json.dumps({"averages": k, "before": model.flat()}) + "\n")
            averaged_by.clear()
            averager.step(torch.tensor(1.0 / (1 + k)), lr=0.01)
            row = {"k": k, "now": averager.steps, "members": averager.members, "time": time.monotonic()}
            if is_global or averager.steps != k + 1:
                row |= {"by": averaged_by[-1] if averaged_by else None, "after": model.flat()}
            file.write(json.dumps(row) + "\n")
        averager.finish()
        file.write(json.dumps({"finished": averager.steps, "after": model.flat(), "momentum": _momentum(opt)}) + "\n")


def _momentum(opt: torch.optim.Optimizer) -> list[float]:
    return [float(state["momentum_buffer"].sum()) for state in opt.state.values() if state.get("momentum_buffer") is not None]


def _record_members(averaged_by: list[list[str]]) -> None:
    """Note who takes part in each global average that arrives."""
    enter, arrive = Elastic._enter, Runner.arrive
    members: list[list[str]] = [[]]

    def entered(self: Elastic, offer: Any) -> bool | None:
        result = enter(self, offer)
        members[0] = [peer.name for peer in offer.members]
        return result

    def arrived(self: Runner) -> None:
        arrive(self)
        averaged_by.append(members[0])

    Elastic._enter, Runner.arrive = entered, arrived  # type: ignore[method-assign]


def _plan_death(plan: dict[str, Any] | None) -> None:
    """Let this process kill itself: {"where": ..., "after": how many times it has got there before}."""
    if plan is None:
        return
    places = {
        "sending": (Transport, "send", "after"),
        "averaging": (Transport, "sum", "after"),
        "arriving": (Runner, "arrive", "after"),
        "connecting": (gloo_group.GlooGroup, "__init__", "before"),
        "handing over": (JobState, "of_job", "after"),
        "taking over": (JobState, "take_over", "before"),
        "attaching": (Elastic, "_attach", "after"),
    }
    owner, name, when = places[plan["where"]]
    original, left = getattr(owner, name), [plan["after"]]

    def fatal(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, fatal)


class Job:
    """A coordinator in a thread, and nodes that are processes."""

    def __init__(self, folder: Path, steps: int | None = None, min_nodes: int = 1, **options: Any):
        """`steps`: when the nodes end. None: they train until `finish` has seen all of them, however slow the machine is."""
        self.folder, self._options = folder, {"steps": steps or 10**9, **options}
        self._is_open = steps is None
        self.lines: list[str] = []
        self.nodes: dict[str, Any] = {}
        self.coordinator: Coordinator | None = None
        self._min_nodes = min_nodes
        self._usual = limits.JOIN_WINDOW, limits.START_GRACE
        self.address = self.start_coordinator(Address("127.0.0.1", 0), grace=0.0)

    def start_coordinator(self, bind: Address, grace: float = 1.5) -> Address:
        started = threading.Event()
        limits.START_GRACE = grace
        limits.JOIN_WINDOW = 0.0
        self.coordinator = Coordinator(bind, self._min_nodes, self.lines.append)

        async def serve() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            assert self.coordinator is not None
            await self.coordinator.serve(lambda _: started.set())

        def run() -> None:
            with suppress(asyncio.CancelledError):
                asyncio.run(serve())

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert started.wait(30)
        return self.coordinator.address

    def stop_coordinator(self) -> None:
        """End it as if its process was killed: all connections close."""
        assert self.coordinator is not None

        def stop() -> None:
            assert self._task is not None
            self._task.cancel()
            for connection in list(self.coordinator._connections.values()):  # type: ignore[union-attr]
                connection.writer.transport.abort()

        self._loop.call_soon_threadsafe(stop)
        self._thread.join(30)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.nodes.values():
            process.kill()
        for process in self.nodes.values():
            process.join(30)
        self.stop_coordinator()
        limits.JOIN_WINDOW, limits.START_GRACE = self._usual

    def start(self, *names: str, **options: Any) -> None:
        for name in names:
            arguments = (str(self.address), name, str(self.folder), {**self._options, **options})
            self.nodes[name] = warm.context.Process(target=node, args=arguments, daemon=True)
            self.nodes[name].start()

    def begin(self, *names: str, **options: Any) -> None:
        """Start the first nodes, which begin together."""
        limits.JOIN_WINDOW = 1_000.0
        self.start(*names, **options)
        self.wait_until_here(*self.nodes)
        limits.JOIN_WINDOW = 0.0

    def wait_until_here(self, *names: str) -> None:
        """Wait until these nodes wait for the first epoch: one that has only said its name is left out of it."""

        def waiting() -> set[str]:
            assert self.coordinator is not None
            return {node.name for node in list(self.coordinator.roster.nodes.values()) if node.ready is not None}

        self.wait(lambda: all(f"{name} is here" in self.lines for name in names) and waiting() >= {*names}, f"{names} are here")

    def signal(self, name: str, number: int) -> None:
        os.kill(self.nodes[name].pid, number)

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def last_row(self, name: str) -> dict[str, Any]:
        """Return the last row with the members and the step."""
        path = self.folder / name
        if not path.exists():
            return {}
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 2**13))
            lines = file.read().decode().splitlines()
        return next((json.loads(line) for line in reversed(lines) if line.startswith('{"k"') and line.endswith("}")), {})

    def step_of(self, name: str) -> int:
        return int(self.last_row(name).get("now", -1))

    def wait_until(self, name: str, step: int) -> None:
        self.wait(lambda: self.step_of(name) >= step, f"{name} reaches step {step}")

    def wait(self, is_true: Any, what: str, deadline: float = 120.0) -> None:
        ends = time.monotonic() + deadline
        while not is_true():
            assert time.monotonic() < ends, f"{what}: not within {deadline:.0f} s. {self.story()}"
            time.sleep(0.02)

    def story(self) -> str:
        """What the coordinator said, and where each node is."""
        where = {name: (self.step_of(name), process.exitcode) for name, process in self.nodes.items()}
        errors = {path.stem: path.read_text()[-600:] for path in self.folder.glob("*.err") if path.read_text()}
        return f"{self.lines[-30:]} {where} {errors}"

    def end_in(self, steps: int) -> None:
        """Let the job end so many steps after its fastest node, in the place of a number of steps that was given before."""
        written = self.folder / "ends_at.new"
        written.write_text(str(max(self.step_of(name) for name in self.nodes) + steps))
        written.rename(self.folder / "ends_at")

    def finish(self, *names: str, deadline: float = 120.0, more: int = 60) -> None:
        """Wait for these nodes to end well, all with the same model. A job without an end first goes on for so many `more` steps."""
        if self._is_open:
            nodes = {name.split(".")[0] for name in names}
            self.wait(lambda: all(nodes <= {*self.last_row(name).get("members", [])} for name in names), f"{nodes} train together")
            self.end_in(more)
        for name in names:
            self.nodes[name].join(deadline)
            assert self.nodes[name].exitcode == 0, f"{name}: {self.nodes[name].exitcode}. {self.story()}"
        ends = [self.rows(name)[-1] for name in names]
        assert all("finished" in end for end in ends), self.story()
        assert all(end["after"] == ends[0]["after"] for end in ends), self.story()

    def check_means(self, *names: str, exact: bool = True) -> int:
        """Check every global average of these nodes, and of those that died, as far as they have written it. Returns how many.

        `exact`: the result is the mean of what the members had; else it is only the same on all of them. A step may have two averages:
        one that a node completed before it died, and one that the survivors repeated without it.
        """
        before: dict[int, dict[str, list[float]]] = defaultdict(dict)
        after: dict[tuple[int, tuple[str, ...]], list[list[float]]] = defaultdict(list)  # by the step and the members
        for name in names:
            for row in self.rows(name):
                if row.get("by") and row["now"] == row["k"] + 1:
                    after[row["k"], tuple(row["by"])].append(row["after"])
        for name in names:  # read last: nodes may still train, and each writes what it has before the others can average it
            for row in self.rows(name):
                if "averages" in row:
                    before[row["averages"]][name] = row["before"]
        for (k, members), models in after.items():
            assert all(model == models[0] for model in models), f"step {k}, members {members}: {models}"
            if exact:
                mean = torch.tensor([before[k][member] for member in members], dtype=torch.float64).mean(dim=0)
                assert torch.allclose(torch.tensor(models[0], dtype=torch.float64), mean, rtol=1e-9, atol=1e-9), f"step {k}: {members}"
        return len(after)


def longest_step(job: Job, names: list[str]) -> float:
    """Return the most seconds between two steps of a node."""
    times = [[row["time"] for row in job.rows(name) if "time" in row] for name in names]
    return max((after - before for of_node in times for before, after in pairwise(of_node)), default=0.0)


def survivors_kept_their_steps(job: Job, names: Sequence[str]) -> bool:
    """Return whether no node ever repeated or skipped a step."""
    return all(row["now"] == row["k"] + 1 for name in names for row in job.rows(name) if "k" in row)


if __name__ == "__main__":  # python -m tests.elastic ADDRESS NAME FOLDER OPTIONS, on a host of the test bed
    node(*sys.argv[1:4], json.loads(sys.argv[4]))
