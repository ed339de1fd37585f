"""The paper's image tables, and our additions."""

from __future__ import annotations

from dataclasses import replace

from networks.runs import QUASI_GLOBAL, QUICK, TRACKING, Run, Table, changed

PARALLEL = Run("Parallel SGD", "complete")
LOCAL = Run("Local SGD", "isolated", 6)
GOSSIP, OSGP = Run("Gossip SGD"), Run("OSGP")
PGA, AGA, SLOWMO = Run("Gossip-PGA", H=6), Run("Gossip-AGA", H=4), Run("SlowMo", H=6)
ONCE = (PARALLEL, LOCAL, GOSSIP, OSGP, PGA, AGA)
GOSSIP_X2 = replace(GOSSIP, stretch=2)

FOUR_BITS = replace(PGA, bits=4)
ON_ALL = (
    *(replace(PARALLEL, bits=bits) for bits in (32, 16, 4)),
    replace(LOCAL, bits=4),
    PGA,
    FOUR_BITS,
    replace(AGA, bits=4),
    replace(FOUR_BITS, state="global"),
    replace(FOUR_BITS, state="always"),
    replace(FOUR_BITS, H=(3, 24)),
    replace(FOUR_BITS, H=(3, 24), state="global"),
    replace(FOUR_BITS, H=(3, 24), state="always"),
    *(Run(QUASI_GLOBAL, H=H, bits=4, momentum=0.0) for H in (6, (3, 24))),  # it has its own momentum instead of the optimizer's
)
ON_UNEVEN = (Run("Scaffold", H=6, bits=4), Run(TRACKING, H=6, bits=4))


def beyond(nodes: int, odd: int) -> Table:
    """Methods that are not the paper's: on `nodes` nodes with even and uneven labels, and on `odd` nodes, not a power of two."""
    on_base_graph = changed((FOUR_BITS, replace(FOUR_BITS, H=(3, 24), state="global")), topology="base_graph")
    uneven = (run for alpha in (0.3, 0.1) for run in changed((*ON_ALL, *ON_UNEVEN), split=f"dirichlet({alpha})"))
    return Table((*changed((*ON_ALL, *uneven), nodes=nodes), *changed((*ON_ALL, *on_base_graph), nodes=odd)), seeds=5)


TABLES = {
    "7": Table((*ONCE, GOSSIP_X2, replace(OSGP, stretch=2), replace(LOCAL, stretch=3)), seeds=5),
    "9": Table((PARALLEL, *changed((GOSSIP, PGA), topology="ring")), seeds=5),
    "7 at n = 50": Table(changed(ONCE, nodes=50), seeds=5),
    "15": Table((PARALLEL, GOSSIP, *(replace(PGA, H=H) for H in (3, 6, 12, 24, 48)))),
    "8": Table((PARALLEL, *(replace(run, H=H) for H in (6, 48) for run in (PGA, SLOWMO)))),
    "10": Table(tuple(run for n in (4, 8, 16, 32) for run in changed((PARALLEL, GOSSIP, PGA), nodes=n))),
    "16": Table(changed((PARALLEL, GOSSIP, PGA), momentum=0.0)),
    "labels": Table(
        tuple(run for alpha in (0.3, 0.1) for run in changed((PARALLEL, LOCAL, GOSSIP, PGA, AGA), split=f"dirichlet({alpha})"))
    ),
    "bits": Table(
        (
            *(replace(run, bits=bits) for run in (PGA, AGA) for bits in (32, 16, 8, 4)),
            *(replace(PARALLEL, bits=bits) for bits in (32, 4)),
            *(replace(PGA, bits=bits, split=f"dirichlet({alpha})") for alpha in (0.1, 0.3) for bits in (32, 4)),
            *(replace(PGA, bits=bits, nodes=50) for bits in (32, 4)),
        ),
        seeds=5,
    ),
    "beyond": beyond(32, 50),
    "beyond small": beyond(16, 20),  # for --net mlp on a CPU
    "1": Table((PARALLEL, GOSSIP, GOSSIP_X2, *changed((GOSSIP, GOSSIP_X2), topology="ring")), seeds=5),
    QUICK: Table(changed((PARALLEL, LOCAL, *changed((GOSSIP, PGA, AGA), topology="ring")), nodes=8), seeds=1),
}
