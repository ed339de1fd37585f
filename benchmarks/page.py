"""Write the tables and the sentences with figures of docs/performance.md, reliability.md and contributing-tests.md, and draw the pictures.

    python benchmarks/page.py            # rewrites the text between <!-- table X --> and <!-- end --> from benchmarks/results

No number of these blocks is typed by hand, so that a new measurement and this command bring the pages up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "experiments"))

import accuracy_pictures  # noqa: E402
import accuracy_tables  # noqa: E402
import network_tables  # noqa: E402
import pictures  # noqa: E402
import sentences  # noqa: E402
import soak_tables  # noqa: E402
from logistic import tables  # noqa: E402

PAGES = ("performance.md", "reliability.md", "contributing-tests.md")
OVERHEAD = """### The parameters of ResNet-50 and BERT

`network.py overhead`: the milliseconds that communication adds to a step that computes for as long as the paper's (ResNet-50 146 ms, BERT
445 ms), with the parameters of ResNet-50 and of BERT-base, on 4 hosts. (The paper: 32 nodes for ResNet-50, 8 nodes for BERT-large.)

"""
BLOCKS: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {  # what makes a block of a page, and the results that it needs
    "headline": (sentences.headline, ("network-peers",)),
    "headline-points": (
        sentences.points,
        ("accuracy", "accuracy-large", "network-resnet", "network-exchange", "network-step", "network-peers"),
    ),
    "headline-steps": (network_tables.headline, ("network-peers",)),
    "exchange": (network_tables.exchange, ("network-exchange",)),
    "exchange-small": (sentences.small_messages, ("network-exchange",)),
    "step": (network_tables.step, ("network-step",)),
    "resnet": (network_tables.resnet, ("network-resnet",)),
    "loopback": (network_tables.loopback, ("network-loopback",)),
    "growth": (sentences.growth, ("network-growth",)),
    "peers": (network_tables.peers, ("network-peers",)),
    "peers-settings": (network_tables.settings, ("network-peers",)),
    "overhead": (lambda results: OVERHEAD + network_tables.overhead(results), ("network-overhead",)),
    "gpu-mixing": (network_tables.mixing, ("gpu",)),
    "gpu-host": (sentences.gpu, ("gpu",)),
    "accuracy-found": (sentences.to_target, ("accuracy",)),
    "larger-found": (sentences.larger, ("accuracy-large",)),
    "larger-to-target": (lambda results: accuracy_tables.to_target(results, 4), ("accuracy-large",)),
    "accuracy-over-links": (sentences.bandwidth, ("accuracy",)),
    "soak": (soak_tables.kept, ("soak",)),
    "soak-jobs": (soak_tables.jobs, ("soak",)),
    "soak-headline": (soak_tables.soak_headline, ("soak",)),
    "faults": (soak_tables.faults, ("faults",)),
    "elastic": (soak_tables.cost, ("network-elastic",)),
}
SECTIONS = ("overhead",)  # blocks with a heading of their own, which are empty until they are measured


def results_of(name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return results


def make(name: str) -> str:
    """Build the block with this name."""
    if name not in BLOCKS and name.startswith("accuracy-"):
        return accuracy_tables.make(name.removeprefix("accuracy-"), results_of("accuracy"))
    block, needs = BLOCKS[name]
    return block(*map(results_of, needs))


def filled_in(text: str) -> str:
    """Return the page with all its blocks rebuilt from the results."""

    def make_if_measured(name: str) -> str:
        try:
            return make(name)
        except FileNotFoundError as error:
            return "" if name in SECTIONS else f"*Not measured yet: there is no {Path(error.filename).relative_to(ROOT)}.*"

    return tables.filled_in(text, make_if_measured)


def draw() -> None:
    """Draw the pictures of all results that there are."""
    folder = ROOT / "docs" / "performance"
    drawn: dict[str, tuple[Callable[[dict[str, Any], Path], None], str]] = {
        "speedup": (pictures.draw_speedup, "network-peers"),
        "step": (pictures.draw_steps, "network-step"),
        "trace": (pictures.draw_trace, "network-trace"),
        "growth": (pictures.draw_growth, "network-growth"),
        "soak": (pictures.draw_soak, "soak"),
    }
    for name, (draw_it, needs) in drawn.items():
        if (RESULTS / f"{needs}.json").exists():
            draw_it(results_of(needs), folder / f"{name}.png")
    if (RESULTS / "accuracy.json").exists():
        accuracy_pictures.draw(results_of("accuracy"), folder)


if __name__ == "__main__":
    for page in (ROOT / "docs" / name for name in PAGES):
        tables.write(page, filled_in(page.read_text()))
    draw()
