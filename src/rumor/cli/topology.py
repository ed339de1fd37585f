"""`rumor topology`: shows beta, degree, spectrum, a picture, and C_beta and D_beta over H."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import numpy as np

from rumor.cli.table import paragraph, table
from rumor.cli.units import nodes
from rumor.cost import TOPOLOGIES, degree
from rumor.cost.network import in_python
from rumor.plots import draw_topology
from rumor.theory import Mixing, time_varying_mixing, transient_stage
from rumor.topology import Topology, complete, isolated
from rumor.topology.drawing import braille, has_hidden_links, links
from rumor.topology.matrix import Array
from rumor.topology.spectrum import EIGENVALUES_UP_TO, moduli

NAMES = {**TOPOLOGIES, "complete": complete, "isolated": isolated}
PERIODS = (1, 2, 4, 8, 16, 32, 64, math.inf)
MOST_NODES = 100_000
COMPLETE_UP_TO = 2_000  # nodes: the complete graph has n^2 links


def add_topology(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "topology",
        help="show a topology: beta, degree, spectrum, a picture, C_beta and D_beta over H",
        description="Shows how fast a topology mixes, what its graph looks like, and C_beta, D_beta and the transient stage over H.",
    )
    parser.add_argument("name", metavar="NAME", help=f"{in_python(', '.join(NAMES))}; with - instead of _ if you like")
    parser.add_argument("-n", "--nodes", type=nodes, required=True, help="number of nodes")
    parser.add_argument("--iid", action="store_true", help="assume that all nodes draw from the same data, for the transient stage")
    parser.add_argument("--out", metavar="FILE", help="also draw the topology into FILE.png, .svg or .pdf (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def build_topology(name: str, n: int) -> Topology:
    """Builds a topology by its name on the command line: one_peer_exponential or one-peer-exponential."""
    build = NAMES.get(name.replace("_", "-"))
    if build is None:
        raise ValueError(f"there is no topology {name!r}: choose from {in_python(', '.join(NAMES))}")
    if n > MOST_NODES:
        raise ValueError(f"-n must be at most {MOST_NODES:,}, got {n}")
    if build is complete and n > COMPLETE_UP_TO:
        raise ValueError(
            f"the complete topology has n^2 links and is shown up to n = {COMPLETE_UP_TO:,} only, got n={n}; its beta is 0 for every n"
        )
    return build(n)


def run(options: argparse.Namespace) -> int:
    topology = build_topology(options.name, options.nodes)
    values = moduli([topology.matrix(k) for k in range(topology.period)])
    over_H = [time_varying_mixing(topology, [H]) for H in PERIODS]  # type: ignore[list-item]
    if options.out:
        draw_topology(topology, values, over_H, options.out)
    print(_json(topology, values, over_H, options.iid) if options.json else _page(topology, values, over_H, options.iid))
    if options.out and not options.json:
        print(f"\nwrote {options.out}")
    return 0


def _json(topology: Topology, values: Array | None, over_H: list[Mixing], iid: bool) -> str:
    found = {
        "name": topology.name,
        "n": topology.n,
        "period": topology.period,
        "beta": topology.beta,
        "degree": degree(topology),
        "links": len(links(topology)),
        "spectrum": None if values is None else values.tolist(),
        "over_H": [
            {
                "H": None if math.isinf(mixing.H) else int(mixing.H),
                "C": mixing.C,
                "D": mixing.D,
                "transient_stage": transient_stage(mixing, iid=iid),
            }
            for mixing in over_H
        ],
    }
    return json.dumps(_finite(found), indent=1)


def _finite(value: Any) -> Any:
    """Replaces infinity by None, because JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _page(topology: Topology, values: Array | None, over_H: list[Mixing], iid: bool) -> str:
    messages, pairs = degree(topology), len(links(topology))
    cycle = f", a cycle of {topology.period} matrices" if topology.period > 1 else ""
    of_cycle = " (the geometric mean over a cycle)" if topology.period > 1 else ""
    picture = braille(topology)
    lines = [
        f"{topology.name}: {pairs:,} link{'s' * (pairs != 1)}{cycle}",
        paragraph(
            f"beta {topology.beta:.5f}{of_cycle}: what a step leaves of the disagreement (0: nothing, 1: all); degree {messages:g} "
            "(messages that the busiest node sends per step)"
        ),
        "",
        picture if picture is not None else f"({pairs:,} links are too many for a picture)",
        *(["(the links that wrap around the edges are not drawn)"] if picture is not None and has_hidden_links(topology) else []),
        "",
        *_chart(topology, values),
        "",
        paragraph(
            "The rows below are for training with one global average every H steps (inf: with none). C_beta and D_beta are the numbers in "
            "the paper's rates that grow with H and beta: lower is better."
        ),
        paragraph(
            "transient stage: about how many steps it takes until training is as good as with a global average at every step, if the "
            f"nodes' data {'are alike (iid)' if iid else 'differ (non-iid)'}. This is an order of magnitude from theory, whose constant "
            "factors are not known. So compare the rows by it, but do not expect this number of steps."
        ),
        "",
        _table(over_H, iid),
    ]
    return "\n".join(lines)


def _chart(topology: Topology, values: Array | None) -> list[str]:
    """Draws a histogram of the absolute eigenvalues, without the eigenvalue 1 of the average."""
    of = "the product of a cycle" if topology.period > 1 else "W"
    if values is None:
        return [f"(the eigenvalues are left out above n = {EIGENVALUES_UP_TO:,}: this graph has no fast way to compute them)"]
    if topology.n == 1:
        return ["(one node has only the eigenvalue 1 of the average)"]
    counts, edges = np.histogram(np.clip(np.round(values[1:], 12), 0, 1), bins=10, range=(0, 1))
    bars = [
        f"  {low:.1f}-{high:.1f}  {_bar(number / counts.max())}{number}"
        for number, low, high in zip(counts[::-1], edges[-2::-1], edges[:0:-1], strict=True)
    ]
    return [paragraph(f"|eigenvalues| of {of}, without the 1 of the average; the largest is {values[1]:.5f}"), *bars]


def _bar(share: float, width: int = 40) -> str:
    eighths = round(8 * width * share)
    return "█" * (eighths // 8) + ["", *"▏▎▍▌▋▊▉"][eighths % 8] + " " if eighths else ""


def _table(over_H: list[Mixing], iid: bool) -> str:
    head = ("H", "C_beta", "D_beta", f"transient stage ({'iid' if iid else 'non-iid'})")
    stages = [transient_stage(mixing, iid=iid) for mixing in over_H]
    rows = [
        ("inf" if math.isinf(mixing.H) else str(mixing.H), f"{mixing.C:.4g}", f"{mixing.D:.4g}", f"{stage:.1e}" if stage else "0")
        for mixing, stage in zip(over_H, stages, strict=True)
    ]
    return table(head, rows, left=0)
