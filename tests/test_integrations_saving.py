"""The mean model saves as an ordinary state dict, which loads in a process that knows nothing of Rumor."""

from pathlib import Path

import torch
from torch import Tensor

import rumor
from tests.cluster import Cluster
from tests.integrations import flat, network, run

LOAD = """
import sys
import torch
from torch import nn

import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

states = {"safetensors": load_file("model.safetensors")}
states["torch.distributed.checkpoint"] = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).state_dict()
dcp.load({"model": states["torch.distributed.checkpoint"]}, checkpoint_id="sharded")
loaded = {}
for kind, state in states.items():
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
    model.load_state_dict(state)
    loaded[kind] = nn.utils.parameters_to_vector(model.parameters()).detach()
assert "rumor" not in sys.modules
torch.save(loaded, "loaded.pt")
"""


def save(rank: int, folder: Path) -> tuple[Tensor, Tensor]:
    """One step apart, then saved in both formats; this node's own model before and after."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    model = network()
    averager = rumor.Averager(model, rumor.gossip_sgd(rumor.ring(4)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)
    averager.step()
    before = flat(model)
    with averager.averaged():
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "sharded")  # every rank: a collective
        if rank == 0:
            save_file(model.state_dict(), folder / "model.safetensors")
    return before, flat(model)


def test_the_mean_model_loads_without_rumor(four: Cluster, tmp_path: Path) -> None:
    models = four.run(save, tmp_path)
    assert all(torch.equal(before, after) for before, after in models)
    own = torch.stack([before for before, _ in models])
    assert own.std(dim=0).min() > 0.1, "nodes that don't differ prove nothing"
    (tmp_path / "load.py").write_text(LOAD)
    run(["load.py"], tmp_path)
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=True)
    assert sorted(loaded) == ["safetensors", "torch.distributed.checkpoint"]
    for model in loaded.values():
        torch.testing.assert_close(model, own.mean(dim=0))
