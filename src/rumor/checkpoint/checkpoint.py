"""save and load: a whole run on disk, each rank in a file of its own."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rumor.averager import Averager
from rumor.averager.setup import rest_by_name
from rumor.checkpoint.folder import FORMAT, add_entry, file_of, find_entry, free_number, numbered, read, seen_in, write
from rumor.checkpoint.random_numbers import random_state, restore_random
from rumor.model.tensors import is_averaged, is_sharded, ordinary_tensors
from rumor.schedule import check_whole

LOOKS, LOOK_AGAIN = 20, 0.5  # how often rank 0 looks for the other ranks' files, and after how many seconds: network file systems lag
T = TypeVar("T")


class Stateful(Protocol):
    """An optimizer, a learning-rate scheduler, a GradScaler, a StatefulDataLoader, ..."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def _call(function: str) -> str:
    return f'rumor.{function}("checkpoints", averager, optimizer=opt)'


@rest_by_name(_call("save"))
def save(folder: str | Path, averager: Averager, position: Any = None, *, keep: int = 2, **others: Stateful) -> None:
    """Write the model, the Averager, random numbers and all of `others`, each rank to its own file. A collective.

    A checkpoint counts once every rank's file is on disk, and rank 0 sees all of them in its folder. Until then, also if a process dies
    meanwhile, the checkpoint before it stays the latest. save() refuses what load() would refuse. If one rank can't write, all raise.

    Args:
        folder: the same on all ranks, on storage that all of them see.
        averager: the Averager; its model is saved with it.
        position: where you are in the data, as plain values (epoch, batch): load() returns it. If None, the number of steps taken.
        keep: how many checkpoints to keep; older ones are removed.
        others: everything else that has a state: optimizer=opt, scheduler=scheduler, scaler=scaler.
    """
    _check_order("save", folder, averager)
    check_whole("keep", keep, 1)
    if hasattr(position, "state_dict"):
        raise TypeError(f"position is for plain values, got {type(position).__name__}: give it by name, as in {_call('save')}")
    averager.refuse_inside_averaged("rumor.save()")
    _check_stateful(others)
    if averager.has_left:
        raise RuntimeError("this node has left the job: call rumor.save() before finish() or leave()")
    if not averager.together(partial(_save, Path(folder), averager, position, keep, others)):
        why = "the others have gone on without it"
        warnings.warn(f"rumor.save: this node has written no checkpoint at step {averager.steps}, because {why}", stacklevel=3)


def _save(folder: Path, averager: Averager, position: Any, keep: int, others: dict[str, Stateful]) -> bool:
    replica, name = averager.replica, f"step-{averager.steps:08d}"
    _compare_names(averager, folder, "starting a checkpoint")
    name = numbered(name, replica.node.from_first(free_number(folder, name)))
    state = {
        "format": FORMAT,
        "model": averager.model.state_dict(),
        "averager": averager.state_dict(),
        "random": random_state(replica.device),
        "position": averager.steps if position is None else position,
        "others": {name: other.state_dict() for name, other in others.items()},
        "kinds": {name: type(other).__name__ for name, other in others.items()},
    }
    by_all(averager, partial(write, folder / name / file_of(replica.node.place), state), "writing a checkpoint")
    _wait_for_files(averager, folder, name)
    entry = {"name": name, "step": averager.steps, "nodes": averager.engine.n, "ranks_of_a_node": replica.node.size}
    is_first = replica.node.place == (0, 0)
    by_all(averager, partial(add_entry, folder, entry, keep) if is_first else lambda: None, "updating latest.json")
    return True


def _compare_names(averager: Averager, folder: Path, doing: str) -> None:
    """Raise on every rank if they were given folders of different names. A collective."""
    averager.replica.node.meet({"name of the checkpoint folder, which must be one folder for all": folder.absolute().name}, doing)


def _wait_for_files(averager: Averager, folder: Path, name: str) -> None:
    """Wait until rank 0 sees the files of all ranks. If some do not come, raise on every rank. A collective."""
    node = averager.replica.node
    is_first, files = node.place == (0, 0), [file_of((i, j)) for i in range(averager.engine.n) for j in range(node.size)]
    for look in range(LOOKS):
        if is_first and look:
            time.sleep(LOOK_AGAIN)
        seen = node.from_first(seen_in(folder / name, files) if is_first else 0)
        if seen == len(files):
            return
    raise ValueError(
        f"this checkpoint could not be loaded: rank 0 sees {seen} of its {len(files)} files, and this rank has written to "
        f"{folder.absolute()}. Give rumor.save() a folder on storage that all nodes share. An earlier checkpoint stays the latest"
    )


