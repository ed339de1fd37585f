"""A communication hook for DistributedDataParallel: it averages gradients with codes of 16, 8 or 4 bits.

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(rumor.ddp_hook_state(bits=4), rumor.ddp_hook)

DDP's steps stay as they are, for any optimizer; only the messages are smaller. What the codes leave out of a gradient is added to the next
one (error feedback). After a gradient that is much larger than the next one, most of what was left out of it is dropped, because it would
drown the next one: it is scaled down to LIMITS[bits] sqrt(n) times the norm of the next gradient. If a gradient is not finite on some rank,
all ranks get NaN, and forget what was left out: the step will be skipped.

With gloo, threads average one bucket while the backward pass computes the next. With NCCL, the backward pass waits for each bucket: the
averages run in its own stream, and the host waits for the device. NCCL between two GPUs has not been tested.

Adam divides each number of a gradient by the root of its second moment v. So for Adam, an error counts relative to that root, but the error
of a code is the same for all numbers of a block. With `optimizer=`, gradients are divided by scales that follow sqrt(v) before they are
encoded, and multiplied by them afterwards:

    s = sqrt(v / mean of v in the block), at least 0.1             the same on all ranks, since DDP's optimizers are
    g <- s mean_i Q(g_i / s + left_out_i)
"""

# DDP compares the annotations of a hook with its own types, so they must not be strings: no `from __future__ import annotations` here
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rumor.engines.codes import CODES, as_blocks
from rumor.engines.engine import Buffer, accumulator
from rumor.engines.processes import handshake
from rumor.engines.processes.alarm import Alarm, DeviceAlarm
from rumor.engines.processes.channel import CodeMemory, Scratch
from rumor.engines.processes.coded_mean import CodedMean, Shares
from rumor.engines.processes.transport import GradBucket, Group, Transport, shared_group_like
from rumor.metrics import Metrics
from rumor.model.ddp_layout import count, in_order_of, in_shape_of, parts_of
from rumor.version import VERSION

DOING = "averaging gradients"
DIFFERENT = (
    "the second moments of the hook's optimizer differ between ranks, but all ranks of DDP must have the same: load the optimizer's state "
    "on every rank, or on none; leave optimizer= out if ranks don't all take every step (DDP's join())"
)
SAME = 1e-6  # relative difference of checksums: ranks of different hardware may round differently
# What was left out, at most, beside sqrt(n) times the norm of the next gradient. While gradients keep their size, it is at most a third of
# this (measured on random gradients of 4 to 32 ranks). After a spike, the error of the next mean is about three times the usual one.
LIMITS = {16: 0.006, 8: 0.024, 4: 0.4}
LEAST_SCALE = 0.1  # beside the root mean square of a block: numbers whose second moment was zero may become large again
REFRESHED = 16  # rounds until scales are taken from the optimizer anew; in the beginning more often: after 1, 2, 4 and 8
AT_ONCE = 3  # buckets: while one waits for its mean, another waits for its codes, and a third is encoded


