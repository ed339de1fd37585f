"""Hooks for lazy=True: messages arrive during the next forward pass, in which each module waits for its own parameters only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class ForwardHooks:
    """Hooks that call `settle(m)` before a module with parameters in the first m buckets runs, and `settle(None)` before an optimizer.

    A parameter must be used by the forward of the module that holds it, or by a torch.nn module around that (as nn.MultiheadAttention uses
    its out_proj). If a forward of the whole model leaves a module out while messages are in flight, that is an error: some of its
    parameters may have been stale. Saving a state_dict waits for all messages.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets_of: Callable[[list[Tensor]], int],
        is_under_way: Callable[[], bool],
        settle: Callable[[int | None], None],
    ):
        self._settle, self._is_under_way = settle, is_under_way
        self._must_run: dict[nn.Module, str] = {}  # its name in the model
        self._not_yet: dict[nn.Module, str] = {}
        self._hooks = [register_optimizer_step_pre_hook(self._before_all)]
        inside: set[nn.Module] = set()  # modules inside a torch.nn module that may use their parameters itself
        for name, module in model.named_modules():
            self._hooks.append(module.register_state_dict_pre_hook(_Hook(self._before_all)))
            is_whole = type(module).__module__.startswith("torch.nn.") and not isinstance(module, CONTAINERS)
            used: list[Tensor] = [p for p in module.parameters(recurse=is_whole) if p.requires_grad]
            if used and module not in inside:
                self._must_run[module] = name
                before = _Hook(self._before_module(buckets_of(used)))
                self._hooks.append(
                    module.register_forward_pre_hook(before, prepend=True)
                )  # before the hook of weight_norm, which reads parameters
            if is_whole:
                inside.update(module.modules())
        self._hooks.append(
            model.register_forward_pre_hook(_Hook(self._before_model), prepend=True)
        )  # registered last, so that it runs first
        self._hooks.append(model.register_forward_hook(_Hook(self._after_model)))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_module(self, buckets: int) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._not_yet.pop(module, None)
            self._settle(buckets)

        return hook

    def _before_model(self, model: nn.Module, inputs: Any) -> None:
        self._not_yet = dict(self._must_run) if self._is_under_way() else {}

    def _after_model(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._not_yet:
            names = ", ".join(name or type(module).__name__ for module, name in self._not_yet.items())
            raise RuntimeError(
                f"lazy=True: the model ran without a forward of {names}, so their parameters may have been used unmixed. Build the "
                "Averager without lazy for a model that uses parameters of modules that it does not call"
            )
        self._settle(None)

    def _before_all(self, *_: Any) -> None:
        self._settle(None)


class _Hook:
    """A hook for one module. A copy of it, in a copy or a pickle of the module, does nothing."""

    def __init__(self, call: Callable[..., None] | None = None):
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        if self._call is not None:
            self._call(*arguments)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()
