"""ProcessGroup: the engine of real processes, with one node for each rank of a torch.distributed group."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from rumor.engines.codes import CODES
from rumor.engines.engine import Buffer, FiniteCheck, Pending, accumulator, check_gossip, check_mean, sum_of_squares
from rumor.engines.processes.alarm import Alarm, DeviceAlarm
from rumor.engines.processes.channel import Channel, CodedChannel, CodeMemory, Scratch
from rumor.engines.processes.coded_mean import CodedBucketMean, CodedMean, Shares
from rumor.engines.processes.gloo_group import GlooGroup
from rumor.engines.processes.gpu_staging import CopyThread, Staging
from rumor.engines.processes.message import Message
from rumor.engines.processes.pending import AllReduce, BucketMean, CodedGossip, Gossip, Links, post_receives, sums_of
from rumor.engines.processes.transport import Group, GroupRef, Transport, default_group, keep_unclaimed
from rumor.metrics import Metrics
from rumor.topology import Topology

AnyChannel = TypeVar("AnyChannel", bound=Channel)


class ProcessGroup:
    """Node `rank` of `n`, with the collectives of `Engine`.

    Args:
        group: the torch.distributed group across nodes; the default group if None.
        local_group: the ranks inside this node, if a node is several ranks.
        metrics: the counters to go on with; new ones if None.

    Attributes:
        transport: sends messages to the other nodes.
        local: sends messages to the other ranks of this node; None if a node is one rank.
        alarm: whether a model was not finite.
        averages_ahead: whether this node does its part of an average with codes in a thread, while it computes. Else nobody's average is
            complete until this node waits for its own.
    """

    def __init__(self, group: Group | GlooGroup | None = None, local_group: Group | None = None, metrics: Metrics | None = None):
        self.metrics = metrics or Metrics()
        self.transport = Transport(group, self.metrics)
        if local_group is not None and group is None:
            raise ValueError("local_group= (the ranks inside this node) needs group= too: one rank of each node, this one among them")
        self.local = None if local_group is None else Transport(local_group, self.metrics, called="local rank")
        self.n, self.rank, self.device = self.transport.n, self.transport.rank, self.transport.device
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._links: dict[tuple[Topology, int], Links] = {}
        self._scratch = Scratch()
        self.averages_ahead = False
        self._helper: ThreadPoolExecutor | None = None
        self._copy_threads: dict[torch.device, CopyThread] = {}
        self.alarm = self._new_alarm()

    @property
    def group(self) -> Group:
        """The torch.distributed group across nodes."""
        return self.transport.group

    # ---- collectives -----------------------------------------------------------------------------------------------------------

    def gossip(
        self, x: Buffer | Tensor, topology: Topology, k: int, scalars: Tensor | None = None, own: bool = True, bits: int = 32
    ) -> Pending:
        check_gossip(bits, scalars, own)
        channel, links = self._coded(self._channel(x, bits), bits), self._links_of(topology, k)
        kind = Gossip if bits == 32 else CodedGossip
        gossip = kind(self.transport, self.alarm, channel, links, k, scalars, own, self._scratch)
        channel.prepare()
        if channel.staging is None:
            gossip.post()
        else:
            channel.task = channel.staging.thread.after(channel.staging.copied, gossip.post)
        self.transport.track(channel.tag, gossip.works, channel)
        self.metrics.bytes_sent += len(links.send) * channel.out.whole.nbytes
        return gossip

    def mean(
        self,
        xs: Iterable[Buffer | Tensor],
        k: int,
        scalars: Tensor | None = None,
        *,
        doing: str = "averaging globally",
        finite_check: FiniteCheck | None = sum_of_squares,
        bits: int = 32,
        left_out: Sequence[Tensor] = (),
    ) -> list[Pending]:
        check_mean(bits, xs, left_out)
        if bits < 32 and self.n > 1:  # one node alone sends nothing, so it need not round
            return self._coded_mean((self._channel(x, bits) for x in xs), k, scalars, f"{doing} at step {k}", bits, left_out)
        channels = [self._channel(x) for x in xs]
        for channel in channels:
            channel.prepare(finite_check or sum_of_squares)
        for channel in channels:
            if channel.staging is not None:
                channel.staging.copied.synchronize()
            if finite_check is not None:  # this head is not sent: it raises the alarm, which the head of the sum carries
                channel.write_head(self.alarm, self.rank, k, None, finite_check)
        pending: list[Pending] = []
        for some in sums_of(channels):
            first = scalars if not pending else None
            total = AllReduce(self.transport, self.alarm, some, f"{doing} at step {k}", first, raises=self.local is None)
            total.post()
            self.transport.track(some[0].tag, total.works, some[0])
            self.metrics.bytes_sent += 2 * (self.n - 1) * total.message.whole.nbytes // self.n
            pending += [BucketMean(total, place) for place in range(len(some))]
        return pending

    def _coded_mean(
        self, channels: Iterator[Channel], k: int, scalars: Tensor | None, doing: str, bits: int, left_out: Sequence[Tensor]
    ) -> list[Pending]:
        first = next(channels)
        shares = self._shares(first, [len(rest) for rest in left_out], bits)
        if first.memory is not None:  # a message that was posted ahead would be in the way
            self._complete_receives(first.memory.channels, k)
        xs = chain([first], channels)
        if self.averages_ahead and self._helper is None and left_out[0].device.type == "cpu":  # a GPU's work belongs to streams
            self._helper = ThreadPoolExecutor(1, thread_name_prefix="rumor-average")
        total = CodedMean(
            self.transport, self.alarm, shares, xs, left_out, k, doing, scalars, self._scratch, self.local is None, self._helper
        )
        total.post()
        self.metrics.bytes_sent += shares.bytes_sent
        return [CodedBucketMean(total, place) for place in range(len(left_out))]

    def self_weight(self, topology: Topology, k: int, dtype: torch.dtype = torch.float64) -> Tensor:
        links = self._links_of(topology, k)
        return self.full(links.kept_32 if dtype == torch.float32 else links.own)

    def full(self, value: float) -> Tensor:
        return torch.full((1,), value, dtype=torch.float64, device=self.device)

    # ---- memory ------------------------------------------------------------------------------------------------------------------

    def allocate(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Channel:
        from_host = self.transport.sends_from_host
        staging = Staging(shape.numel(), dtype, device, self._copy_thread(device)) if from_host and device.type == "cuda" else None
        channel = Channel(shape.numel(), dtype, self.device if from_host else device, self.transport.new_tag(), staging)
        return self._registered(channel)

    def allocate_codes(self, like: Sequence[Tensor], bits: int, keeps: bool) -> list[Buffer]:
        code, from_host = CODES[bits], self.transport.sends_from_host
        pinned = from_host and any(x.is_cuda for x in like)
        device = self.device if from_host or not like else like[0].device
        memory = CodeMemory(code, [x.numel() for x in like], self.n, self.rank, device, pinned)
        buffers: list[Buffer] = []
        for x, messages in zip(like, memory.messages, strict=True):
            tensor = torch.empty_like(x, dtype=accumulator(x.dtype)) if keeps else self._scratch(x, "change")
            channel = self._code_channel(tensor, bits, device, messages)
            channel.memory = memory
            memory.channels.add(channel)
            buffers.append(channel)
        return buffers

    def _coded(self, channel: Channel, bits: int) -> Channel:
        """Return the channel of this bucket's messages, if they have this many bits."""
        if bits == 32 or isinstance(channel, CodedChannel):
            return channel
        if bits not in channel.coded:
            channel.coded[bits] = self._code_channel(channel.tensor, bits, channel.out.whole.device)
        return channel.coded[bits]

    def _code_channel(
        self, bucket: Tensor, bits: int, device: torch.device, messages: tuple[Message, Message] | None = None
    ) -> CodedChannel:
        code, staging = CODES[bits], None
        if bucket.is_cuda and self.transport.sends_from_host:
            staging = Staging(code.nbytes(len(bucket)), torch.uint8, bucket.device, self._copy_thread(bucket.device))
        return self._registered(CodedChannel(bucket, code, device, self.transport.new_tag(), staging, messages))

    def _shares(self, first: Channel, sizes: list[int], bits: int) -> Shares:
        """Return the memory for averages of buckets of these sizes. It belongs to the first of them, and is freed with it."""
        key = (bits, *sizes)
        if key not in first.shares:
            memory, code = first.memory, CODES[bits]
            if memory is None or memory.sizes != sizes:
                memory = CodeMemory(code, sizes, self.n, self.rank, first.out.whole.device, first.staging is not None)
            first.shares[key] = Shares(self.transport, sizes, bits, memory)
        shares: Shares = first.shares[key]
        return shares

    def _registered(self, channel: AnyChannel) -> AnyChannel:
        self._channels.add(channel)
        weakref.finalize(channel, _keep_expected, self.transport.group_ref, channel.expected).atexit = False
        return channel

    def _copy_thread(self, device: torch.device) -> CopyThread:
        if device not in self._copy_threads:
            self._copy_threads[device] = CopyThread(device)
        return self._copy_threads[device]

    def _channel(self, x: Buffer | Tensor, bits: int = 32) -> Channel:
        """Return the channel of a buffer. A tensor from elsewhere, such as a slice of a buffer, is copied into a channel of its own."""
        if isinstance(x, Channel) and (not isinstance(x, CodedChannel) or x.code.bits == bits):
            return x
        given = x.tensor if isinstance(x, Buffer) else x
        channel = self.allocate(given.shape, given.dtype, self.device if self.transport.sends_from_host else given.device)
        channel.tensor.copy_(given.reshape(-1))
        return channel

    def _links_of(self, topology: Topology, k: int) -> Links:
        key = (topology, k % topology.period)
        links = self._links.get(key)
        if links is None:
            if topology.n != self.n:
                raise ValueError(f"{topology} is for n={topology.n} nodes, but the group has {self.n}")
            links = self._links[key] = Links.of(topology, k, self.transport)
        return links

    # ---- receives that are posted ahead of their step --------------------------------------------------------------------------

    def post_receives(self, buffers: Sequence[Buffer], topology: Topology, k: int, bits: int = 32) -> None:
        """Post the receives of step k ahead. What is expected from a neighbour at one step can be used at any later one.

        After the last step of a job, a neighbour may be gone already. If there is another step, that one raises the error.
        """
        if not self.transport.sends_from_host:  # NCCL needs receives together with sends
            return
        links = self._links_of(topology, k)
        doing = f"preparing to gossip at step {k} with node {links.names()}"
        for buffer in buffers:
            if isinstance(buffer, Channel):
                channel = self._coded(buffer, bits)
                post = partial(self.transport.attempt, partial(post_receives, self.transport, channel, links, ahead=True), doing)
                if channel.staging is None:
                    post()
                else:
                    channel.task = channel.staging.thread.after(channel.staging.landed, post)

    def complete_receives(self, k: int) -> None:
        """Send the messages that neighbours have posted receives for, and receive theirs, which nobody will use.

        A neighbour is in `expected` here if and only if this node is in `owed` there: posting ahead adds both, and gossip removes both.
        """
        self._complete_receives(self._channels, k)

    def _complete_receives(self, channels: Iterable[Channel], k: int) -> None:
        doing = f"completing the receives that were posted for step {k}"
        for channel in sorted(channels, key=lambda channel: channel.tag):  # in the same order on all nodes
            if channel.task is not None:
                channel.task.result()
            works = self.transport.call(partial(self.transport.send, channel.out.whole, sorted(channel.owed), channel.tag), doing)
            self.metrics.bytes_sent += len(channel.owed) * channel.out.whole.nbytes
            channel.owed.clear()
            self.transport.wait([*(work for _, work in channel.expected.values()), *works], doing)
            channel.expected.clear()

    # ---- models that are not finite ----------------------------------------------------------------------------------------------

    def forget_alarm(self) -> None:
        """Start without an alarm, for a run that goes on from a checkpoint. The nodes keep their names."""
        names, self.alarm = self.alarm.names, self._new_alarm()
        self.alarm.names = names

    def _new_alarm(self) -> Alarm:
        return Alarm(self.n) if self.transport.sends_from_host else DeviceAlarm(self.n, self.device)

    def raise_settled_alarm(self) -> None:
        """Raise if a global round found some part of a model not finite. Waits for the device, as global rounds do."""
        alarm = self.alarm.wait_for_settled()
        if alarm < math.inf:
            raise self.alarm.error(alarm)

    def raise_alarm(self, k: int, topology: Topology) -> None:
        """Raise if a model was not finite and the news has had time to reach all nodes, which then raise at this same step."""
        alarm = self.alarm.look()
        if self.alarm.settled < math.inf:
            raise self.alarm.error(self.alarm.settled)
        if alarm < math.inf and topology.reach is not None and k >= alarm // self.n + topology.reach:
            raise self.alarm.error(alarm)


def _keep_expected(group: GroupRef, expected: dict[int, Any]) -> None:
    """Keep the memory of posted receives, whose messages may never come."""
    if expected:
        keep_unclaimed(group, [([work], message) for message, work in expected.values()])


@contextmanager
def joined(backend: str, timeout: float, **rendezvous: Any) -> Iterator[ProcessGroup]:
    """Join the group of the processes that torchrun has started (else give init_method, rank, world_size). All leave together."""
    with default_group(backend, timeout, **rendezvous):
        yield ProcessGroup()