class _Memory:
    """What belongs to one bucket of DDP: what codes have left out of its gradients so far, its scales, and the memory for its messages.

    Attributes:
        scales: what gradients are divided by before they are encoded, or None. `left_out` is divided by them, too.
        checksum: of the scales, to notice ranks with others.
    """

    def __init__(self, transport: Transport, bucket: GradBucket, bits: int):
        gradient = bucket.buffer()
        from_host = transport.sends_from_host and gradient.is_cuda
        device = transport.device if transport.sends_from_host else gradient.device
        self.left_out = torch.zeros_like(gradient, dtype=accumulator(gradient.dtype))
        self.scales: Tensor | None = None
        self.checksum = 0.0
        memory = CodeMemory(CODES[bits], [len(gradient)], transport.n, transport.rank, device, pinned=from_host)
        self.shares = Shares(transport, [len(gradient)], bits, memory)
        self._parameters, self._rounds = bucket.parameters(), 0

    def parts(self) -> dict[int, Tensor]:
        """Return what was left out of each parameter's gradients, by its id."""
        left_out = self.left_out if self.scales is None else self.left_out * self.scales
        return dict(zip(map(id, self._parameters), parts_of(left_out, self._parameters), strict=True))

    def take_over(self, parts: dict[int, Tensor]) -> None:
        """Go on from what was left out of each parameter's gradients; nothing, if `parts` does not have it."""
        self.left_out.zero_()
        for parameter, part in zip(self._parameters, parts_of(self.left_out, self._parameters), strict=True):
            if (before := parts.pop(id(parameter), None)) is not None:
                part.copy_(before)
        if self.scales is not None:
            self.left_out.div_(self.scales)

    def refresh_scales(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Count a round, and take the scales from the optimizer's second moments at times. All ranks do so in the same rounds."""
        self._rounds += 1
        is_due = self._rounds % REFRESHED == 0 or self._rounds in (1, 2, 4, 8)
        if optimizer is None or not is_due:
            return
        found = [_second_moment(optimizer, p) for p in self._parameters]
        known = [squares for squares in found if squares is not None]
        if not known:  # before the first step
            return
        usual = torch.cat(known).mean()  # for parameters that are not trained, or that another optimizer trains
        squares = [usual.expand(count(p)) if v is None else v for p, v in zip(self._parameters, found, strict=True)]
        scales = scales_of(torch.cat(squares)).to(self.left_out)
        self.left_out.mul_(scales.reciprocal() if self.scales is None else self.scales / scales)
        weights = torch.linspace(1, 2, len(scales), dtype=torch.float64, device=scales.device)
        self.scales, self.checksum = scales, float((scales * weights).mean())


class _OfThread(threading.local):
    """What each thread has of its own: buckets that are averaged at the same time must not share memory."""

    def __init__(self) -> None:
        self.scratch = Scratch()


class DDPHookState:
    """The state of `ddp_hook`. Build it with `ddp_hook_state`, on every rank.

    Attributes:
        metrics: counts the bytes that this rank has sent.
    """

    def __init__(self, bits: int, group: Group | None, model: nn.Module | None, optimizer: torch.optim.Optimizer | None):
        if type(bits) is not int or bits not in CODES:
            raise ValueError(f"bits must be 16, 8 or 4, got bits={bits!r}: for 32, leave the hook out")
        if optimizer is not None and "betas" not in getattr(optimizer, "defaults", {}):
            kind = type(optimizer).__name__
            raise ValueError(f"optimizer= is for Adam and its like, which keep second moments (exp_avg_sq), got {kind}: leave it out")
        self.bits, self.metrics, self._model, self._optimizer = bits, Metrics(), model, optimizer
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model= must be the model in DDP, got {model!r}")
        if group is None:
            group = getattr(model, "process_group", None)
        self._transport = Transport(shared_group_like(group), self.metrics)
        kind = "none" if optimizer is None else type(optimizer).__name__
        handshake.agree(
            self._transport, {"number of bits of the hook": str(bits), "optimizer of the hook": kind, "version of rumor": VERSION}
        )
        self._memories: dict[tuple[int, ...], _Memory] = {}
        self._waiting: dict[int, Tensor] = {}  # what was left out of parameters whose bucket is not there yet, by their ids
        self._knows_model = optimizer is None
        self._of_thread = _OfThread()
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="rumor-ddp")
        self._rounds = 0
        self._was_bad = False  # whether some gradient of the last backward pass was not finite on some rank

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start to average the gradients of a bucket."""
        if not self._knows_model and self._rounds > 0 and bucket.index() == 0:  # the first backward pass has shown all buckets
            raise ValueError("optimizer= has no parameters of this model: give ddp_hook_state() the optimizer that trains it")
        gradient = bucket.buffer()
        if gradient.layout != torch.strided:
            raise ValueError("rumor.ddp_hook can't average sparse gradients: build the model with nn.Embedding(..., sparse=False)")
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[gradient.device] if gradient.is_cuda else [])
        if self._transport.n == 1 or gradient.numel() == 0:
            future.set_result(gradient)
            return future
        if self._was_bad and bucket.index() == 0:
            self._forget_left_out()
        memory, k = self._memory_of(bucket), self._rounds
        self._rounds += 1
        self.metrics.bytes_sent += memory.shares.bytes_sent
        if not self._transport.sends_from_host:  # the device does it all, in the order of its stream
            future.set_result(self._averaged(gradient, memory, k))
            return future

        ready = torch.cuda.current_stream(gradient.device).record_event() if gradient.is_cuda else None

        def run() -> None:
            try:
                if ready is not None:  # the backward pass may run on another stream than this thread
                    torch.cuda.current_stream(gradient.device).wait_event(ready)
                future.set_result(self._averaged(gradient, memory, k))
            except Exception as error:  # DDP raises it when it waits for the bucket
                future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong

        self._threads.submit(run)
        return future.then(lambda done: done.value())  # DDP would try to cast an exception of `future` itself to a tensor

    @torch.no_grad()
    def _averaged(self, gradient: Tensor, memory: _Memory, k: int) -> Tensor:
        """Average a gradient in place. If one is not finite on some rank, all get NaN, so that GradScaler skips the step everywhere."""
        memory.refresh_scales(self._optimizer)
        transport, scales, left_out = self._transport, memory.scales, memory.left_out
        in_place = gradient if gradient.dtype == left_out.dtype else None  # a gradient in half precision is rounded once, at the end
        size = _norm(gradient)
        is_bad = not math.isfinite(size) and not math.isfinite(_norm(gradient, math.inf))  # a sum of squares may overflow
        own = gradient.zero_() if is_bad else gradient
        if scales is not None:
            own = torch.div(own, scales, out=in_place)
            size = _norm(own)
        limit_left_out(left_out, size, transport.n, self.bits)
        scalars = torch.tensor([is_bad, memory.checksum, memory.checksum**2], dtype=torch.float64, device=gradient.device)
        alarm = Alarm(transport.n) if transport.sends_from_host else DeviceAlarm(transport.n, transport.device)
        total = CodedMean(
            transport, alarm, memory.shares, [Buffer(own)], [left_out], k, DOING, scalars, self._of_thread.scratch, raises=False
        )
        total.post()
        bad_ranks, mean, mean_of_squares = total.arrive().tolist()
        if bad_ranks > 0 or total.is_alarmed:  # the latter: a number is too large for its code, or with what was left out before
            left_out.zero_()
            self._was_bad = True
            return gradient.fill_(torch.nan)
        if mean_of_squares - mean**2 > (SAME * mean) ** 2 + 1e-15:  # the variance, so that all ranks decide alike
            raise RuntimeError(DIFFERENT)
        averaged = total.mean(0, in_place)
        if scales is not None:
            return torch.mul(averaged, scales, out=gradient)
        return gradient if averaged is gradient else gradient.copy_(averaged)

    def _forget_left_out(self) -> None:
        """Forget what was left out of a step that was skipped: other buckets were finite, but their means were not used."""
        for memory in self._memories.values():
            memory.left_out.zero_()
        self._waiting.clear()
        self._was_bad = False

    def _memory_of(self, bucket: GradBucket) -> _Memory:
        """Return the memory of a bucket. After the first backward pass, DDP forms other buckets, which take over what was left out."""
        key = tuple(map(id, bucket.parameters()))
        if key not in self._memories:
            for old in [other for other in self._memories if set(other) & set(key)]:
                self._waiting |= self._memories.pop(old).parts()
            self._memories[key] = memory = _Memory(self._transport, bucket, self.bits)
            memory.take_over(self._waiting)
            if self._optimizer is not None:
                trained = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
                self._knows_model = self._knows_model or not trained.isdisjoint(key)
        return self._memories[key]

    # ---- checkpoints ---------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what was left out so far, by the name of the parameter. Each rank has its own."""
        parts = {one: part for memory in self._memories.values() for one, part in memory.parts().items()} | self._waiting
        named = self._named_parameters("state_dict()")
        if parts.keys() - {id(p) for p in named.values()}:
            raise ValueError("model= of ddp_hook_state() is another model than DDP trains: give it the model in DDP")
        left_out = {name: in_shape_of(p, parts[id(p)]).clone() for name, p in named.items() if id(p) in parts}
        return {"bits": self.bits, "rank": self._transport.rank, "ranks": self._transport.n, "left_out": left_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which this rank has saved."""
        if not isinstance(state, dict) or not isinstance(state.get("left_out"), dict):
            raise ValueError(f"this is not a state of rumor.ddp_hook: load what state_dict() returned, got {type(state).__name__}")
        own = {"bits": self.bits, "rank": self._transport.rank, "ranks": self._transport.n}
        for what, value in own.items():
            if state.get(what, value) != value:
                raise ValueError(
                    f"this state of rumor.ddp_hook is of {what}={state[what]}, but here it is {what}={value}: each rank loads its own, and "
                    "with other ranks or bits it starts without one"
                )
        named = self._named_parameters("load_state_dict()")
        for name, saved in state["left_out"].items():
            if name not in named or count(named[name]) != saved.numel():
                there = "no such parameter" if name not in named else f"{count(named[name])} numbers"
                raise ValueError(f"this state has {saved.numel()} numbers of {name}, but the model here has {there}")
        self._waiting = {id(named[name]): in_order_of(named[name], saved) for name, saved in state["left_out"].items()}
        for memory in self._memories.values():  # the other ranks keep theirs, and all must have the same messages
            memory.take_over(self._waiting)

    def _named_parameters(self, what: str) -> dict[str, nn.Parameter]:
        """Return the parameters by their names in the model itself, whether it was given in DDP or not."""
        if self._model is None:
            raise ValueError(f"{what} needs the names of the parameters: build the state with ddp_hook_state(bits={self.bits}, model=ddp)")
        model = self._model.module if isinstance(self._model, DistributedDataParallel) else self._model
        return dict(model.named_parameters())


def ddp_hook_state(
    bits: int = 4, *, group: Any = None, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
) -> DDPHookState:
    """Return the state of `ddp_hook`. A collective: call it on every rank.

    Args:
        bits: 16, 8 or 4, for each number of a gradient.
        group: the group that DDP averages over. If None, that of `model`, if it is given, else the default group.
        model: the model in DDP. Give it if you want to save what was left out with `state_dict()`.
        optimizer: Adam, AdamW or another optimizer with second moments (`exp_avg_sq`), on every rank. The errors of codes then follow these
            moments. It takes one more copy of the gradients in memory.
    """
    return DDPHookState(bits, group, model, optimizer)


def ddp_hook(state: DDPHookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average the gradients of one bucket. With gloo, the backward pass goes on meanwhile; with NCCL, it waits.

    Use it as `ddp.register_comm_hook(rumor.ddp_hook_state(bits=4), rumor.ddp_hook)`.
    """
    if not isinstance(state, DDPHookState):
        raise TypeError(f"the state of rumor.ddp_hook must be what rumor.ddp_hook_state(bits=4) returns, got {state!r}")
    return state.average(bucket)


def limit_left_out(left_out: Tensor, size: float, n: int, bits: int) -> None:
    """Scale down what codes of so many bits have left out, if it is large beside the norm `size` of the next gradient of one of n ranks."""
    rest, at_most = float(torch.linalg.vector_norm(left_out)), LIMITS[bits] * n**0.5 * size
    if rest > at_most > 0:
        left_out.mul_(at_most / rest)


def scales_of(squares: Tensor) -> Tensor:
    """Return the scales of numbers with these mean squares [d]: their roots beside those of their block, and at least LEAST_SCALE.

    >>> scales_of(torch.cat([torch.full((128,), 1.8), torch.full((128,), 0.2)]))[[0, -1]]
    tensor([1.3416, 0.4472])
    """
    blocks = as_blocks(squares)
    means = blocks.mean(dim=1, keepdim=True)
    scales = (blocks / means).sqrt_().clamp_(min=LEAST_SCALE)
    return torch.where((means > 0) & means.isfinite(), scales, 1.0).view(-1)[: squares.numel()]


def _second_moment(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    """Return a parameter's second moment in the order of DDP's buckets; None if the optimizer has no state for it."""
    state = optimizer.state.get(parameter, {})
    if state and "exp_avg_sq" not in state:
        kind, kept = type(optimizer).__name__, ", ".join(state)
        raise ValueError(
            f"optimizer= is for Adam and its like, which keep second moments (exp_avg_sq), but {kind} keeps {kept}: leave it out"
        )
    return in_order_of(parameter, state["exp_avg_sq"]) if state else None


def _norm(x: Tensor, order: float = 2.0) -> float:
    return float(torch.linalg.vector_norm(x, order, dtype=accumulator(x.dtype)))
