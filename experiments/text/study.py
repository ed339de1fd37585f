"""The paper's Table 11, and our additions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from networks import trials
from networks.runs import QUICK, Run, Table, changed
from networks.store import Settings

WEIGHT_DECAY = 0.01
LAMB = "LAMB"
EARLIER_LAMB = "LAMB, always adapted, not clipped"  # every tensor had a trust ratio, and gradients were not clipped


class Recipe(NamedTuple):
    """The settings of a run that are not in its table. An option of the command that is given replaces its value."""

    lr: float  # the highest learning rate, if there are no trials
    steps: int = 1_500  # of a run that is not stretched
    batch: int = 128  # sequences per node and step; 32 make LAMB's steps noise, and the paper has 512
    optimizer: str = LAMB
    is_tuned: bool = True  # whether each method takes its best learning rate of the trials


RECIPES = {
    "": Recipe(lr=8e-3),
    "earlier": Recipe(lr=8e-3, steps=6_000, batch=32, optimizer=EARLIER_LAMB, is_tuned=False),  # the first results; see docs/networks.md
}
SHORT = {"steps": 60, "batch": 32}  # for --quick

NO_MOMENTUM = None  # LAMB has no momentum setting
PARALLEL, LOCAL = Run("Parallel SGD", "complete", momentum=NO_MOMENTUM), Run("Local SGD", "isolated", 6, momentum=NO_MOMENTUM)
GOSSIP, PGA, AGA = (Run(name, H=H, momentum=NO_MOMENTUM) for name, H in (("Gossip SGD", None), ("Gossip-PGA", 6), ("Gossip-AGA", 4)))
ONCE = (PARALLEL, PGA, GOSSIP, AGA, LOCAL)
STRETCHED = (replace(GOSSIP, stretch=2), replace(LOCAL, stretch=3))
ON_RING = (PARALLEL, LOCAL, *changed((GOSSIP, PGA, AGA), topology="ring"))

TABLES = {
    "11": Table(changed((*ONCE, *STRETCHED), nodes=8), seeds=5, stretched_seeds=3),
    "11 on a ring": Table(changed(ON_RING, nodes=8), seeds=5),  # here gossip alone does not average exactly every 3 steps
    "11 at n = 32": Table(changed(ONCE, nodes=32)),
    "11 bits": Table(changed(tuple(replace(PGA, bits=bits) for bits in (32, 8, 4)), nodes=8)),
    "11 earlier": Table(changed((PARALLEL, LOCAL, GOSSIP, PGA, AGA, *STRETCHED), nodes=8, recipe="earlier")),
    QUICK: Table(changed((PARALLEL, LOCAL, GOSSIP, PGA), nodes=4), seeds=1),
}


def settings_of(run: Run, recipe: Recipe, data: str, size: str, results: Path) -> Settings:
    """The settings of a run. `data` begins with the number of training sequences. The learning rate may come from the trials."""
    net = f"BERT {size}"
    once = Settings(
        data=data,
        net=net,
        epochs=max(1, round(recipe.steps * recipe.batch * run.nodes / int(data.split()[0]))),
        steps=recipe.steps,
        batch=recipe.batch,
        lr=recipe.lr,
        weight_decay=WEIGHT_DECAY,
        smoothing=None,
        optimizer=recipe.optimizer,
    )
    if recipe.is_tuned:
        wanted = {name: getattr(run, name) for name in ("method", "topology", "nodes")}
        tried = trials.best(results, **wanted, batch=recipe.batch, net=net, optimizer=recipe.optimizer)
        once = once if tried is None else replace(once, lr=float(tried["lr"]))
    return once.stretched(run.stretch)
