"""Transport: one torch.distributed group. Every call that fails or times out raises an error that says who is lost, and when."""

from __future__ import annotations

import datetime
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # if an optimizer's first step imported it, its default arguments would keep the group alive
from torch import Tensor
from torch._C._distributed_c10d import GradBucket as GradBucket  # which torch.distributed exports, without a type

from rumor.engines.processes import liveness
from rumor.engines.processes.gloo_group import BreakableSum, GlooGroup
from rumor.metrics import Metrics, span
from rumor.model.tensors import as_real

Group = dist.ProcessGroup

# Messages of two Averagers must never meet, so each numbers its buckets from a start that all ranks have agreed on.
TAGS_OF_AN_ENGINE, ENGINES = 2**16, 2**15


class Work(Protocol):
    """A message or a sum that was posted."""

    def wait(self) -> object: ...


Posted = tuple[Sequence[Work], object]  # what was posted, and the memory that it reads or fills
GroupRef = Callable[[], Group | None]


class Unclaimed(NamedTuple):
    """Messages that nobody waits for."""

    group: GroupRef
    posted: Posted
    have_arrived: Callable[[], bool]


# gloo breaks the connection if memory that a message will fill is freed. So messages outlive the transport that posted them:
_orphans: list[dict[int, Posted]] = []  # will arrive: the next handshake waits for them
_unclaimed: list[Unclaimed] = []  # may never arrive: kept until they do, or until their group is destroyed
_shared_groups: weakref.WeakKeyDictionary[Group, GroupRef] = weakref.WeakKeyDictionary()
_last_engine = 0  # number of the last engine that this process has agreed on with others


