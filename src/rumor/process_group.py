"""ProcessGroup: the engine of real processes, one node a rank, over any `torch.distributed` group.

Messages to and from all neighbours are posted at once, bucket by bucket, so that both directions of every link are busy. `channel.py`
says what a message is and how a model that is not finite is kept from spreading.
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rumor.channel import Alarm, Channel, DeviceAlarm, Message
from rumor.engine import NO_SCALARS, Buckets, Mixed, Pending, accumulator
from rumor.flat import as_real
from rumor.metrics import Metrics
from rumor.topology import Topology

Group = dist.ProcessGroup

_tags = itertools.count()  # no two buckets of a process share one, so that a message never meets another Averager's
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
        self._channels: dict[int, Channel] = {}
        self._links: dict[tuple[Topology, int], _Links] = {}
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._alarm = Alarm(self.n) if self._is_host else DeviceAlarm(self.n, self.device)
        self._under_way: _UnderWay = {}
        weakref.finalize(self, _orphans.append, self._under_way).atexit = False

    # ---- the collectives -------------------------------------------------------------------------------------------------------

    def gossip(self, x: Tensor, topology: Topology, k: int, scalars: Tensor | None = None, own: bool = True) -> Pending:
        channel, links = self._channel(x), self._links_of(topology, k)
        channel.write_head(self._alarm, self.rank, k, scalars)
        works = self._post(channel, links)
        self._under_way[channel.tag] = (works, channel)
        self.metrics.bytes_sent += len(links.send) * channel.out.whole.nbytes
        return _Gossip(self, channel, works, links, k, 0 if scalars is None else scalars.numel(), own)

    def mean(self, x: Tensor, k: int, scalars: Tensor | None = None) -> Pending:
        channel = self._channel(x)
        channel.write_head(self._alarm, self.rank, k, None)
        total = channel.total()
        _scaled(channel.out.payload, 1 / self.n, total.payload)
        total.head.zero_()[1:2].copy_(self._alarm.is_known())
        count = 0 if scalars is None else scalars.numel()
        if scalars is not None:
            total.scalars(count).copy_(scalars)
        works = [dist.all_reduce(total.whole, group=self.group, async_op=True)] if self.n > 1 else []
        self._under_way[channel.tag] = (works, channel)
        self.metrics.bytes_sent += 2 * (self.n - 1) * total.whole.nbytes // self.n
        return _Mean(self, total, works, k, count)

    def self_weight(self, topology: Topology, k: int) -> Tensor:
        return self.full(self._links_of(topology, k).own)

    def full(self, value: float) -> Tensor:
        return torch.full((1,), value, dtype=torch.float64, device=self.device)

    def room(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        channel = Channel(shape.numel(), dtype, self.device if self._is_host else device, next(_tags))
        self._channels[channel.out.payload.data_ptr()] = channel
        return channel.out.payload

    # ---- before and beside the steps ---------------------------------------------------------------------------------------------

    def agree(self, what: str, mine: str) -> None:
        """Raises on every rank, naming both values, unless all say the same. (NCCL wants a first collective before P2P: this is it.)"""
        said: list[Any] = [None] * self.n
        self._guard(lambda: dist.all_gather_object(said, mine, group=self.group), "comparing the set-up of all ranks")
        while _orphans:
            for works, _ in _orphans.pop().values():
                self._wait(works, "taking in the messages of an Averager that was dropped before finish()")
        for rank, theirs in enumerate(said):
            if theirs != said[0]:
                raise ValueError(f"ranks disagree on the {what}: rank 0 has {said[0]}, rank {rank} has {theirs}")

    def broadcast(self, tensors: Iterable[Tensor], group: Group | None = None) -> None:
        """Every rank of `group` takes its rank 0's values, in place."""
        group = group or self.group
        source = dist.get_global_rank(group, 0)
        for tensor in tensors:
            sent = as_real(tensor).contiguous()
            sent = sent.view(torch.uint8) if sent.dtype == torch.bool else sent
            wire = sent.cpu() if self._is_host else sent
            self._guard(partial(dist.broadcast, wire, source, group=group), "taking over rank 0's model")
            as_real(tensor).copy_(wire.view(tensor.dtype) if tensor.dtype == torch.bool else wire)

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
            hears = [(j, dist.get_global_rank(self.group, j), w) for j, w in topology.neighbors(self.rank, k).items()]
            tells = [dist.get_global_rank(self.group, j) for j in topology.sends_to(self.rank, k)]
            self._links[key] = _Links(hears, tells, topology.self_weight(self.rank, k))
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
                f"rank {self.rank} of {self.n} lost touch with the others while {doing}: {error}. A peer has died, is cut off, or is "
                "slower than the time-out that init_process_group(timeout=...) sets; restart the job from its last checkpoint"
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


class _Links(NamedTuple):
    """Whom this rank hears from (node, global rank, weight), whom it sends to (global ranks), and its own weight."""

    receive: list[tuple[int, int, float]]
    send: list[int]
    own: float


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
        names = ", ".join(str(node) for node, _, _ in self.links.receive)
        engine._wait(self.works, f"gossiping at step {self.k} with node {names}")
        for message, (node, _, w) in zip(self.channel.inbox(len(self.links.receive)), self.links.receive, strict=True):
            finite = engine._alarm.hear(message, node, self.k)
            if isinstance(finite, Tensor):
                payload = torch.where(finite, message.payload, own.payload)
            else:
                payload = message.payload if finite else own.payload
            yield payload, message.scalars(self.scalars), w

    def wait(self) -> Mixed:
        out, own = self.channel.out, self.links.own if self.own else 0.0
        mixed = self.engine._room_to_mix(len(out.payload), out.payload.dtype, out.payload.device)
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
    total: Message
    works: list[dist.Work]
    k: int
    scalars: int

    def wait(self) -> Mixed:
        engine, total = self.engine, self.total
        doing = f"averaging globally at step {self.k}"
        engine._wait(self.works, doing)
        if float(total.head[1]) > 0:
            raise engine._settle_alarm(doing)
        return Mixed(total.payload, total.scalars(self.scalars).double() / engine.n if self.scalars else NO_SCALARS)


def unwrap(model: torch.nn.Module, group: Group | None, local_group: Group | None) -> torch.nn.Module:
    """The module to average; refuses one whose gradients DDP already averages over all nodes."""
    if not isinstance(model, DistributedDataParallel):
        return model
    across = dist.get_process_group_ranks(group)
    inside = dist.get_process_group_ranks(local_group) if local_group is not None else [dist.get_rank()]
    if not set(dist.get_process_group_ranks(model.process_group)) <= set(inside):
        raise ValueError(
            f"the model is already in DistributedDataParallel over ranks of the gossip group {across}: hand the Averager the plain module "
            "(model.module); only inside a node of several GPUs may DDP stay, with local_group=its group"
        )
    module: torch.nn.Module = model.module
    return module
