"""Recommends a method, a topology and a period, by these rules:

1. Take DDP (Parallel SGD) if its step is at most 10 % slower than the fastest Gossip-PGA. It is exact, and there is little to gain.
   Take it for two nodes, too, unless their times were measured: an all-reduce between them sends as much as a gossip step.
2. Otherwise take Gossip-PGA on the topology with the fastest gossip step. If several are within 2 %, take the one with the shortest
   transient stage. If transient stages are within a factor of 2 (they are orders of magnitude), take the one that sends the least.
3. Take the smallest H at which global averages add at most 10 % to a gossip step. A longer period would hardly be faster, but have a
   longer transient stage.
   If `rumor probe` has measured a whole step, its topology and period are taken: it has applied these rules.
4. Send codes of 4 bits if that makes a step at least 10 % faster. If DDP with such codes is then within 10 % of Gossip-PGA, take it: it
   needs no gossip.

Gossip SGD is Gossip-PGA without the global averages: at most 10 % faster, with a longer transient stage. Local SGD sends the least, but
needs the most steps to catch up with Parallel SGD. `delay=1` is faster, but less accurate, so it is mentioned and not recommended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rumor.cost.network import TOPOLOGIES, Measured, Network, Workload, distinct, kind
from rumor.cost.prediction import Prediction, Times, period_for, predict, times_with
from rumor.cost.reasons import (
    LONGEST,
    SAME_ORDER,
    TIE,
    WORTH_IT,
    Comparison,
    ddp_with,
    fastest_gossip,
    milliseconds,
    notes,
    seconds_to_expect,
    takes_own_parallel,
    takes_parallel,
    why,
)
from rumor.methods.gossip_pga import gossip_pga, local_sgd
from rumor.schedule import check_whole
from rumor.topology import Topology

FEWEST_BITS = 4  # in five of six settings on images as accurate as float32, in the sixth 0.2 points lower (docs/networks.md)
LONGEST_TIMED = 12  # the longest period whose whole steps `rumor probe` measures, because a longer one would take long


@dataclass(frozen=True)
class Recommendation:
    """The recommended method, and why.

    Attributes:
        method: "Parallel SGD" or "Gossip-PGA".
        topology: the topology in the spelling of `TOPOLOGIES`; None for Parallel SGD.
        H: the period; 1 for Parallel SGD.
        seconds: seconds of a step: measured if it was, else without overlap.
        call: the Python expression of the algorithm to pass to `rumor.Averager`.
        reason: the reason, in words.
        notes: further remarks.
        bits: the number of bits of a number in a message.
        text: the method in the form that `rumor.method` reads, or "DDP", with its hook if that is recommended.
        sentence: the recommendation in one sentence, with the method that it is compared with.
        against: that method: DDP, or the fastest Gossip-PGA if DDP is recommended. None if there is none.
        basis: what is measured, and what is predicted, of the times in this sentence.
    """

    method: str
    topology: str | None
    H: int
    seconds: float
    call: str
    reason: str
    notes: tuple[str, ...] = ()
    bits: int = 32
    text: str = ""
    sentence: str = ""
    basis: str = ""
    against: Prediction | None = None


def recommend(
    n: int,
    workload: Workload,
    network: Network,
    *,
    H: int | None = None,
    max_period: int | None = None,
    iid: bool = False,
    bits: int = FEWEST_BITS,
) -> Recommendation:
    """Recommends a method, a topology and a period for `workload` on `n` nodes of `network`.

    Args:
        n: number of nodes.
        workload: the training job.
        network: a `Link`, or times that were `Measured`.
        H: the period of Gossip-PGA; None chooses one.
        max_period: the longest H allowed, for example from `rumor.theory` for the transient stage that the run can afford.
        iid: whether all nodes draw from the same data. This decides which transient stage counts.
        bits: the codes to compare with float32; 32 for none.

    >>> from rumor.cost import Measured
    >>> seen = Measured(0.278, {"one-peer-exponential": 0.150})  # ResNet-50
    >>> recommend(32, Workload(25_500_000, 0.146), seen).call
    'rumor.gossip_pga(rumor.one_peer_exponential(32), H=5)'
    """
    for name, value in (("H", H), ("max_period", max_period)):
        if value is not None:
            check_whole(name, value, 1)
    if n == 1:
        seconds = predict(n, workload, network)[0].seconds
        alone = "there is only one node"
        return Recommendation(
            "Parallel SGD", None, 1, seconds, "rumor.parallel_sgd(1)", alone, text="parallel_sgd", sentence=f"Take plain training: {alone}"
        )
    compared = _chosen(n, workload, network, H, min(LONGEST, max_period or LONGEST), iid, bits)
    with_bits, is_parallel = "" if compared.bits == 32 else f", bits={compared.bits}", takes_parallel(compared)
    name = kind(compared.topology)
    call = f"rumor.gossip_pga(rumor.{name.replace('-', '_')}({n}), H={compared.H}{with_bits})"
    row, text = compared.best, compared.best.text
    other: Prediction | None = (compared.plain or compared).parallel
    if takes_own_parallel(compared):
        text = f"parallel_sgd(bits={compared.bits})" if with_bits else "parallel_sgd"
    elif is_parallel and with_bits:
        row, text = compared.parallel, ddp_with(compared.bits)
    elif is_parallel:
        row, text, other = compared.parallel, "DDP", fastest_gossip(compared)
    if is_parallel:
        call = f"rumor.parallel_sgd({n}{with_bits})"
    against = "" if other is None else f", {other.text} {milliseconds(other.seconds)}"
    return Recommendation(
        "Parallel SGD" if is_parallel else "Gossip-PGA",
        topology=None if is_parallel else name,
        H=1 if is_parallel else compared.H,
        seconds=row.seconds,
        call=call,
        reason=why(compared),
        notes=notes(compared),
        bits=compared.bits,
        text=text,
        sentence=f"Take {text}: {milliseconds(row.seconds)} a step{against}",
        basis=_basis([row] if other is None else [row, other], network),
        against=other,
    )


def gossip_to_compare(n: int, workload: Workload, network: Network, bits: int = 32, max_period: int | None = None) -> tuple[str, int]:
    """The topology and the period (at least 2) of the best Gossip-PGA with so many bits, also where DDP is recommended."""
    times = times_with(n, workload, network, bits) or Times(n, workload, network)
    compared = _compare(times, None, min(LONGEST, max_period or LONGEST), iid=False)
    return kind(compared.topology), max(2, compared.H)


def _chosen(n: int, workload: Workload, network: Network, H: int | None, longest: int, iid: bool, bits: int) -> Comparison:
    """Compares the methods in float32, and with codes if they pay (rule 4)."""
    compared = _compare(Times(n, workload, network), H, longest, iid)
    if (with_codes := times_with(n, workload, network, bits)) is not None:
        coded = _compare(with_codes, H, longest, iid, plain=compared)
        if seconds_to_expect(coded) * (1 + WORTH_IT) <= seconds_to_expect(compared):
            return coded
        compared = replace(compared, coded=coded)
    return compared


def _basis(rows: list[Prediction], network: Network) -> str:
    if not isinstance(network, Measured):
        return f"{'both are' if len(rows) > 1 else 'this is'} predicted, without overlap"
    found = [(milliseconds(row.seconds), _source(row, network)) for row in rows]
    if len(found) == 1:
        return f"this is {found[0][1]}"
    if len(found) == 2 and found[0][1] == found[1][1]:
        return "both are measured steps" if rows[0].is_measured else "both are sums of measured parts"
    return ", ".join(f"{time}{'' if i else ' is'} {source}" for i, (time, source) in enumerate(found))


def _source(row: Prediction, network: Network) -> str:
    name, H = network.timed(row.bits) or (None, 0)
    if row.is_measured:
        return "a measured step"
    return f"from a measured step with H = {H}" if name == row.topology and row.topology else "the sum of measured parts"


def _period(times: Times, gossip: float, timed: tuple[str, int] | None) -> int:
    """The period by rule 3; or the one whose step was measured, unless that was cut short."""
    H = period_for(times.workload.compute, gossip, times.mean)
    if timed is None:
        return H
    return timed[1] if timed[1] < LONGEST_TIMED else max(timed[1], H)


def _compare(times: Times, given: int | None, longest: int, iid: bool, plain: Comparison | None = None) -> Comparison:
    """Finds the best Gossip-PGA (rules 2 and 3), and the methods to compare it with."""
    n, compute = times.n, times.workload.compute
    everywhere = {topology: times.gossip(topology)[0] for topology in (TOPOLOGIES[name](n) for name in distinct(n))}
    # for n a power of two, the base graph sends and averages as one_peer_exponential does: only noise would choose between them
    gossip = {topology: seconds for topology, seconds in everywhere.items() if not (kind(topology) == "base-graph" and n & (n - 1) == 0)}
    fastest = compute + min(gossip.values())
    candidates: list[tuple[Topology, Prediction]] = []
    timed = times.network.timed(times.bits)
    if timed is not None:  # rumor probe has chosen this topology by the same rule
        measured = {topology: seconds for topology, seconds in gossip.items() if kind(topology) == timed[0]}
        gossip, timed = (measured, timed) if measured else (gossip, None)
    for topology, seconds in gossip.items():
        if compute + seconds <= (1 + TIE) * fastest or timed is not None:
            H = given or min(longest, _period(times, seconds, timed))
            candidates.append((topology, times.row("Gossip-PGA", gossip_pga(topology, H), H)))
    shortest = min(best.stage(iid) for _, best in candidates)
    topology, best = min((pair for pair in candidates if pair[1].stage(iid) <= SAME_ORDER * shortest), key=lambda pair: pair[1].bytes)
    local = times.row("Local SGD", local_sgd(n, best.H), best.H)
    rival = min((other for other in everywhere if other != topology), key=everywhere.__getitem__, default=None)
    return Comparison(
        times.workload,
        times.network,
        topology,
        best,
        times.parallel(),
        local,
        compute + gossip[topology],
        None if rival is None else times.row("Gossip-PGA", gossip_pga(rival, best.H or 1), best.H),
        math.inf if rival is None else compute + everywhere[rival],
        times.mean,
        longest,
        given is not None,
        iid,
        times.bits,
        plain,
    )
