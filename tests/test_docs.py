"""Everything that the pages and the README tell users to type works.

Every block of Python runs as a script of its own, and so do both sides of every diff and every `rumor` command. Of commands that take
too long to run, the script and its options exist. `make test` runs all this in forked processes (see warm.py). `make test-all` also runs
it in new processes, as a user does.
"""

import ast
import inspect
import re
import runpy
import shlex
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

import griffe
import pytest
from torch.distributed.run import get_args_parser

import rumor
from rumor.cli import main
from tests import warm
from tests.elastic import Job
from tests.integrations import LIBRARIES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COORDINATOR = "HOST:29510"  # in scripts whose nodes come and go
LOSS_OF_THE_NODES = r"loss [012]\.\d+; this rank sent [\d,]+ bytes to other nodes\n"  # 20 at the start
PRINTS = {  # in addition to a ```text block below the script
    "train.py": r"largest error of a weight: 0\.[01]\d*, .*'gossip': 167, 'global': 33.*\n",
    "ddp_inside.py": LOSS_OF_THE_NODES,
    "fsdp_inside.py": LOSS_OF_THE_NODES,
    "planning-2": r"rumor\.gossip_pga\(rumor\.one_peer_exponential\(32\).*\n",
}


class Block(NamedTuple):
    """A script, and the output that the page shows in a ```text block below it. Numbers may differ."""

    name: str
    script: str
    shown: str | None

    @property
    def integration(self) -> str | None:
        """Name of the integration that the script uses, if any."""
        return next((name for name in LIBRARIES if f"rumor.integrations.{name}" in self.script), None)


