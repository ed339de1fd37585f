"""The first lines of docs/networks.md, made from the results: our tables beside the paper's, and where they agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from images.study import TABLES as IMAGES
from logistic import tables
from networks import compare, order
from networks.compare import Seeds
from networks.order import Compared
from networks.paper import reported
from networks.store import Store

PARALLEL, BEST, REST = "Parallel SGD", ("Gossip-PGA", "Gossip-AGA"), ("Gossip SGD", "Local SGD")  # the methods of the headline
LONG = "7 at 120 epochs"
NOT_YET = "*Not run yet.*"
KINDS = {  # what a verdict is called in a sentence
    "agrees": "agree",
    "agrees, wide interval": "agree, but our interval is wide",
    "differs in size": "have the same sign and another size",
    "differs": "differ",
}


def first_table(images: Store) -> str:
    """Table 7 with runs as long as the paper's, once all methods of the headline have enough seeds; else with the shorter ones."""
    enough = {seeds.run.method for seeds in compare.of_table(IMAGES[LONG], images) if seeds.run.stretch == 1 and len(seeds.values) >= 3}
    return LONG if enough >= {PARALLEL, *BEST, *REST} else "7"


def _of(table: str, images: Store) -> tuple[dict[str, Seeds], dict[str, Compared]]:
    """The runs of a Table 7 that are not stretched, and how they compare with Parallel SGD, by method."""
    runs = {seeds.run.method: seeds for seeds in compare.of_table(IMAGES[table], images) if seeds.run.stretch == 1}
    pairs = tuple(pair for pair in order.OF_IMAGES if pair.table == table and pair.second.method == PARALLEL and pair.first.stretch == 1)
    return runs, {found.pair.first.method: found for found in order.compared(pairs, images)}


def headline(images: Store) -> str:
    """Say where Gossip-PGA ends, next to Parallel SGD and next to the paper."""
    runs, against = _of(first_table(images), images)
    parallel, ours, found = runs[PARALLEL], runs[BEST[0]], against[BEST[0]]
    return (
        f"On CIFAR-10 with {parallel.run.nodes} nodes, **Gossip-PGA ends {_gap(found.ours)} Parallel SGD's accuracy, "
        f"in {100 * ours.hours / parallel.hours:.0f} % of its modelled hours**;\n"
        f"in [the paper](https://arxiv.org/abs/2105.09080), with ResNet-50 on ImageNet, it ends {_gap(found.paper or 0.0)} it."
    )


def _gap(points: float) -> str:
    """Format a difference of accuracies.

    >>> _gap(-0.19), _gap(0.02)
    ('0.19 points below', '0.02 points above')
    """
    return f"{abs(points):.2f} points {'below' if points < 0 else 'above'}"


def headline_table(images: Store) -> str:
    """Our accuracy and the paper's, with the difference to Parallel SGD in brackets, and the verdict."""
    runs, against = _of(first_table(images), images)
    rows: list[tables.Row] = []
    for method, seeds in sorted(runs.items(), key=lambda item: -item[1].mean):
        paper, found = reported(first_table(images), seeds.run), against.get(method)
        rows.append(
            {
                "method": method,
                "ours: CIFAR-10, %": f"{100 * seeds.mean:.2f}" + (f" ({found.ours:+.2f})" if found else ""),
                "paper: ImageNet, %": "-" if paper is None else f"{paper.value:.2f}" + (f" ({found.paper:+.2f})" if found else ""),
                "verdict": found.verdict if found else "-",
            }
        )
    return tables.as_text(rows)


def long_runs(images: Store) -> str:
    """Say where the methods end that have runs as long as the paper's, next to Parallel SGD."""
    runs, against = _of(LONG, images)
    ends = []
    for method, found in against.items():
        _, ours, interval = found.shown()
        ends.append(f"{method} {ours} ({interval}, {len(runs[method].values)} seeds)")
    return f"- **With 120 epochs**, as in the paper, in points next to Parallel SGD's accuracy: {'; '.join(ends)}." if ends else NOT_YET


def counted(images: Store, words: Store) -> str:
    """Say how many of the paper's differences agree with ours."""
    return "\n".join(
        f"- **{what}**: of {len(found)} differences between methods that the paper reports and we measured, {_counts(found)}."
        for what, found in (("Images", of_images(images)), ("Text, with an earlier LAMB", of_text(words)))
        if found
    )


def _counts(found: Sequence[Compared]) -> str:
    counts = Counter(one.verdict for one in found)
    return "; ".join(f"{counts[kind]} {words}" for kind, words in KINDS.items() if counts[kind])


def differing(words: Store) -> str:
    """The differences on text that are not the paper's. Those on images are in the picture of all differences."""
    rows: list[tables.Row] = []
    for found in of_text(words):
        if found.verdict.startswith("differs"):
            paper, ours, interval = found.shown()
            rows.append({"compared": found.name, "paper": paper, "ours (95 % interval)": f"{ours} ({interval})"})
    return tables.as_text(rows)


def of_images(images: Store) -> list[Compared]:
    return [found for found in order.compared(order.OF_IMAGES, images) if found.paper is not None]


def of_text(words: Store) -> list[Compared]:
    return [found for found in order.compared(order.OF_TEXT, words, order.LONG_ENOUGH) if found.paper is not None]


def against_parallel(images: Store) -> list[Compared]:
    """The differences of the first picture: all methods of Table 7 next to Parallel SGD."""
    return list(_of(first_table(images), images)[1].values())
