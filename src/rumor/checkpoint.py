"""save and load: a whole run on disk, every node its own file, whole or not there."""

from __future__ import annotations

import io
import json
import pickle
import random
import re
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from rumor.averager import Averager
from rumor.checks import is_averaged
from rumor.files import loaded, replacing
from rumor.flat import is_sharded

FORMAT = 2
LATEST = "latest.json"
NAME = re.compile(r"step-\d{8}(\.\d+)?")  # of a checkpoint's folder; a second one of the same step has a number of its own
ENTRY = {"name": str, "step": int, "nodes": int, "ranks_of_a_node": int}  # what latest.json knows of a checkpoint
T = TypeVar("T")


class Stateful(Protocol):
    """An optimizer, a learning-rate scheduler, a GradScaler, a StatefulDataLoader, ..."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def save(folder: str | Path, averager: Averager, position: Any = None, *, keep: int = 2, **others: Stateful) -> None:
    """Writes the model, the Averager, random numbers and all of `others`, each rank its own file. A collective.

    A checkpoint counts once every rank's file is on disk: until then, and whenever a process dies before, the one before it stays the
    latest. What load() would refuse is refused here. If one rank can't write, all raise.

    Args:
        folder: the same on all ranks, on storage that all of them see.
        averager: whose model is saved with it.
        position: where the data is, as plain values (epoch, batch): load() gives it back. The number of steps so far, if None.
        keep: so many checkpoints stay; others are removed.
        others: what else has a state: optimizer=opt, scheduler=scheduler, scaler=scaler.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got keep={keep}")
    averager.refuse_in_averaged("rumor.save()")
    _check_stateful(others)
    folder = Path(folder)
    name = _new_name(folder, averager)
    state = {
        "format": FORMAT,
        "model": averager.model.state_dict(),
        "averager": averager.state_dict(),
        "random": random_state(averager.device),
        "position": averager.steps if position is None else position,
        "others": {name: other.state_dict() for name, other in others.items()},
        "kinds": {name: type(other).__name__ for name, other in others.items()},
    }
    by_all(averager, partial(_write, folder / name / _file(averager.place), state), "writing a checkpoint")
    entry = {"name": name, "step": averager.steps, "nodes": averager.engine.n, "ranks_of_a_node": averager.local_size}
    by_all(averager, partial(_note, folder, entry, keep) if averager.place == (0, 0) else lambda: None, "noting a checkpoint")


def load(folder: str | Path, averager: Averager, *, step: int | None = None, **others: Stateful) -> Any:
    """Goes on from the latest checkpoint in `folder`, and returns its `position`; None, and nothing is changed, if there is none.

    With as many nodes as it was saved with, the rest of the run is bitwise the one that was not interrupted. With more or fewer, every
    node starts from the mean of the saved models, with the optimizer of one of the saved nodes, and the schedule goes on where it was.
    A collective. Files are read as tensors and plain values: code in them is never run. What does not fit is refused on all ranks, before
    anything is changed.

    Args:
        folder: that was saved to.
        averager: over the same model and method; its model is loaded, too.
        step: go back to the checkpoint after so many steps, in the place of the latest.
        others: what else was saved, by the same names.
    """
    averager.refuse_in_averaged("rumor.load()")
    _check_stateful(others)
    folder = Path(folder)
    entry = by_all(averager, partial(_find, folder, step), "looking for a checkpoint")
    found = "none" if entry is None else f"{entry['name']} of {entry['nodes']} nodes"
    averager.meet({f"checkpoint in {folder.name} (is it on storage that all see?)": found}, "looking for a checkpoint")
    if entry is None:
        return None
    state = by_all(averager, partial(_state_for, averager, folder, entry, others), "reading a checkpoint")
    averager.settle()  # what a lazy step left under way belongs to the model that goes now
    averager.model.load_state_dict(state["model"])
    if entry["nodes"] == averager.engine.n:
        averager.load_state_dict(state["averager"])
        restore_random(state["random"], averager.device)
    else:
        averager.go_on(state["averager"])
    for name, other in others.items():
        other.load_state_dict(state["others"][name])
    return state["position"]


