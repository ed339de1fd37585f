"""The release: the wheel and the sdist, what they say of themselves, and an installation that has nothing to do with the repository."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet

import rumor
from tests import warm

ROOT = warm.ROOT
GITHUB = ROOT / ".github"
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
needs_build = pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="build is not installed: pip install build hatchling")


# ---- what is released ---------------------------------------------------------------------------------------------------------------


def test_the_changelog_begins_with_this_version_and_the_citation_names_it() -> None:
    heads = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    (unreleased, _), (version, date), *_ = heads
    assert (unreleased, version) == ("Unreleased", rumor.__version__)
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {version}\n" in citation
    assert f"\ndate-released: {date}\n" in citation


@pytest.mark.parametrize("folder", ["src", "examples"])
def test_the_source_is_that_of_the_oldest_python(folder: str) -> None:
    oldest = tuple(map(int, PYTHONS[0].split(".")))
    for path in (ROOT / folder).rglob("*.py"):
        ast.parse(path.read_text(), path.name, feature_version=oldest)


# ---- the workflow and the templates -------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


def test_the_workflow_runs_what_a_developer_runs() -> None:
    workflow = read(GITHUB / "workflows" / "ci.yml")
    assert {"push", "pull_request"} <= set(workflow[True]), "YAML reads the word `on` as true"
    (job,) = workflow["jobs"].values()
    *setup, last = job["steps"]
    assert last == {"run": ".ci/run"}
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in setup)
    python = setup[-1]["with"]
    assert job["strategy"]["matrix"] == {"python": PYTHONS}
    assert python["python-version"] == "${{ matrix.python }}"
    assert python["cache"] == "pip"
    assert all((ROOT / name).exists() for name in python["cache-dependency-path"].split())


@pytest.mark.parametrize("path", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_an_issue_template_has_what_github_needs(path: Path) -> None:
    form = read(path)
    if path.stem == "config":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert {"name", "description", "body"} <= set(form) <= {"name", "description", "body", "labels", "title"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert fields
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    for name in re.findall(r"\b(?:docs/\w+|SECURITY)\.md", path.read_text()):
        assert (ROOT / name).exists(), name


# ---- the wheel and the sdist --------------------------------------------------------------------------------------------------------


def without_repository() -> dict[str, str]:
    """The environment of a user who has no clone."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONSTARTUP")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::SyntaxWarning"}


