"""Tables of the results of network.py and gpu.py, for docs/performance.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from limits import shown
from pictures import of_rate

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

from logistic import tables

Results = dict[str, Any]
OURS = "Gossip-PGA, 4 bits"
PAPER_OVERHEAD = (  # its Table 17
    ("ResNet-50", "278", "150"),
    ("BERT-large", "1469", "566"),
)
MIXING = ("pack", "mix, delay=0", "mix, delay=1")
NAMES = {"one_peer_exponential": "gossip, one peer", "ring": "gossip, ring", "exponential": "gossip, exponential", "mean": "average of all"}
MODELS = {"resnet50": "ResNet-50", "bert_base": "BERT-base", "tiny": "tiny"}
HEADLINE = {  # the columns of the first table
    OURS: "Gossip-PGA, 4 bits",
    "DDP, 4 bits": "DDP, 4 bits",
    "DDP, bf16 hook": "DDP, bf16",
    "DDP, PowerSGD hook": "DDP, PowerSGD",
}


def headline(results: Results) -> str:
    """How many times as fast as DDP a step is, with a row for each rate."""
    rows = [["link", *HEADLINE.values()]]
    for rate in rates_of(results):
        found = of_rate(results["rows"], rate)
        rows.append([shown(rate), *(_times(found, name) for name in HEADLINE)])
    return as_text(rows)


def exchange(results: Results) -> str:
    """How many times bytes / rate the exchange of the largest message takes, and the seconds."""
    largest = max(row["bytes"] for row in results["rows"])
    rows = [[f"{largest / 1e6:.0f} MB", *map(shown, rates_of(results))]]
    for what in dict.fromkeys(row["what"] for row in results["rows"]):
        found = [row for row in results["rows"] if (row["what"], row["bytes"]) == (what, largest)]
        rows.append([NAMES.get(what, what), *(f"**{row['ratio']:.2f}** ({row['median']:.3g} s)" for row in found)])
    return as_text(rows)


def step(results: Results) -> str:
    """ms of a training step at each rate, and how many times the limit that is. DDP has its best bucket size."""
    rates = rates_of(results)
    panels = [of_rate(results["rows"], rate) for rate in rates]
    rows = [["ms: times the limit", *map(shown, rates)]]
    rows += [[name, *(f"{_ms(found[name])}: **{found[name]['ratio']:.2f}**" for found in panels)] for name in panels[0]]
    return as_text(rows)


def resnet(results: Results) -> str:
    """A training step, with a table for each rate. DDP has its best bucket size."""
    texts = []
    for rate in rates_of(results):
        rows = [[shown(rate), "ms a step", "times the limit", "times as fast as DDP"]]
        for name, row in of_rate(results["rows"], rate).items():
            rows.append([name, _ms(row), f"{row['ratio']:.2f}", f"**{row['times_as_fast_as_ddp']:.2f}**"])
        texts.append(as_text(rows))
    return "\n\n".join(texts)


def loopback(results: Results) -> str:
    """ms of a training step of both models where the network costs nothing, and how many times as fast as DDP."""
    models = {"mlp": "MLP", "resnet50": "ResNet-50"}
    found = [of_rate([row for row in results["rows"] if row["model"] == model], rates_of(results)[0]) for model in models]
    rows = [["ms: times as fast", *models.values()]]
    rows += [[name, *(f"{_ms(of[name])}: **{of[name]['times_as_fast_as_ddp']:.2f}**" for of in found)] for name in found[0]]
    return as_text(rows)


def peers(results: Results) -> str:
    """How many times as fast as DDP a training step of each library is; a first row has DDP's ms."""
    rates = rates_of(results)
    panels = [of_rate(results["rows"], rate) for rate in rates]
    rows = [["times as fast as DDP", *map(shown, rates)], ["DDP: ms a step", *(_ms(found["DDP"]) for found in panels)]]
    for name in dict.fromkeys(name for found in panels for name in found if name != "DDP"):
        rows.append([name, *(_times(found, name) for found in panels)])
    return as_text(rows)


def settings(results: Results) -> str:
    """List the settings of each library, and what was replaced in it."""
    found = dict[str, list[str]]()
    for what, description in dict.fromkeys((row["what"], row["description"]) for row in results["rows"]):
        found.setdefault(description, []).append(what)
    return "\n".join(f"- **{'; '.join(names)}**: {description}." for description, names in found.items())


def overhead(results: Results) -> str:
    """ms that an all-reduce and gossip add to a step. The paper's numbers come first."""
    _, *names = dict.fromkeys(row["what"] for row in results["rows"])  # the first one is computing alone
    rows = [["ms added", *names], *([f"paper: {what}", *ms, *["-"] * (len(names) - 2)] for what, *ms in PAPER_OVERHEAD)]
    for model, rate in dict.fromkeys((row["model"], row["rate"]) for row in results["rows"]):
        found = {row["what"]: row for row in results["rows"] if (row["model"], row["rate"]) == (model, rate)}
        rows.append([f"{MODELS[model]}, {shown(rate)}", *(f"{1e3 * found[name]['overhead']:.0f}" for name in names)])
    return as_text(rows)


def mixing(results: Results) -> str:
    """Microseconds of packing and mixing, and their share of the bandwidth of a plain copy (from gpu.json)."""
    rows = [["", *MIXING]]
    for model, kinds in results["mixing"].items():
        for kind, found in kinds.items():
            cells = [f"{1e6 * found[what]['seconds']:.0f} us: **{found[what]['share_of_copy']:.2f}**" for what in MIXING]
            rows.append([f"{model.split(',')[0]}, {kind}", *cells])
    return as_text(rows)


def rates_of(results: Results) -> list[str]:
    return list(dict.fromkeys(row["rate"] for row in results["rows"]))


def as_text(rows: list[list[str]]) -> str:
    """Format a table whose first row is its head."""
    head, *body = rows
    return tables.as_text([dict(zip(head, row, strict=True)) for row in body])


def _ms(row: dict[str, Any]) -> str:
    return f"{1e3 * row['median']:.0f}"


def _times(found: dict[str, dict[str, Any]], name: str) -> str:
    if name not in found:
        return "-"
    mark = "**" if name == OURS else ""
    return f"{mark}{found[name]['times_as_fast_as_ddp']:.2f}{mark}"
