"""One frozen small trajectory per algorithm: a change that should not change numbers keeps them. `pytest --rewrite-golden` writes them."""

import json
from pathlib import Path

import pytest
import torch

import rumor
from tests.problems import ALGORITHMS, FIVE_NODES, N, train_here

GOLDEN = Path(__file__).parent / "golden.json"
AVERAGED_STATE = {  # with averaged momentum; a period from 1 on leaves it local at first
    f"averaged momentum, H from {shortest}": lambda H=H: rumor.gossip_pga(rumor.one_peer_exponential(N), H, bits=4)
    for shortest, H in ((3, rumor.LearningRate(3, 24, power=0.3)), (1, rumor.LearningRate(1, 24, power=2)))
}
RECOMMENDED = {  # in docs/beyond.md
    "recommended": lambda: rumor.gossip_pga(rumor.one_peer_exponential(N), rumor.LearningRate(1, 24, power=0.48), bits=4)
}
BUILDERS = ALGORITHMS | FIVE_NODES | AVERAGED_STATE | RECOMMENDED


@pytest.mark.parametrize("name", BUILDERS)
def test_trajectory_is_the_golden_one(name: str, request: pytest.FixtureRequest) -> None:
    iterates, _, periods = train_here(BUILDERS[name](), "nesterov", 12, "global" if name in AVERAGED_STATE else None)
    found = {"models": iterates[[3, 11], :, :3].tolist(), "periods": periods}
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if request.config.getoption("--rewrite-golden"):
        GOLDEN.write_text(json.dumps(golden | {name: found}, indent=0) + "\n")
        return
    assert found["periods"] == golden[name]["periods"]
    assert torch.allclose(torch.tensor(found["models"]), torch.tensor(golden[name]["models"]), rtol=0, atol=1e-10)
