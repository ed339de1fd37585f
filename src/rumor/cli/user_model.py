"""Loads the user's own model and training step: `--model FILE.py:FUNCTION`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

FORM = (
    "FILE.py:FUNCTION, where FUNCTION() returns (model, step) and step() runs one forward, backward and optimizer step (write "
    "`def step(model=model)` to time DDP, too)"
)


def load_model(place: str) -> tuple[nn.Module, Callable[..., object] | None]:
    """Calls FUNCTION and returns its model and step. The step is None if FUNCTION returns a model only."""
    file, _, name = place.rpartition(":")
    if not file or not name:
        raise ValueError(f"--model takes {FORM}; got {place!r}")
    if not Path(file).is_file():
        raise ValueError(f"--model {place}: there is no file {file}")
    returned = _call(place, file, name)
    model, step = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(model, nn.Module) or not (step is None or callable(step)):
        raise ValueError(f"--model takes {FORM}; {name}() returned {type(returned).__name__}")
    return model, step


def _call(place: str, file: str, name: str) -> Any:
    specification = importlib.util.spec_from_file_location("rumor_users_model", file)
    if specification is None or specification.loader is None:
        raise ValueError(f"--model {place}: {file} is not a Python file")
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
        if not callable(getattr(module, name, None)):
            raise ValueError(f"{file} has no function {name}")
        return getattr(module, name)()
    except (Exception, SystemExit) as error:  # the user's code may raise anything; the error must say that it comes from there
        raise ValueError(f"--model {place}: {type(error).__name__}: {error}") from error
