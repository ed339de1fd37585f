"""Compare our order of methods with the paper's: its difference for each pair of runs, and ours with an interval of 95 %."""

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
LONG_ENOUGH = 6_000  # steps of Table 11's runs: in shorter runs, the order only shows which methods have left BERT's first plateau
ALIKE = {True: 0.1, False: 0.02}  # differences of the paper up to this count as none: points of accuracy (True), or loss (False)
LARGE = 5  # an interval with differences of more than so many times ALIKE does not show that there is none
COMPARABLE = 2  # two differences are of comparable size if neither is more than so many times the other


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


def _of_7_1_9(suffix: str, recipe: str) -> tuple[Pair, ...]:
    """The pairs of Tables 7, 1 and 9 at one length."""
    parallel, pga, aga, gossip, osgp, local = (
        replace(run, recipe=recipe) for run in (_I.PARALLEL, _I.PGA, _I.AGA, _I.GOSSIP, _I.OSGP, _I.LOCAL)
    )
    seven, one, nine = (number + suffix for number in "719")
    return (
        *(Pair(seven, first, parallel) for first in (pga, aga, gossip, osgp, local)),
        *(Pair(seven, replace(first, stretch=k), parallel) for first, k in ((gossip, 2), (osgp, 2), (local, 3))),
        *(Pair(seven, *both) for both in ((pga, gossip), (pga, local), (pga, aga), (gossip, osgp), (gossip, local))),
        Pair(one, _ring(gossip), gossip),
        *(Pair(nine, _ring(pga), second) for second in (_ring(gossip), parallel)),
    )


def _of_16(table: str, recipe: str) -> tuple[Pair, ...]:
    pga, gossip, parallel = (replace(run, momentum=0.0, recipe=recipe) for run in (_I.PGA, _I.GOSSIP, _I.PARALLEL))
    return tuple(Pair(table, pga, second) for second in (gossip, parallel))


OF_IMAGES = (
    *_of_7_1_9(" at 120 epochs", "120 epochs"),
    *(
        Pair("7 without smoothing", replace(first, recipe="no smoothing"), replace(_I.PARALLEL, recipe="no smoothing"))
        for first in (_I.PGA, _I.AGA)
    ),
    *_of_7_1_9("", ""),
    *(Pair("8", _with(H), replace(_I.SLOWMO, H=H)) for H in (6, 48)),
    *(Pair("15", _with(6), _with(H)) for H in (3, 12, 24, 48)),
    *(Pair("10", replace(first, nodes=n), replace(_I.PARALLEL, nodes=n)) for n in (4, 8, 16) for first in (_I.GOSSIP, _I.PGA)),
    *_of_16("16", ""),
    *_of_16("16 tuned", "no momentum"),
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


class Compared(NamedTuple):
    """The difference of a pair in the paper, if it has it, and ours with its interval: in points of accuracy, or of loss."""

    pair: Pair
    paper: float | None
    ours: float
    interval: tuple[float, float]
    is_accuracy: bool

    @property
    def name(self) -> str:
        return " - ".join(_described(run, self.pair) for run in self.pair[1:])

    @property
    def verdict(self) -> str:
        return "-" if self.paper is None else verdict(self.paper, self.ours, self.interval, ALIKE[self.is_accuracy])

    def shown(self) -> tuple[str, str, str]:
        """Format the paper's difference, ours, and our interval."""
        digits = 2 if self.is_accuracy else 3
        low, high = (f"{end:+.{digits}f}" for end in self.interval)
        return "-" if self.paper is None else f"{self.paper:+.2f}", f"{self.ours:+.{digits}f}", f"{low} to {high}"


def compared(pairs: tuple[Pair, ...], store: Store, least_steps: int = 0) -> list[Compared]:
    """Compare each pair whose runs both have at least three seeds and `least_steps` steps.

    A tuned table without trials has the runs of the plain one, which are compared once.
    """
    rows: dict[object, Compared] = {}
    for pair in pairs:
        found, keys = compare.of_table(Table(pair[1:], MOST_SEEDS), store), tuple(map(store.key, pair[1:]))
        interval = compare.interval(*found) if len(found) == 2 else None
        if interval is not None and min(seeds.steps for seeds in found) >= least_steps and keys not in rows:
            theirs = [reported(pair.table, run) for run in pair[1:]]
            paper = round(theirs[0].value - theirs[1].value, 2) if theirs[0] and theirs[1] else None
            times, is_accuracy = (100, True) if found[0].is_accuracy else (1, False)
            ends = (times * interval[0], times * interval[1])
            rows[keys] = Compared(pair, paper, times * compare.difference(*found), ends, is_accuracy)
    return list(rows.values())


def order_table(pairs: tuple[Pair, ...], store: Store, least_steps: int = 0) -> list[tables.Row]:
    """A row for each pair of `compared`."""
    rows: list[tables.Row] = []
    for found in compared(pairs, store, least_steps):
        paper, ours, interval = found.shown()
        rows.append(
            {
                "table": found.pair.table,
                "compared": found.name,
                "paper": paper,
                "ours": ours,
                "95 % interval": interval,
                "verdict": found.verdict,
            }
        )
    return rows


def verdict(paper: float, ours: float, interval: tuple[float, float], alike: float) -> str:
    """Say whether our difference agrees with the paper's.

    It agrees if the paper's lies in our interval. A wide interval says little: it holds 0 although the paper has a difference, or large
    differences although the paper has none.

    >>> verdict(0.9, 0.8, (0.5, 1.1), alike=0.1), verdict(0.9, 0.8, (-0.5, 2.1), alike=0.1)
    ('agrees', 'agrees, wide interval')
    >>> verdict(0.02, 0.1, (-0.1, 0.3), alike=0.1), verdict(0.02, 0.1, (-0.5, 0.7), alike=0.1)
    ('agrees', 'agrees, wide interval')

    Outside of the interval, it agrees if both have the same sign and a comparable size, and the interval does not hold 0.

    >>> verdict(0.9, 0.6, (0.5, 0.7), alike=0.1), verdict(0.9, 0.3, (0.2, 0.4), alike=0.1), verdict(-0.29, -2.05, (-2.4, -1.7), alike=0.1)
    ('agrees', 'differs in size', 'differs in size')
    >>> verdict(0.9, -0.3, (-0.4, -0.2), alike=0.1), verdict(-0.35, 0.01, (-0.03, 0.05), alike=0.02)
    ('differs', 'differs')
    """
    low, high = interval
    has_zero, is_none = low <= 0 <= high, abs(paper) <= alike  # whether the paper has no difference to speak of
    if low <= paper <= high:
        is_wide = max(-low, high) > LARGE * alike if is_none else has_zero
        return "agrees, wide interval" if is_wide else "agrees"
    if has_zero or is_none or (paper > 0) != (ours > 0):
        return "differs"
    return "agrees" if 1 / COMPARABLE <= ours / paper <= COMPARABLE else "differs in size"


def _described(run: Run, pair: Pair) -> str:
    marks = [f"H = {run.H}"] if pair.table in ("8", "15") else []
    marks += [f"{run.nodes} nodes"] if pair.table == "10" else []
    marks += [run.split] if pair.table == "labels" else []
    marks += ["ring"] if run.topology == "ring" else []
    marks += ["no momentum"] if run.momentum == 0 else []
    return ", ".join([run.name, *marks])
