"""`rumor plan --paper`: compares the paper's run times with those of the time model."""

from __future__ import annotations

import json
from typing import Any

from rumor.cli.table import paragraph, table
from rumor.cost import Link, recommend
from rumor.cost.paper import RESNET50, SCALING_NODES, TRAININGS, H, Row, Scaling, Training, reproduce, reproduce_scaling

ROCE = Link(bandwidth=4 * 100e9 / 8, latency=5e-6)  # 4 x 100 Gbit/s; the paper gives no latency, this one is typical of RoCE


def paper_page(name: str, as_json: bool) -> str:
    """Returns the text or the JSON that `rumor plan --paper NAME` prints."""
    training = TRAININGS[name]
    rows, scaling = reproduce(training), reproduce_scaling() if training is RESNET50 else None
    if as_json:
        found: dict[str, Any] = {"training": training.title, "table": training.table, "rows": [_as_dict(row) for row in rows]}
        if scaling:
            by_nodes = {str(n): [_as_dict(row) for row in rows] for n, rows in scaling.rows.items()}
            found["scaling"] = {**scaling._asdict(), "table": 10, "rows": by_nodes}
        return json.dumps(found, indent=1)
    return "\n".join([*_hours(training, rows), *(_scaling(scaling) if scaling else []), *_advice(training)])


def _as_dict(row: Row) -> dict[str, Any]:
    return {**row._asdict(), "deviation": row.deviation}


def _hours(training: Training, rows: list[Row]) -> list[str]:
    w, times = training.workload, training.measured
    gossip = next(iter(times.gossip_seconds.values()))
    cells = [
        (row.method, "-" if row.predicted is None else f"{row.predicted:.2f}", f"{row.reported:.2f}", _deviation(row), row.why or "")
        for row in rows
    ]
    return [
        f"Table {training.table}: {training.title}, {w.steps:,} steps",
        f"Table 17: computing {w.compute * 1e3:g} ms, all-reduce {times.all_reduce_seconds * 1e3:g} ms, gossip {gossip * 1e3:g} ms; "
        f"H = {H}\n",
        table(("hours", "model", "paper", "off by"), [cell[:4] for cell in cells]),
        "",
        *(paragraph(f"{row.method} can't be predicted: {row.why}.", "  ") for row in rows if row.why),
    ]


def _deviation(row: Row) -> str:
    return "-" if row.deviation is None else f"{row.deviation:+.1%}"


def _scaling(found: Scaling) -> list[str]:
    def line(method: str) -> list[tuple[str, ...]]:
        rows = [next(row for row in found.rows[n] if row.method == method) for n in SCALING_NODES]
        kinds = (("model", lambda row: f"{row.predicted:.2f}"), ("paper", lambda row: f"{row.reported:.1f}"), ("off by", _deviation))
        return [(method if kind == "model" else "", kind, *(show(row) for row in rows)) for kind, show in kinds]

    def milliseconds(seconds: list[float]) -> str:
        return ", ".join(f"{s * 1e3:.0f}" for s in seconds)

    return [
        "\nTable 10: ResNet-50 on 4, 8, 16 and 32 nodes",
        paragraph(
            f"Table 17 has the times of 32 nodes only. Table 10's hours without the computing are {milliseconds(found.all_reduce_seconds)} "
            f"ms per all-reduce and {milliseconds(found.gossip_seconds)} ms per gossip step. Least squares fit these with "
            f"2(n-1)/n {found.transfer * 1e3:.1f} ms + 2(n-1) {found.latency * 1e3:.2f} ms for the all-reduce and "
            f"{found.gossip * 1e3:.0f} ms for gossip. The model's hours are:"
        ),
        "",
        table(
            ("hours", "", *(f"n = {n}" for n in SCALING_NODES)),
            [row for method in ("Parallel SGD", "Gossip SGD", "Gossip-PGA") for row in line(method)],
            left=2,
        ),
    ]


def _advice(training: Training) -> list[str]:
    advice = recommend(training.n, training.workload, training.measured)
    lines = ["", paragraph(f"With these times the planner recommends {advice.call}: {advice.reason}.", "  ")]
    if training is RESNET50:
        fast = recommend(training.n, training.workload, ROCE)
        lines.append(paragraph(f"On 4 x 100 Gbit/s RoCE it recommends {fast.call}, as the paper does: {fast.reason}.", "  "))
    return lines
