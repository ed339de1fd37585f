"""ProcessGroup: the engine of real processes, one node a rank, over any `torch.distributed` group.

A message is a bucket with a head of a few float64 numbers in front: whether the bucket is finite, the alarm (below), and scalars that
travel along. Messages to and from all neighbours are posted at once, bucket by bucket, so that both directions of every link are busy.

The alarm. A model that is not finite must not spread: receivers put their own model in the place of a bucket whose head says that it is
not finite, and note which node sent it and when, as a number that is the smaller the earlier; heads carry it on. By the next global
round, or when word of it has had time to reach everyone, every rank raises. A gossip step reads the head where it lies: no further
collective, and on a GPU no synchronisation.
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

from rumor.engine import NO_SCALARS, Buckets, Mixed, Pending, accumulator
from rumor.flat import as_real
from rumor.metrics import Metrics
from rumor.topology import Topology

Group = dist.ProcessGroup

HEAD = 8  # float64 numbers in front of a bucket: [sum, alarm, scalars ...]; 64 bytes keep what follows aligned
SCALARS = HEAD - 2


_tags = itertools.count()  # no two buckets of a process share one, so that a message never meets another Averager's
_UnderWay = dict[int, tuple[list[dist.Work], "_Channel"]]
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
        self._channels: dict[int, _Channel] = {}
        self._links: dict[tuple[Topology, int], _Links] = {}
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._alarm: float | Tensor = math.inf  # the earliest known k * n + node, on the device where there is one
        self._under_way: _UnderWay = {}
        weakref.finalize(self, _orphans.append, self._under_way).atexit = False

    # ---- the collectives -------------------------------------------------------------------------------------------------------

    def gossip(self, x: Tensor, topology: Topology, k: int, scalars: Tensor | None = None, own: bool = True) -> Pending:
        channel, links = self._channel(x), self._links_of(topology, k)
        channel.stamp(self, k, scalars)
        works = self._post(channel, links)
        self._under_way[channel.tag] = (works, channel)
        self.metrics.bytes_sent += len(links.send) * channel.out.whole.nbytes
        return _Gossip(self, channel, works, links, k, 0 if scalars is None else scalars.numel(), own)

    def mean(self, x: Tensor, k: int, scalars: Tensor | None = None) -> Pending:
        channel = self._channel(x)
        channel.stamp(self, k, None)
        total = channel.total()
        _scaled(channel.out.payload, 1 / self.n, total.payload)
        total.head.zero_()
        total.head[:1].copy_(self._alarmed())
        count = 0 if scalars is None else scalars.numel()
        if scalars is not None:
            total.head[1 : 1 + count] = scalars
        works = [dist.all_reduce(total.whole, group=self.group, async_op=True)] if self.n > 1 else []
        self._under_way[channel.tag] = (works, channel)
        self.metrics.bytes_sent += 2 * (self.n - 1) * total.whole.nbytes // self.n
        return _Mean(self, total, works, k, count)

    def self_weight(self, topology: Topology, k: int) -> Tensor:
        return self.full(self._links_of(topology, k).own)

    def full(self, value: float) -> Tensor:
        return torch.full((1,), value, dtype=torch.float64, device=self.device)

    def room(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        channel = _Channel(shape.numel(), dtype, self.device if self._is_host else device, next(_tags))
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

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Every rank takes rank 0's values, in place."""
        source = dist.get_global_rank(self.group, 0)
        for tensor in tensors:
            sent = as_real(tensor).contiguous()
            sent = sent.view(torch.uint8) if sent.dtype == torch.bool else sent
            wire = sent.cpu() if self._is_host else sent
            self._guard(partial(dist.broadcast, wire, source, group=self.group), "taking over rank 0's model")
            as_real(tensor).copy_(wire.view(tensor.dtype) if tensor.dtype == torch.bool else wire)

    def mean_inside(self, value: Tensor, local_group: Group) -> Tensor:
        """The average of a scalar over the ranks inside this node."""
        wire = value.to(self.device, copy=True)
        self._guard(lambda: dist.all_reduce(wire, group=local_group), "averaging the loss inside the node")
        return wire / dist.get_world_size(local_group)

    def raise_alarm(self, k: int, topology: Topology) -> None:
        """Raises if some node's model is not finite and word of it has had time to reach all, who then raise at this same step."""
        if isinstance(self._alarm, Tensor) or self._alarm == math.inf:
            return  # on a GPU only a global round looks: a look here would wait for the device
        if topology.reach is not None and k >= self._alarm // self.n + topology.reach:
            raise self._not_finite(int(self._alarm))

    # ---- below -----------------------------------------------------------------------------------------------------------------

    def _channel(self, x: Tensor) -> _Channel:
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

    def _post(self, channel: _Channel, links: _Links) -> list[dist.Work]:
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

    # ---- the alarm ---------------------------------------------------------------------------------------------------------------

    def _hear(self, message: _Message, node: int, k: int) -> bool | Tensor:
        """Takes in a head: is this bucket finite? Notes the earliest alarm that it or its head tells of."""
        code = float(k * self.n + node)
        if message.on_host is not None:
            finite = math.isfinite(message.on_host[0])
            self._alarm = min(self._alarm, float(message.on_host[1]), math.inf if finite else code)
            return finite
        fine = message.head[0].isfinite()
        heard = torch.where(fine, message.head[1], message.head[1].clamp(max=code))
        self._alarm = heard if isinstance(self._alarm, float) else torch.minimum(self._alarm, heard)
        return fine

    def _alarmed(self) -> Tensor:
        """1 where this node knows of a model that is not finite, else 0."""
        alarm = self._alarm if isinstance(self._alarm, Tensor) else torch.tensor(self._alarm)
        return (alarm < math.inf).double()

    def _all_alarmed(self, doing: str) -> None:
        """At a global round that found some rank alarmed: all of them are here, so they can settle whose alarm was the first."""
        first = torch.as_tensor(self._alarm, dtype=torch.float64).reshape(1).clone()
        self._guard(lambda: dist.all_reduce(first, dist.ReduceOp.MIN, group=self.group), doing)
        raise self._not_finite(int(first))

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


