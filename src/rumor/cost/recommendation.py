"""Which method, topology and period to take.

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

from rumor.cost.network import TOPOLOGIES, Network, Workload, kind
from rumor.cost.prediction import Prediction, period_for, predict
from rumor.cost.reasons import LONGEST, SAME_ORDER, WORTH_IT, Case, notes, why_gossip_pga, why_parallel
from rumor.schedule import check_whole

TIE = 0.02  # topologies whose gossip steps are this close count as equally fast


@dataclass(frozen=True)
class Recommendation:
    """What to do.

    Attributes:
        method: the choice, "Parallel SGD" or "Gossip-PGA".
        topology: as the command line writes it; None for Parallel SGD.
        H: its period; 1 for Parallel SGD.
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


def recommend(
    n: int, workload: Workload, network: Network, *, H: int | None = None, max_period: int | None = None, iid: bool = False
) -> Recommendation:
    """The method, topology and H to take for `workload` on `n` nodes of `network`.

    Args:
        H: the period to take if it is Gossip-PGA; None to choose one.
        max_period: a bound on H, say from `rumor.theory` for the transient stage that the run can afford.
        iid: whether all nodes draw from the same data; decides which transient stage counts.

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
        return Recommendation("Parallel SGD", None, 1, seconds, "rumor.parallel_sgd(1)", "with one node there is no one to average with")
    case = _case(n, workload, network, H, min(LONGEST, max_period or LONGEST), iid)
    if case.parallel.seconds <= (1 + WORTH_IT) * case.best.seconds or case.H == 1:  # Gossip-PGA with H = 1 is Parallel SGD
        call, seconds = f"rumor.parallel_sgd({n})", min(case.parallel.seconds, case.best.seconds)
        return Recommendation("Parallel SGD", None, 1, seconds, call, why_parallel(case), notes(case))
    call = f"rumor.gossip_pga(rumor.{kind(case.topology).replace('-', '_')}({n}), H={case.H})"
    return Recommendation("Gossip-PGA", kind(case.topology), case.H, case.best.seconds, call, why_gossip_pga(case), notes(case))


def _case(n: int, workload: Workload, network: Network, given: int | None, longest: int, iid: bool) -> Case:
    """The best of Gossip-PGA (rules 2 and 3), and what it is up against."""
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
    return Case(workload, network, topology, best, rows[0], local, step, min(gossip.values()), mean, longest, iid)
