"""The reasons of a recommendation in plain words, with their numbers."""

from __future__ import annotations

from dataclasses import dataclass

from rumor.cost.network import Network, Workload, degree, kind
from rumor.cost.prediction import GLOBAL_SHARE, Prediction
from rumor.topology import Topology

WORTH_IT = 0.10  # how much slower Parallel SGD may be and still be the better choice
SAME_ORDER = 2.0  # transient stages leave constants out: one has to be this many times another to count as longer
LONGEST = 64  # a period beyond this (Gossip-AGA's own limit) is not recommended


@dataclass(frozen=True)
class Case:
    """What was weighed.

    Attributes:
        topology: of the best of Gossip-PGA.
        best, parallel, local: Gossip-PGA at its best, Parallel SGD, and Local SGD with the same period as the best.
        gossip, quickest: seconds of a step of gossip alone, over this topology and over the quickest one.
        mean: seconds of an all-reduce.
        longest: the longest period allowed.
    """

    workload: Workload
    network: Network
    topology: Topology
    best: Prediction
    parallel: Prediction
    local: Prediction
    gossip: float
    quickest: float
    mean: float
    longest: int
    iid: bool

    @property
    def H(self) -> int:
        return self.best.H or 1

    @property
    def added(self) -> float:
        """What global rounds add to a step of gossip, as a share of it."""
        return (self.workload.compute + self.mean - self.gossip) / self.H / self.gossip


def why_parallel(case: Case) -> str:
    if case.best.seconds < case.parallel.seconds and case.H == 1:
        return (
            f"an all-reduce takes {_ms(case.mean)}, a gossip step {_ms(case.gossip - case.workload.compute)}: to average with all at every "
            f"step costs no more. DDP was timed at {_ms(case.parallel.seconds)}, rumor.parallel_sgd takes {_ms(case.best.seconds)}"
        )
    other, seconds = f"Gossip-PGA's ({case.best.topology}, H = {case.H}", case.best.seconds
    if case.H == 1:  # which is Parallel SGD itself: even a gossip step alone is within the 10 %
        other, seconds = f"a gossip step ({case.best.topology}", case.gossip
    slower = case.parallel.seconds / seconds - 1
    how = f"only {slower:.1%} slower than" if slower > 0.0005 else "no slower than"
    is_fast = case.parallel.seconds <= 1.5 * case.workload.compute
    why = "The network is fast beside the computation" if is_fast else "An all-reduce costs little more than gossip here"
    form = "DistributedDataParallel, which hides part of the all-reduce besides, is its usual form"
    if case.network.ddp() is not None:
        why = why if is_fast else "DDP hides much of its all-reduce behind the backward pass"
        without = _ms(case.workload.compute + case.mean)
        form = f"run it as DistributedDataParallel, which was timed: rumor.parallel_sgd does not overlap, and would take {without}"
    return f"its step of {_ms(case.parallel.seconds)} is {how} {other}: {_ms(seconds)}), and it is exact. {why}; {form}"


def why_gossip_pga(case: Case) -> str:
    H, best, parallel = case.H, case.best.seconds, case.parallel.seconds
    shorter = f" (H = {H - 1}: {_percent(case.added * H / (H - 1))})" if H > 1 and case.added <= GLOBAL_SHARE else ""
    return (
        f"its step takes {_ms(best)}, Parallel SGD's {_ms(parallel)}: {1 - best / parallel:.0%} less. {_why_topology(case)} With H = {H} "
        f"global rounds add {_percent(case.added)} to it{shorter}. {_why_not_local(case)}"
    )


def _why_topology(case: Case) -> str:
    messages = degree(case.topology)
    said = f"{kind(case.topology)} ({messages:g} message{'s' * (messages != 1)} a step)"
    if case.gossip <= case.quickest:
        return f"{said} has the quickest gossip step, {_ms(case.gossip)}."
    return f"{said} has a gossip step of {_ms(case.gossip)}, next to the quickest, and a far shorter transient stage."


def _why_not_local(case: Case) -> str:
    start = f"Local SGD with that H would take {_ms(case.local.seconds)}"
    theirs, ours = case.local.stage(case.iid), case.best.stage(case.iid)
    if theirs > SAME_ORDER * ours:
        return f"{start}, but its transient stage is of the order of {theirs:.1e} steps, not {f'{ours:.1e}' if ours else 'none'}"
    # contraction(l) = 1 for l < log2(n) at the worst phase of a one-peer cycle, say: the bound then sees no gossip at all
    return (
        f"{start}. Local SGD's transient stage is not longer, as far as the theory can tell ({theirs:.1e}, {ours:.1e}: bounds, which see "
        "hardly any gain from gossip within so short a period), but the paper's ResNet-50 lost 2 points of accuracy with it and none with "
        "Gossip-PGA"
    )


def notes(case: Case) -> tuple[str, ...]:
    """What else to know."""
    is_parallel = case.parallel.seconds <= (1 + WORTH_IT) * case.best.seconds or case.H == 1
    found = [] if is_parallel else [*_note_on_period(case)]
    found += _notes_on_overlap(case)
    if case.best.note and not is_parallel:
        found.append(f"{case.best.topology}: {case.best.note}")
    if case.workload.bytes_per_parameter < 4:
        found.append("parameters of fewer than 4 bytes gossip as they are; global rounds are summed, hence sent, in float32")
    return tuple(found)


def _note_on_period(case: Case) -> list[str]:
    if case.added <= GLOBAL_SHARE + 1e-9:
        return []
    dear = f"an all-reduce of {_ms(case.mean)} is so dear that global rounds still add {_percent(case.added)} at H = {case.H}"
    bound = "the longest allowed (max_period)" if case.longest < LONGEST else "the longest recommended"
    n, gossip = case.topology.n, case.gossip - case.workload.compute
    rounds = max(1, (n - 1).bit_length())  # ceil(log2 n), the length of a one-peer cycle
    instead = ""
    if kind(case.topology) == "one-peer-exponential" and rounds * gossip < case.mean:
        left = case.topology.contraction(rounds)
        exact = f"leaving {left:.0%} of the disagreement" if left else "just as exact"
        instead = f"average_rounds={rounds} makes a global round of {rounds} gossip steps, {_ms(rounds * gossip)} and {exact}; or "
    return [f"{dear}, {bound}; {instead}gossip_aga lets the period grow as the loss falls"]


def _notes_on_overlap(case: Case) -> list[str]:
    parallel, best = case.parallel, case.best
    if case.network.ddp() is None and parallel.seconds > (1 + WORTH_IT) * best.seconds >= parallel.seconds_overlapped:
        return [
            f"all times are without overlap: if DDP can hide its whole all-reduce behind the backward pass, its step takes "
            f"{_ms(parallel.seconds_overlapped)} (Gossip-PGA with delay=1: {_ms(best.seconds_overlapped)}): time DDP before you decide"
        ]
    if case.network.ddp() is not None and case.H > 1 and parallel.seconds > (1 + WORTH_IT) * best.seconds_overlapped:
        return [
            f"DDP's time includes its overlap, that of Gossip-PGA has none: delay=1 could bring {best.topology}, H = {best.H}, to "
            f"{_ms(best.seconds_overlapped)} at best"
        ]
    return []


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 1 else f"{share:.0%}"
