"""Nodes of several ranks for tests: groups, models inside them, methods, and training there and in one process."""

import datetime
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import networkx as nx
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rumor
from tests.problems import OPTIMIZERS, batches, decayed, loss_fn, network, trained

STEPS = 11  # the last one is no global round


@lru_cache
def groups(size: int, timeout: float = 60.0) -> tuple[dist.ProcessGroup, dist.ProcessGroup, Any]:
    """This rank's group across nodes, the one inside its node of `size` ranks, and both as a mesh for FSDP."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("replicate", "shard"))
    limit = datetime.timedelta(seconds=timeout)
    across, inside = (dist.new_subgroups_by_enumeration(ranks, timeout=limit)[0] for ranks in (mesh.mesh.t().tolist(), mesh.mesh.tolist()))
    return across, inside, mesh


def averager_of(model: nn.Module, algorithm: Any, size: int, *timeout: float) -> rumor.Averager:
    across, inside, _ = groups(size, *timeout)
    return rumor.Averager(model, algorithm, group=across, local_group=inside)


def wrapped(model: nn.Module, how: str, size: int) -> nn.Module:
    _, inside, mesh = groups(size)
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=inside)
    from torch.distributed.fsdp import fully_shard

    if isinstance(model, nn.Sequential):
        fully_shard(model[0], mesh=mesh["shard"])  # the rest is the root's, which FSDP treats in its own way
    return fully_shard(model, mesh=mesh["shard"])


def whole(model: nn.Module) -> Tensor:
    """All parameters, [d]; of a sharded model too."""
    return torch.cat(
        [p.full_tensor().detach().reshape(-1) if hasattr(p, "full_tensor") else p.detach().reshape(-1) for p in model.parameters()]
    )


class Narrow(nn.Module):
    """So few parameters, and all of one row, that some ranks have none of them."""

    def __init__(self, d: int):
        super().__init__()
        self.line = nn.Parameter(torch.linspace(0.2, 0.5, d, dtype=torch.float64)[None])  # [1, d]

    def forward(self, x: Tensor) -> Tensor:
        z = x[..., : self.line.shape[1]] @ self.line.t()
        return torch.cat([z, 0 * z, -z], dim=-1)


MODELS: dict[str, Callable[[], nn.Module]] = {"network": network, "narrow": lambda: Narrow(1), "odd": lambda: Narrow(5)}


def links(n: int) -> rumor.Topology:
    """On a ring of 2 or 3, gossip would be a global average."""
    pair = rumor.from_matrix(torch.tensor([[0.7, 0.3], [0.3, 0.7]], dtype=torch.float64))
    return pair if n == 2 else rumor.from_networkx(nx.path_graph(n))


def lopsided(n: int) -> rumor.Topology:
    """Push-sum weights that are not 1 take three nodes."""
    return links(n) if n == 2 else rumor.from_digraph(nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2), (2, 1)]))


ALGORITHMS: dict[str, Callable[[int], Any]] = {
    "parallel_sgd": rumor.parallel_sgd,
    "local_sgd": lambda n: rumor.local_sgd(n, 3),
    "gossip_sgd complete": lambda n: rumor.gossip_sgd(rumor.complete(n)),
    "gossip_pga": lambda n: rumor.gossip_pga(links(n), 3),
    "gossip_pga delayed": lambda n: rumor.gossip_pga(links(n), 3, delay=1),
    "gossip_pga by gossip": lambda n: rumor.gossip_pga(links(n), 3, average_rounds=2),
    "local_sgd delayed": lambda n: rumor.gossip_pga(rumor.isolated(n), 3, delay=1),
    "gossip_aga": lambda n: rumor.gossip_aga(links(n), warmup=4, H_init=2, H_max=5),
    "gossip_aga delayed": lambda n: rumor.gossip_aga(links(n), warmup=4, H_init=2, H_max=5, delay=1),
    "gossip_aga by gossip": lambda n: rumor.gossip_aga(links(n), warmup=4, H_init=2, H_max=5, average_rounds=2, delay=1),
    "slowmo": lambda n: rumor.slowmo(links(n), 3, momentum=0.6, slow_lr=0.9),
    "diloco": lambda n: rumor.diloco(n, 3, topology=links(n)),
    "osgp": lambda n: rumor.osgp(lopsided(n)),
    "sgp": lambda n: rumor.osgp(lopsided(n), delay=0),
}


# Blocks of codes are cut from what a rank exchanges, which is another part of the model in every kind of node.
IN_CODES: dict[str, Callable[[int], Any]] = {
    "gossip_pga 4 bits": lambda n: rumor.gossip_pga(links(n), 3, bits=4),
    "gossip_pga 8 bits delayed": lambda n: rumor.gossip_pga(links(n), 3, delay=1, bits=8),
    "gossip_aga 16 bits": lambda n: rumor.gossip_aga(links(n), warmup=4, H_init=2, H_max=5, bits=16),
    "parallel_sgd 4 bits": lambda n: rumor.parallel_sgd(n, bits=4),
}


def train_there(rank: int, size: int, how: str, model_name: str, name: str) -> dict[str, Any]:
    n = dist.get_world_size() // size
    model = wrapped(MODELS[model_name](), how, size)
    averager = averager_of(model, {**ALGORITHMS, **IN_CODES}[name](n), size)
    opt = OPTIMIZERS["nesterov"](model.parameters())
    iterates = [whole(model) for _ in trained(model, averager, opt, rank, *batches(STEPS, n * size))]
    result = {"x": torch.stack(iterates), "H": averager.metrics.H, "distance": averager.consensus_distance()}
    assert averager.metrics.consensus_distance == result["distance"]
    with averager.averaged():
        result["averaged"] = whole(model)
    assert torch.equal(whole(model), iterates[-1]), "its own again"
    averager.finish()
    return {**result, "finished": whole(model)}


def train_here(n: int, size: int, model_name: str, name: str) -> dict[str, Any]:
    """n nodes of one rank, with the batches of `size` ranks each."""
    sim = rumor.Simulator(MODELS[model_name](), ALGORITHMS[name](n))
    opt = OPTIMIZERS["nesterov"](list(sim.parameters()))
    x, y = batches(STEPS, n * size)
    iterates = []
    for k in range(STEPS):
        lr = decayed(opt, k)
        losses = sim(loss_fn, x[k].reshape(n, -1, 5), y[k].reshape(n, -1))
        losses.sum().backward()
        opt.step()
        opt.zero_grad()
        sim.step(losses, lr=lr)
        iterates.append(sim.X)
    result = {"x": torch.stack(iterates, dim=1), "H": sim.metrics.H, "distance": sim.consensus_distance()}
    sim.finish()
    return {**result, "finished": sim.X}
