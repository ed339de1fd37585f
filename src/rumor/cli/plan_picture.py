"""What `rumor plan --out` draws: about ten methods, the fastest first, and why the ones above the recommended one are not taken."""

from __future__ import annotations

from rumor.cli.plan_page import Inputs
from rumor.cli.units import show_count, show_nodes
from rumor.cost import Prediction
from rumor.cost.network import in_python
from rumor.cost.reasons import WORTH_IT
from rumor.plots import Bar, draw_plan

LEFT_OUT = ("OSGP", "Gossip-AGA")  # their times lie between those of the others


def draw(inputs: Inputs, rows: list[Prediction], chosen: Prediction | None, iid: bool, path: str) -> None:
    drawn = rows_to_draw(rows, chosen)
    topology = next(row.topology for row in drawn if row.method == "Gossip SGD")
    bars = [_bar(row, chosen, topology, inputs.workload.compute, iid) for row in drawn]
    title = f"A training step: {show_nodes(inputs.n)}, {show_count(inputs.workload.parameters)} parameters, {_links(inputs)}"
    if topology is not None:
        title += f"\nGossip over {in_python(topology)}, where no other topology is named"
    draw_plan(bars, title, path)


def rows_to_draw(rows: list[Prediction], chosen: Prediction | None) -> list[Prediction]:
    """Sorts by time: each method once, on the best topology, and the recommended kind of Gossip-PGA on the fastest other topology."""
    drawn = [row for row in rows if row.method not in LEFT_OUT]
    gossip = [row for row in drawn if row.method == "Gossip-PGA" and not row.delay and not row.is_elastic]
    shown = chosen if chosen and chosen.topology else min(gossip, key=lambda row: (not row.is_measured, row.seconds))
    found: dict[str, Prediction] = {}
    for row in sorted(drawn, key=lambda row: (row is not chosen, not row.is_measured)):
        if row.topology in (None, shown.topology):
            found.setdefault(row.label, row)
    elsewhere = [row for row in gossip if row.topology != shown.topology and row.bits == shown.bits]
    return sorted([*found.values(), *sorted(elsewhere, key=lambda row: row.seconds)[:1]], key=lambda row: row.seconds)


def _bar(row: Prediction, chosen: Prediction | None, topology: str | None, compute: float, iid: bool) -> Bar:
    period = f", H = {row.H}" if (row.H or 1) > 1 else ""
    other = f", {in_python(row.topology)}" if row.topology not in (None, topology) else ""
    computing = min(compute, row.seconds)  # a whole step may have been measured in a faster moment
    remark = "recommended" if row is chosen else drawback(row, chosen, iid) if chosen else ""
    return Bar(f"{row.label}{period}{other}", computing, row.seconds - computing, remark, row is chosen)


def drawback(row: Prediction, chosen: Prediction, iid: bool = False) -> str:
    """Says in a few words why a faster row is not the recommended one; "" if it is not faster, or if nothing speaks against it."""
    if row.seconds >= chosen.seconds:
        return ""
    if row.delay:
        return "a little less accurate"
    if row.method == "Gossip-PGA" and chosen.method == "Parallel SGD" and chosen.seconds <= (1 + WORTH_IT) * row.seconds:
        return f"less than {WORTH_IT:.0%} faster"
    if row.is_elastic:
        return "in an elastic group"
    if row.stage(iid) > chosen.stage(iid):
        return "takes more steps to be as good"
    return "less accurate in the paper" if row.method == "Local SGD" else ""


def _links(inputs: Inputs) -> str:
    """The links as the probe measured them; else where the times come from."""
    if inputs.probe is None:
        return inputs.source
    try:
        rate = 8e-6 * inputs.probe.link().bandwidth
    except ValueError:  # the times are too noisy to compute a rate
        return inputs.source
    return f"links of about {float(f'{rate:.2g}'):,g} Mbit/s"