@rest_by_name(_call("load"))
def load(folder: str | Path, averager: Averager, *, step: int | None = None, from_mean: bool = False, **others: Stateful) -> Any:
    """Continue from the latest checkpoint in `folder`, and return its `position`.

    If the folder is empty or missing, return None and change nothing; rank 0 then prints a line. A folder with other contents, or a file,
    is refused. What was saved under a name that is not in `others` is left out, with a warning.

    With as many nodes as it was saved with, the rest of the run is bitwise equal to one that was not interrupted. With more or fewer nodes,
    every node starts from the mean of the saved models, with the optimizer of one of the saved nodes, and the schedule goes on where it
    was. With from_mean=True they do so in any case; the method may then be another one. Rank 0 prints a line that says what is loaded.
    A collective. Files are read as tensors and plain values: code in them is never run. A
    checkpoint that does not fit is refused on all ranks, before anything is changed.

    Args:
        folder: the folder that was given to save().
        averager: an Averager with the same model and method; its model is loaded, too.
        step: load the checkpoint after this many steps, instead of the latest.
        from_mean: start all nodes from the mean of the saved models, also with the same number of nodes.
        others: everything else that was saved, by the same names.

    In an elastic group, a node that joins a job under way has the members' state already: this then returns its step, and reads nothing.
    """
    _check_order("load", folder, averager)
    if step is not None:
        check_whole("step", step, 0)
    averager.refuse_inside_averaged("rumor.load()")
    _check_stateful(others)
    if averager.is_elastic and averager.steps > 0:
        return averager.steps  # it has joined a job that is under way, and has the members' state
    position = averager.together(partial(_load, Path(folder), averager, step, from_mean, others), rejoins=True)
    return averager.steps if position is None and averager.is_elastic and averager.steps > 0 else position


def _load(folder: Path, averager: Averager, step: int | None, from_mean: bool, others: dict[str, Stateful]) -> Any:
    _compare_names(averager, folder, "looking for a checkpoint")
    entry = by_all(averager, partial(find_entry, folder, step), "looking for a checkpoint")
    found = "none" if entry is None else f"{entry['name']} of {_nodes(entry['nodes'])}"
    averager.replica.node.meet({"checkpoint to load (is the folder on storage that all nodes share?)": found}, "looking for a checkpoint")
    is_first = averager.replica.node.place == (0, 0)
    if entry is None:
        if is_first:
            print(f"rumor.load: no checkpoint in {folder} yet, nothing is loaded", file=sys.stderr, flush=True)
        return None
    from_mean = from_mean or entry["nodes"] != averager.engine.n
    state = by_all(averager, partial(_state_for, averager, folder, entry, from_mean, others), "reading a checkpoint")
    averager.settle()  # what a lazy step left in flight belongs to the old model
    averager.model.load_state_dict(state["model"])
    if from_mean:
        with ordinary_tensors():
            averager.replica.continue_schedule(state["averager"])
    else:
        averager.load_state_dict(state["averager"])
        restore_random(state["random"], averager.replica.device)
    if is_first:
        said = _with_other_nodes(entry, averager, others) if from_mean else f"{entry['name']} is loaded"
        print(f"rumor.load: {said}", file=sys.stderr, flush=True)
    for name, other in others.items():
        other.load_state_dict(state["others"][name])
    if is_first and (left_out := sorted(set(state["others"]) - set(others))):
        names = ", ".join(f"{name} ({state['kinds'][name]})" for name in left_out)
        call = ", ".join(f"{name}={name}" for name in (*others, *left_out))
        one, many = f"the saved state of {names} is not loaded and starts", f"the saved states of {names} are not loaded and start"
        warnings.warn(f"{one if len(left_out) == 1 else many} anew: use rumor.load(folder, averager, {call})", stacklevel=5)
    return state["position"]


def _with_other_nodes(entry: dict[str, Any], averager: Averager, others: Collection[str]) -> str:
    """Say what becomes of a checkpoint that all nodes start from the mean of, as with another number of nodes."""
    was, n = entry["nodes"], averager.engine.n
    what = " and ".join(others)
    if n == 1:
        start, rest = "this node starts from the mean of the saved models", f"it takes the {what} of saved node 0"
    elif was == 1:
        start, rest = "all nodes start from the saved model", f"they take the {what} of the saved node"
    else:
        start, rest = "all nodes start from the mean of the saved models", f"node i takes the {what} of saved node i"
        rest += f" % {was}" * (n > was)
    waits = (
        f". rumor.elastic(..., min_nodes={was}) would wait for {was} nodes, here and after a loss"
        if averager.is_elastic and n < was
        else ""
    )
    return (
        f"{entry['name']} of {_nodes(was)} is loaded on {n}: {start}, {f'{rest}, ' if others else ''}and the step count goes on. "
        f"Random numbers and the rest of the method's state start anew{waits}"
    )


def _nodes(n: int) -> str:
    return f"{n} node{'s' * (n > 1)}"


