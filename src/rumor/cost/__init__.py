"""The time model and the planner: the cost of a step of each method on a given network, and which method to choose.

>>> from rumor.cost import Link, Workload, recommend
>>> resnet50 = Workload(parameters=25_500_000, compute=0.146)
>>> fast = Link(bandwidth=400e9 / 8, latency=5e-6)  # 4 x 100 Gbit/s
>>> recommend(32, resnet50, fast).call
'rumor.parallel_sgd(32)'
>>> slow = Link(bandwidth=10e9 / 8, latency=50e-6)  # 10 Gbit/s
>>> recommend(32, resnet50, slow).call
'rumor.gossip_pga(rumor.one_peer_exponential(32), H=4)'
"""

from rumor.cost.network import TOPOLOGIES, Link, Measured, Network, Workload, degree
from rumor.cost.prediction import Prediction, period_for, predict
from rumor.cost.recommendation import Recommendation, recommend

__all__ = [
    "TOPOLOGIES",
    "Link",
    "Measured",
    "Network",
    "Prediction",
    "Recommendation",
    "Workload",
    "degree",
    "period_for",
    "predict",
    "recommend",
]
