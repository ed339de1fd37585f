"""The paper's Table 11, and our addition."""

from __future__ import annotations

from dataclasses import replace

from networks.runs import QUICK, Run, Table, changed

LR = 8e-3  # the best of 3e-3, 4e-3, 6e-3, 8e-3 and 1e-2 for Parallel SGD
LAMB = None  # LAMB has no momentum setting
PARALLEL, LOCAL = Run("Parallel SGD", "complete", momentum=LAMB), Run("Local SGD", "isolated", 6, momentum=LAMB)
GOSSIP, PGA, AGA = Run("Gossip SGD", momentum=LAMB), Run("Gossip-PGA", H=6, momentum=LAMB), Run("Gossip-AGA", H=4, momentum=LAMB)
ALL = (PARALLEL, LOCAL, GOSSIP, PGA, AGA, replace(GOSSIP, stretch=2), replace(LOCAL, stretch=3))

TABLES = {
    "11": Table(changed(ALL, nodes=8)),
    "11 bits": Table(changed(tuple(replace(PGA, bits=bits) for bits in (32, 8, 4)), nodes=8)),
    QUICK: Table(changed((PARALLEL, LOCAL, GOSSIP, PGA), nodes=4), seeds=1),
}
