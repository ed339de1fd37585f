"""The architecture: imports flow one way, and no file or function grows out of hand. `python -m tests.house` prints it."""

import re
import subprocess
import sys

from tests import house, mutants


def test_imports_flow_one_way() -> None:
    assert house.upward_imports() == []


def test_there_are_no_cycles() -> None:
    assert house.cycle() == []


def test_files_and_functions_stay_readable() -> None:
    assert len(house.top_modules()) <= 12
    assert house.longest_files()[0][0] <= 350, house.longest_files()[0]
    assert max(house.functions())[0] <= 70, max(house.functions())


def test_no_conditional_expression_stands_as_a_statement() -> None:
    assert house.conditional_statements() == []


def test_only_one_file_imports_torch_distributed() -> None:
    imported = re.compile(r"^\s*((import|from) torch\.distributed|from torch import .*\bdistributed\b)", re.M)
    assert [name for name, path in house.MODULES.items() if imported.search(path.read_text())] == ["rumor.engines.processes.transport"]


WITHOUT_DISTRIBUTED = """
import sys, torch
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()  # torch imports what its optimizers need
torch.distributed.is_available = lambda: False
for name in list(sys.modules):
    if name.startswith("torch.distributed"):
        sys.modules[name] = None  # importing it again is an error
import rumor
sim = rumor.Simulator(torch.nn.Linear(2, 1), rumor.gossip_pga(rumor.ring, H=2), n=4)
opt = torch.optim.SGD(sim.parameters(), lr=0.1)
for _ in range(2):
    losses = sim(lambda model, x: model(x).square().mean(), torch.randn(4, 8, 2))
    losses.sum().backward()
    opt.step()
    sim.step(losses)
assert sim.consensus_distance() < 1e-12
assert rumor.theory.C_beta(rumor.ring(8).beta, 4) > 1
try:
    rumor.Averager
except ImportError as error:
    print(error)
"""


def test_simulator_theory_and_topologies_work_where_torch_has_no_distributed() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_DISTRIBUTED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "rumor.Averager needs torch.distributed, which this build of torch does not have" in done.stdout


def test_every_mutant_changes_a_line_that_is_there() -> None:
    for mutant in mutants.MUTANTS:
        assert mutant.before in (mutants.ROOT / "src" / "rumor" / mutant.path).read_text(), mutant
