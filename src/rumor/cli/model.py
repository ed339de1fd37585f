"""`--model FILE.py:FUNCTION`: a user's own model, and its training step."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

FORM = (
    "FILE.py:FUNCTION, where FUNCTION() returns (model, step) and step() is one forward, backward and optimizer step (with "
    "`def step(model=model)` DDP is timed, too)"
)


def load(place: str) -> tuple[nn.Module, Callable[..., object] | None]:
    """The model that FUNCTION returns, and its step (None where it returns a model alone)."""
    file, _, name = place.rpartition(":")
    if not file or not name:
        raise ValueError(f"--model takes {FORM}; got {place!r}")
    if not Path(file).is_file():
        raise ValueError(f"--model {place}: there is no file {file}")
    made = _called(place, file, name)
    model, step = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not (step is None or callable(step)):
        raise ValueError(f"--model takes {FORM}; {name}() returned {type(made).__name__}")
    return model, step


def _called(place: str, file: str, name: str) -> Any:
    specification = importlib.util.spec_from_file_location("rumor_users_model", file)
    if specification is None or specification.loader is None:
        raise ValueError(f"--model {place}: {file} is not a Python file")
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
        if not callable(getattr(module, name, None)):
            raise ValueError(f"{file} has no function {name}")
        return getattr(module, name)()
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and the one line should say whose it is
        raise ValueError(f"--model {place}: {type(error).__name__}: {error}") from error
