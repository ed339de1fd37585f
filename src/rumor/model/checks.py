"""Checks of a module before it is trained. Each error names the value, the rule and the fix."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import UninitializedParameter

from rumor.model.tensors import is_sharded, local_part


def check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model comes first and must be a torch.nn.Module, got {type(model).__name__}")


def trained_and_frozen(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that are averaged, and those that are left alone because they do not train."""
    parameters = list(module.parameters())
    memory: dict[int, str] = {}
    for name, p in module.named_parameters():
        if isinstance(p, UninitializedParameter) or p.is_meta:
            raise ValueError(f"parameter {name} has no values yet (lazy, or on the meta device): initialise the model first")
        here = local_part(p)
        if here.numel() and memory.setdefault(here.data_ptr(), name) != name:
            other = memory[here.data_ptr()]
            raise ValueError(
                f"parameters {other} and {name} share memory but are two Parameters: tie them by assigning the Parameter itself"
            )
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        raise ValueError(f"{type(module).__name__} has no parameters that train (of {len(parameters)}): there is nothing to average")
    return trained, [p for p in parameters if not p.requires_grad]


def description(module: nn.Module) -> str:
    """Return what must be the same on all ranks: names, shapes and dtypes, and which parameters are frozen."""
    parameters = [f"{name} {list(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}" for name, p in module.named_parameters()]
    return ", ".join([*parameters, *(f"{name} {list(b.shape)} {b.dtype}" for name, b in module.named_buffers())])


def layouts(module: nn.Module) -> str:
    """Return what ranks of one node must also have in common, because they exchange ranges of memory: the strides."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return ", ".join(f"{name} {list(t.stride())}" for name, t in tensors if not t.is_contiguous()) or "contiguous"


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile or module.compile() was called on it or on a part of it."""
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in module.modules())


# ---- FSDP -------------------------------------------------------------------------------------------------------------------------


def check_shards(module: nn.Module, local_ranks: list[int] | None) -> None:
    """Refuse DTensors unless they are sharded over the ranks of this node, so that counterparts on other nodes hold the same part."""
    if any(_is_a(m, "FullyShardedDataParallel") for m in module.modules()):
        raise ValueError("FullyShardedDataParallel (FSDP1) hides the parameters: use torch.distributed.fsdp.fully_shard (FSDP2)")
    for name, p in module.named_parameters():
        if not is_sharded(p):
            continue
        mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
        ranks = mesh.mesh.flatten().tolist()
        if local_ranks is None:
            raise ValueError(
                f"parameter {name} is a DTensor over ranks {ranks}: pass these as local_group= (the ranks inside this node), and as group= "
                "one rank of each node"
            )
        if sorted(ranks) != sorted(local_ranks) or not all(placement.is_shard() for placement in placements):
            raise ValueError(
                f"parameter {name} is placed as {placements} over ranks {ranks}, but must be sharded over the ranks of local_group=, "
                f"{local_ranks}, and no more, as by fully_shard(model, mesh=mesh['shard']): across nodes, Rumor averages in FSDP's place"
            )


def reshard(module: nn.Module) -> None:
    """Let FSDP2 free gathered parameters: it keeps the root's after a forward without a backward, and Rumor averages the shards."""
    for m in module.modules():
        if _is_a(m, "FSDPModule"):
            m.reshard()  # type: ignore[operator]


def _is_a(module: nn.Module, name: str) -> bool:
    """Compare by name: importing FSDP takes a second, and whoever uses it has imported it."""
    return any(kind.__name__ == name for kind in type(module).__mro__)
