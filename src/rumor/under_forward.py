"""Messages that arrive under the next forward pass: each module waits for its own parameters, and no longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class UnderForward:
    """Hooks that call `settle(m)` before a module runs whose parameters are in the first m buckets, and `settle(None)` before an optimizer.

    A parameter must be used by the forward of the module that holds it, or of a torch.nn module around that (nn.MultiheadAttention uses
    its out_proj so). A forward of the whole model that has left a module out is an error: some of its parameters may have been stale.
    """

    def __init__(self, model: nn.Module, buckets_of: Callable[[list[Tensor]], int], settle: Callable[[int | None], None]):
        self._settle = settle
        self._must_run: dict[nn.Module, str] = {}  # by its name in the model
        self._not_yet: dict[nn.Module, str] = {}
        self._hooks = [register_optimizer_step_pre_hook(self._before_optimizer)]
        self._hooks += [model.register_forward_pre_hook(self._before_model), model.register_forward_hook(self._after_model)]
        inside: set[nn.Module] = set()  # of a torch.nn module that may use their parameters itself
        for name, module in model.named_modules():
            is_whole = type(module).__module__.startswith("torch.nn.") and not isinstance(module, CONTAINERS)
            used: list[Tensor] = [p for p in module.parameters(recurse=is_whole) if p.requires_grad]
            if used and module not in inside:
                self._must_run[module] = name
                self._hooks.append(module.register_forward_pre_hook(self._before_module(buckets_of(used))))
            if is_whole:
                inside.update(module.modules())

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_module(self, buckets: int) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._not_yet.pop(module, None)
            self._settle(buckets)

        return hook

    def _before_model(self, model: nn.Module, inputs: Any) -> None:
        self._not_yet = dict(self._must_run)

    def _after_model(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._not_yet:
            names = ", ".join(name or type(module).__name__ for module, name in self._not_yet.items())
            raise RuntimeError(
                f"lazy=True: the model ran without a forward of {names}, so their parameters may have been used unmixed. Build the "
                "Averager without lazy for a model that uses parameters of modules that it does not call"
            )
        self._settle(None)

    def _before_optimizer(self, optimizer: Any, arguments: Any, options: Any) -> None:
        self._settle(None)
