"""Compare our order of methods with the paper's: its difference for each pair of runs, and ours with a paired test."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import images.study as images
import text.study as words
from logistic import tables
from networks import compare
from networks.paper import reported
from networks.runs import Run, Table
from networks.store import Store

MOST_SEEDS = 5
SIGNIFICANT = 0.05
LONG_ENOUGH = 6_000  # steps of Table 11's runs: in shorter runs, the order only shows which methods have left BERT's first plateau
ALIKE = {True: 0.1, False: 0.02}  # differences of the paper up to this count as none: points of accuracy (True), or loss (False)
LARGE = 3  # our difference counts as none only up to so many times ALIKE, even if it may be chance


class Pair(NamedTuple):
    """Two runs that one table of the paper compares."""

    table: str
    first: Run
    second: Run


def _ring(run: Run) -> Run:
    return replace(run, topology="ring")


def _with(H: int) -> Run:
    return replace(images.PGA, H=H)


_I = images
OF_IMAGES = (
    *(Pair("7", first, _I.PARALLEL) for first in (_I.PGA, _I.AGA, _I.GOSSIP, _I.OSGP, _I.LOCAL)),
    *(Pair("7", replace(first, stretch=k), _I.PARALLEL) for first, k in ((_I.GOSSIP, 2), (_I.OSGP, 2), (_I.LOCAL, 3))),
    *(Pair("7", _I.PGA, second) for second in (_I.GOSSIP, _I.LOCAL)),
    *(Pair("7", *both) for both in ((_I.PGA, _I.AGA), (_I.GOSSIP, _I.OSGP), (_I.GOSSIP, _I.LOCAL))),
    Pair("1", _ring(_I.GOSSIP), _I.GOSSIP),
    *(Pair("9", _ring(_I.PGA), second) for second in (_ring(_I.GOSSIP), _I.PARALLEL)),
    *(Pair("8", _with(H), replace(_I.SLOWMO, H=H)) for H in (6, 48)),
    *(Pair("15", _with(6), _with(H)) for H in (3, 12, 24, 48)),
    *(Pair("10", replace(first, nodes=n), replace(_I.PARALLEL, nodes=n)) for n in (4, 8, 16) for first in (_I.GOSSIP, _I.PGA)),
    *(Pair("16", replace(_I.PGA, momentum=0.0), replace(second, momentum=0.0)) for second in (_I.GOSSIP, _I.PARALLEL)),
    *(
        Pair("labels", *(replace(run, split=f"dirichlet({alpha})") for run in both))
        for alpha in (0.3, 0.1)
        for both in (*((first, _I.GOSSIP) for first in (_I.PGA, _I.AGA)), *((_I.PGA, second) for second in (_I.LOCAL, _I.PARALLEL)))
    ),
)


def _of_text(table: str, recipe: str) -> tuple[Pair, ...]:
    of = {name: replace(getattr(words, name), nodes=8, recipe=recipe) for name in ("PARALLEL", "LOCAL", "GOSSIP", "PGA", "AGA")}
    return (
        *(Pair(table, of[name], of["PARALLEL"]) for name in ("PGA", "AGA", "GOSSIP", "LOCAL")),
        *(Pair(table, replace(of[name], stretch=k), of["PARALLEL"]) for name, k in (("GOSSIP", 2), ("LOCAL", 3))),
        *(Pair(table, of["PGA"], of[name]) for name in ("GOSSIP", "LOCAL")),
    )


OF_TEXT = _of_text("11", "") + _of_text("11 earlier", "earlier")


def order_table(pairs: tuple[Pair, ...], store: Store, least_steps: int = 0) -> list[tables.Row]:
    """A row for each pair whose runs both have at least three seeds and `least_steps` steps."""
    rows: list[tables.Row] = []
    for pair in pairs:
        found = compare.of_table(Table(pair[1:], MOST_SEEDS), store)
        p = compare.p_value(*found) if len(found) == 2 else None
        if p is not None and min(seeds.steps for seeds in found) >= least_steps:
            rows.append(_row(pair, compare.difference(*found), p, is_accuracy=found[0].is_accuracy))
    return rows


def _row(pair: Pair, ours: float, p: float, is_accuracy: bool) -> tables.Row:
    theirs = [reported(pair.table, run) for run in pair[1:]]
    paper = round(theirs[0].value - theirs[1].value, 2) if theirs[0] and theirs[1] else None
    digits, ours = (2, 100 * ours) if is_accuracy else (3, ours)
    return {
        "table": pair.table,
        "compared": " - ".join(_described(run, pair) for run in pair[1:]),
        "paper": "-" if paper is None else f"{paper:+.2f}",
        "ours": f"{ours:+.{digits}f}",
        "p": "< 0.001" if p < 0.001 else f"{p:.3f}",
        "verdict": "-" if paper is None else verdict(paper, ours, p, ALIKE[is_accuracy]),
    }


def verdict(paper: float, ours: float, p: float, alike: float) -> str:
    """Say whether our difference agrees with the paper's.

    >>> verdict(0.9, 0.3, 0.01, alike=0.1), verdict(0.9, 0.3, 0.2, alike=0.1), verdict(0.9, -0.3, 0.01, alike=0.1)
    ('agrees', 'not shown', 'differs')
    >>> verdict(0.02, 0.2, 0.2, alike=0.1), verdict(0.02, 0.5, 0.2, alike=0.1), verdict(0.02, -0.2, 0.01, alike=0.1)
    ('no difference seen', 'not shown', 'differs')
    """
    same = abs(paper) <= alike  # in the paper
    if p >= SIGNIFICANT:
        return "no difference seen" if same and abs(ours) <= LARGE * alike else "not shown"
    return "agrees" if not same and (paper > 0) == (ours > 0) else "differs"


def _described(run: Run, pair: Pair) -> str:
    marks = [f"H = {run.H}"] if pair.table in ("8", "15") else []
    marks += [f"{run.nodes} nodes"] if pair.table == "10" else []
    marks += [run.split] if pair.table == "labels" else []
    marks += ["ring"] if run.topology == "ring" else []
    marks += ["no momentum"] if run.momentum == 0 else []
    return ", ".join([run.name, *marks])
