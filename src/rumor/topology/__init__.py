"""Topologies: who talks to whom at step k, and with what weight."""

from rumor.topology.base_graph import base_graph
from rumor.topology.builders import (
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
from rumor.topology.topology import Topology

__all__ = [
    "Topology",
    "base_graph",
    "complete",
    "exponential",
    "from_digraph",
    "from_matrices",
    "from_matrix",
    "from_networkx",
    "grid",
    "isolated",
    "one_peer_exponential",
    "ring",
    "torus",
]
