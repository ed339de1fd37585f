"""What `rumor plan` prints: the inputs, a table that fits the terminal, and the recommendation."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from rumor.cli.table import columns, fitted, paragraph
from rumor.cli.units import show_bytes, show_count, show_nodes, show_seconds
from rumor.cost import Measured, Network, Prediction, Recommendation, Workload
from rumor.cost.network import in_python, same_as
from rumor.probe import Probe

HEAD = ("method", "H", "step", "overlapped", "sent", "hours", "transient", "")
LESS_NEEDED = ("overlapped", "sent", "transient", "hours")  # columns that a narrow terminal has no room for, the first ones first
LEGEND = {  # by column
    "overlapped": "the step if all messages could travel while the nodes compute: a lower limit. With delay=1, in OSGP and in DDP, some of "
    "them do.",
    "sent": "bytes that the busiest node sends per step.",
    "transient": "order of magnitude of the number of steps until the method is as good as DDP (Parallel SGD), {data}. A bound from theory "
    "to compare rows by, no forecast of your run: lower is better.{cycles}",
    "<": "recommended. Gossip-AGA moves between its two rows. SlowMo costs as much as Gossip-PGA.",
}
OF_CYCLES = (
    " For one_peer_exponential and base_graph, it is a bound for the worst phase of their cycles: compare these rows with each other, not "
    "with those of ring, grid or exponential."
)


@dataclass(frozen=True)
class Inputs:
    """The cluster and the workload to plan for.

    Attributes:
        source: where the times come from.
        measured_by: who has measured or predicted them, for the end of a sentence.
        probe: the probe whose whole steps the plan compares, if it does.
    """

    n: int
    workload: Workload
    network: Network
    source: str
    measured_by: str
    probe: Probe | None = None


def json_page(inputs: Inputs, rows: list[Prediction], advice: Recommendation) -> str:
    """Returns what `rumor plan --json` prints."""
    network = {"kind": type(inputs.network).__name__.lower(), **asdict(inputs.network)}  # type: ignore[call-overload]
    found = {
        "n": inputs.n,
        "workload": asdict(inputs.workload),
        "network": network,
        "recommendation": asdict(advice),
        "predictions": [asdict(row) for row in rows],
    }
    return json.dumps(found, indent=1)


def page(inputs: Inputs, rows: list[Prediction], chosen: Prediction | None, advice: Recommendation, iid: bool, shows_all: bool) -> str:
    """Returns what `rumor plan` prints. `shows_all`: every row; else other topologies than the best have one row each."""
    w = inputs.workload
    others = [] if shows_all else _on_other_topologies(rows, chosen, advice)
    shown = [row for row in rows if row.topology is None or row.topology not in {other.topology for other in others}]
    head = (
        f"{show_nodes(inputs.n)}, {show_count(w.parameters)} parameters of {w.bytes_per_parameter:g} bytes ({show_bytes(w.bytes)}), "
        f"{show_seconds(w.compute)} of computing, {w.steps:,} step{'s' * (w.steps != 1)}; {inputs.source}"
    )
    text, left_out = fitted(HEAD, [*_by_topology(shown, chosen, iid), *_others(others, rows, iid)], LESS_NEEDED, columns(sys.stdout))
    legend = _legend(rows, iid, inputs.network, left_out)
    if (same := same_topologies(inputs.n)) and inputs.n > 1:
        legend.append(same)
    if others:
        legend.append("`--all` shows every method on every topology.")
    lines = [paragraph(head), "", text, "", *map(paragraph, legend), ""]
    return "\n".join([*lines, *advice_lines(advice, inputs.measured_by), *map(_remark, advice.notes)])


def advice_lines(advice: Recommendation, measured_by: str) -> list[str]:
    """The recommendation: one sentence, which says what it was measured by, and the reason."""
    if not advice.basis:
        return [paragraph(f"{advice.sentence}.")]
    return [paragraph(f"{advice.sentence}; {advice.basis}, {measured_by}."), _remark(f"why: {advice.reason}")]


def same_topologies(n: int) -> str:
    """Says which topologies are the same for n nodes; "" if none are.

    >>> same_topologies(3)
    'With 3 nodes, torus and exponential are the same as ring.'
    """
    alike: dict[str, list[str]] = {}
    for name, first in same_as(n).items():
        if name != first:
            alike.setdefault(in_python(first), []).append(in_python(name))
    found = [
        f"{' and '.join(filter(None, (', '.join(b[:-1]), b[-1])))} {'is' if len(b) == 1 else 'are'} the same as {a}"
        for a, b in alike.items()
    ]
    return f"With {show_nodes(n)}, {', and '.join(found)}." if found else ""


def _remark(text: str) -> str:
    return paragraph(f"  {_capital(text)}.", "    ")


def _capital(text: str) -> str:
    """A sentence begins with a capital letter, unless it begins with a name of Rumor."""
    is_name = set("(_") & set(text.split(" ")[0]) or text.startswith("delay")
    return text if is_name else text[0].upper() + text[1:]


def _legend(rows: list[Prediction], iid: bool, network: Network, left_out: list[str]) -> list[str]:
    step = "measured as a whole; ~ if it is the sum of its parts, without overlap, or carried over from a measured step with another H."
    if not any(row.is_measured for row in rows):
        step = "the sum of its measured parts, without overlap." if isinstance(network, Measured) else "predicted, without overlap."
    data = "if all nodes draw from the same data (iid)" if iid else "if the nodes' data differ (non-iid)"
    cycles = OF_CYCLES if {"one-peer-exponential", "ring"} <= {row.topology for row in rows} else ""
    lines = [f"{name}: {text.format(data=data, cycles=cycles)}" for name, text in {"step": step, **LEGEND}.items() if name not in left_out]
    if left_out:
        lines.append(f"Columns left out, because they do not fit into {columns(sys.stdout)} characters: {', '.join(left_out)}.")
    notes = dict.fromkeys(f"{in_python(row.topology)}: {row.note}" for row in rows if row.topology and row.note)
    return [*lines, *(f"* {note}" for note in notes)]


def _on_other_topologies(rows: list[Prediction], chosen: Prediction | None, advice: Recommendation) -> list[Prediction]:
    """Gossip-PGA as it is recommended, or compared with DDP, on each topology but the best: one row each."""
    against = advice.against if advice.against and advice.against.topology else None  # Gossip-PGA, where DDP is recommended
    kind = ("Gossip-PGA", against.bits if against else advice.bits, 0, False)
    alike = [row for row in rows if (row.method, row.bits, row.delay, row.is_elastic) == kind]
    if not alike:
        return []
    shown = chosen if chosen and chosen.topology else against
    best = shown.topology if shown else min(alike, key=lambda row: (not row.is_measured, row.seconds)).topology
    by_topology = {row.topology: row for row in reversed(alike)}  # the first row of each
    return [by_topology[name] for name in dict.fromkeys(row.topology for row in alike) if name != best]


def _by_topology(rows: list[Prediction], chosen: Prediction | None, iid: bool) -> list[tuple[str, ...]]:
    """The lines of the table. A line with a topology alone is above its rows."""
    lines, last = list[tuple[str, ...]](), None
    for row in rows:
        if row.topology and row.topology != last:
            lines += [(), (_starred(row),)]
        lines.append(_cells(row, row.label, rows, iid, "<" if row is chosen else ""))
        last = row.topology
    return lines


def _others(others: list[Prediction], rows: list[Prediction], iid: bool) -> list[tuple[str, ...]]:
    if not others:
        return []
    return [(), (f"{others[0].label}, on other topologies",), *(_cells(row, _starred(row), rows, iid) for row in others)]


def _starred(row: Prediction) -> str:
    """The topology, with a star if there is a note about it."""
    return f"{in_python(row.topology or '')}{'*' if row.note else ''}"


def _cells(row: Prediction, label: str, rows: list[Prediction], iid: bool, mark: str = "") -> tuple[str, ...]:
    is_sum = not row.is_measured and any(each.is_measured for each in rows)
    stage = row.transient_stage_iid if iid else row.transient_stage
    return (
        f"  {label}",
        "-" if row.H is None else str(row.H),
        f"{'~' if is_sum else ''}{show_seconds(row.seconds)}",
        show_seconds(row.seconds_overlapped),
        show_bytes(row.bytes),
        f"{row.hours:.2f}" if row.hours < 1000 else f"{row.hours:,.0f}",
        "-" if stage is None else f"{stage:.1e}" if stage else "0",
        mark,
    )