class Transport:
    """The members of one group, and what they send each other.

    Attributes:
        n: number of members.
        rank: this process among them.
        sends_from_host: True for gloo and MPI, whose messages are in host memory; False for NCCL.
        device: where messages are.
        addresses: where each process listens (see liveness.py), by its name in errors; filled in by the handshake.
        has_news: whether this node wants all nodes to hear of something; the next sum or average over all nodes tells them.
        heard_news: whether some node had news, as of the last one. It is the same on all nodes.
    """

    def __init__(self, group: Group | GlooGroup | None, metrics: Metrics, called: str = "rank"):
        self._gloo = group if isinstance(group, GlooGroup) else None  # a group that torch.distributed does not know
        self.metrics, self._called = metrics, called
        self.has_news = self.heard_news = False
        if isinstance(group, GlooGroup):
            group = group.group
        else:
            if not (dist.is_available() and dist.is_initialized()):
                raise RuntimeError("no process group: call torch.distributed.init_process_group() first (torchrun sets its variables)")
            group = group or dist.distributed_c10d._get_default_group()
        assert group is not None
        self.group_ref: GroupRef = weakref.ref(group)
        self.n = dist.get_world_size(group)
        self.rank = dist.get_rank(group) if self._gloo is None else group.rank()
        if self.rank < 0:
            raise ValueError("this process is not in the group it was given: each rank must pass a group that it belongs to")
        self.backend = dist.get_backend(group) if self._gloo is None else "gloo"
        self.sends_from_host = self.backend != "nccl"
        self.device = torch.device("cpu") if self.sends_from_host else torch.device("cuda", torch.cuda.current_device())
        self.addresses: liveness.Addresses = {}
        self._tags = itertools.count()
        self._in_flight: dict[int, Posted] = {}  # by tag
        self._finalizer = weakref.finalize(self, _orphans.append, self._in_flight)
        self._finalizer.atexit = False

    @property
    def group(self) -> Group:
        """The group, which torch owns: if it outlived destroy_process_group(), its threads could abort the process at exit."""
        if (group := self.group_ref()) is None:
            raise ValueError("the process group of this Averager was destroyed: make a new one, and a new Averager over it")
        return group

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the members."""
        return dist.get_process_group_ranks(self.group) if self._gloo is None else list(range(self.n))

    def global_rank(self, member: int) -> int:
        return dist.get_global_rank(self.group, member) if self._gloo is None else member

    # ---- messages ----------------------------------------------------------------------------------------------------------------

    def new_tag(self) -> int:
        """Return a tag for the messages of one bucket. All ranks ask for them in the same order."""
        return next(self._tags)

    def send(self, tensor: Tensor, peers: Iterable[int], tag: int) -> list[Work]:
        if self._gloo is not None:
            return [self.group.send([tensor], peer, tag) for peer in peers]
        works = [dist.isend(tensor, peer, self.group, tag) for peer in peers]
        return [work for work in works if work is not None]

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Work:
        if self._gloo is not None:
            return self.group.recv([tensor], peer, tag)
        work = dist.irecv(tensor, peer, self.group, tag)
        assert work is not None  # this rank is in the group
        return work

    def exchange(self, outbox: Iterable[tuple[Tensor, int]], inbox: Iterable[tuple[Tensor, int]], tag: int) -> list[Work]:
        """Post sends (tensor, receiver) and receives (tensor, sender). Returns the receives first."""
        if self.sends_from_host:  # receives first, or gloo asks the receiver
            receives = [self.receive(tensor, peer, tag) for tensor, peer in inbox]
            return receives + [work for tensor, peer in outbox for work in self.send(tensor, [peer], tag)]
        operations = [dist.P2POp(dist.isend, tensor, peer, self.group, tag) for tensor, peer in outbox]
        operations += [dist.P2POp(dist.irecv, tensor, peer, self.group, tag) for tensor, peer in inbox]
        return list(dist.batch_isend_irecv(operations)) if operations else []  # NCCL would deadlock on them one by one

    def exchange_rows(self, rows: Tensor, tag: int, doing: str) -> list[Work]:
        """Send this member's row of `rows` [n, s] to all others, and receive theirs. Returns the receives first, by member."""
        others = [(rows[member], self.global_rank(member)) for member in range(self.n) if member != self.rank]
        own = rows[self.rank]
        self.metrics.bytes_sent += len(others) * own.nbytes
        works: list[Work] = self.call(lambda: self.exchange([(own, peer) for _, peer in others], others, tag), doing)
        return works

    def sum(self, tensor: Tensor, doing: str) -> list[Work]:
        """Start to sum `tensor` over all members, in place."""
        if self.n == 1:
            return []
        work = self.call(partial(dist.all_reduce, tensor, group=self.group, async_op=True), doing)
        return [work if self._gloo is None else BreakableSum(work, self._gloo)]

    def min(self, tensor: Tensor, doing: str) -> None:
        """Take the minimum of `tensor` over all members, in place."""
        self.call(partial(dist.all_reduce, tensor, dist.ReduceOp.MIN, group=self.group), doing)

    def gather(self, rows: Tensor, doing: str) -> None:
        """Fill in the rows [n, ...] of all other members; each has filled in its own."""
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed the latter
        work = self.call(partial(all_gather, rows.view(-1), rows[self.rank], group=self.group, async_op=True), doing)
        self.wait([work], doing)

    def gather_objects(self, value: Any, doing: str) -> list[Any]:
        """Return the values of all members."""
        values: list[Any] = [None] * self.n
        self.call(partial(dist.all_gather_object, values, value, group=self.group), doing)
        return values

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give every member the values of member 0, in place."""
        for tensor in tensors:
            values = as_real(tensor).to(self.device if self.sends_from_host else tensor.device).contiguous().reshape(-1)
            self.call(partial(dist.broadcast, values.view(torch.uint8), group=self.group, group_src=0), "receiving the values of rank 0")
            as_real(tensor).copy_(values.view(as_real(tensor).shape))

    # ---- waiting -----------------------------------------------------------------------------------------------------------------

    def track(self, tag: int, works: Sequence[Work], memory: object) -> None:
        """Keep the memory of messages alive until `wait` has returned, even if this transport is dropped before."""
        self._in_flight[tag] = (works, memory)

    def abandon(self) -> object:
        """Wait for no message any more. Returns the memory that they may still fill, to be freed after the group."""
        self._finalizer.detach()
        return self._in_flight

    def leave(self, tag: int, have_arrived: Callable[[], bool]) -> None:
        """Keep the memory of messages that nobody will wait for."""
        works, memory = self._in_flight.pop(tag, ((), None))
        if works:
            keep_unclaimed(self.group_ref, [(works, memory)], have_arrived)

    def wait(self, works: list[Work], doing: str, senders: Sequence[int] = (), tag: int | None = None) -> None:
        """Wait for each once, and remove it: a second wait() on a gloo message would wait for a second message.

        `senders` are the nodes that the first of them come from. `tag` is that of `track`, if they were tracked.
        """
        with span("rumor::wait"):
            began = time.perf_counter()
            for node in [*senders, *[None] * (len(works) - len(senders))][: len(works)]:  # NCCL may put several into one
                self.call(works.pop(0).wait, doing)
                now = time.perf_counter()
                self.metrics.seconds_waiting += now - began
                if node is not None:
                    self.metrics.waited_for[node] = self.metrics.waited_for.get(node, 0.0) + now - began
                began = now
        if tag is not None:
            self._in_flight.pop(tag, None)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting."""
        began = time.perf_counter()
        with span("rumor::wait"):
            yield
        self.metrics.seconds_waiting += time.perf_counter() - began

    def call(self, function: Callable[[], Any], doing: str) -> Any:
        """Call torch.distributed. If that fails, raise ConnectionError with the likely reason."""
        try:
            return _called(function)
        except RuntimeError as error:
            reason = liveness.likely_reason(self.addresses, error, _store())
            raise ConnectionError(
                f"{self._called} {self.rank} of {self.n} lost touch with the others while {self.metrics.locate(doing)}: {reason}. "
                f"Fix this, then restart the job from its last checkpoint. ({error})"
            ) from error

    def attempt(self, function: Callable[[], object], doing: str) -> None:
        """Call torch.distributed for something that may never be needed, and ignore it if that fails.

        Members that may come and go end together, so there it means that one is lost, which must be noticed at once.
        """
        if self._gloo is not None:
            self.call(function, doing)
            return
        with suppress(RuntimeError):
            _called(function)

    # ---- handshake ---------------------------------------------------------------------------------------------------------------

    def agree_on_tags(self, last_engines: Iterable[int], doing: str) -> None:
        """Start the tags of this engine above those of all earlier engines of all members, whose last numbers are given."""
        global _last_engine
        _last_engine = 1 + max(last_engines)
        self._tags = itertools.count(_last_engine % ENGINES * TAGS_OF_AN_ENGINE)
        while _orphans:
            for works, _ in _orphans.pop().values():
                self.wait(list(works), doing)


