"""A method's state as plain numbers and tensors, with the messages in flight; and back again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rumor.engines import Buckets, Buffer, Mixed, Pending
from rumor.engines.engine import NO_SCALARS, Arrived, accumulator
from rumor.methods.algorithm import InFlight, Nodes, State
from rumor.schedule import ScheduleState

FORMAT = 2  # of the saved state


def saved_state(state: State, nodes: Nodes) -> dict[str, Any]:
    """Return what `read_state` reads. Waits for what is in flight."""
    flight = None if state.in_flight is None else _saved_messages(state.in_flight, nodes)  # first: what arrives may change the buckets
    return {
        "format": FORMAT,
        "schedule": state.schedule._asdict(),
        "buckets": {name: _joined(tensors) for name, tensors in state.buckets.items()},
        "scalars": {name: tensor.clone() for name, tensor in state.scalars.items()},
        "flight": flight,
    }


def check_format(saved: dict[str, Any], algorithm: str) -> None:
    """Raise ValueError unless this is a saved state of the method with this repr."""
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise ValueError("this is not a state of Rumor (or one of another version): load what state_dict() returned")
    if saved["algorithm"] != algorithm:
        raise ValueError(f"this state is of {saved['algorithm']}, but the algorithm here is {algorithm}")


def read_state(saved: dict[str, Any], state: State, nodes: Nodes) -> Callable[[], None]:
    """Check that a saved state fits, without a change to `state`. Returns a function that then puts it into `state`."""
    buckets = {name: _split_like(saved["buckets"][name], tensors) for name, tensors in state.buckets.items()}
    in_flight = None if saved["flight"] is None else _restored_messages(saved["flight"], nodes)

    def restore() -> None:
        for name, tensors in state.buckets.items():
            for tensor, value in zip(tensors, buckets[name], strict=True):
                tensor.copy_(value)
        state.scalars = {name: saved["scalars"][name].to(tensor, copy=True) for name, tensor in state.scalars.items()}
        state.schedule, state.in_flight = ScheduleState(**saved["schedule"]), in_flight

    return restore


def _saved_messages(in_flight: InFlight, nodes: Nodes) -> dict[str, Any]:
    sent = [buffer.tensor for buffer in in_flight.sent]
    has_state = len(sent) > len(nodes.x)
    model, buffers = _shapes(nodes.with_state if has_state else nodes.x), _shapes(nodes.in_full)
    interpolates = bool(sent) and not in_flight.relayed
    return {
        "sent": _joined(sent) if sent else None,
        "relayed": in_flight.relayed,
        "has_state": has_state,
        "pending": _saved_lerps(in_flight.pending, model, sent) if interpolates else _saved_results(in_flight.pending, model),
        "buffers": _saved_results(in_flight.buffers, buffers) if in_flight.buffers else None,
        "loss": in_flight.signal.wait().scalars.clone() if in_flight.signal else None,  # the name in this format, also of a learning rate
    }


def _restored_messages(saved: dict[str, Any], nodes: Nodes) -> InFlight:
    model, buffers = _shapes(nodes.with_state if saved.get("has_state") else nodes.x), _shapes(nodes.in_full)
    sent = [] if saved["sent"] is None else _split_like(saved["sent"], model)
    return InFlight(
        sent=[Buffer(part) for part in sent],
        pending=_arrived(saved["pending"], model),
        buffers=_arrived(saved["buffers"], buffers) if saved["buffers"] is not None else [],
        signal=None if saved["loss"] is None else Arrived(Mixed(saved["loss"], saved["loss"])),
        relayed=saved["relayed"],
    )


def _saved_results(pending: Sequence[Pending], like: Sequence[Tensor]) -> dict[str, Any]:
    """Save what wait() returns."""
    parts, scalars = [], []
    for message, shaped in zip(pending, like, strict=True):
        mixed = message.wait()
        parts.append(mixed.x.expand(shaped.shape).clone())  # a mean may be one row for all nodes
        scalars.append(mixed.scalars.clone())
    return {"x": _joined(parts), "scalars": scalars, "weights": [1.0] * len(parts)}


def _saved_lerps(pending: Sequence[Pending], like: Sequence[Tensor], sent: Sequence[Tensor]) -> dict[str, Any]:
    """Save what lerp() returns."""
    parts, weights = [], []
    for message, shaped, own in zip(pending, like, sent, strict=True):
        end, weight, _ = message.lerp().guarded(own)
        parts.append(end.expand(shaped.shape).clone())
        weights.append(weight)
    changes = [change.clone() for message in pending if (change := message.change()) is not None]
    return {"x": _joined(parts), "scalars": [NO_SCALARS] * len(parts), "weights": weights, "changes": _joined(changes) if changes else None}


def _arrived(saved: dict[str, Any], like: Sequence[Tensor]) -> list[Pending]:
    parts = zip(_split_like(saved["x"], like), saved["scalars"], saved["weights"], like, strict=True)
    arrived = [Arrived(Mixed(x.to(accumulator(t.dtype), copy=True), scalars.to(t.device)), weight) for x, scalars, weight, t in parts]
    if (changes := saved.get("changes")) is not None:
        for message, change in zip(arrived, _split_like(changes, like), strict=True):
            message.difference = change
    return [*arrived]


def _shapes(x: Buckets) -> list[Tensor]:
    """Return tensors with the shapes, dtypes and devices of the buckets."""
    return [x.peek(b) for b in range(len(x))]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Join into one flat tensor, so that a state does not depend on how the model was cut into buckets."""
    return torch.cat([t.reshape(-1) for t in tensors])


def _split_like(joined: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    sizes = [t.numel() for t in tensors]
    if joined.numel() != sum(sizes):
        raise ValueError(f"this state is of a model with {joined.numel()} numbers, but the model here has {sum(sizes)}")
    is_mixed = len({t.dtype for t in tensors}) > 1  # then joining has widened some of them
    dtypes = [accumulator(t.dtype) if is_mixed else joined.dtype for t in tensors]
    parts = zip(torch.split(joined, sizes), tensors, dtypes, strict=True)
    return [part.view(t.shape).to(t.device, dtype) for part, t, dtype in parts]