class _Message:
    """One stretch of memory: head, then payload."""

    def __init__(self, d: int, dtype: torch.dtype, device: torch.device, head: torch.dtype = torch.float64):
        in_front = HEAD * head.itemsize // dtype.itemsize
        self.whole = torch.zeros(in_front + d, dtype=dtype, device=device)
        self.head = self.whole[:in_front].view(head)
        self.payload = self.whole[in_front:]
        # the same memory, for the host to read and write without the cost of a tensor operation
        self.on_host = self.head.numpy() if device.type == "cpu" else None


class _Channel:
    """The buffers of one bucket: what goes out, what each neighbour sends, and what all of them sum up."""

    def __init__(self, d: int, dtype: torch.dtype, device: torch.device, tag: int):
        self.tag = tag
        self.out = _Message(d, dtype, device)
        self._shape = (d, dtype, device)
        self._inbox: list[_Message] = []
        self._total: _Message | None = None

    def inbox(self, count: int) -> list[_Message]:
        while len(self._inbox) < count:
            self._inbox.append(_Message(*self._shape))
        return self._inbox[:count]

    def total(self) -> _Message:
        if self._total is None:
            d, dtype, device = self._shape
            self._total = _Message(d, accumulator(dtype), device, head=accumulator(dtype))
        return self._total

    def stamp(self, engine: ProcessGroup, k: int, scalars: Tensor | None) -> None:
        """Fills the head. A sum of squares is finite if and only if its terms are; one that overflows is as bad a sign."""
        head, payload = self.out.head, self.out.payload
        is_half = payload.dtype != accumulator(payload.dtype)
        size = payload.sum(dtype=torch.float32) if is_half else torch.dot(payload, payload)  # dot is the faster one
        if self.out.on_host is not None:
            self.out.on_host[:2] = size.item(), math.inf
            engine._hear(self.out, engine.rank, k)
            self.out.on_host[1] = engine._alarm
        else:  # fill_ and copy_: assigning a number to an element would wait for the device
            head[:1].copy_(size)
            head[1:2].fill_(math.inf)
            engine._hear(self.out, engine.rank, k)
            head[1:2].copy_(torch.as_tensor(engine._alarm))
        if scalars is not None:
            head[2 : 2 + scalars.numel()] = scalars


@dataclass
class _Gossip(Pending):
    engine: ProcessGroup
    channel: _Channel
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
            finite = engine._hear(message, node, self.k)
            if isinstance(finite, Tensor):
                payload = torch.where(finite, message.payload, own.payload)
            else:
                payload = message.payload if finite else own.payload
            yield payload, message.head[2 : 2 + self.scalars], w

    def wait(self) -> Mixed:
        out, own = self.channel.out, self.links.own if self.own else 0.0
        mixed = self.engine._room_to_mix(len(out.payload), out.payload.dtype, out.payload.device)
        _scaled(out.payload, own, mixed) if self.own else mixed.zero_()
        scalars = out.head[2 : 2 + self.scalars] * own
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
    total: _Message
    works: list[dist.Work]
    k: int
    scalars: int

    def wait(self) -> Mixed:
        engine, total = self.engine, self.total
        doing = f"averaging globally at step {self.k}"
        engine._wait(self.works, doing)
        if float(total.head[0]) > 0:
            engine._all_alarmed(doing)
        return Mixed(total.payload, total.head[1 : 1 + self.scalars].double() / engine.n if self.scalars else NO_SCALARS)


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
