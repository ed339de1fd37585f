"""The paper's Table 11."""

from __future__ import annotations

from dataclasses import replace

from networks.command import QUICK
from networks.runs import Run, Table, changed

PARALLEL, LOCAL, GOSSIP = Run("Parallel SGD", "complete"), Run("Local SGD", "isolated", 6), Run("Gossip SGD")
PGA, AGA = Run("Gossip-PGA", H=6), Run("Gossip-AGA", H=4)
ALL = (PARALLEL, LOCAL, GOSSIP, PGA, AGA, replace(GOSSIP, stretch=2), replace(LOCAL, stretch=3))

TABLES = {
    "11": Table(changed(ALL, nodes=8)),
    QUICK: Table(changed((PARALLEL, LOCAL, GOSSIP, PGA), nodes=4), seeds=1),
}
