"""Which method, topology and period to take, and why.

1. Parallel SGD, where its step is at most 10 % slower than the best of Gossip-PGA: it is exact, and there is nothing to gain.
2. Otherwise Gossip-PGA, over the topology whose gossip step is the quickest; of those within 2 %, the one with the shortest transient
   stage; of stages within a factor of 2 (they are orders of magnitude), the one that sends least.
3. H is the smallest period at which global rounds add at most 10 % to a gossip step. A longer one would hardly be faster, and its
   transient stage is longer.

Gossip SGD is Gossip-PGA without the global rounds: at most 10 % faster, with a longer transient stage. Local SGD sends least, and is the
slowest to catch up.
"""

from __future__ import annotations

from dataclasses import dataclass

from rumor.cost.network import TOPOLOGIES, Network, Workload, degree, kind
from rumor.cost.prediction import GLOBAL_SHARE, Prediction, period_for, predict
from rumor.schedule import check_whole
from rumor.topology import Topology

WORTH_IT = 0.10  # how much slower Parallel SGD may be and still be the better choice
TIE = 0.02  # topologies whose gossip steps are this close count as equally fast
SAME_ORDER = 2.0  # transient stages leave constants out: one has to be this many times another to count as longer
LONGEST = 64  # a period beyond this (Gossip-AGA's own limit) is not recommended


@dataclass(frozen=True)
class Recommendation:
    """What to do.

    Attributes:
        method, topology, H: the choice; topology is None for Parallel SGD.
        seconds: of its step, without overlap.
        call: the algorithm to hand to `rumor.Averager`, as Python.
        reason: why, in plain words.
        notes: what else to know.
    """

    method: str
    topology: str | None
    H: int
    seconds: float
    call: str
    reason: str
    notes: tuple[str, ...] = ()


def recommend(n: int, workload: Workload, network: Network, *, max_period: int | None = None, iid: bool = False) -> Recommendation:
    """The method, topology and H to take for `workload` on `n` nodes of `network`.

    Args:
        max_period: a bound on H, say from `rumor.theory` for the transient stage that the run can afford.
        iid: whether all nodes draw from the same data; decides which transient stage counts.

    >>> from rumor.cost import Measured
    >>> seen = Measured(0.278, {"one-peer-exponential": 0.150})  # the paper's ResNet-50
    >>> recommend(32, Workload(25_500_000, 0.146), seen).call
    'rumor.gossip_pga(rumor.one_peer_exponential(32), H=5)'
    """
    if max_period is not None:
        check_whole("max_period", max_period, 1)
    longest = min(LONGEST, max_period or LONGEST)
    rows = predict(n, workload, network)
    parallel = rows[0]
    if n == 1:
        return _parallel(n, parallel, "with one node there is no one to average with")
    mean = network.all_reduce(n, workload.bytes)
    gossip = {row.topology: row.seconds for row in rows if row.method == "Gossip SGD" and row.topology}
    ties = [name for name, seconds in gossip.items() if seconds <= (1 + TIE) * min(gossip.values())]
    candidates = [_gossip_pga_on(TOPOLOGIES[name](n), workload, network, gossip[name] - workload.compute, mean, longest) for name in ties]
    shortest = min(_stage(row, iid) for row in candidates)
    best = min((row for row in candidates if _stage(row, iid) <= SAME_ORDER * shortest), key=lambda row: row.bytes)
    step = gossip[str(best.topology)]
    if parallel.seconds <= (1 + WORTH_IT) * best.seconds:
        return _parallel(
            n, parallel, _nothing_to_gain(workload, network, parallel, best, step, mean), _notes_on_overlap(workload, parallel, best)
        )
    (local,) = (row for row in predict(n, workload, network, H=best.H, topologies=[]) if row.method == "Local SGD")
    return _gossip_pga(TOPOLOGIES[str(best.topology)](n), workload, best, parallel, local, step, min(gossip.values()), mean, longest, iid)


def _gossip_pga_on(topology: Topology, workload: Workload, network: Network, gossip: float, mean: float, longest: int) -> Prediction:
    """Gossip-PGA with the shortest period whose global rounds cost little."""
    H = min(longest, period_for(workload.compute, gossip, mean))
    return next(row for row in predict(topology.n, workload, network, H=H, topologies=[topology]) if row.method == "Gossip-PGA")


def _stage(row: Prediction, iid: bool) -> float:
    stage = row.transient_stage_iid if iid else row.transient_stage
    assert stage is not None  # only OSGP has none
    return stage


def _parallel(n: int, row: Prediction, reason: str, notes: tuple[str, ...] = ()) -> Recommendation:
    return Recommendation("Parallel SGD", None, 1, row.seconds, f"rumor.parallel_sgd({n})", reason, notes)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 1 else f"{share:.0%}"


