"""What the README tells users to type does what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def run(arguments: list[str], folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_script(tmp_path: Path) -> None:
    (script,) = [block for block in BLOCKS if block.startswith("# train.py")]
    (tmp_path / "train.py").write_text(script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    said = run([*torchrun, "train.py"], tmp_path)
    error = re.search(r"largest error of a weight: ([\d.]+), .*'gossip': 167, 'global': 33", said)
    assert error, said
    assert float(error.group(1)) < 0.2


def test_other_blocks(tmp_path: Path) -> None:
    others = [block for block in BLOCKS if not block.startswith("# train.py")]
    assert others
    for block in others:
        (tmp_path / "block.py").write_text(block)
        assert run([sys.executable, "block.py"], tmp_path)


def test_the_planning_commands(tmp_path: Path) -> None:
    (block,) = [block for block in re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S) if "rumor plan" in block]
    commands = [line.split("#")[0].split() for line in block.splitlines()]
    assert [command[0] for command in commands] == ["torchrun", "rumor", "rumor", "rumor"]
    for name, *arguments in commands:
        module = "torch.distributed.run" if name == "torchrun" else "rumor"
        assert run([sys.executable, "-m", module, *arguments], tmp_path)
    assert (tmp_path / "probe.json").exists()


def test_the_demo_prints_its_table(tmp_path: Path) -> None:
    said = run([sys.executable, "-m", "rumor", "demo", "--nodes", "4", "--steps", "60"], tmp_path)
    rows = re.findall(r"^(Parallel SGD|Local SGD|Gossip SGD|Gossip-PGA|Gossip-AGA) +([\d.]+)%", said, re.M)
    assert len(rows) == 5, said
    assert all(float(accuracy) > 50 for _, accuracy in rows)
    assert sorted(path.name for path in (tmp_path / "rumor-demo").iterdir()) == ["demo.json", "demo.png"]


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
