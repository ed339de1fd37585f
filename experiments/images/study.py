"""The paper's image tables, and our additions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from networks import trials
from networks.runs import QUASI_GLOBAL, QUICK, TRACKING, Run, Table, changed
from networks.store import USUAL_DECAY, Settings

IMAGES = 256  # a recipe's lr is for this many images per step; it grows with the total batch of all nodes (linear scaling)


class Recipe(NamedTuple):
    """The settings of a run that are not in its table. An option of the command that is given replaces its value."""

    lr: float  # the highest learning rate, for 256 images per step
    weight_decay: float = 5e-4
    label_smoothing: float = 0.2
    epochs: int = 40
    batch: int = 32  # images per node and step
    like: int | None = None  # take the learning rate and the steps of this many nodes with 32 images each
    decay: str = USUAL_DECAY  # how the learning rate falls: in stages, or cosine
    is_tuned: bool = False  # whether the learning rate is Parallel SGD's best of the trials, if there are any


USUAL = Recipe(0.5)  # the learning rate was tuned once, for Parallel SGD with 32 nodes x 32 images
RECIPES = {
    "": USUAL,
    "120 epochs": USUAL._replace(epochs=120, is_tuned=True),
    "no smoothing": USUAL._replace(label_smoothing=0.0, epochs=120, is_tuned=True),
    "no momentum": USUAL._replace(is_tuned=True),
    "cosine": USUAL._replace(decay="cosine"),
    "as 32 nodes": USUAL._replace(batch=20, like=32),  # 50 x 20 images are nearest to 32 x 32 from below
}
SHORT: dict[str, Any] = {"lr": 4.0, "epochs": 2}  # for --quick, which has smaller batches and shorter runs
RESNET: dict[str, Any] = {"lr": 0.1, "weight_decay": 1e-4, "label_smoothing": 0.0}  # the paper's protocol (Goyal et al.)
PERCEPTRON: dict[str, Any] = {  # the learning rate was tuned as USUAL's was, on Fashion-MNIST with 16 nodes x 32 images
    "lr": 0.2,
    "weight_decay": 1e-4,
    "label_smoothing": 0.0,
}
OF_NETWORK = {"resnet50": RESNET, "mlp": PERCEPTRON}  # what a network changes in every recipe

PARALLEL = Run("Parallel SGD", "complete")
LOCAL = Run("Local SGD", "isolated", 6)
GOSSIP, OSGP = Run("Gossip SGD"), Run("OSGP")
PGA, AGA, SLOWMO = Run("Gossip-PGA", H=6), Run("Gossip-AGA", H=4), Run("SlowMo", H=6)
ONCE = (PARALLEL, LOCAL, GOSSIP, OSGP, PGA, AGA)
GOSSIP_X2 = replace(GOSSIP, stretch=2)
TABLE_7 = (PARALLEL, PGA, GOSSIP, AGA, LOCAL, OSGP, GOSSIP_X2, replace(OSGP, stretch=2), replace(LOCAL, stretch=3))
RING = (PARALLEL, *changed((GOSSIP, PGA), topology="ring"))
TABLE_1 = (PARALLEL, GOSSIP, GOSSIP_X2, *changed((GOSSIP, GOSSIP_X2), topology="ring"))

FOUR_BITS = replace(PGA, bits=4)
ON_ALL = (
    *(replace(PARALLEL, bits=bits) for bits in (32, 16, 4)),
    replace(LOCAL, bits=4),
    replace(LOCAL, H=(1, 8), bits=4),
    PGA,
    FOUR_BITS,
    replace(FOUR_BITS, H=(1, 24)),
    replace(AGA, bits=4),
    replace(FOUR_BITS, state="global"),
    replace(FOUR_BITS, state="always"),
    replace(FOUR_BITS, H=(3, 24)),
    replace(FOUR_BITS, H=(3, 24), state="global"),
    replace(FOUR_BITS, H=(3, 24), state="always"),
    *(Run(QUASI_GLOBAL, H=H, bits=4, momentum=0.0) for H in (6, (3, 24))),  # it has its own momentum instead of the optimizer's
)
ON_UNEVEN = (Run("Scaffold", H=6, bits=4), Run(TRACKING, H=6, bits=4))


def beyond(nodes: int, odd: int) -> Table:
    """Methods that are not the paper's: on `nodes` nodes with even and uneven labels, and on `odd` nodes, not a power of two."""
    on_base_graph = changed((FOUR_BITS, replace(FOUR_BITS, H=(3, 24), state="global")), topology="base_graph")
    uneven = (run for alpha in (0.3, 0.1) for run in changed((*ON_ALL, *ON_UNEVEN), split=f"dirichlet({alpha})"))
    return Table((*changed((*ON_ALL, *uneven), nodes=nodes), *changed((*ON_ALL, *on_base_graph), nodes=odd)), seeds=5)


def cosine(nodes: int, odd: int) -> Table:
    """The methods that send least, with a learning rate that falls like a cosine, on even and uneven labels."""
    few = (*(run for run in ON_ALL if isinstance(run.H, tuple) and run.H[0] == 1), FOUR_BITS, replace(AGA, bits=4))
    runs = changed((PARALLEL, replace(PARALLEL, bits=4), *few), recipe="cosine")
    uneven = (run for alpha in (0.3, 0.1) for run in changed(runs, split=f"dirichlet({alpha})"))
    return Table((*changed((*runs, *uneven), nodes=nodes), *changed(runs, nodes=odd)), seeds=5)


