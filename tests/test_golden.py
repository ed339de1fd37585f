"""One frozen small trajectory per algorithm: a change that should not change numbers keeps them. `pytest --rewrite-golden` writes them."""

import json
from pathlib import Path

import pytest
import torch

from tests.problems import ALGORITHMS, train_here

GOLDEN = Path(__file__).parent / "golden.json"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_trajectory_is_the_golden_one(name: str, request: pytest.FixtureRequest) -> None:
    iterates, _, periods = train_here(ALGORITHMS[name](), "nesterov", 12)
    found = {"models": iterates[[3, 11], :, :3].tolist(), "periods": periods}
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if request.config.getoption("--rewrite-golden"):
        GOLDEN.write_text(json.dumps(golden | {name: found}, indent=0) + "\n")
        return
    assert found["periods"] == golden[name]["periods"]
    assert torch.allclose(torch.tensor(found["models"]), torch.tensor(golden[name]["models"]), rtol=0, atol=1e-10)
