"""Recommends a method, a topology and a period, by these rules:

1. Take Parallel SGD if its step is at most 10 % slower than the best Gossip-PGA. It is exact, and there is little to gain.
2. Otherwise take Gossip-PGA on the topology with the fastest gossip step. If several are within 2 %, take the one with the shortest
   transient stage. If transient stages are within a factor of 2 (they are orders of magnitude), take the one that sends the least.
3. Take the smallest H at which global rounds add at most 10 % to a gossip step. A longer period would hardly be faster, but have a
   longer transient stage.

Gossip SGD is Gossip-PGA without the global rounds: at most 10 % faster, with a longer transient stage. Local SGD sends the least, but
needs the most steps to catch up with Parallel SGD.
"""

from __future__ import annotations

from dataclasses import dataclass

from rumor.cost.network import TOPOLOGIES, Network, Workload, kind
from rumor.cost.prediction import Prediction, period_for, predict
from rumor.cost.reasons import LONGEST, SAME_ORDER, WORTH_IT, Comparison, notes, why_gossip_pga, why_parallel
from rumor.schedule import check_whole

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
    """

    method: str
    topology: str | None
    H: int
    seconds: float
    call: str
    reason: str
    notes: tuple[str, ...] = ()


def recommend(
    n: int, workload: Workload, network: Network, *, H: int | None = None, max_period: int | None = None, iid: bool = False
) -> Recommendation:
    """Recommends a method, a topology and a period for `workload` on `n` nodes of `network`.

    Args:
        n: number of nodes.
        workload: the training job.
        network: a `Link`, or times that were `Measured`.
        H: the period of Gossip-PGA; None chooses one.
        max_period: the longest H allowed, for example from `rumor.theory` for the transient stage that the run can afford.
        iid: whether all nodes draw from the same data. This decides which transient stage counts.

    >>> from rumor.cost import Measured
    >>> seen = Measured(0.278, {"one-peer-exponential": 0.150})  # the paper's ResNet-50
    >>> recommend(32, Workload(25_500_000, 0.146), seen).call
    'rumor.gossip_pga(rumor.one_peer_exponential(32), H=5)'
    """
    for name, value in (("H", H), ("max_period", max_period)):
        if value is not None:
            check_whole(name, value, 1)
    if n == 1:
        seconds = predict(n, workload, network)[0].seconds
        return Recommendation("Parallel SGD", None, 1, seconds, "rumor.parallel_sgd(1)", "there is only one node")
    compared = _compare(n, workload, network, H, min(LONGEST, max_period or LONGEST), iid)
    if compared.parallel.seconds <= (1 + WORTH_IT) * compared.best.seconds or compared.H == 1:  # Gossip-PGA with H = 1 is Parallel SGD
        call, seconds = f"rumor.parallel_sgd({n})", min(compared.parallel.seconds, compared.best.seconds)
        return Recommendation("Parallel SGD", None, 1, seconds, call, why_parallel(compared), notes(compared))
    call = f"rumor.gossip_pga(rumor.{kind(compared.topology).replace('-', '_')}({n}), H={compared.H})"
    return Recommendation(
        "Gossip-PGA", kind(compared.topology), compared.H, compared.best.seconds, call, why_gossip_pga(compared), notes(compared)
    )


def _compare(n: int, workload: Workload, network: Network, given: int | None, longest: int, iid: bool) -> Comparison:
    """Finds the best Gossip-PGA (rules 2 and 3) and the methods to compare it with."""
    rows, mean = predict(n, workload, network), network.all_reduce(n, workload.summed_bytes)
    gossip = {row.topology: row.seconds for row in rows if row.method == "Gossip SGD" and row.topology}
    candidates: list[tuple[Prediction, Prediction]] = []  # Gossip-PGA, and Local SGD of the same period
    for name, seconds in gossip.items():
        if seconds <= (1 + TIE) * min(gossip.values()):
            H = given or min(longest, period_for(workload.compute, seconds - workload.compute, mean))
            _, local, _, best, *_ = predict(n, workload, network, H=H, topologies=[TOPOLOGIES[name](n)])
            candidates.append((best, local))
    shortest = min(best.stage(iid) for best, _ in candidates)
    best, local = min((pair for pair in candidates if pair[0].stage(iid) <= SAME_ORDER * shortest), key=lambda pair: pair[0].bytes)
    topology = TOPOLOGIES[str(best.topology)](n)
    step = gossip[str(best.topology)]
    return Comparison(workload, network, topology, best, rows[0], local, step, min(gossip.values()), mean, longest, iid)