def diloco(nodes: int) -> Table:
    """DiLoCo and Local SGD at short and long periods; DiLoCo also with gossip between its outer steps."""
    periods, outers = (6, 24, 96), ((0.7, 0.9), (0.7, 0.5), (1.0, 0.3))
    local = changed(tuple(replace(LOCAL, H=H) for H in periods), bits=4)
    outer = tuple(replace(run, method="DiLoCo", outer=outer) for run in local for outer in outers)
    return Table(changed((PARALLEL, *local, *outer, *changed(outer, topology="one_peer_exponential")), nodes=nodes))


ONE_PEER = ("one_peer_exponential", "base_graph", "equitopo")  # at most one message per node and step


def graphs(nodes: int) -> Table:
    """Graphs with one peer a step, for a number of nodes that is no power of two, on even and uneven data."""
    of_graph = ((PARALLEL, *changed((GOSSIP, PGA, replace(PGA, H=24)), topology=graph)) for graph in ONE_PEER)
    runs = tuple(dict.fromkeys(run for runs in of_graph for run in runs))
    return Table((*changed(runs, nodes=nodes), *changed(runs, nodes=nodes, split="dirichlet(0.1)")), seeds=5)


TABLES = {
    "7": Table((*ONCE, GOSSIP_X2, replace(OSGP, stretch=2), replace(LOCAL, stretch=3)), seeds=5),
    "9": Table(RING, seeds=5),
    "7 at n = 50": Table(changed(ONCE, nodes=50), seeds=5),
    "15": Table((PARALLEL, GOSSIP, *(replace(PGA, H=H) for H in (3, 6, 12, 24, 48))), seeds=5),
    "8": Table((PARALLEL, *(replace(run, H=H) for H in (6, 48) for run in (PGA, SLOWMO))), seeds=5),
    "10": Table(tuple(run for n in (4, 8, 16, 32) for run in changed((PARALLEL, GOSSIP, PGA), nodes=n)), seeds=5),
    "16": Table(changed((PARALLEL, GOSSIP, PGA), momentum=0.0), seeds=5),
    "labels": Table(
        tuple(run for alpha in (0.3, 0.1) for run in changed((PARALLEL, LOCAL, GOSSIP, PGA, AGA), split=f"dirichlet({alpha})"))
    ),
    "bits": Table(
        (
            *(replace(run, bits=bits) for run in (PGA, AGA) for bits in (32, 16, 8, 4)),
            *(replace(PARALLEL, bits=bits) for bits in (32, 4)),
            *(replace(PGA, bits=bits, split=f"dirichlet({alpha})") for alpha in (0.1, 0.3) for bits in (32, 4)),
            *(replace(PGA, bits=bits, nodes=50) for bits in (32, 4)),
        ),
        seeds=5,
    ),
    "bits again": Table(tuple(replace(PGA, bits=bits, split="dirichlet(0.3)") for bits in (32, 4)), seeds=10),
    "beyond": beyond(32, 50),
    "beyond small": beyond(16, 20),  # for --net mlp on a CPU
    "cosine": cosine(32, 50),
    "cosine small": cosine(16, 20),  # for --net mlp on a CPU
    "diloco": diloco(32),
    "diloco small": diloco(16),  # for --net mlp on a CPU
    "graphs small": graphs(20),  # for --net mlp on a CPU
    "1": Table(TABLE_1, seeds=5),
    "7 at 120 epochs": Table(changed(TABLE_7, recipe="120 epochs"), seeds=5),
    "9 at 120 epochs": Table(changed(RING, recipe="120 epochs"), seeds=5),
    "1 at 120 epochs": Table(changed(TABLE_1, recipe="120 epochs"), seeds=5),
    "7 without smoothing": Table(changed((PARALLEL, PGA, AGA), recipe="no smoothing"), seeds=5),
    "16 tuned": Table(changed((PARALLEL, GOSSIP, PGA), momentum=0.0, recipe="no momentum"), seeds=5),
    "7 at n = 50 as 32": Table(changed(ONCE, nodes=50, recipe="as 32 nodes"), seeds=5),
    QUICK: Table(changed((PARALLEL, LOCAL, *changed((GOSSIP, PGA, AGA), topology="ring")), nodes=8), seeds=1),
}


def settings_of(run: Run, recipe: Recipe, data: str, images: int, net: str, results: Path) -> Settings:
    """The settings of a run. The learning rate may come from the trials of Parallel SGD with the same momentum and label smoothing."""
    lr, together = recipe.lr, USUAL.batch * recipe.like if recipe.like else recipe.batch * run.nodes
    if recipe.is_tuned:
        wanted = {"method": PARALLEL.method, "momentum": run.momentum, "smoothing": recipe.label_smoothing, "net": net}
        tried = trials.best(results, **wanted)
        lr = lr if tried is None else float(tried["lr"]) * IMAGES / (int(tried["nodes"]) * int(tried["batch"]))
    once = Settings(
        data=data,
        net=net,
        epochs=recipe.epochs,
        steps=recipe.epochs * (images // together),
        batch=recipe.batch,
        lr=lr * together / IMAGES,
        weight_decay=recipe.weight_decay,
        smoothing=recipe.label_smoothing,
        decay=recipe.decay,
    )
    return once.stretched(run.stretch)