def python_blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```python\n(.*?)^```\n(?:[^`#]*?^```text\n(.*?)^```)?", page.read_text(), re.S | re.M)
    names = [re.match(r"# (\w+\.py)", script) for script, _ in found]
    numbered = [name[1] if name else f"{page.stem}-{i}" for i, name in enumerate(names, start=1)]
    return [Block(name, script, shown or None) for name, (script, shown) in zip(numbered, found, strict=True)]


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"^```bash\n(?!#SBATCH)(.*?)^```", page.read_text(), re.S | re.M)  # Slurm's script has a test of its own
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("rumor ") or (line.startswith("torchrun --standalone") and "-m rumor" in line)]


def printed(arguments: list[str], folder: Path, processes: int | None = None, as_typed: bool = False, preload: Sequence[str] = ()) -> str:
    """Return the output of `python ARGUMENTS`, or of torchrun with that many processes."""
    options = {"preload": preload, "fresh": as_typed}
    done = warm.torchrun(processes, arguments, folder, **options) if processes else warm.run(arguments, folder, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_numbers(text: str) -> str:
    return re.sub(r"-?\d[\d.,]*(e[+-]\d+)?", "#", text)


@pytest.mark.processes
@warm.both_ways
@pytest.mark.parametrize(
    "block", [block for page in PAGES for block in python_blocks(page) if COORDINATOR not in block.script], ids=lambda block: block.name
)
def test_a_block_runs_on_its_own(block: Block, as_typed: bool, tmp_path: Path) -> None:
    """If its first line names a file, the block is a script for torchrun, with as many processes as the line says, or four."""
    (tmp_path / "script.py").write_text(block.script)
    first = block.script.splitlines()[0]
    several = re.match(r"# \w+\.py", first)
    number = re.search(r"--nproc-per-node (\d+)", first)
    processes = int(number[1]) if number else 4 if several else None
    preload = LIBRARIES[block.integration] if block.integration else ()
    said = printed(["script.py"], tmp_path, processes, as_typed, preload)
    if block.shown is not None:
        assert without_numbers(said) == without_numbers(block.shown)
    assert re.fullmatch(PRINTS.get(block.name, "(?s:.*)"), said), said


@pytest.mark.processes
@warm.both_ways
@pytest.mark.parametrize(
    "block", [block for page in PAGES for block in python_blocks(page) if COORDINATOR in block.script], ids=lambda block: block.name
)
def test_an_elastic_block_runs_on_two_nodes(block: Block, as_typed: bool, tmp_path: Path) -> None:
    with Job(tmp_path, steps=0, min_nodes=2) as job, ExitStack() as running:
        (tmp_path / "script.py").write_text(block.script.replace(COORDINATOR, str(job.address)))
        nodes = [running.enter_context(warm.Job([tmp_path / "script.py"], {}, fresh=as_typed)) for _ in range(2)]
        assert [node.wait() for node in nodes] == [0, 0], [node.output() for node in nodes]
        assert any(line.startswith("the job has ended at step ") for line in job.lines), job.lines


def test_what_is_expected_of_a_block_is_of_one_that_exists() -> None:
    names = [block.name for page in PAGES for block in python_blocks(page)]
    assert len(names) == len(set(names))
    assert set(PRINTS) <= set(names)


@pytest.mark.processes
@warm.both_ways
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(
    page: Path, as_typed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(ROOT / "docs" / "planning-probe.json", tmp_path / "probe.json")  # for pages that do not measure
    monkeypatch.chdir(tmp_path)
    for line in commands(page):
        name, *arguments = shlex.split(line, comments=True)
        if name == "torchrun":
            (tmp_path / "probe.json").unlink()
            standalone, option, number, *command = arguments
            assert (standalone, option) == ("--standalone", "--nproc-per-node")
            assert printed(command, tmp_path, int(number), as_typed)
            assert (tmp_path / "probe.json").exists()
        elif as_typed:
            assert printed(["-m", "rumor", *arguments], tmp_path, as_typed=True), line
        else:
            assert main(arguments) in (None, 0), line
            assert capsys.readouterr().out, line


# ---- differences, and commands that want more hosts, data or time than there is here ----------------------------------------------------

WITH_DIFFS = """
import sys, torch, torch._dynamo, rumor
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Net(nn.Linear):
    def __init__(self):
        super().__init__(5, 1)

torch._dynamo.config.disable = True  # the compiler takes long, and a diff does not depend on it
dist.init_process_group("gloo")
rank, device, path, algorithm = dist.get_rank(), "cpu", "model.pt", rumor.gossip_sgd(rumor.ring(2))
loader, loss_fn = [(torch.randn(4, 5), torch.randn(4, 1)) for _ in range(7)], nn.functional.mse_loss
for name in sys.argv[1:]:
    model = Net()
    opt, averager = torch.optim.SGD(model.parameters()), rumor.Averager(model, algorithm)
    source, here = open(name).read(), dict(globals())
    exec(compile(source, name, "exec"), here)
    steps = 7 if "averager.step(" in source else 0
    assert here["averager"].steps == steps, (name, here["averager"].steps)
    here["averager"].finish()
    del here  # DDP must be gone when the group is
dist.destroy_process_group()
"""
LEFT_OUT = "for x, y in loader:\n    loss = loss_fn(model(x), y); loss.backward()"  # what a diff may write as ...


@pytest.mark.processes
def test_diffs_run_before_and_after(tmp_path: Path) -> None:
    diffs = [(page.stem, block) for page in PAGES for block in re.findall(r"^```diff\n(.*?)^```", page.read_text(), re.S | re.M)]
    assert diffs
    names = []
    for number, (page, diff) in enumerate(diffs):
        assert all(line[:2] in ("  ", "- ", "+ ") for line in diff.splitlines()), diff
        for side, when in (("-", "before"), ("+", "after")):
            lines = [line[2:] for line in diff.splitlines() if line[0] in (" ", side)]
            names.append(f"{page}-{number}-{when}.py")
            (tmp_path / names[-1]).write_text("\n".join(LEFT_OUT if line == "..." else line for line in lines) + "\n")
    (tmp_path / "script.py").write_text(WITH_DIFFS)
    printed(["script.py", *names], tmp_path, processes=2)


def long_commands() -> dict[str, list[str]]:
    """Return the commands of all pages that are not run, by their line on the page."""
    found = {}
    for page in PAGES:
        text = re.sub(r"^```(python|diff)\n.*?^```", "", page.read_text(), flags=re.S | re.M).replace("\\\n", " ")
        text = re.sub(r"^```bash\n(.*?)^```", lambda block: indent(block[1], "    "), text, flags=re.S | re.M)
        for line in re.findall(r"^ {4}((?:torchrun|python3?|make|pip) .*)$", text, re.M):
            found[line] = shlex.split(line, comments=True)
    return found


@lru_cache
def help_of(script: Path) -> str:
    return printed([str(script), "--help"], ROOT)


@pytest.mark.processes
@pytest.mark.parametrize("line", long_commands())
def test_a_command_that_is_not_run_names_what_there_is(line: str) -> None:
    name, *arguments = long_commands()[line]
    if name == "torchrun":
        options = get_args_parser().parse_args(arguments)  # torchrun's own
        if options.module:
            assert options.training_script == "rumor"
            return
        arguments = [options.training_script, *options.training_script_args]
    if name == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M)
    elif name == "pip":
        assert arguments[0] == "install"
    elif arguments[0] not in {block.name for page in PAGES for block in python_blocks(page)}:
        known = help_of(ROOT / arguments[0])
        assert [word for word in arguments[1:] if word.startswith("--") and word not in known] == []


def test_the_errors_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # texts of several lines
    rows = re.findall(r"^\| (.*?) \| ", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    said = [row for row in rows if row not in ("it says", "---")]
    assert len(said) > 40
    pieces = [piece.strip(" ,:") for row in said for piece in re.split("…|; ", row)]
    assert [piece for piece in pieces if piece not in source] == []


def test_the_tests_that_the_page_for_contributors_names_are_there() -> None:
    page = (ROOT / "docs" / "contributing-tests.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    names = re.findall(r"`(test_\w+)`", page)
    assert len(names) > 25
    assert [name for name in names if f"def {name}(" not in tests] == []
    assert "test_" not in (ROOT / "docs" / "reliability.md").read_text()  # that page is for users


def test_the_slurm_script_on_the_page_is_the_file() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    (block,) = re.findall(r"^```bash\n(#SBATCH.*?)^```", page, re.S | re.M)
    script = (ROOT / "examples" / "slurm.sh").read_text()
    assert script.endswith(block)
    assert script.count("#SBATCH --") == block.count("#SBATCH --") + 1, "but for the job's name"


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: rumor\.([\w.]+)", pages, re.M))
    of_integrations = {name for name in shown if name.startswith("integrations.")}
    of_extending = {name for name in shown if name.startswith(("methods.", "engines."))}
    assert {name.split(".")[-1] for name in shown - of_integrations - of_extending} == set(rumor.__all__)
    assert {name.removeprefix("methods.") for name in of_extending if name.startswith("methods.")} <= set(rumor.methods.__all__)
    assert {name.removeprefix("engines.") for name in of_extending if name.startswith("engines.")} <= set(rumor.engines.__all__)
    assert len(of_extending) > 10
    defined = {
        f"integrations.{path.stem}.{node.name}"
        for path in (ROOT / "src" / "rumor" / "integrations").glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    }
    assert of_integrations == defined - {"integrations.huggingface.rank_file"}  # which the tests use


def test_the_reference_shows_functions_and_not_the_modules_of_their_names() -> None:
    """`rumor.gossip_pga` is a function in a module of that name, whose other members do not belong on the page."""
    (extensions,) = re.findall(r"^ +extensions: \[(.*)\]", (ROOT / "mkdocs.yml").read_text(), re.M)
    loaded = griffe.load_extensions(*(ROOT / path for path in extensions.split(", ")))
    package = griffe.load("rumor", search_paths=[ROOT / "src"], extensions=loaded)
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    shown = re.findall(r"^::: rumor\.([\w.]+)", pages, re.M)
    functions = [name for name in shown if "." not in name and inspect.isfunction(getattr(rumor, name))]
    assert len(functions) > 20
    assert [name for name in functions if not package[name].is_function] == []


def test_inline_code_breaks_only_between_the_parts_of_names() -> None:
    (hook,) = re.findall(r"^hooks: \[(.*)\]", (ROOT / "mkdocs.yml").read_text(), re.M)
    on_page_content = runpy.run_path(str(ROOT / hook))["on_page_content"]
    block = "<pre><span></span><code>rumor plan -n 4\n</code></pre>"
    page = f"<p><code>--steps 9</code> <code>{'long ' * 9}</code></p><td><code>base_graph(n)</code></td>{block}"
    assert on_page_content(page) == (
        f'<p><code class="short">--steps 9</code> <code>{"long " * 9}</code></p><td><code>base_<wbr>graph(<wbr>n)</code></td>{block}'
    )
