"""A folder of checkpoints: one folder for each, a file for each rank in it, and latest.json, which names those that are complete."""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rumor.checkpoint.files import load_tensors, replacing

FORMAT = 2
LATEST = "latest.json"
NAME = re.compile(r"step-\d{8}(\.\d+)?")  # of a checkpoint's folder; a second one of the same step has another number behind it
ENTRY = {"name": str, "step": int, "nodes": int, "ranks_of_a_node": int}  # what latest.json says of a checkpoint


def file_of(place: tuple[int, int]) -> str:
    """Return the name of the file of a rank: (node, rank inside it)."""
    return f"node-{place[0]}-rank-{place[1]}.pt"


def free_number(folder: Path, name: str) -> int:
    """Return the smallest number for which `numbered(name, number)` is not in the folder yet: no earlier file is ever overwritten."""
    number = 0
    with suppress(OSError):  # writing will report it
        while (folder / numbered(name, number)).exists():
            number += 1
    return number


def numbered(name: str, number: int) -> str:
    return f"{name}.{number}" if number else name


def write(path: Path, state: dict[str, Any]) -> None:
    """Write a rank's file. Refuses what could not be loaded again."""
    folder = path.parent.parent
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: rumor.save() takes a folder for checkpoints")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        torch.save(state, aside)
        try:
            torch.load(aside, map_location="cpu", weights_only=True, mmap=True)  # reads everything but the tensors
        except pickle.UnpicklingError as error:
            what = next((what for what, part in {"position": state["position"], **state["others"]}.items() if not _is_plain(part)), "it")
            raise ValueError(
                f"this checkpoint could not be loaded again, because {what} holds more than tensors and plain values (a numpy number, a "
                "Path, a date?): make it int(...), float(...), str(...) or a tensor"
            ) from error


def seen_in(folder: Path, names: list[str]) -> int:
    """Return how many of these files are in the folder. It is listed, because that makes network file systems look again."""
    try:
        return len({path.name for path in folder.iterdir()} & set(names))
    except OSError:
        return 0


def _is_plain(part: Any) -> bool:
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    try:
        torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def add_entry(folder: Path, entry: dict[str, Any], keep: int) -> None:
    """Make it the latest, and remove all but the last `keep` checkpoints."""
    kept = [*_entries(folder), entry][-keep:]
    with replacing(folder / LATEST) as aside:
        aside.write_text(json.dumps({"format": FORMAT, **entry, "earlier": kept[:-1]}, indent=1))
    names = {one["name"] for one in kept}
    for path in folder.iterdir():
        if path.is_dir() and NAME.fullmatch(path.name) and path.name not in names:
            shutil.rmtree(path, ignore_errors=True)


def _entries(folder: Path) -> list[dict[str, Any]]:
    """Return the complete checkpoints of the folder, the latest last."""
    path = folder / LATEST
    if not path.exists():
        return []
    with suppress(ValueError, AttributeError, TypeError, KeyError, IsADirectoryError):
        latest = json.loads(path.read_text())
        found: list[dict[str, Any]] = [{key: one[key] for key in ENTRY} for one in (*latest["earlier"], latest)]
        if latest["format"] == FORMAT and all(_is_entry(one) for one in found):
            return found
    raise ValueError(f"{path} is not what rumor.save() writes: remove it to start again, or name another folder")


def _is_entry(one: dict[str, Any]) -> bool:
    return all(type(one[key]) is kind for key, kind in ENTRY.items()) and one["nodes"] > 0 and bool(NAME.fullmatch(one["name"]))


def find_entry(folder: Path, step: int | None) -> dict[str, Any] | None:
    """Return the latest checkpoint, or that of `step`; None if the folder is empty or missing."""
    _refuse_other_paths(folder)
    entries = _entries(folder)
    wanted = entries if step is None else [entry for entry in entries if entry["step"] == step]
    if wanted or step is None:
        return wanted[-1] if wanted else None
    there = f"only those after: {', '.join(str(entry['step']) for entry in entries)}" if entries else "and no other"
    raise ValueError(f"{folder} has no checkpoint after {step} steps, {there}")


def _refuse_other_paths(folder: Path) -> None:
    """Refuse a path that save() was not given. "No checkpoint yet" would be wrong there, and the run would start again from zero."""
    if not folder.exists():
        return
    inside = folder if folder.is_dir() else folder.parent
    has_checkpoints = (inside / LATEST).exists()
    if not has_checkpoints and (NAME.fullmatch(inside.name) or any(inside.glob("node-*-rank-*.pt"))):
        raise ValueError(f"{folder} is part of one checkpoint: rumor.load() takes the folder of all of them, {inside.parent}")
    if not folder.is_dir():
        likely = f", here {inside}" if has_checkpoints else ""
        raise ValueError(f"{folder} is a file: rumor.load() takes the folder that rumor.save() was given{likely}")
    if not has_checkpoints:
        # a first checkpoint that was cut short leaves its folder; a new file system has lost+found
        foreign = sorted(
            p.name for p in folder.iterdir() if not (NAME.fullmatch(p.name) or p.name.startswith(".") or p.name == "lost+found")
        )
        if foreign:
            raise ValueError(
                f"{folder} holds {', '.join(foreign[:3])}{', ...' * (len(foreign) > 3)} but no checkpoint: name the folder that "
                "rumor.save() was given, or an empty one to start from the beginning"
            )


def read(path: Path) -> dict[str, Any]:
    """Read a rank's file. Refuses what is damaged, or was not written by rumor.save()."""
    try:
        state = load_tensors(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: the folder must be on storage that all nodes see") from None
    wanted = ("model", "averager", "random", "position", "others", "kinds")
    if not isinstance(state, dict) or state.get("format") != FORMAT or any(key not in state for key in wanted):
        raise ValueError(f"{path} was not written by rumor.save(), or by another version: name a checkpoint of this version")
    return dict(state)
