"""Rumor: train one PyTorch model on many nodes with far less communication than all-reduce."""

from rumor import cost, theory
from rumor.algorithm import GossipPGA, gossip_aga, gossip_pga, gossip_sgd, local_sgd, parallel_sgd
from rumor.averager import Averager
from rumor.checkpoint import load, save
from rumor.engine import Stacked
from rumor.metrics import Metrics
from rumor.process_group import ProcessGroup
from rumor.push_sum import PushSum, osgp
from rumor.schedule import Adaptive, Never, Periodic
from rumor.simulator import Simulator
from rumor.slowmo import SlowMo, slowmo
from rumor.topology import (
    Topology,
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

__all__ = [
    "Adaptive",
    "Averager",
    "GossipPGA",
    "Metrics",
    "Never",
    "Periodic",
    "ProcessGroup",
    "PushSum",
    "Simulator",
    "SlowMo",
    "Stacked",
    "Topology",
    "complete",
    "cost",
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
    "one_peer_exponential",
    "osgp",
    "parallel_sgd",
    "ring",
    "save",
    "slowmo",
    "theory",
    "torus",
]
