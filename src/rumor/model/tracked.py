"""TrackedTensors: the parameters or buffers of a module, and whether one of them has been replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from rumor.model.tensors import is_sharded, local_part


class TrackedTensors:
    """The places where a module registers its parameters or buffers. A tensor that is registered twice counts once.

    If a tensor, or its memory, is replaced, views of the old one would be averaged without effect and without an error. So the
    Averager looks at every step whether the tensors are still where they were.
    """

    def __init__(self, module: nn.Module, registry: str, wanted: Callable[[Tensor], bool]):
        self._module, self._registry, self._wanted = module, registry, wanted
        self._places = list(self._walk())
        self.remember()

    def _walk(self) -> Iterator[tuple[dict[str, Tensor | None], str]]:
        """Yield the dictionary that holds each tensor, and its key there."""
        seen: set[int] = set()
        for owner in self._module.modules():
            tensors: dict[str, Tensor | None] = getattr(owner, self._registry)
            for name, t in tensors.items():
                if t is not None and self._wanted(t) and id(t) not in seen:
                    seen.add(id(t))
                    yield tensors, name

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are there now, in the order of `module.parameters()`."""
        return [t for registered, name in self._places if (t := registered.get(name)) is not None]

    def are_gone(self) -> bool:
        """Return whether some tensors are no longer there."""
        return any(registered.get(name) is None for registered, name in self._places)

    def new_parameters(self) -> list[str]:
        """Return the names of trained parameters that were added to the module since."""
        known = {id(t) for t in self.tensors()}
        return [name for name, p in self._module.named_parameters() if id(p) not in known and p.requires_grad]

    def remember(self) -> None:
        """Take the tensors as they are now for unchanged."""
        self._remembered = [registered.get(name) for registered, name in self._places]
        self._sharded = any(t is not None and is_sharded(t) for t in self._remembered)
        self._pointers = [0 if t is None else local_part(t).data_ptr() for t in self._remembered]

    def have_changed(self) -> bool:
        """Return whether a tensor, or its memory, has been replaced."""
        for (registered, name), was, pointer in zip(self._places, self._remembered, self._pointers, strict=True):
            t = registered.get(name)
            if t is not was or (t is not None and (local_part(t) if self._sharded else t).data_ptr() != pointer):
                return True
        return False
