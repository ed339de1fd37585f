"""Builds the methods of the demo by the names of their functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rumor.methods import Algorithm, gossip_aga, gossip_pga, gossip_sgd, local_sgd, method, osgp, parallel_sgd, slowmo
from rumor.topology import Topology

RECOMMENDED = "gossip_pga(one_peer_exponential, H=6, bits=4)"
DEFAULT = ("parallel_sgd", RECOMMENDED, "gossip_pga", "gossip_sgd", "local_sgd")
WITH_H = ("local_sgd", "gossip_pga", "slowmo")
WITH_DELAY = ("gossip_sgd", "gossip_pga", "gossip_aga", "osgp")
ADAPTED = {"H_init": 2, "H_max": 16}  # for Gossip-AGA: the loss falls so fast here that the period would become a tenth of the run


@dataclass(frozen=True)
class Method:
    """A method and its names. Parallel SGD runs as DistributedDataParallel, and its `algorithm` is used for measurements only."""

    name: str
    label: str
    algorithm: Algorithm
    with_ddp: bool = False

    @property
    def is_recommended(self) -> bool:
        return self.name == RECOMMENDED

    @property
    def call(self) -> str:
        return f"DistributedDataParallel over {self.algorithm.topology.n} processes" if self.with_ddp else repr(self.algorithm)


def build_method(name: str, topology: Topology, H: int, delay: int | None, steps: int) -> Method:
    """Builds a method for a run of `steps` steps, by its name or from text. `delay=None` means the method's own default."""
    n, warmup = topology.n, max(1, steps // 10)
    if "(" in name:
        return Method(name, "Gossip-PGA, 4 bits" if name == RECOMMENDED else name, method(name).bind(n))
    delayed = {} if delay is None else {"delay": delay}
    known: dict[str, Callable[[], Method]] = {
        "parallel_sgd": lambda: Method(name, "Parallel SGD", parallel_sgd(n), with_ddp=True),
        "local_sgd": lambda: Method(name, "Local SGD", local_sgd(n, H)),
        "gossip_sgd": lambda: Method(name, "Gossip SGD", gossip_sgd(topology, **delayed)),
        "gossip_pga": lambda: Method(name, "Gossip-PGA", gossip_pga(topology, H, **delayed)),
        "gossip_aga": lambda: Method(name, "Gossip-AGA", gossip_aga(topology, warmup, **ADAPTED, **delayed)),
        "slowmo": lambda: Method(name, "SlowMo", slowmo(topology, H)),
        "osgp": lambda: Method(name, "SGP" if delay == 0 else "OSGP", osgp(topology, **delayed)),
    }
    if name not in known:
        raise ValueError(
            f'the demo has no short name {name!r}: choose from {", ".join(known)}, or write a method out, such as "diloco(H=100)"'
        )
    return known[name]()
