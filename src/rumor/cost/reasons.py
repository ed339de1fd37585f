"""Explains a recommendation in words, with the numbers behind it."""

from __future__ import annotations

from dataclasses import dataclass

from rumor.cost.network import Network, Workload, degree, kind
from rumor.cost.prediction import GLOBAL_SHARE, Prediction
from rumor.topology import Topology

WORTH_IT = 0.10  # Parallel SGD is the better choice up to this much slower
SAME_ORDER = 2.0  # transient stages are without constants: below this ratio they count as equally long
LONGEST = 64  # the longest period to recommend (Gossip-AGA's own limit)


@dataclass(frozen=True)
class Comparison:
    """The candidates of a recommendation.

    Attributes:
        topology: the topology of `best`.
        best: the best Gossip-PGA.
        parallel: Parallel SGD.
        local: Local SGD with the same period as `best`.
        gossip: seconds of a gossip step on this topology, including the computing.
        fastest_gossip: seconds of a gossip step on the fastest topology, including the computing.
        mean: seconds of an all-reduce.
        longest: the longest period allowed.
        bits: the number of bits of a number in a message.
        plain: the same candidates with messages in float32, if these have fewer bits.
    """

    workload: Workload
    network: Network
    topology: Topology
    best: Prediction
    parallel: Prediction
    local: Prediction
    gossip: float
    fastest_gossip: float
    mean: float
    longest: int
    iid: bool
    bits: int = 32
    plain: Comparison | None = None

    @property
    def H(self) -> int:
        return self.best.H or 1

    @property
    def added(self) -> float:
        """The time that global rounds add to a gossip step, as a share of the gossip step."""
        return (self.workload.compute + self.mean - self.gossip) / self.H / self.gossip


def takes_parallel(compared: Comparison) -> bool:
    """Whether Parallel SGD is the better choice. (Gossip-PGA with H = 1 is Parallel SGD.)"""
    return compared.parallel.seconds <= (1 + WORTH_IT) * compared.best.seconds or compared.H == 1


def why_parallel(compared: Comparison) -> str:
    if compared.plain is not None:
        return _why_coded_parallel(compared, compared.plain)
    if compared.best.seconds < compared.parallel.seconds and compared.H == 1:
        return (
            f"an all-reduce takes {_ms(compared.mean)} and a gossip step {_ms(compared.gossip - compared.workload.compute)}, so averaging "
            f"all nodes at every step costs no more. DDP was timed at {_ms(compared.parallel.seconds)}, but rumor.parallel_sgd takes only "
            f"{_ms(compared.best.seconds)}"
        )
    other, seconds = f"that of Gossip-PGA ({compared.best.topology}, H = {compared.H}", compared.best.seconds
    if compared.H == 1:  # Gossip-PGA with H = 1 is Parallel SGD, so compare with a gossip step, which is within the 10 % as well
        other, seconds = f"a gossip step ({compared.best.topology}", compared.gossip
    slower = compared.parallel.seconds / seconds - 1
    how = f"only {slower:.1%} slower than" if slower > 0.0005 else "no slower than"
    is_fast = compared.parallel.seconds <= 1.5 * compared.workload.compute
    why = "The network is fast compared with the computation" if is_fast else "An all-reduce costs little more than gossip here"
    form = "Its usual form is DistributedDataParallel, which also hides part of the all-reduce"
    if compared.network.ddp() is not None:
        why = why if is_fast else "DDP hides much of its all-reduce behind the backward pass"
        without = _ms(compared.workload.compute + compared.mean)
        form = f"Run it as DistributedDataParallel, as it was timed: rumor.parallel_sgd does not overlap, and would take {without}"
    return f"its step of {_ms(compared.parallel.seconds)} is {how} {other}: {_ms(seconds)}), and it is exact. {why}. {form}"


def _why_coded_parallel(compared: Comparison, plain: Comparison) -> str:
    hook = f"ddp.register_comm_hook(rumor.ddp_hook_state(bits={compared.bits}), rumor.ddp_hook)"
    return (
        f"{_why_codes(compared, plain, compared.parallel)} Gossip would hardly be faster: {_ms(compared.best.seconds)}. In "
        f"DistributedDataParallel, use rumor.ddp_hook, which also overlaps: {hook}"
    )


def _why_codes(compared: Comparison, plain: Comparison, chosen: Prediction) -> str:
    parallel, same = plain.parallel.seconds, plain.parallel if chosen.method == "Parallel SGD" else plain.best
    without = "" if same is plain.parallel else f" ({same.method} in float32: {_ms(same.seconds)})"
    return (
        f"with messages of {compared.bits} bits, its step takes {_ms(chosen.seconds)}, {1 - chosen.seconds / parallel:.0%} less than the "
        f"{_ms(parallel)} of Parallel SGD in float32{without}."
    )