def last_engine() -> int:
    """Return the number of the last engine that this process has agreed on."""
    return _last_engine


def keep_unclaimed(group: GroupRef, posted: Iterable[Posted], have_arrived: Callable[[], bool] = lambda: False) -> None:
    """Keep messages that may never arrive until they do, or until their group is destroyed. Also drops earlier ones that can go."""
    kept = [entry for entry in _unclaimed if entry.group() is not None and not entry.have_arrived()]
    _unclaimed[:] = [*kept, *(Unclaimed(group, one, have_arrived) for one in posted)]


def _called(function: Callable[[], Any]) -> Any:
    if not torch._C._autograd._profiler_enabled():
        return function()
    with _unrecorded():
        return function()


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Hide calls from the profiler: a gloo message that it saw begin and that ends after profiling writes to freed memory (torch 2.13)."""
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def ranks_of(group: Group) -> list[int]:
    """Return the global ranks of a group's members."""
    return dist.get_process_group_ranks(group)


def shared_group_like(group: Group | None) -> Group:
    """Return a group of the same ranks, kind and time-out, beside that of DDP. The first call for a group is a collective.

    All transports on it have tags of their own. torch keeps a group until destroy_process_group(), so one serves all of them.
    """
    like, backend = group or dist.distributed_c10d._get_default_group(), dist.get_backend(group)
    if (known := _shared_groups.get(like)) is not None and (found := known()) is not None:
        return found
    timeout = like._get_backend(torch.device("cuda" if backend == "nccl" else "cpu")).options._timeout  # else it would be half an hour
    found = dist.new_group(dist.get_process_group_ranks(like), timeout, backend, use_local_synchronization=True)
    assert isinstance(found, Group)  # this rank is among them
    _shared_groups[like] = weakref.ref(found)
    return found


@contextmanager
def default_group(backend: str, timeout: float, **rendezvous: Any) -> Iterator[None]:
    """Initialize torch.distributed, and destroy it when all ranks have come to the end."""
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout), **rendezvous)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _store() -> liveness.Store | None:
    """Return the store of the job; None if there is no default group."""
    try:
        store: liveness.Store = dist.distributed_c10d._get_default_store()
    except ValueError:
        return None
    return store
