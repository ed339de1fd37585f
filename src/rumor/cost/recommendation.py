"""Recommends a method, a topology and a period, by these rules:

1. Take Parallel SGD if its step is at most 10 % slower than the best Gossip-PGA. It is exact, and there is little to gain.
2. Otherwise take Gossip-PGA on the topology with the fastest gossip step. If several are within 2 %, take the one with the shortest
   transient stage. If transient stages are within a factor of 2 (they are orders of magnitude), take the one that sends the least.
3. Take the smallest H at which global rounds add at most 10 % to a gossip step. A longer period would hardly be faster, but have a
   longer transient stage.
4. Send codes of 4 bits if that makes a step at least 10 % faster. If Parallel SGD with such codes is then within 10 % of Gossip-PGA, take
   it: it needs no gossip.

Gossip SGD is Gossip-PGA without the global rounds: at most 10 % faster, with a longer transient stage. Local SGD sends the least, but
needs the most steps to catch up with Parallel SGD.
"""

from __future__ import annotations

from dataclasses import dataclass

from rumor.cost.network import TOPOLOGIES, Network, Workload, kind
from rumor.cost.prediction import Prediction, Times, period_for, predict, times_with
from rumor.cost.reasons import LONGEST, SAME_ORDER, WORTH_IT, Comparison, notes, takes_parallel, why_gossip_pga, why_parallel
from rumor.methods.gossip_pga import gossip_pga, local_sgd
from rumor.schedule import check_whole
from rumor.topology import Topology

FEWEST_BITS = 4  # as accurate as float32 on CIFAR-10 (docs/networks.md)
TIE = 0.02  # gossip steps within this share of each other count as equally fast


@dataclass(frozen=True)
class Recommendation:
    """The recommended method, and why.

    Attributes:
        method: "Parallel SGD" or "Gossip-PGA".
        topology: the topology in the spelling of the command line; None for Parallel SGD.
        H: the period; 1 for Parallel SGD.
        seconds: seconds of a step, without overlap.
        call: the Python expression of the algorithm to pass to `rumor.Averager`.
        reason: the reason, in words.
        notes: further remarks.
        bits: the number of bits of a number in a message.
    """

    method: str
    topology: str | None
    H: int
    seconds: float
    call: str
    reason: str
    notes: tuple[str, ...] = ()
    bits: int = 32


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
        return Recommendation("Parallel SGD", None, 1, seconds, "rumor.parallel_sgd(1)", "there is only one node")
    longest = min(LONGEST, max_period or LONGEST)
    compared = _compare(Times(n, workload, network), H, longest, iid)
    if (with_codes := times_with(n, workload, network, bits)) is not None:
        coded = _compare(with_codes, H, longest, iid, plain=compared)
        if min(coded.best.seconds, coded.parallel.seconds) * (1 + WORTH_IT) <= min(compared.best.seconds, compared.parallel.seconds):
            compared = coded
    with_bits = "" if compared.bits == 32 else f", bits={compared.bits}"
    if takes_parallel(compared):
        call, seconds = f"rumor.parallel_sgd({n}{with_bits})", min(compared.parallel.seconds, compared.best.seconds)
        return Recommendation("Parallel SGD", None, 1, seconds, call, why_parallel(compared), notes(compared), compared.bits)
    call = f"rumor.gossip_pga(rumor.{kind(compared.topology).replace('-', '_')}({n}), H={compared.H}{with_bits})"
    name, reason, seconds = kind(compared.topology), why_gossip_pga(compared), compared.best.seconds
    return Recommendation("Gossip-PGA", name, compared.H, seconds, call, reason, notes(compared), compared.bits)


def _compare(times: Times, given: int | None, longest: int, iid: bool, plain: Comparison | None = None) -> Comparison:
    """Finds the best Gossip-PGA (rules 2 and 3), and the methods to compare it with."""
    n, compute = times.n, times.workload.compute
    gossip = {topology: times.gossip(topology)[0] for topology in (build(n) for build in TOPOLOGIES.values())}
    fastest = compute + min(gossip.values())
    candidates: list[tuple[Topology, Prediction]] = []
    for topology, seconds in gossip.items():
        if compute + seconds <= (1 + TIE) * fastest:
            H = given or min(longest, period_for(compute, seconds, times.mean))
            candidates.append((topology, times.row("Gossip-PGA", gossip_pga(topology, H), H)))
    shortest = min(best.stage(iid) for _, best in candidates)
    topology, best = min((pair for pair in candidates if pair[1].stage(iid) <= SAME_ORDER * shortest), key=lambda pair: pair[1].bytes)
    local = times.row("Local SGD", local_sgd(n, best.H), best.H)
    step = compute + gossip[topology]
    return Comparison(
        times.workload, times.network, topology, best, times.parallel(), local, step, fastest, times.mean, longest, iid, times.bits, plain
    )
