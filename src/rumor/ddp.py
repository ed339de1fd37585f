"""A communication hook for DistributedDataParallel: it averages gradients with codes of 16, 8 or 4 bits.

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(rumor.ddp_hook_state(bits=4), rumor.ddp_hook)

DDP's steps stay as they are, for any optimizer; only the messages are smaller. What the codes leave out of a gradient is added to the next
one (error feedback), so nothing is lost over time.
"""

# DDP compares the annotations of a hook with its own types, so they must not be strings: no `from __future__ import annotations` here
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from rumor.engines.codes import CODES
from rumor.engines.engine import Buffer, accumulator
from rumor.engines.processes import handshake
from rumor.engines.processes.alarm import Alarm, DeviceAlarm
from rumor.engines.processes.channel import Scratch
from rumor.engines.processes.coded_mean import CodedMean, Shares
from rumor.engines.processes.transport import GradBucket, Group, Transport, group_like
from rumor.metrics import Metrics
from rumor.version import VERSION

DOING = "averaging gradients"
AT_ONCE = 3  # buckets: while one waits for its mean, another waits for its codes, and a third is encoded


class _Memory:
    """What belongs to one bucket of DDP: what codes have left out of its gradients so far, and the memory for its messages."""

    def __init__(self, transport: Transport, bucket: GradBucket, bits: int):
        gradient = bucket.buffer()
        from_host = transport.sends_from_host and gradient.is_cuda
        device = transport.device if transport.sends_from_host else gradient.device
        self.left_out = torch.zeros_like(gradient, dtype=accumulator(gradient.dtype))
        self.parts = dict(zip(map(id, bucket.parameters()), _parts(self.left_out, bucket.parameters()), strict=True))
        self.shares = Shares(transport, [len(gradient)], bits, from_host, device)


class _OfThread(threading.local):
    """What each thread has of its own: buckets that are averaged at the same time must not share memory."""

    def __init__(self) -> None:
        self.scratch = Scratch()


class DDPHookState:
    """The state of `ddp_hook`. Build it with `ddp_hook_state`, on every rank.

    Attributes:
        metrics: counts the bytes that this rank has sent.
    """

    def __init__(self, bits: int, group: Group | None, model: nn.Module | None):
        if bits not in CODES or isinstance(bits, bool):
            raise ValueError(f"bits must be 16, 8 or 4, got bits={bits!r}: for 32, leave the hook out")
        self.bits, self.metrics, self._model = bits, Metrics(), model
        self._transport = Transport(group_like(group), self.metrics)
        handshake.agree(self._transport, {"number of bits of the hook": str(bits), "version of rumor": VERSION})
        self._memories: dict[tuple[int, ...], _Memory] = {}
        self._loaded: dict[int, Tensor] = {}  # by the id of a parameter
        self._of_thread = _OfThread()
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="rumor-ddp")
        self._rounds = 0

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start to average the gradients of a bucket."""
        memory, k = self._memory_of(bucket), self._rounds
        self._rounds += 1
        self.metrics.bytes_sent += memory.shares.bytes_sent
        gradient = bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[gradient.device] if gradient.is_cuda else [])
        if not self._transport.sends_from_host:  # the device does it all, in the order of its stream
            future.set_result(self._averaged(gradient, memory, k))
            return future

        def run() -> None:
            try:
                future.set_result(self._averaged(gradient, memory, k))
            except Exception as error:  # DDP raises it when it waits for the bucket
                future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong

        self._threads.submit(run)
        return future

    @torch.no_grad()
    def _averaged(self, gradient: Tensor, memory: _Memory, k: int) -> Tensor:
        """Average a gradient in place. If one is not finite on some rank, all get NaN, so that GradScaler skips the step everywhere."""
        is_bad = ~torch.linalg.vector_norm(gradient, dtype=torch.float32).isfinite()
        own = torch.where(is_bad, 0.0, gradient) if bool(is_bad) else gradient
        flag = is_bad.to(torch.float64).reshape(1)
        transport = self._transport
        alarm = Alarm(transport.n) if transport.sends_from_host else DeviceAlarm(transport.n, transport.device)
        total = CodedMean(transport, alarm, memory.shares, [Buffer(own)], [memory.left_out], k, DOING, flag, self._of_thread.scratch)
        total.post()
        if float(total.arrive()) > 0:
            memory.left_out.zero_()
            return gradient.fill_(torch.nan)
        return gradient.copy_(total.mean(0))

    def _memory_of(self, bucket: GradBucket) -> _Memory:
        """Return the memory of a bucket. After the first backward pass, DDP forms other buckets, which take over what was left out."""
        key = tuple(map(id, bucket.parameters()))
        if key not in self._memories:
            memory = _Memory(self._transport, bucket, self.bits)
            kept = {one: part for old in self._memories.values() for one, part in old.parts.items()}
            for one, part in memory.parts.items():
                if (before := self._loaded.pop(one, kept.get(one))) is not None:
                    part.copy_(before)
            self._memories = {k: old for k, old in self._memories.items() if not set(k) & set(key)}
            self._memories[key] = memory
        return self._memories[key]

    # ---- checkpoints ---------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what was left out so far, by the name of the parameter. Each rank has its own."""
        parts = {one: part for memory in self._memories.values() for one, part in memory.parts.items()}
        named = self._named_parameters("state_dict()")
        return {"bits": self.bits, "left_out": {name: parts[id(p)].clone() for name, p in named.items() if id(p) in parts}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which this rank has saved."""
        named = self._named_parameters("load_state_dict()")
        for name, saved in state["left_out"].items():
            if name not in named or named[name].numel() != saved.numel():
                there = "no such parameter" if name not in named else f"{named[name].numel()} numbers"
                raise ValueError(f"this state has {saved.numel()} numbers of {name}, but the model here has {there}")
        self._memories.clear()
        self._loaded = {id(named[name]): saved for name, saved in state["left_out"].items()}

    def _named_parameters(self, what: str) -> dict[str, nn.Parameter]:
        if self._model is None:
            raise ValueError(f"{what} needs the names of the parameters: build the state with ddp_hook_state(bits={self.bits}, model=ddp)")
        return dict(self._model.named_parameters())


def ddp_hook_state(bits: int = 4, *, group: Any = None, model: nn.Module | None = None) -> DDPHookState:
    """Return the state of `ddp_hook`. A collective: call it on every rank.

    Args:
        bits: 16, 8 or 4, for each number of a gradient.
        group: the group that DDP averages over; the default group if None.
        model: the model, if you want to save what was left out with `state_dict()`.
    """
    return DDPHookState(bits, group, model)


def ddp_hook(state: DDPHookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average the gradients of one bucket, while the backward pass goes on.

    Use it as `ddp.register_comm_hook(rumor.ddp_hook_state(bits=4), rumor.ddp_hook)`.
    """
    return state.average(bucket)


def _parts(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the part of each parameter in a bucket."""
    return list(torch.split(flat, [p.numel() for p in parameters]))
