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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rumor.channel import Alarm, Channel, DeviceAlarm, Message
from rumor.engine import NO_SCALARS, Buckets, Mixed, Pending, accumulator, rounded
from rumor.flat import as_real
from rumor.metrics import Metrics
from rumor.topology import Topology

Group = dist.ProcessGroup

# a message must never meet one of another Averager, so each engine numbers its buckets from a start that all ranks have agreed on
TAGS_OF_AN_ENGINE, ENGINES = 2**16, 2**15
_engines = 0  # that this process has agreed on
_UnderWay = dict[int, tuple[list[dist.Work], Channel]]
_orphans: list[_UnderWay] = []  # of engines that are gone: gloo breaks the connection if memory that a message will fill is freed


class ProcessGroup:
    """Node `rank` of `n`: the collectives of `Engine`, over `group` (the default group if None)."""

    def __init__(self, group: Group | None = None):
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("no process group: call torch.distributed.init_process_group() first (torchrun sets its variables)")
        self.group = group or dist.distributed_c10d._get_default_group()
        self.n = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:
            raise ValueError("this process is not in the group it was given: each rank must pass a group that it belongs to")
        self.metrics = Metrics()
        self.backend = dist.get_backend(self.group)
        self._is_host = self.backend != "nccl"  # gloo and MPI send from host memory
        self.device = torch.device("cpu") if self._is_host else torch.device("cuda", torch.cuda.current_device())
        self._tags = itertools.count()
        self._channels: dict[int, Channel] = {}
        self._links: dict[tuple[Topology, int], _Links] = {}
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._under_way: _UnderWay = {}
        self.forget_alarm()
        weakref.finalize(self, _orphans.append, self._under_way).atexit = False

    # ---- the collectives -------------------------------------------------------------------------------------------------------

    def gossip(self, x: Tensor, topology: Topology, k: int, scalars: Tensor | None = None, own: bool = True) -> Pending:
        channel, links = self._channel(x), self._links_of(topology, k)
        channel.write_head(self._alarm, self.rank, k, scalars)
        works: list[dist.Work] = []
        self._guard(lambda: works.extend(self._post(channel, links)), _gossiping(links, k))
        self._under_way[channel.tag] = (works, channel)
        self.metrics.bytes_sent += len(links.send) * channel.out.whole.nbytes
        return _Gossip(self, channel, works, links, k, 0 if scalars is None else scalars.numel(), own)

    def mean(self, x: Tensor, k: int, scalars: Tensor | None = None, *, doing: str = "averaging globally", finite: bool = True) -> Pending:
        channel = self._channel(x)
        if finite:
            channel.write_head(self._alarm, self.rank, k, None)
        total = channel.total()
        _scaled(channel.out.payload, 1 / self.n, total.payload)
        doing = f"{doing} at step {k}"
        total.write_shared_head(self._alarm.is_known(), doing)
        count = 0 if scalars is None else scalars.numel()
        if scalars is not None:
            total.scalars(count).copy_(scalars)
        works: list[dist.Work] = []
        self._guard(lambda: works.extend(self._post_sum(total)), doing)
        self._under_way[channel.tag] = (works, channel)
        self.metrics.bytes_sent += 2 * (self.n - 1) * total.whole.nbytes // self.n
        return _Mean(self, channel, works, doing, count)

    def self_weight(self, topology: Topology, k: int, dtype: torch.dtype = torch.float64) -> Tensor:
        links = self._links_of(topology, k)
        return self.full(links.kept_32 if dtype == torch.float32 else links.own)

    def full(self, value: float) -> Tensor:
        return torch.full((1,), value, dtype=torch.float64, device=self.device)

    def room(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        channel = Channel(shape.numel(), dtype, self.device if self._is_host else device, next(self._tags))
        self._channels[channel.out.payload.data_ptr()] = channel
        return channel.out.payload

    # ---- before and beside the steps ---------------------------------------------------------------------------------------------

    def agree(self, setup: dict[str, str], problem: Exception | None = None) -> None:
        """Raises on every rank, naming both values, unless all have the same set-up and no rank has a problem.

        It is also the first collective, which NCCL wants before any message, and settles where this engine's tags begin.
        """
        global _engines
        said: list[Any] = [None] * self.n
        mine = (setup, str(problem) if problem else None, _engines)
        self._guard(lambda: dist.all_gather_object(said, mine, group=self.group), "comparing the set-up of all ranks")
        _engines = 1 + max(engines for _, _, engines in said)
        self._tags = itertools.count(_engines % ENGINES * TAGS_OF_AN_ENGINE)
        while _orphans:
            for works, _ in _orphans.pop().values():
                self._wait(works, "taking in the messages of an Averager that was dropped before finish()")
        if problem:
            raise problem
        for rank, (theirs, their_problem, _) in enumerate(said):
            if their_problem:
                raise RuntimeError(f"rank {rank} could not set up its Averager: {their_problem}")
            for what, value in theirs.items():
                if value != said[0][0][what]:
                    raise ValueError(f"ranks disagree on the {what}: rank 0 has {said[0][0][what]}, rank {rank} has {value}")

    def broadcast(self, tensors: Iterable[Tensor], group: Group | None = None) -> None:
        """Every rank of `group` takes its rank 0's values, in place."""
        group = group or self.group
        source = dist.get_global_rank(group, 0)
        for tensor in tensors:
            values = as_real(tensor).to(self.device if self._is_host else tensor.device).contiguous().reshape(-1)
            self._guard(partial(dist.broadcast, values.view(torch.uint8), source, group=group), "taking over rank 0's model")
            as_real(tensor).copy_(values.view(as_real(tensor).shape))

    def forget_alarm(self) -> None:
        """For a run that goes on from a checkpoint."""
        self._alarm = Alarm(self.n) if self._is_host else DeviceAlarm(self.n, self.device)

    def mean_inside(self, value: Tensor, local_group: Group) -> Tensor:
        """The average of a scalar over the ranks inside this node."""
        wire = value.to(self.device, copy=True)
        self._guard(lambda: dist.all_reduce(wire, group=local_group), "averaging the loss inside the node")
        return wire / dist.get_world_size(local_group)

    def raise_alarm(self, k: int, topology: Topology) -> None:
        """Raises if some node's model is not finite and word of it has had time to reach all, who then raise at this same step."""
        alarm = self._alarm.look()
        if alarm < math.inf and topology.reach is not None and k >= alarm // self.n + topology.reach:
            raise self._not_finite(int(alarm))

    # ---- below -----------------------------------------------------------------------------------------------------------------

    def _channel(self, x: Tensor) -> Channel:
        known = self._channels.get(x.data_ptr())
        if known is not None:
            return known
        room = self.room(x.shape, x.dtype, x.device)  # a tensor from elsewhere is copied into a channel of its own
        room.copy_(x.reshape(-1))
        return self._channels.pop(room.data_ptr())

    def _links_of(self, topology: Topology, k: int) -> _Links:
        key = (topology, k % topology.period)
        if key not in self._links:
            if topology.n != self.n:
                raise ValueError(f"{topology} is for n={topology.n} nodes, but the group has {self.n}")
            pulls, pushes = topology.neighbors(self.rank, k), topology.sends_to(self.rank, k)
            hears = [(j, dist.get_global_rank(self.group, j), w) for j, w in pulls.items()]
            tells = [dist.get_global_rank(self.group, j) for j in pushes]
            own = topology.self_weight(self.rank, k)
            lost = [sum(w - rounded(w) for w in weights) for weights in (pulls.values(), pushes.values())]
            self._links[key] = _Links(hears, tells, own, own + lost[0], own + lost[1])
        return self._links[key]

    def _post(self, channel: Channel, links: _Links) -> list[dist.Work]:
        """All messages of a bucket at once, to and from all neighbours."""
        out, tag, group = channel.out.whole, channel.tag, self.group
        inbox = [(message.whole, peer) for message, (_, peer, _) in zip(channel.inbox(len(links.receive)), links.receive, strict=True)]
        if self._is_host:
            works = [dist.irecv(room, peer, group, tag) for room, peer in inbox]
            return [work for work in (*works, *(dist.isend(out, peer, group, tag) for peer in links.send)) if work is not None]
        operations = [dist.P2POp(dist.isend, out, peer, group, tag) for peer in links.send]
        operations += [dist.P2POp(dist.irecv, room, peer, group, tag) for room, peer in inbox]
        return list(dist.batch_isend_irecv(operations)) if operations else []  # NCCL would deadlock on them one by one

    def _post_sum(self, total: Message) -> list[dist.Work]:
        return [dist.all_reduce(total.whole, group=self.group, async_op=True)] if self.n > 1 else []

    def _arrive(self, channel: Channel, works: list[dist.Work], doing: str) -> None:
        self._wait(works, doing)
        self._under_way.pop(channel.tag, None)

    def _wait(self, works: list[dist.Work], doing: str) -> None:
        """Waits for each once: a second wait() on a gloo message would wait for a second message."""
        began = time.perf_counter()
        while works:
            self._guard(works.pop(0).wait, doing)
        self.metrics.seconds_waiting += time.perf_counter() - began

    def _guard(self, call: Callable[[], object], doing: str) -> None:
        try:
            call()
        except RuntimeError as error:
            raise ConnectionError(
                f"rank {self.rank} of {self.n} lost touch with the others while {doing}: {error}. A peer has died, is cut off, is slower "
                "than the time-out that init_process_group(timeout=...) sets, or has not called step(), averaged() or finish() as often as "
                "this rank; once that is mended, restart the job from its last checkpoint"
            ) from error

    def _room_to_mix(self, d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        dtype = accumulator(dtype)
        if dtype not in self._scratch or len(self._scratch[dtype]) < d:
            self._scratch[dtype] = torch.empty(d, dtype=dtype, device=device)
        return self._scratch[dtype][:d]

    def _settle_alarm(self, doing: str) -> FloatingPointError:
        """At a global round that found some rank alarmed: all of them are here, so they can settle whose alarm was the first."""
        first = self._alarm.settle()
        self._guard(lambda: dist.all_reduce(first, dist.ReduceOp.MIN, group=self.group), doing)
        return self._not_finite(int(first))

    def _not_finite(self, alarm: int) -> FloatingPointError:
        return FloatingPointError(
            f"the model of node {alarm % self.n} was not finite (NaN or Inf) when it was sent at step {alarm // self.n}; it was kept from "
            "spreading, and all ranks stop here: go back to the last checkpoint, with a lower learning rate or clipped gradients"
        )


def _scaled(x: Tensor, factor: float, out: Tensor) -> Tensor:
    """out <- factor x; `out` may be of a wider dtype, which the product is then taken in."""
    return torch.mul(x, factor, out=out) if x.dtype == out.dtype else out.copy_(x).mul_(factor)


def _gossiping(links: _Links, k: int) -> str:
    return f"gossiping at step {k} with node {', '.join(str(node) for node, _, _ in links.receive)}"


class _Links(NamedTuple):
    """Whom this rank hears from (node, global rank, weight), whom it sends to (global ranks), and its own weight.

    `own_32` makes up for the rounding to float32 of the weights that it hears with, `kept_32` for that of the shares that it pushes: a sum
    of weights that is off 1 would move the mean, step by step, always the same way.
    """

    receive: list[tuple[int, int, float]]
    send: list[int]
    own: float
    own_32: float
    kept_32: float


@dataclass
class _Gossip(Pending):
    engine: ProcessGroup
    channel: Channel
    works: list[dist.Work]
    links: _Links
    k: int
    scalars: int
    own: bool

    def arrived(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Payload, scalars and weight of each neighbour's message; what is not finite is replaced by this node's own."""
        engine, own = self.engine, self.channel.out
        engine._arrive(self.channel, self.works, _gossiping(self.links, self.k))
        for message, (node, _, w) in zip(self.channel.inbox(len(self.links.receive)), self.links.receive, strict=True):
            finite = engine._alarm.hear(message, node, self.k)
            if isinstance(finite, Tensor):
                payload = torch.where(finite, message.payload, own.payload)
                yield payload, torch.where(finite, message.scalars(self.scalars), own.scalars(self.scalars)), w
            else:
                taken = message if finite else own
                yield taken.payload, taken.scalars(self.scalars), w

    def wait(self) -> Mixed:
        out = self.channel.out
        mixed = self.engine._room_to_mix(len(out.payload), out.payload.dtype, out.payload.device)
        own = 0.0 if not self.own else self.links.own_32 if mixed.dtype == torch.float32 else self.links.own
        _scaled(out.payload, own, mixed) if self.own else mixed.zero_()
        scalars = out.scalars(self.scalars) * own
        for payload, theirs, w in self.arrived():
            mixed.add_(payload, alpha=w)
            scalars += w * theirs
        return Mixed(mixed, scalars)

    def write_to(self, x: Buckets, b: int) -> None:
        """W x = x + (1 - w_ii) (the neighbours' average - x), straight into the parameters: one pass less than by way of a buffer."""
        if self.channel.out.payload.dtype != accumulator(self.channel.out.payload.dtype):
            return super().write_to(x, b)  # half precision: sum in float32 first
        average, total = None, 0.0
        for payload, _, w in self.arrived():
            total += w
            average = payload if average is None else torch.lerp(average, payload, w / total, out=average)
        if average is not None:
            x.lerp(b, average, total)


@dataclass
class _Mean(Pending):
    engine: ProcessGroup
    channel: Channel
    works: list[dist.Work]
    doing: str
    scalars: int

    def wait(self) -> Mixed:
        engine, total = self.engine, self.channel.total()
        engine._arrive(self.channel, self.works, self.doing)
        head = total.head.tolist()
        if not total.all_did_the_same(head, engine.n):
            raise RuntimeError(
                f"ranks are out of step: rank {engine.rank} was {self.doing}, another one was doing something else. Every rank must call "
                "step(), averaged(), finish() and consensus_distance() in the same order and equally often, also one with fewer batches"
            )
        if head[1] > 0:
            raise engine._settle_alarm(self.doing)
        return Mixed(total.payload, total.scalars(self.scalars).double() / engine.n if self.scalars else NO_SCALARS)


def check_model(model: torch.nn.Module, group: Group | None, local_group: Group | None) -> None:
    """Refuses what can't be averaged, such as a module whose gradients DDP already averages over all nodes."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"the model comes first and must be a torch.nn.Module, got {type(model).__name__}")
    if local_group is not None and group is None:
        raise ValueError("local_group= (the ranks inside this node) needs group= too: one rank of each node, this one among them")
    inner = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    if inner is None:
        return
    inside = dist.get_process_group_ranks(local_group) if local_group is not None else [dist.get_rank()]
    ddp = dist.get_process_group_ranks(inner.process_group)
    if not set(ddp) <= set(inside):
        raise ValueError(
            f"the model is already in DistributedDataParallel over ranks {ddp}, which averages their gradients at every step: take it out, "
            "train the plain module and hand that to the Averager. Only inside a node of several GPUs may DDP stay, with local_group= the "
            "group that it is over"
        )


@contextmanager
def joined(backend: str, timeout: float) -> Iterator[ProcessGroup]:
    """The group of the processes that torchrun has started; none waits for another longer than `timeout` seconds. All leave together."""
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    try:
        yield ProcessGroup()
        dist.barrier()
    finally:
        dist.destroy_process_group()
