"""ProcessGroup: the engine of real processes, one node a rank, over any `torch.distributed` group.

Messages to and from all neighbours are posted at once, bucket by bucket, so that both directions of every link are busy. `channel.py`
says what a message is and how a model that is not finite is kept from spreading.
"""

from __future__ import annotations

import datetime
import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported by an optimizer's first step, its defaults would keep the group for ever
from torch import Tensor
from torch.profiler import record_function

from rumor import doors
from rumor.arrivals import Gossip, Links, Mean, Sum, gossiping, side_by_side, unrecorded
from rumor.channel import Alarm, Channel, DeviceAlarm, Message, Work
from rumor.engine import Judge, Pending, rounded, size
from rumor.flat import as_real
from rumor.metrics import Metrics
from rumor.staging import Courier, Staging
from rumor.topology import Topology

Group = dist.ProcessGroup

# a message must never meet one of another Averager, so each engine numbers its buckets from a start that all ranks have agreed on
TAGS_OF_AN_ENGINE, ENGINES = 2**16, 2**15
_engines = 0  # that this process has agreed on
_UnderWay = dict[int, tuple[list[Work], Channel]]
_orphans: list[_UnderWay] = []  # of engines that are gone: gloo breaks the connection if memory that a message will fill is freed
_kept: list[tuple[Message, Work]] = []  # likewise, for messages that may never come


