"""Elastic: keeps a replica attached to the members that are there, as nodes die, hang, leave and join.

- Between global averages a loss is no emergency. A node that can't reach its neighbours takes its steps alone.
- Before its next global average it meets the other survivors. They connect anew, bind the method to their number, and average.
- After a global average in which some node had news of newcomers, all members stop, connect anew with them, and rank 0 hands them all
  that they need. At that moment the members have the same model.
- Without a coordinator, members go on as they are. If one of them is lost then, the others take all their steps alone, global averages
  too, and meet at their next global average once the coordinator is back. Those that are behind catch up first. Nobody averages with some
  of the survivors alone: two parts of a network could then both do so.
- A global average changes no model until all of it has arrived, so one that a node's death interrupts can be repeated. If some members
  have completed it, the others do without it: they keep their models, and go on to the next.
"""

from __future__ import annotations

import logging
import secrets
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rumor.averager.job_state import JobState
from rumor.averager.mail import Mail
from rumor.averager.replica import Replica
from rumor.engines.processes.gloo_group import GlooGroup, connect, store_server
from rumor.engines.processes.local_group import LocalGroup
from rumor.engines.processes.process_group import ProcessGroup
from rumor.membership.group import ElasticGroup
from rumor.membership.link import Link
from rumor.membership.member import listed, shortened
from rumor.membership.offer import Offer
from rumor.membership.protocol import PROTOCOL, Address, Stage
from rumor.methods.algorithm import Algorithm
from rumor.metrics import Metrics
from rumor.model.tensors import ordinary_tensors
from rumor.schedule import ScheduleState

RECENT = 0.9  # how much of the slowest recent step remains of it a step later

T = TypeVar("T")
log = logging.getLogger("rumor")