def by_all(averager: Averager, do: Callable[[], T], doing: str) -> T:
    """Call `do` on every rank, and return what it returns on this one. If it fails on one rank, all of them raise. A collective."""
    result, problem = None, None
    try:
        result = do()
    except (OSError, ValueError) as error:
        problem = error
    except Exception as error:  # a damaged file can raise anything, and no rank may wait for this one in vain
        problem = ValueError(f"{doing} failed: {type(error).__name__}: {error}")
    try:
        averager.replica.node.meet({f"outcome of {doing}": "succeeded" if problem is None else f"failed: {problem}"}, doing)
    except ValueError:
        if problem is None:
            raise
    if problem is not None:
        raise problem
    return result  # type: ignore[return-value]


# ---- what fits ----------------------------------------------------------------------------------------------------------------------


def _check_order(function: str, folder: object, averager: object) -> None:
    if not isinstance(folder, str | os.PathLike) or not isinstance(averager, Averager):
        raise TypeError(
            f"rumor.{function}() takes the folder, then the Averager, got {type(folder).__name__} and {type(averager).__name__}: "
            f"call {_call(function)}"
        )


def _check_stateful(others: dict[str, Stateful]) -> None:
    for name, other in others.items():
        if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
            raise TypeError(f"{name}= needs state_dict() and load_state_dict(), as optimizers have them: {type(other).__name__} has none")


def _state_for(averager: Averager, folder: Path, entry: dict[str, Any], from_mean: bool, others: dict[str, Stateful]) -> dict[str, Any]:
    """Read this rank's own state. With from_mean=True, read that of one node, with the mean of all saved models."""
    replica = averager.replica
    if (was := entry["ranks_of_a_node"]) != (now := replica.node.size):
        ranks = f"{was} rank{'s' * (was > 1)} a node"
        raise ValueError(f"{entry['name']} was saved with {ranks}, and this run has {now}: start it with {ranks}")
    (node, local_rank), nodes = replica.node.place, entry["nodes"]
    paths = [folder / entry["name"] / file_of((other, local_rank)) for other in range(nodes)]
    path = paths[node % nodes]
    state = read(path)
    _check_model(averager, state["model"], path)
    _check_others(state, others, path)
    if not from_mean:
        try:
            replica.check_state(state["averager"])
        except ValueError as error:
            instead = "rumor.load(..., from_mean=True) starts all nodes from the mean of the saved models, also with another method"
            raise ValueError(f"{path}: {error}. {instead}") from error
    else:
        models = [state["model"] if other == path else read(other)["model"] for other in paths]
        state["model"] = _mean_of(models, dict(averager.model.named_parameters()), path.parent)
    return state


def _check_model(averager: Averager, saved: dict[str, Any], path: Path) -> None:
    shapes = [{name: getattr(value, "shape", None) for name, value in model.items()} for model in (averager.model.state_dict(), saved)]
    for name in {**shapes[0], **shapes[1]}:
        here, there = (f"has {name} of shape {list(s[name] or ())}" if name in s else f"has no {name}" for s in shapes)
        if here != there:
            raise ValueError(f"{path} is of another model: it {there}, and the model here {here}")


def _check_others(state: dict[str, Any], others: dict[str, Stateful], path: Path) -> None:
    if missing := sorted(set(others) - set(state["others"])):
        saved = f"it was saved with {', '.join(state['others'])}" if state["others"] else "only the model was saved"
        raise ValueError(f"{path} has no state of {', '.join(missing)}: {saved}")
    for name, other in others.items():
        if (was := state["kinds"][name]) != (now := type(other).__name__):
            raise ValueError(f"{path} has the state of {name} of type {was}, but here it is of type {now}")
        if isinstance(other, torch.optim.Optimizer):
            sizes = [[len(group["params"]) for group in groups] for groups in (state["others"][name]["param_groups"], other.param_groups)]
            if sizes[0] != sizes[1]:
                raise ValueError(f"{path} has {name} with groups of {sizes[0]} parameters, but here it has groups of {sizes[1]}")


def _mean_of(models: list[dict[str, Tensor]], trained: Collection[str], folder: Path) -> dict[str, Tensor]:
    """Return the mean of all float values, and the first model's of the rest. Leaves out models that are not finite."""
    if any(is_sharded(value) for value in models[0].values() if isinstance(value, Tensor)):
        raise ValueError(f"{folder} has shards of FSDP2: it can only be loaded with as many nodes as it was saved with")
    averaged = [name for name, value in models[0].items() if isinstance(value, Tensor) and is_averaged(value)]
    # a buffer that is infinite on every node (a mask, say) is meant to be
    must_be_finite = [name for name in averaged if name in trained or any(bool(m[name].isfinite().all()) for m in models)]
    finite = [m for m in models if all(bool(m[name].isfinite().all()) for name in must_be_finite)]
    if not finite:
        raise ValueError(f"no node's model in {folder} is finite: go back to an earlier one with rumor.load(..., step=...)")
    return {name: _mean([m[name] for m in finite]) if name in averaged else first for name, first in finite[0].items()}


def _mean(values: list[Tensor]) -> Tensor:
    wide = torch.promote_types(values[0].dtype, torch.float64)  # complex ones stay so
    return sum((value.to(wide) for value in values[1:]), values[0].to(wide)).div(len(values)).to(values[0])
