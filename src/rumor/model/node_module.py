"""NodeModule: a module that runs with the tensors of one node of many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


class NodeModule(nn.Module):
    """The model and the loss as one module, so that the model has a node's tensors while `functional_call` runs `loss_fn`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, loss_fn: Callable[..., Tensor], batch: tuple[Any, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        loss = loss_fn(self.model, *batch)
        return loss, dict(self.model.named_buffers())

    def called_with(
        self, leaves: dict[str, Tensor], buffers: dict[str, Tensor], loss_fn: Callable[..., Tensor], batch: tuple[Any, ...]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and the buffers as the model has left them, with these tensors in the place of its own."""
        given = {f"model.{name}": tensor for name, tensor in {**leaves, **buffers}.items()}
        result: tuple[Tensor, dict[str, Tensor]] = functional_call(self, given, (loss_fn, batch))
        return result
