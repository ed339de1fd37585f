"""Training runs as values, and tables of runs. A run that is in several tables is run once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

import rumor
from networks.methods import GradientTracking, QuasiGlobalMomentum, Scaffold
from rumor.methods import Algorithm
from rumor.model.optimizer_state import AverageState
from rumor.schedule import Schedule
from rumor.topology import Topology

AGA_WARM_UP = 0.04  # share of all steps
TENTHS = 3  # how often the learning rate falls to a tenth; then the period of rumor.LearningRate is its longest
IID = "iid"
QUICK = "quick"  # the name of a small table
ON_REQUEST = (QUICK, "beyond small", "cosine small", "diloco small", "graphs small")  # tables that are run only if they are named
QUASI_GLOBAL, TRACKING = "Quasi-global momentum", "Gradient tracking"
GRAPH_MARKS = {"base_graph": "base graph", "equitopo": "EquiTopo"}


def equitopo(n: int, seed: int, steps: int = 64) -> Topology:
    """EquiTopo's one-peer graph (Song et al., 2022): at each step, all nodes average with the node that is as far away, drawn at random."""
    one, shifts = np.eye(n), np.random.default_rng(seed).integers(1, n, steps)
    return rumor.from_matrices([(one + np.roll(one, shift, 0)) / 2 for shift in shifts])


@dataclass(frozen=True)
class Run:
    """One training run. `stretch` multiplies its length, and stretches the learning-rate schedule with it.

    `H` is the period; a pair is the shortest and the longest period of `rumor.LearningRate`.
    """

    method: str
    topology: str = "one_peer_exponential"
    H: int | tuple[int, int] | None = None
    nodes: int = 32
    stretch: int = 1
    split: str = IID  # or dirichlet(0.3)
    momentum: float | None = 0.9  # None if the optimizer has no momentum
    bits: int = 32  # of each number in a message
    recipe: str = ""  # the name of the study's recipe: epochs, batch, learning rate and the like
    state: AverageState | None = None  # how nodes average the optimizer's state
    outer: tuple[float, float] | None = None  # DiLoCo's learning rate and momentum at global averages
    seed: int = 0

    @property
    def name(self) -> str:
        """The name of the run in the paper, with what is not the paper's."""
        marks = [f"H {self.H[0]} to {self.H[1]}"] if isinstance(self.H, tuple) else []
        marks += [GRAPH_MARKS[self.topology]] if self.topology in GRAPH_MARKS else []
        marks += [f"state {self.state}"] if self.state else []
        marks += ["outer {:g}, {:g}".format(*self.outer)] if self.outer else []
        marks += [f"{self.bits} bits"] if self.bits < 32 else []
        return ", ".join([self.method + (f" x{self.stretch}" if self.stretch > 1 else ""), *marks])

    @property
    def graph(self) -> Topology:
        if self.topology == "equitopo":
            return equitopo(self.nodes, self.seed)
        found: Topology = getattr(rumor, self.topology)(self.nodes)
        return found

    @property
    def schedule(self) -> Schedule:
        """Which steps average globally, for methods with a period."""
        if isinstance(self.H, tuple):
            shortest, longest = self.H
            growth = math.ceil((longest / shortest) ** (1 / TENTHS) - 1e-9)
            return rumor.LearningRate(shortest, longest, power=math.log10(growth))
        return rumor.Periodic(self.H or 1)

    def algorithm(self, steps: int) -> Algorithm:
        graph, H, bits = self.graph, self.schedule, self.bits
        first = self.H if isinstance(self.H, int) else 1
        make: dict[str, Callable[[], Algorithm]] = {
            "Parallel SGD": lambda: rumor.parallel_sgd(self.nodes, bits=bits),
            "Local SGD": lambda: rumor.local_sgd(self.nodes, H, bits=bits),
            "Gossip SGD": lambda: rumor.gossip_sgd(graph, bits=bits),
            "OSGP": lambda: rumor.osgp(graph),
            "Gossip-PGA": lambda: rumor.gossip_pga(graph, H, bits=bits),
            "Gossip-AGA": lambda: rumor.gossip_aga(graph, round(AGA_WARM_UP * steps), H_init=first, bits=bits),
            "SlowMo": lambda: rumor.slowmo(graph, H, bits=bits),
            "DiLoCo": lambda: rumor.diloco(self.nodes, H, *(self.outer or ()), topology=graph, bits=bits),
            QUASI_GLOBAL: lambda: QuasiGlobalMomentum(graph, H, bits=bits),
            "Scaffold": lambda: Scaffold(graph, H, bits=bits),
            TRACKING: lambda: GradientTracking(graph, H, bits=bits),
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
