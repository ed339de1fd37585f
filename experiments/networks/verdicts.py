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

PARALLEL, PGA = "Parallel SGD", "Gossip-PGA"
LONG, SHORT = "7 at 120 epochs", "7"
LENGTHS = {"120 epochs": LONG, "40 epochs": SHORT}
NOT_YET = "*Not run yet.*"
KINDS = {  # what a verdict is called in a sentence
    "agrees": "agree",
    "agrees, wide interval": "agree, but our interval is wide",
    "differs in size": "have the same sign and another size",
    "differs": "differ",
}


def _of(table: str, images: Store) -> tuple[dict[str, Seeds], dict[str, Compared]]:
    """The runs of a Table 7 that are not stretched, and how they compare with Parallel SGD, by method."""
    runs = {seeds.run.method: seeds for seeds in compare.of_table(IMAGES[table], images) if seeds.run.stretch == 1}
    pairs = tuple(pair for pair in order.OF_IMAGES if pair.table == table and pair.second.method == PARALLEL and pair.first.stretch == 1)
    return runs, {found.pair.first.method: found for found in order.compared(pairs, images)}


def headline(images: Store) -> str:
    """Say where Gossip-PGA ends, next to Parallel SGD and next to the paper."""
    runs, against = _of(LONG, images)
    parallel, ours, found = runs[PARALLEL], runs[PGA], against[PGA]
    epochs, hours = len(parallel.curves[0]), 100 * ours.hours / parallel.hours
    return (
        f"On CIFAR-10 with {parallel.run.nodes} nodes and the paper's {epochs} epochs, **Gossip-PGA ends {_gap(found.ours)} "
        f"Parallel SGD's accuracy** (95 % interval: {found.shown()[2]}), **in {hours:.0f} % of its modelled hours**;\n"
        f"in [the paper](https://arxiv.org/abs/2105.09080), with ResNet-50 on ImageNet, it ends {_gap(found.paper or 0.0)} it."
    )


def _gap(points: float) -> str:
    """Format a difference of accuracies.

    >>> _gap(-0.19), _gap(0.02)
    ('0.19 points below', '0.02 points above')
    """
    return f"{abs(points):.2f} points {'below' if points < 0 else 'above'}"


def headline_table(images: Store) -> str:
    """The paper's accuracies and ours at both lengths, with differences to Parallel SGD and verdicts. The paper's best is first."""
    found = {length: _of(table, images) for length, table in LENGTHS.items()}
    papers = {method: reported(SHORT, seeds.run) for runs, _ in found.values() for method, seeds in runs.items()}
    known = sorted(((method, paper) for method, paper in papers.items() if paper), key=lambda row: -row[1].value)
    parallel = next(paper.value for method, paper in known if method == PARALLEL)
    rows: list[tables.Row] = []
    for method, paper in known:
        row: tables.Row = {"method": method, "paper: ImageNet, %": _with_difference(paper.value, paper.value - parallel, method)}
        for length, (runs, against) in found.items():
            seeds, compared = runs.get(method), against.get(method)
            row[f"ours, {length}, %"] = _with_difference(100 * seeds.mean, compared.ours if compared else 0.0, method) if seeds else "-"
            row["verdict" if length == "120 epochs" else f"verdict, {length}"] = compared.verdict if compared else "-"
        rows.append(row)
    return tables.as_text(rows)


def _with_difference(accuracy: float, difference: float, method: str) -> str:
    return f"{accuracy:.2f}" + ("" if method == PARALLEL else f" ({difference:+.2f})")


def long_runs(images: Store) -> str:
    """Say how much the methods differ after 120 epochs: in training accuracy, in test accuracy, and in training loss."""
    runs, against = _of(LONG, images)
    fitted = min(curve[-1].trained or 0.0 for seeds in runs.values() for curve in seeds.curves)
    shown = [method for method, found in against.items() if not found.interval[0] <= 0 <= found.interval[1]]
    losses = {method: compare.difference(runs[method].in_training(), runs[PARALLEL].in_training()) for method in against}
    apart = "; ".join(f"{method} {loss:+.3f}" for method, loss in losses.items())
    farthest, loss = max(abs(found.ours) for found in against.values()), runs[PARALLEL].in_training().mean
    return (
        f"- **With 120 epochs**, every run ends with at least {100 * fitted:.1f} % of the training images right, and the methods end\n"
        f"  within {farthest:.2f} points of Parallel SGD on the test images: {_shown_by(shown)}. Their training losses differ\n"
        f"  from Parallel SGD's {loss:.3f}: {apart}."
    )


def short_runs(images: Store) -> str:
    """Say what the methods lose after 40 epochs, next to what they lose in the paper, and in training loss."""
    runs, against = _of(SHORT, images)
    behind = {method: found for method, found in against.items() if (found.paper or 0.0) < -order.ALIKE[True]}
    shares = [found.ours / found.paper for found in behind.values() if found.paper]
    losses = [compare.difference(runs[method].in_training(), runs[PARALLEL].in_training()) for method in against]
    names = sorted(behind, key=lambda method: -behind[method].ours)
    return (
        f"- **With 40 epochs**, {', '.join(names[:-1])} and {names[-1]} are in the paper's order, and lose {100 * min(shares):.0f} to "
        f"{100 * max(shares):.0f} % of what they\n"
        f"  lose in the paper. {PGA} loses {abs(against[PGA].ours):.2f} points, where it loses nothing in the paper.\n"
        f"  The training losses are {min(losses):.3f} to {max(losses):.3f} above Parallel SGD's."
    )


def _shown_by(methods: Sequence[str]) -> str:
    """
    >>> _shown_by([]), _shown_by(["Gossip SGD"])
    ('no difference is shown, all intervals contain 0', 'a difference is shown for Gossip SGD alone')
    """
    if not methods:
        return "no difference is shown, all intervals contain 0"
    return f"a difference is shown for {' and '.join(methods)} alone"


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


def against_parallel(images: Store) -> dict[str, dict[str, Compared]]:
    """The differences of the first picture: the methods of Table 7 next to Parallel SGD, by length and method."""
    return {length: _of(table, images)[1] for length, table in LENGTHS.items()}
