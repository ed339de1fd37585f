"""Hours that a run would take on the paper's cluster, by its own step times (Table 17)."""

from __future__ import annotations

from networks.runs import Run
from rumor.cost.paper import PEERS, RESNET50, Training, reproduce_scaling


def hours(run: Run, global_share: float, training: Training) -> float:
    """Computing, plus gossip or an all-reduce as often as the run had them. OSGP's message is taken to be hidden behind computing.

    With the measured times for as many nodes as the paper had; for others (ResNet-50 only) with those fitted to its Table 10. A ring's
    gossip, which the paper found to take as long as one peer's (1.56 and 1.55 hours in Table 1), counts the same.
    """
    compute, n = training.workload.compute, run.nodes
    gossip, all_reduce = training.measured.gossip_seconds[PEERS], training.measured.all_reduce_seconds
    if n != training.n and training is RESNET50:
        fit = reproduce_scaling()
        gossip, all_reduce = fit.gossip, 2 * (n - 1) / n * fit.transfer + 2 * (n - 1) * fit.latency
    mixed = compute + global_share * all_reduce + (1 - global_share) * gossip
    seconds = {"Parallel SGD": compute + all_reduce, "OSGP": max(compute, gossip), "Local SGD": compute + global_share * all_reduce}
    steps = training.workload.steps * training.n / n * run.stretch  # epochs are the same, batches smaller
    return seconds.get(run.method, mixed) * steps / 3600