def by_all(averager: Averager, do: Callable[[], T], doing: str) -> T:
    """What `do` returns on this rank. If it fails on one, all of them raise. A collective."""
    result, problem = None, None
    try:
        result = do()
    except (OSError, ValueError) as error:
        problem = error
    except Exception as error:  # a file that is not what it should be can raise anything, and nobody may wait for this rank in vain
        problem = ValueError(f"{doing} failed: {type(error).__name__}: {error}")
    try:
        averager.meet({f"outcome of {doing}": "done" if problem is None else str(problem)}, doing)
    except ValueError:
        if problem is None:
            raise
    if problem is not None:
        raise problem
    return result  # type: ignore[return-value]


# ---- what fits ----------------------------------------------------------------------------------------------------------------------


def _check_stateful(others: dict[str, Stateful]) -> None:
    for name, other in others.items():
        if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
            raise TypeError(f"{name}= needs state_dict() and load_state_dict(), as optimizers have them: {type(other).__name__} has none")


def _state_for(averager: Averager, folder: Path, entry: dict[str, Any], others: dict[str, Stateful]) -> dict[str, Any]:
    """This rank's own. With another number of nodes, that of one of them, with the mean of all their models in the place of its own."""
    if (was := entry["ranks_of_a_node"]) != (now := averager.local_size):
        raise ValueError(f"{entry['name']} was saved with {was} ranks a node, and this run has {now}: start it with {was}")
    (node, local_rank), nodes = averager.place, entry["nodes"]
    paths = [folder / entry["name"] / _file((other, local_rank)) for other in range(nodes)]
    path = paths[node % nodes]
    state = _read(path)
    _check_model(averager, state["model"], path)
    _check_others(state, others, path)
    if nodes == averager.engine.n:
        averager.check_state(state["averager"])
    else:
        models = [state["model"] if other == path else _read(other)["model"] for other in paths]
        state["model"] = _mean_of(models, dict(averager.model.named_parameters()), path.parent)
    return state


def _check_model(averager: Averager, saved: dict[str, Any], path: Path) -> None:
    shapes = [{name: getattr(value, "shape", None) for name, value in model.items()} for model in (averager.model.state_dict(), saved)]
    for name in {**shapes[0], **shapes[1]}:
        here, there = (str(list(s[name] or ())) if name in s else "none" for s in shapes)
        if here != there:
            raise ValueError(f"{path} is of another model: its {name} has shape {there}, and here it has {here}")


def _check_others(state: dict[str, Any], others: dict[str, Stateful], path: Path) -> None:
    if missing := sorted(set(others) - set(state["others"])):
        raise ValueError(f"{path} has no state of {', '.join(missing)}: it was saved with {', '.join(state['others']) or 'none'}")
    for name, other in others.items():
        if (was := state["kinds"][name]) != (now := type(other).__name__):
            raise ValueError(f"{path} has the state of {name} as a {was}, but it is a {now} here")
        if isinstance(other, torch.optim.Optimizer):
            sizes = [[len(group["params"]) for group in groups] for groups in (state["others"][name]["param_groups"], other.param_groups)]
            if sizes[0] != sizes[1]:
                raise ValueError(f"{path} has {name} with groups of {sizes[0]} parameters, but they are of {sizes[1]} here")


def _mean_of(models: list[dict[str, Tensor]], trained: Collection[str], folder: Path) -> dict[str, Tensor]:
    """Of what floats; the first one's of the rest. Models that are not finite are left out."""
    if any(is_sharded(value) for value in models[0].values() if isinstance(value, Tensor)):
        raise ValueError(f"{folder} has shards of FSDP2: it can be loaded with as many nodes as it was saved with only")
    averaged = [name for name, value in models[0].items() if isinstance(value, Tensor) and is_averaged(value)]
    # a buffer that is infinite on every node, as a mask is, is meant to be
    must_be_finite = [name for name in averaged if name in trained or any(bool(m[name].isfinite().all()) for m in models)]
    finite = [m for m in models if all(bool(m[name].isfinite().all()) for name in must_be_finite)]
    if not finite:
        raise ValueError(f"no node's model in {folder} is finite: go back to an earlier one with rumor.load(..., step=...)")
    return {name: _mean([m[name] for m in finite]) if name in averaged else first for name, first in finite[0].items()}


