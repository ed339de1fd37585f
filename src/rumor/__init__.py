"""Rumor: train one PyTorch model on many nodes over slow links."""

from typing import NoReturn

import torch

from rumor import cost, theory
from rumor.engines import Stacked
from rumor.membership import JobEndedError, RefusedError, elastic
from rumor.methods import (
    DiLoCo,
    GossipPGA,
    PushSum,
    SlowMo,
    diloco,
    gossip_aga,
    gossip_pga,
    gossip_sgd,
    local_sgd,
    method,
    osgp,
    parallel_sgd,
    slowmo,
)
from rumor.metrics import Metrics
from rumor.schedule import Adaptive, LearningRate, Never, Periodic
from rumor.simulator import Simulator
from rumor.topology import (
    Topology,
    base_graph,
    complete,
    exponential,
    from_digraph,
    from_matrices,
    from_matrix,
    from_networkx,
    grid,
    isolated,
    one_peer_exponential,
    ring,
    torus,
)
from rumor.version import VERSION

__version__ = VERSION

# Some builds of torch have no torch.distributed. With them, all works but what needs real processes.
if torch.distributed.is_available():
    from rumor.averager import Averager
    from rumor.checkpoint import load, save
    from rumor.ddp import ddp_hook, ddp_hook_state
    from rumor.engines.processes.process_group import ProcessGroup
else:

    def __getattr__(name: str) -> NoReturn:
        if name in ("Averager", "ProcessGroup", "ddp_hook", "ddp_hook_state", "load", "save"):
            raise ImportError(f"rumor.{name} needs torch.distributed, which this build of torch does not have: install another build")
        raise AttributeError(f"module 'rumor' has no attribute {name!r}")


__all__ = [
    "Adaptive",
    "Averager",
    "DiLoCo",
    "GossipPGA",
    "JobEndedError",
    "LearningRate",
    "Metrics",
    "Never",
    "Periodic",
    "ProcessGroup",
    "PushSum",
    "RefusedError",
    "Simulator",
    "SlowMo",
    "Stacked",
    "Topology",
    "base_graph",
    "complete",
    "cost",
    "ddp_hook",
    "ddp_hook_state",
    "diloco",
    "elastic",
    "exponential",
    "from_digraph",
    "from_matrices",
    "from_matrix",
    "from_networkx",
    "gossip_aga",
    "gossip_pga",
    "gossip_sgd",
    "grid",
    "isolated",
    "load",
    "local_sgd",
    "method",
    "one_peer_exponential",
    "osgp",
    "parallel_sgd",
    "ring",
    "save",
    "slowmo",
    "theory",
    "torus",
]
