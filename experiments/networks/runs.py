"""Training runs as values, and tables of runs. A run that is in several tables is run once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import rumor
from rumor.methods.gossip_pga import Algorithm

AGA_WARM_UP = 0.04  # share of all steps
IID = "iid"
QUICK = "quick"  # the name of a small table, which is run on request only


@dataclass(frozen=True)
class Run:
    """One training run. `stretch` multiplies its length, and stretches the learning-rate schedule with it."""

    method: str
    topology: str = "one_peer_exponential"
    H: int | None = None
    nodes: int = 32
    stretch: int = 1
    split: str = IID  # or dirichlet(0.3)
    momentum: float | None = 0.9  # None if the optimizer has no momentum
    bits: int = 32  # of each number in a message
    recipe: str = ""  # the name of the study's recipe: epochs, batch, learning rate and the like
    seed: int = 0

    @property
    def name(self) -> str:
        """The name of the run in the paper, with its number of bits if that is not the paper's."""
        return self.method + (f" x{self.stretch}" if self.stretch > 1 else "") + (f", {self.bits} bits" if self.bits < 32 else "")

    def algorithm(self, steps: int) -> Algorithm:
        graph, H = getattr(rumor, self.topology)(self.nodes), self.H or 0
        make: dict[str, Callable[[], Algorithm]] = {
            "Parallel SGD": lambda: rumor.parallel_sgd(self.nodes, bits=self.bits),
            "Local SGD": lambda: rumor.local_sgd(self.nodes, H, bits=self.bits),
            "Gossip SGD": lambda: rumor.gossip_sgd(graph, bits=self.bits),
            "OSGP": lambda: rumor.osgp(graph),
            "Gossip-PGA": lambda: rumor.gossip_pga(graph, H, bits=self.bits),
            "Gossip-AGA": lambda: rumor.gossip_aga(graph, round(AGA_WARM_UP * steps), H_init=H, bits=self.bits),
            "SlowMo": lambda: rumor.slowmo(graph, H, bits=self.bits),
        }
        return make[self.method]()


@dataclass(frozen=True)
class Table:
    """A table of the paper (its key is a number), or one of ours (its key is a word)."""

    runs: tuple[Run, ...]
    seeds: int = 3
    stretched_seeds: int | None = None  # seeds of stretched runs, if they have fewer

    def seeds_of(self, run: Run) -> int:
        return self.stretched_seeds if run.stretch > 1 and self.stretched_seeds is not None else self.seeds

    def all_runs(self, seeds: int | None = None) -> Iterator[Run]:
        """Yields the runs seed by seed, so that the finished runs can be compared if time runs out."""
        for seed in range(seeds or self.seeds):
            for run in self.runs:
                if seed < (seeds or self.seeds_of(run)):
                    yield replace(run, seed=seed)


Tables = Mapping[str, Table]


def tables_of(run: Run, tables: Tables) -> list[str]:
    """The tables that this run is in. The quick table is named only if there is no other."""
    plain = replace(run, seed=0)
    names = [name for name, table in tables.items() if plain in table.runs and run.seed < table.seeds_of(run)]
    return [name for name in names if name != QUICK] or names


def changed(runs: tuple[Run, ...], **changes: object) -> tuple[Run, ...]:
    return tuple(replace(run, **changes) for run in runs)  # type: ignore[arg-type]