def _mean(values: list[Tensor]) -> Tensor:
    wide = torch.promote_types(values[0].dtype, torch.float64)  # complex ones stay so
    return sum((value.to(wide) for value in values[1:]), values[0].to(wide)).div(len(values)).to(values[0])


# ---- files --------------------------------------------------------------------------------------------------------------------------


def _file(place: tuple[int, int]) -> str:
    return f"node-{place[0]}-rank-{place[1]}.pt"


def _new_name(folder: Path, averager: Averager) -> str:
    """Of a folder that is not there yet, as rank 0 of node 0 sees it: no file of an earlier checkpoint is ever written to."""
    name, number = f"step-{averager.steps:08d}", 0
    with suppress(OSError):  # which writing will tell of
        while (folder / (f"{name}.{number}" if number else name)).exists():
            number += 1
    number = averager.from_first(number)
    return f"{name}.{number}" if number else name


def _write(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        torch.save(state, aside)
        try:
            torch.load(aside, map_location="cpu", weights_only=True, mmap=True)  # reads what is there beside tensors only
        except pickle.UnpicklingError as error:
            what = next((what for what, part in {"position": state["position"], **state["others"]}.items() if not _is_plain(part)), "it")
            raise ValueError(
                f"this checkpoint could not be loaded again, since {what} holds more than tensors and plain values (a number of numpy's, a "
                "Path, a date?): make it int(...), float(...), str(...) or a tensor"
            ) from error


def _is_plain(part: Any) -> bool:
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    try:
        torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def _note(folder: Path, entry: dict[str, Any], keep: int) -> None:
    """Makes it the latest, and removes all that are not among the last `keep` then."""
    kept = [*_entries(folder), entry][-keep:]
    with replacing(folder / LATEST) as aside:
        aside.write_text(json.dumps({"format": FORMAT, **entry, "earlier": kept[:-1]}, indent=1))
    names = {one["name"] for one in kept}
    for path in folder.iterdir():
        if path.is_dir() and NAME.fullmatch(path.name) and path.name not in names:
            shutil.rmtree(path, ignore_errors=True)


def _entries(folder: Path) -> list[dict[str, Any]]:
    """What the folder has, the latest last."""
    path = folder / LATEST
    if not path.exists():
        return []
    with suppress(ValueError, AttributeError, TypeError, KeyError, IsADirectoryError):
        latest = json.loads(path.read_text())
        found: list[dict[str, Any]] = [{key: one[key] for key in ENTRY} for one in (*latest["earlier"], latest)]
        if latest["format"] == FORMAT and all(_is_entry(one) for one in found):
            return found
    raise ValueError(f"{path} is not what rumor.save() writes: remove it to start anew, or name another folder")


def _is_entry(one: dict[str, Any]) -> bool:
    return all(type(one[key]) is kind for key, kind in ENTRY.items()) and one["nodes"] > 0 and bool(NAME.fullmatch(one["name"]))


def _find(folder: Path, step: int | None) -> dict[str, Any] | None:
    entries = _entries(folder)
    wanted = entries if step is None else [entry for entry in entries if entry["step"] == step]
    if wanted or step is None:
        return wanted[-1] if wanted else None
    there = ", ".join(str(entry["step"]) for entry in entries) or "none"
    raise ValueError(f"{folder} has no checkpoint after {step} steps, only those after: {there}")


def _read(path: Path) -> dict[str, Any]:
    """A file that is whole, and ours."""
    try:
        state = loaded(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: the folder must be on storage that all nodes see") from None
    wanted = ("model", "averager", "random", "position", "others", "kinds")
    if not isinstance(state, dict) or state.get("format") != FORMAT or any(key not in state for key in wanted):
        raise ValueError(f"{path} is no checkpoint of rumor.save(), or one of another version")
    return dict(state)


# ---- random numbers -----------------------------------------------------------------------------------------------------------------


def random_state(device: torch.device) -> dict[str, Any]:
    """Of this process and its device, as what `torch.load(..., weights_only=True)` takes."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)),
    }


def restore_random(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"][0].cpu(), device)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
