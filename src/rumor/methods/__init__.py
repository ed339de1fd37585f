"""Methods: each is written once, on tensors [*nodes, d], and runs on every engine.

To write your own, subclass `Algorithm` (docs/extending.md has an example).
"""

from rumor.methods.algorithm import Algorithm, Builder, InFlight, Kind, Nodes, State, Step, average, wait_for
from rumor.methods.diloco import DiLoCo, diloco
from rumor.methods.from_text import method
from rumor.methods.gossip_pga import GossipPGA, gossip_aga, gossip_pga, gossip_sgd, local_sgd, parallel_sgd
from rumor.methods.push_sum import PushSum, osgp
from rumor.methods.slow_momentum import SlowMo, slowmo

__all__ = [
    "Algorithm",
    "Builder",
    "DiLoCo",
    "GossipPGA",
    "InFlight",
    "Kind",
    "Nodes",
    "PushSum",
    "SlowMo",
    "State",
    "Step",
    "average",
    "diloco",
    "gossip_aga",
    "gossip_pga",
    "gossip_sgd",
    "local_sgd",
    "method",
    "osgp",
    "parallel_sgd",
    "slowmo",
    "wait_for",
]