class Elastic:
    """This node's membership in a job.

    Args:
        group: the coordinator, and this node's name.
        replica: the model.
        algorithm: the method, for any number of nodes.
        setup: what must be the same on all nodes.
        optimizer: whose state newcomers take over, if any.
        meanwhile: called now and then while this node waits for the next epoch.

    Attributes:
        members: names of the members, by rank.
        rank: of this node.
        state: what a newcomer takes over.
        has_left: whether finish() or leave() was called.
        takeovers: how often this node has taken over the state of another.
    """

    def __init__(
        self,
        group: ElasticGroup,
        replica: Replica,
        algorithm: Algorithm,
        setup: dict[str, str],
        optimizer: torch.optim.Optimizer | None,
        meanwhile: Callable[[], object] = lambda: None,
    ):
        self._uid = secrets.token_hex(8)  # tells this node from all others
        self._replica, self._algorithm = replica, algorithm
        self.members: list[str] = []
        self.rank = self.takeovers = 0
        self.state = JobState(replica, optimizer)
        self._gloo: GlooGroup | None = None
        self._is_member = False  # whether this node has the job's state
        self.has_left = False
        self._missed: ScheduleState | None = None  # the schedule to go on with, if this node has missed an average
        self._is_at_end = False  # whether it came in after the others had made their last average
        self._is_over = False  # whether the coordinator has nothing left to say to this node
        self._metrics, self._meanwhile = Metrics(), meanwhile
        self._computing_since, self._steps_taken = time.monotonic(), 0
        hello = {
            "protocol": PROTOCOL,
            "uid": self._uid,
            "name": group.name,
            "setup": {what: shortened(text) for what, text in setup.items()},
            "min_nodes": group.min_nodes,
            "timeout": group.timeout,
            "drop_slow": group.drop_slow,
        }
        on_lost = weakref.WeakMethod(self._on_lost)
        self._link = Link(group.coordinator, hello, lambda why: break_up(why) if (break_up := on_lost()) is not None else None)
        # an Averager that is dropped is no longer a member
        weakref.finalize(self, self._link.close, "has ended without averager.finish() or leave()").atexit = False
        self._link.connect()
        self._store = store_server()
        self._link.start(Address(self._link.host, self._store.port))
        try:
            self._regroup("join")
        except BaseException:
            self._link.close()
            raise
        self._start_computing()

    # ---- training ----------------------------------------------------------------------------------------------------------------

    def step(self, loss: Tensor | float | None, lr: float | None) -> None:
        """Mix the models with those of the members that are there."""
        if self.has_left:
            raise RuntimeError("this node has left the job: call step() before finish() or leave()")
        self._stop_computing(is_step=True)
        self._link.stepping = self._replica.runner.k
        self._transport.has_news = self._link.newcomers > 0
        try:
            if self._replica.runner.is_next_global:
                self._global_step(loss, lr)
            else:
                self._gossip_step(loss, lr)
        finally:
            self._link.stepping = -1
            self._start_computing()

    def _gossip_step(self, loss: Tensor | float | None, lr: float | None) -> None:
        k = self._replica.runner.k
        if not self._is_broken:
            try:
                self._replica.begin(loss, lr)
                self._replica.settle()
            except ConnectionError as error:
                self._break(error)
        if self._replica.runner.k == k:  # else the step had ended when the connection was lost
            self._replica.runner.step_alone()

    def _global_step(self, loss: Tensor | float | None, lr: float | None) -> None:
        k, was_broken = self._replica.runner.k, False
        while self._replica.runner.k == k:
            if self._is_broken:
                was_broken = True
                if self._regroup("before"):
                    if self._missed is not None:
                        self._replica.runner.step_alone(self._missed)
                    return
                self._transport.has_news = self._link.newcomers > 0
            try:
                self._replica.begin(loss, lr, at_once=was_broken)
                self._replica.runner.arrive()
                self._replica.settle()
            except ConnectionError as error:
                self._break(error)
                if self._replica.runner.k == k:
                    self._replica.runner.drop_step()
        self._link.average = k
        if self._transport.heard_news and not self._is_broken:
            self._regroup("after")

    @property
    def place(self) -> tuple[int, int]:
        """Number of this node among the members, and how many there are."""
        return self.rank, len(self.members)

    def together(self, do: Callable[[], T], otherwise: object = None, rejoins: bool = False) -> T | None:
        """Call `do`, a collective that all members call at this step. Repeat it with the survivors if a member dies meanwhile.

        Returns None without a result if the others have gone on without this node; also after finish() or leave(). If this node
        `rejoins`, it then takes over their state: it has none of its own yet.
        """
        if self.has_left:  # all have had the same model since
            return None
        self._stop_computing()
        try:
            while True:
                if self._is_broken:
                    self._is_member = self._is_member and not rejoins
                    if self._regroup("between"):
                        if self._missed is not None:
                            log.warning(
                                "rumor: step %d: this node is not with the others, so it uses its own model", self._replica.runner.k
                            )
                        return None
                try:
                    return do()
                except ConnectionError as error:
                    self._break(error)
        finally:
            self._start_computing()

    def finish(self) -> None:
        """Wait until all members have come to the end, average once more, wait until all have done so, and leave."""
        if self.has_left:
            return
        self._stop_computing()
        while not (self._is_over or self._is_at_end or self._last_average()):
            pass
        while not (self._is_over or self._regroup("end")):
            pass
        self.leave()

    def _last_average(self) -> bool:
        """Returns whether it was completed."""
        if self._regroup("finish"):  # this node has taken over the state of another, or it was told to end
            return False
        try:
            self._replica.finish()
        except ConnectionError as error:
            self._break(error)
            return False
        return True

    def leave(self) -> None:
        """Leave the job. The others go on."""
        self.has_left = True
        self._link.close()
        if self._gloo is not None:
            self._gloo.break_up()
            self._dispose()

    # ---- losses ------------------------------------------------------------------------------------------------------------------

    @property
    def _is_broken(self) -> bool:
        return self._gloo is None or self._gloo.is_broken

    @property
    def _transport(self) -> Any:
        return self._replica.engine.transport

    def _break(self, error: Exception) -> None:
        """Give up this epoch's connections, so that all members notice."""
        assert self._gloo is not None
        if not self._gloo.is_broken:
            log.info("rumor: step %d: %s", self._replica.runner.k, error)
            self._gloo.break_up()
        self._tell_link()
        self._link.beat()  # some may wait to hear how far this node has come

    def _on_lost(self, why: str) -> None:
        """The coordinator says that this epoch is broken (in the link's thread)."""
        log.warning("rumor: %s", why)
        if (gloo := self._gloo) is not None:
            gloo.break_up()

    # ---- the next epoch ------------------------------------------------------------------------------------------------------------

    def _regroup(self, stage: Stage) -> bool:
        """Wait for the next epoch, and connect to its members.

        Returns whether there is nothing left to do for the caller: at the "end" because the job is over, else because this node has
        taken over the state of another member, or because it does without the average that it waited for: others have completed it, or
        there is no coordinator.
        """
        began, self._missed, self._link.computing = time.perf_counter(), None, False
        while True:
            k = self._replica.runner.k if self._gloo is not None else 0
            self._tell_link()
            offer = self._link.next_epoch(k, stage if self._is_member else "join", not self._is_broken, self._meanwhile)
            if offer.is_over or offer.is_same:
                self._transport.heard_news = False
                self._is_over = offer.is_over
                return offer.is_over
            if offer.passed is not None or offer.is_alone:
                runner = self._replica.runner
                self._missed = ScheduleState(*offer.passed) if offer.passed else runner.algorithm.schedule.next(runner.state.schedule)
                return True
            if (took_over := self._enter(offer)) is not None:
                break
        self._metrics.membership_changes += 1
        self._metrics.seconds_regrouping += time.perf_counter() - began
        k = self._replica.runner.k  # 0 if the job begins, or if it is about to load a checkpoint, which has another step
        log.warning("rumor: %s%s", f"step {k}: " if k else "", listed(self.members))
        return took_over

    def _enter(self, offer: Offer) -> bool | None:
        """Become a member of an epoch. Returns whether this node has taken over the state of another; None if it has failed."""
        rank, n = [peer.uid for peer in offer.members].index(self._uid), len(offer.members)
        store, name = offer.members[0].store, f"{offer.number}-{offer.token}"
        gloo = connect(lambda: GlooGroup(store, name, rank, n, self._link.host), lambda: self._link.is_lost(offer))
        if gloo is None:
            self._link.failed(offer)
            return None
        takes_over = rank >= offer.holders
        own = self._replica.runner.shared_state() if self._gloo is not None and not takes_over else None
        self._dispose()
        self._gloo, self.members, self.rank = gloo, [peer.name for peer in offer.members], rank
        if self._link.is_lost(offer):  # while it was connecting
            gloo.break_up()
        if takes_over:
            self._is_member = False  # until it has all of the state
        try:
            with ordinary_tensors():
                self._attach(gloo, own)
                mail = Mail(self._transport, self._tag, self._replica.runner.k, self._count_piece)
                self.takeovers += self.state.hand_over(offer, rank, mail)
                self._link.average = offer.members[0].average
        except ConnectionError as error:
            self._break(error)
            return None if takes_over else False
        self._is_member, self._is_at_end = True, takes_over and offer.is_at_end
        return takes_over

    def _attach(self, gloo: GlooGroup, own: dict[str, Any] | None) -> None:
        """Bind the method to the members that there are now."""
        engine = ProcessGroup(gloo, metrics=self._metrics)
        engine.alarm.names = self.members
        self._metrics.waited_for.clear()
        self._tag = engine.transport.new_tag()
        self._replica.attach(engine, LocalGroup(engine), self._algorithm.bind(engine.n), broadcast=False)
        if own is not None:
            self._replica.runner.take_over(own, is_own=True)

    def _dispose(self) -> None:
        """Free the connections of the epoch before."""
        if self._gloo is not None:
            self._gloo.break_up()
            self._gloo.dispose((self._transport.abandon(), self._replica.buckets))
            self._gloo = None

    # ---- what the coordinator hears ------------------------------------------------------------------------------------------------

    def _stop_computing(self, is_step: bool = False) -> None:
        link, took = self._link, time.monotonic() - self._computing_since
        if self._steps_taken > 1 or is_step:  # the first step may be long, and says nothing of the others
            link.step_seconds = max(took, RECENT * link.step_seconds) if self._steps_taken > 1 else took
        self._steps_taken += is_step
        link.computing = False

    def _start_computing(self) -> None:
        self._computing_since = time.monotonic()
        self._tell_link()
        self._link.computing = True

    def _tell_link(self) -> None:
        """Let the coordinator know how far this node has come."""
        if self._gloo is not None:
            self._link.k, self._link.schedule = self._replica.runner.k, self._replica.runner.state.schedule

    def _count_piece(self) -> None:
        self._link.moved += 1
