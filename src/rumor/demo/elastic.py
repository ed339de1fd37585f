"""A job of the demo whose node dies and comes back: real processes in an elastic group, one of which is killed by SIGKILL.

The processes are started together, one more than there are nodes. The last one waits, and takes the place of the node that is killed.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from rumor.averager import Averager
from rumor.demo.digits import Digits
from rumor.demo.methods import RECOMMENDED
from rumor.demo.processes import Processes
from rumor.demo.training import BATCH, LAST_LR, LR, MOMENTUM, accuracy, build_model
from rumor.membership import elastic
from rumor.membership.coordinator import Coordinator
from rumor.membership.protocol import Address
from rumor.methods import method

PAUSE = 0.05  # seconds that each step sleeps, in the place of a larger model
STARTS_WITHIN = 10.0  # seconds for the coordinator to start, or to end
DIES, RETURNS = 1 / 3, 1 / 2  # of the steps


@dataclass(frozen=True)
class Moment:
    """One node after one step. The clock is the same for all processes of a machine."""

    node: int
    at: float  # time.monotonic()
    step: int
    members: int
    loss: float
    accuracy: float | None  # after a global average, when all members have the same model; else None


@dataclass(frozen=True)
class Member:
    """The job of one process: train as a node of the elastic group. It sends a Moment after each step."""

    node: int
    coordinator: str
    digits: Digits
    steps: int
    seed: int

    def __call__(self, send: Callable[[Moment], None]) -> None:
        if self.node > 0:  # all say the same when members change, so let the first one say it; it is never the one that is killed
            logging.getLogger("rumor").setLevel(logging.ERROR)
        x, y, test_x, test_y = (torch.from_numpy(part) for part in self.digits)
        model = build_model(self.seed)
        opt = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        group = elastic(self.coordinator, name=f"node {self.node}")
        averager = Averager(model, method(RECOMMENDED), group=group, optimizer=opt)
        share = iter(averager.share_of(len(x), self.seed))  # its part of the images, as members change
        while averager.steps < self.steps:
            opt.param_groups[0]["lr"] = LR + (LAST_LR - LR) * averager.steps / self.steps
            batch = torch.tensor([next(share) for _ in range(BATCH)])
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            opt.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            opt.step()
            averages = averager.metrics.rounds["global"]
            averager.step(loss)
            is_mean = averager.metrics.rounds["global"] > averages
            found = accuracy(model, test_x, test_y) if is_mean else None
            send(Moment(self.node, time.monotonic(), averager.steps, len(averager.members), loss.item(), found))
            time.sleep(PAUSE)
        averager.finish()


@dataclass
class Story:
    """What has happened so far. Times are seconds since the first step.

    Attributes:
        n: number of nodes.
        victim: the node that is killed.
        moments: in the order in which they came.
        killed: when the victim was killed, and the step that the job was at.
        restarted: when its place was taken by a new process.
        back: when it had taken its first step as a member again, and that step.
    """

    n: int
    victim: int
    moments: list[Moment] = field(default_factory=list)
    killed: tuple[float, int] | None = None
    restarted: float | None = None
    back: tuple[float, int] | None = None
    _began: float = 0.0

    def seconds(self, at: float) -> float:
        return at - self._began

    def add(self, moment: Moment) -> None:
        self._began = self._began or moment.at
        self.moments.append(moment)
        if self.restarted is not None and self.back is None and moment.node == self.victim:
            self.back = self.seconds(moment.at), moment.step

    @property
    def averages(self) -> list[Moment]:
        """Each global average, as the first node reported it."""
        found: dict[int, Moment] = {}
        for moment in self.moments:
            if moment.accuracy is not None:
                found.setdefault(moment.step, moment)
        return list(found.values())

    @property
    def next_average(self) -> float | None:
        """Seconds from the death to the next global average of the survivors."""
        if self.killed is None:
            return None
        after = [self.seconds(moment.at) for moment in self.averages if moment.members < self.n]
        return min((at - self.killed[0] for at in after if at > self.killed[0]), default=None)

    @property
    def lost_steps(self) -> int:
        """How many steps the survivors have repeated or left out."""
        survivors = [i for i in range(self.n) if i != self.victim]
        steps = {i: [moment.step for moment in self.moments if moment.node == i] for i in survivors}
        return sum(after - before != 1 for of_node in steps.values() for before, after in pairwise(of_node))

    def as_dict(self) -> dict[str, Any]:
        moments = [
            {"node": m.node, "seconds": self.seconds(m.at), "step": m.step, "members": m.members, "loss": m.loss, "accuracy": m.accuracy}
            for m in self.moments
        ]
        return {
            "victim": self.victim,
            "killed": self.killed,
            "restarted": self.restarted,
            "back": self.back,
            "seconds_to_next_average": self.next_average,
            "steps_lost_by_survivors": self.lost_steps,
            "moments": moments,
        }


def kill_and_restart(processes: Processes, n: int, digits: Digits, steps: int, seed: int) -> Iterator[Story]:
    """Train with n nodes, kill one, and let another process take its place. Yields the story after each step of a node.

    Args:
        processes: n + 1 of them.
        n: number of nodes.
        digits: all training images, which the members divide among themselves.
        steps: of the job.
        seed: of the model and the order of the images.
    """
    story = Story(n, victim=n - 1)
    with _coordinator() as address:
        for node in range(n):
            processes.give(node, Member(node, address, digits, steps, seed))
        for _, moment in processes.messages():
            story.add(moment)
            if story.killed is None and moment.step >= DIES * steps and moment.members == n:
                processes.kill(story.victim)
                story.killed = story.seconds(time.monotonic()), moment.step
            elif story.killed is not None and story.restarted is None and moment.step >= RETURNS * steps:
                processes.give(n, Member(story.victim, address, digits, steps, seed))
                story.restarted = story.seconds(time.monotonic())
            yield story


@contextmanager
def _coordinator() -> Iterator[str]:
    """Run a coordinator in a thread, at a free port of this machine."""
    loop, found = asyncio.new_event_loop(), queue.Queue[str]()
    task = loop.create_task(Coordinator(Address("127.0.0.1", 0), log=lambda line: None).serve(lambda address: found.put(str(address))))

    def serve() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield found.get(timeout=STARTS_WITHIN)
    finally:
        if not task.done():
            loop.call_soon_threadsafe(task.cancel)
        thread.join(STARTS_WITHIN)
