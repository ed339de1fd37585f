"""The contents of each figure, as values. The runs, the tables and the pictures are made from these."""

from __future__ import annotations

from dataclasses import dataclass

import rumor
from rumor.methods.gossip_pga import Algorithm

H_PAPER = 16
SIZES = (20, 50, 100)
TOPOLOGIES = {"exponential": rumor.exponential, "grid": rumor.grid, "ring": rumor.ring}

# Gossip-AGA has no figure in the paper's convex part. H_init is that of the paper's deep-learning experiments. The warm-up is a tenth of
# the steps between two changes of the learning rate.
AGA = {"warmup": 100, "H_init": 4, "H_max": 64}
H_LIKE_AGA = 6  # a fixed period that averages about as often as Gossip-AGA does
NAMES = {
    "parallel_sgd": "Parallel",
    "local_sgd": "Local",
    "gossip_sgd": "Gossip",
    "gossip_pga": "Gossip-PGA",
    "gossip_aga": "Gossip-AGA",
    "gossip_sgd_final_average": "Gossip, one final average",
}


@dataclass(frozen=True)
class Setting:
    """The problem of a panel: synthetic data, or a LIBSVM file that is distributed to the nodes (iid, or sorted by label)."""

    n: int
    iid: bool
    data: str = "synthetic"

    def __str__(self) -> str:
        split = "iid" if self.iid else ("not iid" if self.data == "synthetic" else "by label")
        return f"{'' if self.data == 'synthetic' else self.data + ', '}n = {self.n}, {split}"


@dataclass(frozen=True)
class Curve:
    """One method in one setting. `final_average` shows Gossip SGD's error if all nodes averaged once, at that step."""

    setting: Setting
    method: str
    topology: str | None = None
    H: int | None = None
    final_average: bool = False

    @property
    def algorithm(self) -> Algorithm:
        n = self.setting.n
        if self.method == "parallel_sgd":
            return rumor.parallel_sgd(n)
        if self.method == "local_sgd":
            return rumor.local_sgd(n, self.H or 1)
        topology = TOPOLOGIES[self.topology or "ring"](n)
        if self.method == "gossip_sgd":
            return rumor.gossip_sgd(topology)
        return rumor.gossip_aga(topology, **AGA) if self.method == "gossip_aga" else rumor.gossip_pga(topology, self.H or 1)

    @property
    def run(self) -> Curve:
        """The run that this curve is read from."""
        return Curve(self.setting, self.method, self.topology, self.H)

    @property
    def row(self) -> dict[str, object]:
        """The columns of this curve in a table. No gossip means W = I, and no global average means H = infinity."""
        topology = self.topology or {"parallel_sgd": "complete", "local_sgd": "isolated"}[self.method]
        period = {"parallel_sgd": 1, "gossip_sgd": "inf", "gossip_aga": "adaptive"}.get(self.method, self.H)
        method = "gossip_sgd_final_average" if self.final_average else self.method
        return {"method": method, "topology": topology, "n": self.setting.n, "H": period, "iid": self.setting.iid}

    def __str__(self) -> str:
        return NAMES[str(self.row["method"])] + (f" (H = {self.H})" if self.H else "")


@dataclass(frozen=True)
class Panel:
    title: str
    curves: tuple[Curve, ...]

    @property
    def setting(self) -> Setting:
        return self.curves[0].setting


def parallel(setting: Setting) -> Curve:
    return Curve(setting, "parallel_sgd")


def local(setting: Setting, H: int = H_PAPER) -> Curve:
    return Curve(setting, "local_sgd", None, H)


def gossip(setting: Setting, topology: str = "ring", final_average: bool = False) -> Curve:
    return Curve(setting, "gossip_sgd", topology, None, final_average)


def pga(setting: Setting, topology: str = "ring", H: int = H_PAPER) -> Curve:
    return Curve(setting, "gossip_pga", topology, H)


def aga(setting: Setting) -> Curve:
    return Curve(setting, "gossip_aga", "ring")


def _on_the_ring(iid: bool) -> list[Panel]:
    settings = [Setting(n, iid) for n in SIZES]
    return [Panel(f"ring, {s}", (parallel(s), gossip(s), pga(s))) for s in settings]


def _by_topology(other: str) -> list[Panel]:
    panels = []
    for s in (Setting(20, False), Setting(100, False)):
        for topology in TOPOLOGIES:
            third = gossip(s, topology) if other == "gossip" else local(s)
            panels.append(Panel(f"{topology}, {s}", (parallel(s), third, pga(s, topology))))
    return panels


def _by_period() -> list[Panel]:
    settings = (Setting(20, False), Setting(100, False))
    return [Panel(f"grid, H = {H}, {s}", (parallel(s), local(s, H), pga(s, "grid", H))) for s in settings for H in (16, 32, 64)]


def _extra() -> list[Panel]:
    """Our additions: Gossip-AGA and a fixed period that averages as often, one average at the end, and Local SGD on iid data."""
    panels = []
    for s in [Setting(n, iid) for iid in (False, True) for n in SIZES]:
        curves = (pga(s), pga(s, H=H_LIKE_AGA), aga(s), gossip(s, final_average=True))
        panels.append(Panel(f"ring, {s}", (parallel(s), *((local(s),) if s.iid else ()), *curves)))
    return panels


def _real(data: str) -> list[Panel]:
    settings = [Setting(20, iid, data) for iid in (True, False)]
    return [Panel(f"ring, {s}", (parallel(s), local(s), gossip(s), pga(s))) for s in settings]


FIGURES: dict[str, list[Panel]] = {
    "1": _on_the_ring(iid=False),
    "4": _on_the_ring(iid=True),
    "5": _by_topology("gossip"),
    "6": _by_topology("local"),
    "7": _by_period(),
    "extra": _extra(),
    "a9a": _real("a9a"),
    "w8a": _real("w8a"),
}
THE_PAPERS = ("1", "4", "5", "6", "7")
CLAIMS = {
    "1": "Figure 1: on a ring, different data on each node. Gossip-PGA reaches Parallel SGD first",
    "4": "Figure 4: the same on iid data, where the gap is smaller",
    "5": "Figure 5: exponential graph, grid and ring. On sparser graphs, global averages help more",
    "6": "Figure 6: Local SGD with the same period. Gossip between the averages helps on every graph",
    "7": "Figure 7: on the grid, the gain over Local SGD grows with the period",
    "extra": "Our additions: an adaptive period (Gossip-AGA), and Gossip SGD with one average at the end",
    "a9a": "Real data: a9a (123 features) on a ring of 20",
    "w8a": "Real data: w8a (300 features) on a ring of 20",
}


def curves_of(panels: list[Panel]) -> list[Curve]:
    """Returns each curve once, in the order of the panels."""
    return list(dict.fromkeys(curve for panel in panels for curve in panel.curves))