def _nothing_to_gain(workload: Workload, network: Network, parallel: Prediction, best: Prediction, gossip: float, mean: float) -> str:
    other, seconds = f"Gossip-PGA's ({best.topology}, H = {best.H}", best.seconds
    if best.H == 1:  # which is Parallel SGD itself: even a gossip step alone is within the 10 %
        other, seconds = f"a gossip step ({best.topology}", gossip
    slower = parallel.seconds / seconds - 1 if seconds > 0 else 0.0
    how = f"only {slower:.1%} slower than" if slower > 0.0005 else "no slower than"
    is_fast = parallel.seconds <= 1.5 * workload.compute
    why = "The network is fast beside the computation" if is_fast else "An all-reduce costs little more than gossip here"
    form = "DistributedDataParallel, which hides part of the all-reduce besides, is its usual form"
    if network.ddp() is not None:
        without = _ms(workload.compute + mean)
        form = f"run it as DistributedDataParallel, which was timed: rumor.parallel_sgd does not overlap, and would take {without}"
    return f"its step of {_ms(parallel.seconds)} is {how} {other}: {_ms(seconds)}), and it is exact. {why}; {form}"


def _gossip_pga(
    topology: Topology,
    workload: Workload,
    best: Prediction,
    parallel: Prediction,
    local: Prediction,
    gossip: float,  # seconds of a step of gossip alone
    quickest: float,  # of all topologies
    mean: float,  # seconds of an all-reduce
    longest: int,
    iid: bool,
) -> Recommendation:
    H = best.H or 1
    added = (workload.compute + mean - gossip) / H / gossip
    shorter = f" (H = {H - 1}: {_percent(added * H / (H - 1))})" if H > 1 and added <= GLOBAL_SHARE else ""
    reason = (
        f"its step takes {_ms(best.seconds)}, Parallel SGD's {_ms(parallel.seconds)}: {1 - best.seconds / parallel.seconds:.0%} less. "
        f"{_why_topology(topology, gossip, quickest)} With H = {H} global rounds add {_percent(added)} to it{shorter}. "
        f"{_why_not_local(local, _stage(local, iid), _stage(best, iid))}"
    )
    notes = _notes_on_period(topology, H, longest, added, gossip - workload.compute, mean)
    notes += _notes_on_overlap(workload, parallel, best) + ((f"{best.topology}: {best.note}",) if best.note else ())
    return Recommendation("Gossip-PGA", best.topology, H, best.seconds, _call(topology, H), reason, notes)


def _why_not_local(local: Prediction, theirs: float, ours: float) -> str:
    start = f"Local SGD with that H would take {_ms(local.seconds)}"
    if theirs > SAME_ORDER * ours:
        return f"{start}, but its transient stage is of the order of {theirs:.1e} steps, not {ours:.1e}"
    # c(l) = 1 for l < log2(n) at the worst phase of a one-peer cycle: within so short a period the bound sees no gossip
    return (
        f"{start}. Its transient stage is no longer as far as the theory can tell ({theirs:.1e}, {ours:.1e}: bounds, which see no gain "
        "from gossip within so short a period), but in the paper's training of ResNet-50 it ended at 74.20 % and Gossip-PGA at 76.28 %"
    )


def _call(topology: Topology, H: int) -> str:
    return f"rumor.gossip_pga(rumor.{kind(topology).replace('-', '_')}({topology.n}), H={H})"


def _why_topology(topology: Topology, gossip: float, quickest: float) -> str:
    messages = degree(topology)
    said = f"{kind(topology)} ({messages:g} message{'s' * (messages != 1)} a step)"
    if gossip <= quickest:
        return f"{said} has the quickest gossip step, {_ms(gossip)}."
    return f"{said} has a gossip step of {_ms(gossip)}, next to the quickest, and a far shorter transient stage."


def _notes_on_period(topology: Topology, H: int, longest: int, added: float, gossip: float, mean: float) -> tuple[str, ...]:
    if added <= GLOBAL_SHARE + 1e-9:
        return ()
    wanted = f"global rounds still add {_percent(added)} at H = {H}, the longest allowed (max_period)" if longest < LONGEST else ""
    wanted = (
        wanted
        or f"an all-reduce of {_ms(mean)} is so dear that global rounds still add {_percent(added)} at H = {H}, the longest recommended"
    )
    rounds = max(1, (topology.n - 1).bit_length())
    by_gossip = rounds * gossip < mean and kind(topology) == "one-peer-exponential"
    left = topology.contraction(rounds) if by_gossip else 1.0
    exact = f"leaving {left:.0%} of the disagreement" if left else "just as exact"
    instead = f"average_rounds={rounds} makes a global round of {rounds} gossip steps, {_ms(rounds * gossip)} and {exact}"
    return (f"{wanted}; {f'{instead}; or ' if by_gossip else ''}gossip_aga lets the period grow as the loss falls",)


def _notes_on_overlap(workload: Workload, parallel: Prediction, best: Prediction) -> tuple[str, ...]:
    notes = []
    if parallel.seconds > (1 + WORTH_IT) * best.seconds >= parallel.seconds_overlapped:
        notes.append(
            f"all times are without overlap: if DDP can hide its whole all-reduce behind the backward pass, its step takes "
            f"{_ms(parallel.seconds_overlapped)} (Gossip-PGA with delay=1: {_ms(best.seconds_overlapped)}): time DDP before you decide"
        )
    if parallel.seconds == parallel.seconds_overlapped > (1 + WORTH_IT) * best.seconds_overlapped:
        notes.append(
            f"DDP's time includes its overlap, that of Gossip-PGA has none: delay=1 could bring {best.topology}, H = {best.H}, to "
            f"{_ms(best.seconds_overlapped)} at best"
        )
    if workload.bytes_per_parameter < 4:
        notes.append("half-precision parameters gossip as they are, but Rumor sums global rounds in float32: those send twice the bytes")
    return tuple(notes)
