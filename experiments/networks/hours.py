"""Hours that a run would take on the paper's cluster, from the step times of its Table 17."""

from __future__ import annotations

from networks.runs import Run
from rumor.cost.paper import PEERS, RESNET50, Training, reproduce_scaling


def hours(run: Run, global_share: float, training: Training) -> float:
    """Return the hours of computing, gossip and all-reduces. OSGP's messages count as hidden behind computing.

    With the paper's number of nodes, the times are the measured ones. With other numbers (only ResNet-50), they are fitted to its Table 10.
    Gossip on a ring counts like gossip with one peer, because the paper found that they take as long (1.56 and 1.55 hours in Table 1).
    """
    compute, n = training.workload.compute, run.nodes
    gossip, all_reduce = training.measured.gossip_seconds[PEERS], training.measured.all_reduce_seconds
    if n != training.n and training is RESNET50:
        fit = reproduce_scaling()
        gossip, all_reduce = fit.gossip, 2 * (n - 1) / n * fit.transfer + 2 * (n - 1) * fit.latency
    mixed = compute + global_share * all_reduce + (1 - global_share) * gossip
    seconds = {"Parallel SGD": compute + all_reduce, "OSGP": max(compute, gossip), "Local SGD": compute + global_share * all_reduce}
    steps = training.workload.steps * training.n / n * run.stretch  # the same epochs: fewer nodes have smaller batches and more steps
    return seconds.get(run.method, mixed) * steps / 3600