class ProcessGroup:
    """Node `rank` of `n`: the collectives of `Engine`, over `group` (the default group if None). `local_group`: the ranks inside it."""

    def __init__(self, group: Group | None = None, local_group: Group | None = None):
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("no process group: call torch.distributed.init_process_group() first (torchrun sets its variables)")
        self._group = weakref.ref(group or dist.distributed_c10d._get_default_group())
        self.n = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        if local_group is not None and group is None:
            raise ValueError("local_group= (the ranks inside this node) needs group= too: one rank of each node, this one among them")
        if self.rank < 0:
            raise ValueError("this process is not in the group it was given: each rank must pass a group that it belongs to")
        self.metrics, self.called = Metrics(), "rank"
        self.inside = None if local_group is None else ProcessGroup(local_group)
        if self.inside is not None:
            self.inside.metrics, self.inside.called = self.metrics, "local rank"  # time is that of one rank, whomever it waits for
        self.backend = dist.get_backend(self.group)
        self._is_host = self.backend != "nccl"  # gloo and MPI send from host memory
        self.device = torch.device("cpu") if self._is_host else torch.device("cuda", torch.cuda.current_device())
        self._tags = itertools.count()
        self._channels: dict[int, Channel] = {}
        self._links: dict[tuple[Topology, int], Links] = {}
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._under_way: _UnderWay = {}
        self._couriers: dict[torch.device, Courier] = {}
        self._errands: dict[int, Future[None]] = {}  # by the tag of the channel
        self.doors: doors.Doors = {}  # of all processes, as far as this one knows them
        self.forget_alarm()
        weakref.finalize(self, _keep, self._under_way, self._channels).atexit = False

    # ---- the collectives -------------------------------------------------------------------------------------------------------

    def gossip(self, x: Tensor, topology: Topology, k: int, scalars: Tensor | None = None, own: bool = True) -> Pending:
        channel, links = self._channel(x), self._links_of(topology, k)
        inbox: list[Message] = []
        works: list[Work] = []

        def send() -> None:
            channel.write_head(self._alarm, self.rank, k, scalars)
            self._guard(lambda: self._post(channel, links, inbox, works), gossiping(links, k))

        self._once_on_host(channel, send)
        self._under_way[channel.tag] = (works, channel)
        self.metrics.bytes_sent += len(links.send) * channel.out.whole.nbytes
        return Gossip(self, channel, inbox, works, links, k, 0 if scalars is None else scalars.numel(), own)

    def expect(self, x: Tensor, topology: Topology, k: int) -> None:
        """Posts the receives of step k ahead, so that a neighbour who is there first need not wait to send.

        What is expected of a neighbour at one step will do for any later one, such as after the load of a checkpoint.
        """
        if self._is_host:  # NCCL wants them together with the sends
            channel, links = self._channel(x), self._links_of(topology, k)
            receive = partial(self._guard, partial(self._post_receives, channel, links), gossiping(links, k))
            staging = channel.staging
            receive() if staging is None else self._ask(channel, staging.courier.once(staging.landed, receive))

    def mean(
        self, xs: Sequence[Tensor], k: int, scalars: Tensor | None = None, *, doing: str = "averaging globally", judge: Judge | None = size
    ) -> list[Pending]:
        channels = [self._channel(x) for x in xs]
        for channel in channels:
            channel.come_to_host(judge or size)
        for channel in channels:
            channel.wait_for_host()
            if judge is not None:
                channel.write_head(self._alarm, self.rank, k, None, judge)
        pending: list[Pending] = []
        for some in side_by_side(channels):
            total = Sum(self, some, f"{doing} at step {k}", None if pending else scalars)
            self._guard(lambda total=total: total.works.extend(self._post_sum(total.message)), total.doing)  # type: ignore[misc]
            self._under_way[some[0].tag] = (total.works, some[0])
            self.metrics.bytes_sent += 2 * (self.n - 1) * total.message.whole.nbytes // self.n
            pending += [Mean(total, place) for place in range(len(some))]
        return pending

    def self_weight(self, topology: Topology, k: int, dtype: torch.dtype = torch.float64) -> Tensor:
        links = self._links_of(topology, k)
        return self.full(links.kept_32 if dtype == torch.float32 else links.own)

    def full(self, value: float) -> Tensor:
        return torch.full((1,), value, dtype=torch.float64, device=self.device)

    def room(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        staged = self._is_host and device.type == "cuda"
        if staged and device not in self._couriers:
            self._couriers[device] = Courier(device)
        staging = Staging(shape.numel(), dtype, device, self._couriers[device]) if staged else None
        channel = Channel(shape.numel(), dtype, self.device if self._is_host else device, next(self._tags), staging)
        self._channels[channel.own.data_ptr()] = channel
        return channel.own

    # ---- before and beside the steps ---------------------------------------------------------------------------------------------

    def agree(self, setup: dict[str, str], problem: Exception | None = None, inside: Sequence[doors.Address | None] = ()) -> None:
        """Raises on every rank, naming both values, unless all have the same set-up and no rank has a problem.

        It is also the first collective, which NCCL wants before any message, and settles tags and doors (`inside`: of a node of several).
        """
        global _engines
        said: list[Any] = [None] * self.n
        mine = (setup, str(problem) if problem else None, _engines, inside or [doors.address()])
        self._guard(lambda: dist.all_gather_object(said, mine, group=self.group), "comparing the set-up of all ranks")
        _engines = 1 + max(engines for _, _, engines, _ in said)
        self.doors = doors.by_name([of_node for _, _, _, of_node in said])
        self._tags = itertools.count(_engines % ENGINES * TAGS_OF_AN_ENGINE)
        while _orphans:
            for works, _ in _orphans.pop().values():
                self._wait(works, "taking in the messages of an Averager that was dropped before finish()")
        if problem:
            raise problem
        for rank, (_, their_problem, _, _) in enumerate(said):
            if their_problem:
                raise RuntimeError(f"rank {rank} could not set up its Averager: {their_problem}")
        _check_alike([theirs for theirs, _, _, _ in said])

    def compare(self, values: dict[str, str], doing: str) -> None:
        """Raises on every rank, naming both values, unless all have the same. A meeting: none leaves before all have come."""
        said: list[Any] = [None] * self.n
        self._guard(lambda: dist.all_gather_object(said, values, group=self.group), doing)
        _check_alike(said)

    def broadcast(self, tensors: Iterable[Tensor], group: Group | None = None) -> None:
        """Every rank of `group` takes its rank 0's values, in place."""
        group = group or self.group
        source = dist.get_global_rank(group, 0)
        for tensor in tensors:
            values = as_real(tensor).to(self.device if self._is_host else tensor.device).contiguous().reshape(-1)
            self._guard(partial(dist.broadcast, values.view(torch.uint8), source, group=group), "taking over what rank 0 has")
            as_real(tensor).copy_(values.view(as_real(tensor).shape))

    def post_to_all(self, rows: Tensor, tag: int, doing: str) -> list[Work]:
        """Sends this node's of `rows` [n, s] to all others, and lets theirs come: the first of what is returned, by node."""
        peers = [(rows[node], dist.get_global_rank(self.group, node)) for node in range(self.n) if node != self.rank]
        posts = [(dist.irecv, row, peer) for row, peer in peers] + [(dist.isend, rows[self.rank], peer) for _, peer in peers]
        works: list[Work] = []
        if self._is_host:
            self._guard(lambda: works.extend(post(row, peer, self.group, tag) for post, row, peer in posts), doing)  # type: ignore[misc]
        elif posts:
            together = [dist.P2POp(post, row, peer, self.group, tag) for post, row, peer in posts]
            self._guard(lambda: works.extend(dist.batch_isend_irecv(together)), doing)
        self.metrics.bytes_sent += len(peers) * rows[0].nbytes
        return works

    def forget_alarm(self) -> None:
        """For a run that goes on from a checkpoint."""
        self._alarm = Alarm(self.n) if self._is_host else DeviceAlarm(self.n, self.device)

    @property
    def group(self) -> Group:
        """torch's to keep: the threads of one that outlives destroy_process_group() can abort the process at its end."""
        if (group := self._group()) is None:
            raise ValueError("the process group of this Averager was destroyed: make a new one, and a new Averager over it")
        return group

    @property
    def ranks(self) -> list[int]:
        """Of its members, among all processes."""
        return dist.get_process_group_ranks(self.group)

    def gather(self, rows: Tensor, doing: str) -> None:
        """Each rank has filled in its own of `rows` [n, ...]; then all have all of them."""
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the latter's name since torch 2.13
        works: list[Work] = []
        self._guard(lambda: works.append(all_gather(rows.view(-1), rows[self.rank], group=self.group, async_op=True)), doing)
        self._wait(works, doing)

    def raise_settled_alarm(self) -> None:
        """Raises if a global round, over some part of the model, found it not finite. Waits for the device, as global rounds do."""
        alarm = self._alarm.wait_for_settled()
        if alarm < math.inf:
            raise self._alarm.error(alarm)

    def raise_alarm(self, k: int, topology: Topology) -> None:
        """Raises if some node's model is not finite and word of it has had time to reach all, who then raise at this same step."""
        alarm = self._alarm.look()
        if self._alarm.settled < math.inf:
            raise self._alarm.error(self._alarm.settled)
        if alarm < math.inf and topology.reach is not None and k >= alarm // self.n + topology.reach:
            raise self._alarm.error(alarm)

    # ---- below -----------------------------------------------------------------------------------------------------------------

    def _channel(self, x: Tensor) -> Channel:
        known = self._channels.get(x.data_ptr())
        if known is not None:
            return known
        room = self.room(x.shape, x.dtype, self.device if self._is_host else x.device)
        room.copy_(x.reshape(-1))  # a tensor from elsewhere is copied into a channel of its own
        return self._channels.pop(room.data_ptr())

    def _links_of(self, topology: Topology, k: int) -> Links:
        key = (topology, k % topology.period)
        if key not in self._links:
            if topology.n != self.n:
                raise ValueError(f"{topology} is for n={topology.n} nodes, but the group has {self.n}")
            pulls, pushes = topology.neighbors(self.rank, k), topology.sends_to(self.rank, k)
            hears = [(j, dist.get_global_rank(self.group, j), w) for j, w in pulls.items()]
            tells = [dist.get_global_rank(self.group, j) for j in pushes]
            own = topology.self_weight(self.rank, k)
            lost = [sum(w - rounded(w) for w in weights) for weights in (pulls.values(), pushes.values())]
            self._links[key] = Links(hears, tells, own, own + lost[0], own + lost[1])
        return self._links[key]

    def _once_on_host(self, channel: Channel, send: Callable[[], None]) -> None:
        """At once, or by the courier when it has come down from the GPU."""
        channel.come_to_host()
        staging = channel.staging
        send() if staging is None else self._ask(channel, staging.courier.once(staging.copied, send))

    def _ask(self, channel: Channel, errand: Future[None]) -> None:
        self._errands[channel.tag] = errand  # a courier is asked in turn, so the last errand of a channel ends last

    def _post(self, channel: Channel, links: Links, inbox: list[Message], works: list[Work]) -> None:
        """All messages of a bucket at once, to and from all neighbours."""
        out, tag, group = channel.out.whole, channel.tag, self.group
        if self._is_host:
            self._post_receives(channel, links)  # before the sends, or gloo asks first whether it may send
            for _, peer, _ in links.receive:
                message, work = channel.expected.pop(peer)
                inbox.append(message)
                works.append(work)
            sends = [dist.isend(out, peer, group, tag) for peer in links.send]
            works.extend(work for work in sends if work is not None)
        else:
            inbox.extend(channel.inbox(len(links.receive)))
            operations = [dist.P2POp(dist.isend, out, peer, group, tag) for peer in links.send]
            rooms = zip(inbox, links.receive, strict=True)
            operations += [dist.P2POp(dist.irecv, message.whole, peer, group, tag) for message, (_, peer, _) in rooms]
            works.extend(dist.batch_isend_irecv(operations) if operations else [])  # NCCL would deadlock on them one by one

    def _post_receives(self, channel: Channel, links: Links) -> None:
        """From all neighbours of whom nothing is expected yet."""
        peers = [peer for _, peer, _ in links.receive if peer not in channel.expected]
        for peer, message in zip(peers, channel.inbox(len(peers)), strict=True):
            work = dist.irecv(message.whole, peer, self.group, channel.tag)
            assert work is not None  # this rank is in the group
            channel.expected[peer] = (message, work)

    def _post_sum(self, total: Message) -> list[Work]:
        return [dist.all_reduce(total.whole, group=self.group, async_op=True)] if self.n > 1 else []

    def _arrive(self, channel: Channel, works: list[Work], doing: str, senders: Sequence[int] = ()) -> None:
        if (errand := self._errands.pop(channel.tag, None)) is not None:
            with self._waiting():
                errand.result()
        self._wait(works, doing, senders)
        self._under_way.pop(channel.tag, None)

    def _wait(self, works: list[Work], doing: str, senders: Sequence[int] = ()) -> None:
        """Waits for each once: a second wait() on a gloo message would wait for a second message. `senders`: of the first of them."""
        with self._waiting():
            for node in [*senders, *[None] * (len(works) - len(senders))][: len(works)]:  # NCCL may put several into one
                began = time.perf_counter()
                self._guard(works.pop(0).wait, doing)
                if node is not None:
                    self.metrics.waited_for[node] = self.metrics.waited_for.get(node, 0.0) + time.perf_counter() - began

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        with record_function("rumor::wait"):
            yield
        self.metrics.seconds_waiting += time.perf_counter() - began

    def _guard(self, call: Callable[[], object], doing: str) -> None:
        try:
            with unrecorded():
                call()
        except RuntimeError as error:
            raise ConnectionError(
                f"{self.called} {self.rank} of {self.n} lost touch with the others while {self.metrics.placed(doing)}: "
                f"{doors.likely_reason(self.doors, error)}. Once that is mended, restart the job from its last checkpoint. ({error})"
            ) from error

    def _settle_alarm(self, doing: str) -> None:
        """At a global round that found some rank alarmed: all of them are here, so they can settle whose alarm was the first."""
        first = self._alarm.settle()
        self._guard(lambda: dist.all_reduce(first, dist.ReduceOp.MIN, group=self.group), doing)
        if self.inside is None:
            raise self._alarm.error(float(first))
        self._alarm.is_settled(first)  # the other ranks of the node do not know yet: all raise once it has shared its parts


def _check_alike(said: list[dict[str, str]]) -> None:
    for rank, theirs in enumerate(said):
        for what, value in theirs.items():
            if value != (first := said[0].get(what)):
                raise ValueError(f"ranks disagree on the {what}: rank 0 has {first}, rank {rank} has {value}")


def _keep(under_way: _UnderWay, channels: dict[int, Channel]) -> None:
    _orphans.append(under_way)
    _kept.extend(expected for channel in channels.values() for expected in channel.expected.values())


@contextmanager
def joined(backend: str, timeout: float, **rendezvous: Any) -> Iterator[ProcessGroup]:
    """The group of the processes that torchrun has started (others: give init_method, rank, world_size). All leave together."""
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout), **rendezvous)
    try:
        yield ProcessGroup()
        dist.barrier()
    finally:
        dist.destroy_process_group()
