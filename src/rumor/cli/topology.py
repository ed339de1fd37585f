"""`rumor topology`: beta, degree, spectrum, a picture, and C_beta and D_beta over H."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any, NamedTuple

import numpy as np

from rumor import spectrum, theory
from rumor.cli.table import table
from rumor.cli.units import nodes
from rumor.cost import TOPOLOGIES, degree
from rumor.drawing import braille, has_hidden_links, links
from rumor.matrix import Array
from rumor.topology import Topology, complete, isolated

NAMES = {**TOPOLOGIES, "complete": complete, "isolated": isolated}
PERIODS = (1, 2, 4, 8, 16, 32, 64, math.inf)
MOST_NODES = 100_000
COMPLETE_UP_TO = 2_000  # nodes: its links are n^2


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "topology",
        help="show a topology: beta, degree, spectrum, a picture, C_beta and D_beta over H",
        description="Shows how fast a topology mixes, what its graph looks like, and C_beta, D_beta and the transient stage over H.",
    )
    parser.add_argument("name", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("-n", "--nodes", type=nodes, required=True, help="number of nodes")
    parser.add_argument("--iid", action="store_true", help="all nodes draw from the same data: that transient stage")
    parser.add_argument("--out", metavar="FILE", help="draw it into FILE.png, .svg or .pdf as well (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def build(name: str, n: int) -> Topology:
    known = NAMES.get(name.replace("_", "-"))
    if known is None:
        raise ValueError(f"there is no topology {name!r}: choose from {', '.join(NAMES)}")
    if n > MOST_NODES:
        raise ValueError(f"-n is at most {MOST_NODES:,}, got {n}")
    if known is complete and n > COMPLETE_UP_TO:
        raise ValueError(f"complete has n^2 links, which is shown up to n = {COMPLETE_UP_TO:,}, got n={n}; its beta is 0 for every n")
    return known(n)


class Constants(NamedTuple):
    """C_beta, D_beta and the transient stage at one period."""

    H: float
    C: float
    D: float
    transient_stage: float


def constants(topology: Topology, iid: bool = False) -> list[Constants]:
    found = []
    for H in PERIODS:
        mixing = theory.time_varying_mixing(topology, [H])  # type: ignore[list-item]
        found.append(Constants(H, mixing.C, mixing.D, theory.transient_stage(mixing, iid=iid)))
    return found


def run(options: argparse.Namespace) -> int:
    topology = build(options.name, options.nodes)
    values = spectrum.moduli([topology.matrix(k) for k in range(topology.period)])
    over_H = constants(topology, options.iid)
    if options.out:
        from rumor.plots import draw_topology  # matplotlib is an extra

        draw_topology(topology, values, over_H, options.out)
    print(_json(topology, values, over_H) if options.json else _page(topology, values, over_H, options.iid))
    if options.out and not options.json:
        print(f"\nwritten to {options.out}")
    return 0


def _json(topology: Topology, values: Array | None, over_H: list[Constants]) -> str:
    found = {
        "name": topology.name,
        "n": topology.n,
        "period": topology.period,
        "beta": topology.beta,
        "degree": degree(topology),
        "links": len(links(topology)),
        "spectrum": None if values is None else values.tolist(),
        "over_H": [{**row._asdict(), "H": None if math.isinf(row.H) else int(row.H)} for row in over_H],
    }
    return json.dumps(_finite(found), indent=1)


def _finite(value: Any) -> Any:
    """JSON has no infinity: None stands for it."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _page(topology: Topology, values: Array | None, over_H: list[Constants], iid: bool) -> str:
    messages, pairs = degree(topology), len(links(topology))
    cycle = f", a cycle of {topology.period} matrices" if topology.period > 1 else ""
    of_cycle = " (the geometric mean over a cycle)" if topology.period > 1 else ""
    picture = braille(topology)
    lines = [
        f"{topology.name}: {pairs:,} link{'s' * (pairs != 1)}{cycle}",
        f"beta {topology.beta:.5f}{of_cycle}; degree {messages:g} (messages that the busiest node sends in a step)",
        "",
        picture if picture is not None else f"({pairs:,} links are too many for a picture)",
        *(["(its ends meet: the links around it are not drawn)"] if picture is not None and has_hidden_links(topology) else []),
        "",
        *_chart(topology, values),
        "",
        _table(over_H, iid),
    ]
    return "\n".join(lines)


def _chart(topology: Topology, values: Array | None) -> list[str]:
    """Eigenvalues other than the 1 of the average, by size."""
    of = "the product of a cycle" if topology.period > 1 else "W"
    if values is None:
        return [f"(all eigenvalues are left out above n = {spectrum.EIGENVALUES_UP_TO:,}: this graph has no short cut to them)"]
    if topology.n == 1:
        return ["(one node: no eigenvalue but the 1 of the average)"]
    counts, edges = np.histogram(np.clip(np.round(values[1:], 12), 0, 1), bins=10, range=(0, 1))
    bars = [
        f"  {low:.1f}-{high:.1f}  {_bar(number / counts.max())}{number}"
        for number, low, high in zip(counts[::-1], edges[-2::-1], edges[:0:-1], strict=True)
    ]
    return [f"|eigenvalues| of {of}, without the 1 of the average; the largest {values[1]:.5f}", *bars]


def _bar(share: float, width: int = 40) -> str:
    eighths = round(8 * width * share)
    return "█" * (eighths // 8) + ["", *"▏▎▍▌▋▊▉"][eighths % 8] + " " if eighths else ""


def _table(over_H: list[Constants], iid: bool) -> str:
    head = ("H", "C_beta", "D_beta", f"transient stage ({'iid' if iid else 'non-iid'}, an order)")
    rows = [
        (
            "inf" if math.isinf(row.H) else str(row.H),
            f"{row.C:.4g}",
            f"{row.D:.4g}",
            f"{row.transient_stage:.1e}" if row.transient_stage else "0",
        )
        for row in over_H
    ]
    return table(head, rows, left=0)