def why_gossip_pga(compared: Comparison) -> str:
    H, best = compared.H, compared.best.seconds
    shorter = f" (H = {H - 1}: {_percent(compared.added * H / (H - 1))})" if H > 1 and compared.added <= GLOBAL_SHARE else ""
    parallel = compared.parallel.seconds
    start = f"its step takes {_ms(best)}, {1 - best / parallel:.0%} less than Parallel SGD's {_ms(parallel)}."
    if compared.plain is not None:
        start = _why_codes(compared, compared.plain, compared.best)
    return (
        f"{start} {_why_topology(compared)} "
        f"With H = {H}, global rounds add {_percent(compared.added)} to it{shorter}. {_why_not_local(compared)}"
    )


def _why_topology(compared: Comparison) -> str:
    messages = degree(compared.topology)
    name = f"{kind(compared.topology)} ({messages:g} message{'s' * (messages != 1)} per step)"
    if compared.gossip <= compared.fastest_gossip:
        return f"{name} has the fastest gossip step, {_ms(compared.gossip)}."
    return f"{name} has a gossip step of {_ms(compared.gossip)}, close to the fastest, and a much shorter transient stage."


def _why_not_local(compared: Comparison) -> str:
    start = f"Local SGD with the same H would take {_ms(compared.local.seconds)}"
    theirs, ours = compared.local.stage(compared.iid), compared.best.stage(compared.iid)
    if theirs > SAME_ORDER * ours:
        instead = f"of {ours:.1e}" if ours else "of none at all"
        return f"{start}, but its transient stage is of the order of {theirs:.1e} steps instead {instead}"
    # For example, contraction(l) = 1 for l < log2(n) at the worst phase of a one-peer cycle: then the bound ignores gossip.
    return (
        f"{start}. In theory its transient stage is not longer ({theirs:.1e} against {ours:.1e}; these are bounds, which hardly count the "
        "gossip within such a short period). But the paper's ResNet-50 lost 2 points of accuracy with Local SGD, and none with Gossip-PGA"
    )


def notes(compared: Comparison) -> tuple[str, ...]:
    """Remarks on the recommendation."""
    is_parallel = takes_parallel(compared)
    found = [] if is_parallel else [*_note_on_period(compared)]
    found += _notes_on_overlap(compared)
    if compared.best.note and not is_parallel:
        found.append(f"{compared.best.topology}: {compared.best.note}")
    if compared.workload.bytes_per_parameter < 4 and compared.bits == 32:
        found.append(
            "gossip sends the parameters in their own precision; global rounds sum in float32, and so they send 4 bytes per parameter"
        )
    return tuple(found)


def _note_on_period(compared: Comparison) -> list[str]:
    if compared.added <= GLOBAL_SHARE + 1e-9:
        return []
    slow = f"an all-reduce takes {_ms(compared.mean)}, so global rounds still add {_percent(compared.added)} at H = {compared.H}"
    bound = "the longest allowed (max_period)" if compared.longest < LONGEST else "the longest recommended"
    n, gossip = compared.topology.n, compared.gossip - compared.workload.compute
    rounds = max(1, (n - 1).bit_length())  # ceil(log2 n), the length of a one-peer cycle
    instead = ""
    if kind(compared.topology) == "one-peer-exponential" and rounds * gossip < compared.mean and compared.bits == 32:
        left = compared.topology.contraction(rounds)
        exact = f"leaves {left:.0%} of the disagreement" if left else "is just as exact"
        instead = (
            f"use average_rounds={rounds}, which replaces the all-reduce by {rounds} gossip steps, takes {_ms(rounds * gossip)} and "
            f"{exact}; or "
        )
    return [f"{slow}, {bound}. To reduce this, {instead}use gossip_aga, which lets the period grow as the loss falls"]


def _notes_on_overlap(compared: Comparison) -> list[str]:
    parallel, best = (compared.plain or compared).parallel, compared.best
    if compared.network.ddp() is None and parallel.seconds > (1 + WORTH_IT) * best.seconds >= parallel.seconds_overlapped:
        return [
            f"all times are without overlap. If DDP can hide its whole all-reduce behind the backward pass, its step takes "
            f"{_ms(parallel.seconds_overlapped)} (Gossip-PGA with delay=1: {_ms(best.seconds_overlapped)}). Time DDP before you decide"
        ]
    if compared.network.ddp() is not None and compared.H > 1 and parallel.seconds > (1 + WORTH_IT) * best.seconds_overlapped:
        return [
            f"DDP's time includes overlap, Gossip-PGA's time does not. With delay=1, Gossip-PGA ({best.topology}, H = {best.H}) takes "
            f"{_ms(best.seconds_overlapped)} at best"
        ]
    return []


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 1 else f"{share:.0%}"