def done(command: list[str | Path], folder: Path, env: dict[str, str] | None = None) -> str:
    """Run a command that must succeed, and return what it prints."""
    ended = subprocess.run(list(map(str, command)), cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, (command, ended.stdout[-2000:], ended.stderr[-6000:])
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it: `python -m build`, with the backend that is installed here."""
    folder = tmp_path_factory.mktemp("dist")
    done([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT], folder)
    return folder


def wheel_in(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.long
@needs_build
def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(wheel_in(built)) as wheel:
        names = wheel.namelist()
    info = f"rumor-{rumor.__version__}.dist-info/"
    here = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "rumor").rglob("*") if path.suffix in (".py", ".typed")}
    assert {name for name in names if not name.startswith(info)} == here
    assert "rumor/py.typed" in names
    assert {f"{info}licenses/LICENSE", f"{info}entry_points.txt"} <= set(names)


@pytest.mark.long
@needs_build
def test_the_metadata_is_valid_and_true(built: Path) -> None:
    from trove_classifiers import classifiers

    with zipfile.ZipFile(wheel_in(built)) as wheel:
        found = Metadata.from_email(wheel.read(f"rumor-{rumor.__version__}.dist-info/METADATA"), validate=True)
    assert (found.name, str(found.version), found.license_expression) == ("rumor", rumor.__version__, "Apache-2.0")
    assert found.requires_python == SpecifierSet(f">={PYTHONS[0]}")
    assert found.description == (ROOT / "README.md").read_text()
    assert found.description_content_type == "text/markdown"
    assert found.classifiers is not None
    assert set(found.classifiers) <= classifiers
    assert [one.split(" :: ")[-1] for one in found.classifiers if re.search(r":: 3\.\d+$", one)] == PYTHONS
    assert {requirement.name for requirement in found.requires_dist or [] if requirement.marker is None} == {"torch", "numpy"}


@pytest.mark.long
@needs_build
def test_the_sdist_is_small_and_builds_the_wheel_of_the_repository(built: Path, tmp_path: Path) -> None:
    done([sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, ROOT], tmp_path)
    assert wheel_in(tmp_path).read_bytes() == wheel_in(built).read_bytes()
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as files:
        top = {Path(name).parts[1] for name in files.getnames()}
    wanted = {"src", "examples", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "constraints.txt"}
    assert wanted <= top <= wanted | {"PKG-INFO", ".gitignore"}
    assert sdist.stat().st_size < 1_000_000


# ---- an installation ----------------------------------------------------------------------------------------------------------------

SIMULATOR = """
import sys, torch, rumor
assert "site-packages" in rumor.__file__, rumor.__file__
assert "tests" not in sys.modules
sim = rumor.Simulator(torch.nn.Linear(20, 1), rumor.gossip_pga(rumor.ring, H=6), n=8)
opt = torch.optim.SGD(sim.parameters(), lr=0.05)
for step in range(60):
    x = torch.randn(8, 8, 20)
    losses = sim(lambda model, x: (model(x) - x.sum(dim=1, keepdim=True)).square().mean(), x)
    losses.sum().backward()
    opt.step()
    opt.zero_grad()
    sim.step(losses)
print(rumor.__version__, float(losses.mean()))
"""
GOSSIP = """
import torch, rumor
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(20, 1)
averager = rumor.Averager(model, rumor.method("gossip_pga(one_peer_exponential, H=6, bits=4)"))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(dist.get_rank())
for step in range(60):
    x = torch.randn(8, 20)
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    averager.step(loss)
averager.finish()
if dist.get_rank() == 0:
    print(float(loss), averager.metrics.rounds["gossip"])
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bin folder of a new environment with the wheel, and with what the wheel asks for: torch, numpy and no more."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True)
    pip: list[str | Path] = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile"]
    done([*pip, "--constraint", ROOT / "constraints.txt", wheel_in(built)], folder, without_repository())
    yield folder / "bin"
    shutil.rmtree(folder)  # 0.8 GB, which pytest would keep


@pytest.mark.long
@pytest.mark.processes
@needs_build
def test_an_installation_works_without_the_repository(installed: Path, tmp_path: Path) -> None:
    env = without_repository()
    version, loss = done([installed / "python", "-c", SIMULATOR], tmp_path, env).split()
    assert version == rumor.__version__
    assert float(loss) < 1, "20 at the start"

    (tmp_path / "train.py").write_text(GOSSIP)
    loss, rounds = done([installed / "torchrun", "--standalone", "--nproc-per-node", "2", "train.py"], tmp_path, env).split()
    assert float(loss) < 1
    assert int(rounds) == 50

    assert "coordinator" in done([installed / "rumor"], tmp_path, env)
    assert "beta" in done([installed / "rumor", "topology", "ring", "-n", "16"], tmp_path, env)
    plan = ["plan", "-n", "8", "--parameters", "25.5M", "--compute", "146ms", "--bandwidth", "10Gbit/s"]
    assert "gossip" in done([installed / "rumor", *plan], tmp_path, env).lower()


@pytest.mark.long
@pytest.mark.processes
@needs_build
def test_an_installation_has_types_and_no_strangers(installed: Path, tmp_path: Path) -> None:
    """Type checkers look for py.typed. Packages beside rumor would hide a user's own: tests, examples and the like."""
    (site,) = installed.parent.glob("lib/python*/site-packages")
    assert (site / "rumor" / "py.typed").exists()
    source = "import importlib.metadata as m; print(*{str(f).split('/')[0] for f in m.files('rumor')} - {'..'})"
    packages = done([installed / "python", "-c", source], tmp_path, without_repository()).split()
    assert sorted(packages) == ["rumor", f"rumor-{rumor.__version__}.dist-info"]
    assert not any((site / name).exists() for name in ("tests", "examples", "experiments", "benchmarks", "docs", "src"))
