"""save and load: a whole run on disk, every node its own file, whole or not there."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rumor.averager import Averager
from rumor.checks import is_averaged
from rumor.files import loaded, replacing

FORMAT = 1
LATEST = "latest.json"


class Stateful(Protocol):
    """An optimizer, a learning-rate scheduler, a GradScaler, a StatefulDataLoader, ..."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def save(folder: str | Path, averager: Averager, position: Any = None, *, keep: int = 2, **others: Stateful) -> None:
    """Writes the model, the Averager, random numbers and all of `others`, each rank its own file. A collective.

    A checkpoint counts once every rank's file is on disk: until then, and whenever a process dies before, the one before it stays the
    latest. Nothing is pickled but tensors and plain values.

    Args:
        folder: the same on all ranks, on storage that all of them see.
        averager: whose model is saved with it.
        position: where the data is, as plain values (epoch, batch): load() gives it back.
        keep: so many checkpoints stay; older ones are removed.
        others: what else has a state: optimizer=opt, scheduler=scheduler.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got keep={keep}")
    folder = Path(folder)
    name = f"step-{averager.steps:08d}"
    (folder / name).mkdir(parents=True, exist_ok=True)
    state = {
        "format": FORMAT,
        "model": averager.model.state_dict(),
        "averager": averager.state_dict(),
        "random": _random_state(averager),
        "position": position,
        "others": {name: other.state_dict() for name, other in others.items()},
    }
    with replacing(folder / name / _file(averager.place)) as aside:
        torch.save(state, aside)
    averager.meet({"checkpoint": name}, "waiting for all ranks to have written their checkpoints")
    if averager.place == (0, 0):
        with replacing(folder / LATEST) as aside:
            aside.write_text(
                json.dumps({"format": FORMAT, "name": name, "nodes": averager.engine.n, "ranks_of_a_node": averager.local_size})
            )
        _remove_old(folder, name, keep)
    averager.meet({"checkpoint": name}, "waiting for rank 0 to have noted the checkpoint")


def load(folder: str | Path, averager: Averager, **others: Stateful) -> Any:
    """Goes on from the latest checkpoint in `folder`, and returns its `position`; None, and nothing is changed, if there is none.

    With as many nodes as it was saved with, the rest of the run is bitwise the one that was not interrupted. With more or fewer, every
    node starts from the mean of the saved models, with the optimizer of one of the saved nodes, and the schedule goes on where it was.
    A collective. Files are read as tensors and plain values: code in them is never run.
    """
    folder = Path(folder)
    latest: dict[str, Any] | None = None
    problem: Exception | None = None
    try:
        latest = _latest(folder)
    except ValueError as error:
        problem = error
    found = str(problem) if problem else "none" if latest is None else f"{latest['name']} of {latest['nodes']} nodes"
    averager.meet({f"checkpoint in {folder.name} (is it on storage that all see?)": found}, "looking for a checkpoint")
    if problem is not None:
        raise problem
    if latest is None:
        return None
    if latest["ranks_of_a_node"] != averager.local_size:
        was, now = latest["ranks_of_a_node"], averager.local_size
        raise ValueError(f"{latest['name']} was saved with {was} ranks a node, and this run has {now}: start it with {was}")
    state = read_by_all(averager, partial(_state_for, averager, folder / latest["name"], latest["nodes"], others))
    averager.model.load_state_dict(state["model"])
    if latest["nodes"] == averager.engine.n:
        averager.load_state_dict(state["averager"])
        _restore_random(state["random"], averager)
    else:
        averager.go_on(state["averager"])
    for name, other in others.items():
        other.load_state_dict(state["others"][name])
    return state["position"]


def read_by_all(averager: Averager, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `read` returns on this rank. If it fails on one, all of them raise, and none changes its model."""
    state, problem = {}, None
    try:
        state = read()
    except (OSError, ValueError) as error:
        problem = error
    averager.meet({"checkpoint, when they read it": str(problem)}, "reading a checkpoint")
    if problem is not None:
        raise problem
    return state


def _state_for(averager: Averager, folder: Path, nodes: int, others: dict[str, Stateful]) -> dict[str, Any]:
    """This rank's own. With another number of nodes, that of one of them, with the mean of all their models in the place of its own."""
    node, local_rank = averager.place
    state = _read(folder / _file((node % nodes, local_rank)), others)
    if nodes != averager.engine.n:
        state["model"] = _mean_of([_read(folder / _file((other, local_rank)), others)["model"] for other in range(nodes)])
    return state


def _mean_of(models: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of what floats; the first one's of the rest."""
    return {
        name: sum((model[name].double() for model in models[1:]), first.double()).div(len(models)).to(first)
        if is_averaged(first)
        else first
        for name, first in models[0].items()
    }


# ---- files --------------------------------------------------------------------------------------------------------------------------


def _file(place: tuple[int, int]) -> str:
    return f"node-{place[0]}-rank-{place[1]}.pt"


def _latest(folder: Path) -> dict[str, Any] | None:
    path = folder / LATEST
    if not path.exists():
        return None
    try:
        latest = json.loads(path.read_text())
        if latest["format"] == FORMAT and {"name", "nodes", "ranks_of_a_node"} <= set(latest):
            return dict(latest)
    except (ValueError, KeyError, TypeError, UnicodeDecodeError):
        pass
    raise ValueError(f"{path} is not what rumor.save() writes: remove it to start anew, or name another folder")


def _read(path: Path, others: dict[str, Stateful]) -> dict[str, Any]:
    """A file that is whole, is ours, and has what is asked for."""
    try:
        state = loaded(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: the folder must be on storage that all nodes see") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT or "averager" not in state:
        raise ValueError(f"{path} is no checkpoint of rumor.save(), or one of another version")
    if missing := sorted(set(others) - set(state["others"])):
        raise ValueError(f"{path} has no state of {', '.join(missing)}: it was saved with {', '.join(state['others']) or 'none'}")
    return dict(state)


def _remove_old(folder: Path, latest: str, keep: int) -> None:
    names = sorted(path.name for path in folder.glob("step-*") if path.is_dir() and path.name <= latest)
    for name in names[:-keep]:
        shutil.rmtree(folder / name, ignore_errors=True)


# ---- random numbers -----------------------------------------------------------------------------------------------------------------


def _random_state(averager: Averager) -> dict[str, Any]:
    name, keys, position, has_gauss, gauss = np.random.get_state()
    cuda = [torch.cuda.get_rng_state(averager.device)] if averager.device.type == "cuda" else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)),
    }


def _restore_random(state: dict[str, Any], averager: Averager) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and averager.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"][0], averager.device)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
