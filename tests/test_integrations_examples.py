"""The examples run and learn; the scripts for clusters call what is there; importing rumor imports none of the libraries."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import warm
from tests.integrations import ROOT, run, torchrun

EXAMPLES = ROOT / "examples"


@pytest.mark.processes
def test_from_ddp_in_three_changed_lines(tmp_path: Path) -> None:
    lines = (EXAMPLES / "from_ddp.py").read_text().split('"""', 2)[2].splitlines()
    changed = [line.strip() for line in lines if "rumor" in line or "averager" in line]
    assert [line.split("(")[0] for line in changed[3:]] == ["with averager.averaged", "averager.finish"]
    assert len(changed) == 5, "three lines train; two more evaluate the mean model and end with it"
    said = torchrun(EXAMPLES / "from_ddp.py", folder=tmp_path)
    accuracies = [float(percent) for percent in re.findall(r"accuracy of the mean model ([\d.]+)%", said)]
    assert len(accuracies) == 5, "rank 0 alone prints"
    assert accuracies[-1] > 85 > accuracies[0]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "bound", "integration"),
    [
        ("lightning_callback", 0.1, "lightning"),
        ("huggingface_trainer", 0.5, "huggingface"),
        ("accelerate_loop", 0.1, "huggingface"),
    ],
)
def test_an_example_learns(tmp_path: Path, name: str, bound: float, integration: str) -> None:
    said = torchrun(EXAMPLES / f"{name}.py", folder=tmp_path, integration=integration)
    (loss,) = re.findall(r"loss of the mean model: ([\d.]+)", said)
    assert float(loss) < bound


@pytest.mark.processes
def test_ray_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a token would be written to the home folder
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    said = run([str(EXAMPLES / "ray_train.py")], tmp_path)
    error = re.search(r"largest error of a weight: ([\d.]+), bytes sent: [\d,]+", said)
    assert error, said
    assert float(error.group(1)) < 0.05


def options_of(command: list[str]) -> dict[str, str]:
    return dict(option.removeprefix("--").split("=") for option in command if option.startswith("--"))


def test_the_slurm_script_goes_on_without_a_lost_host() -> None:
    script = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    text = script.read_text()
    assert "--ntasks-per-node=1" in text, "one node a host"
    assert re.search(r"^#SBATCH --no-kill$", text, re.M)
    assert re.search(r"^srun --no-kill --kill-on-bad-exit=0 --wait=0 ", text, re.M)


def test_the_slurm_script_starts_a_coordinator_and_nodes_that_may_fail(tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands, rumor and python, which print what they are called with. The first start fails."""
    stand_ins = {
        "scontrol": "echo host-a; echo host-b",
        "srun": 'shift 3; SLURM_PROCID=1 "$@"',
        "rumor": 'echo rumor "$@"; exec sleep 30',
        "python": f'echo python "$@"; mkdir "{tmp_path}/failed" 2> /dev/null && exit 1; sleep 0.2',
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**warm.environment(), "SLURM_JOB_NODELIST": "host-[a-b]", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(EXAMPLES / "slurm.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=True)
    coordinator, *nodes = sorted(done.stdout.splitlines(), reverse=True)
    assert coordinator == "rumor coordinator --bind 0.0.0.0:29510"
    assert nodes == 2 * ["python examples/elastic.py --coordinator host-a:29510 --name host1"]
    assert (ROOT / "examples" / "elastic.py").exists()


def test_the_kubernetes_job_finds_its_coordinator_and_replaces_lost_pods() -> None:
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))
    service, deployment, job = (next(d for d in documents if d["kind"] == kind) for kind in ("Service", "Deployment", "Job"))
    (port,) = service["spec"]["ports"]
    of_coordinator = deployment["spec"]["template"]
    (coordinator,) = of_coordinator["spec"]["containers"]
    assert service["spec"]["selector"] == of_coordinator["metadata"]["labels"] == deployment["spec"]["selector"]["matchLabels"]
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"}), "one coordinator a job"
    assert coordinator["command"][:2] == ["rumor", "coordinator"]
    assert options_of(coordinator["command"])["bind"] == f"0.0.0.0:{port['port']}"
    assert coordinator["ports"] == [{"containerPort": port["port"]}]

    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert job["spec"]["parallelism"] > 1
    assert "completions" not in job["spec"], "else a pod that is replaced after the end would be refused again and again"
    assert job["spec"]["backoffLimit"] >= 100
    assert pod["restartPolicy"] == "Never"
    options = options_of(container["command"])
    assert options["coordinator"] == f"{service['metadata']['name']}:{port['port']}"
    assert options["name"] == "$(POD)"
    assert "POD" in [variable["name"] for variable in container["env"]]
    threads = next(variable["value"] for variable in container["env"] if variable["name"] == "OMP_NUM_THREADS")
    assert container["resources"]["requests"]["cpu"] == container["resources"]["limits"]["cpu"] == threads
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount == {"name": volume["name"], "mountPath": "/dev/shm"}
    assert volume["emptyDir"] == {"medium": "Memory"}
    assert container["command"][0] == "python"
    assert (ROOT / container["command"][1]).exists()


@pytest.mark.processes
@pytest.mark.parametrize(("name", "library"), [("lightning", "lightning"), ("huggingface", "transformers")])
def test_a_library_that_is_missing_is_named_with_the_extra_that_brings_it(name: str, library: str, tmp_path: Path) -> None:
    lines = [f"import sys; sys.modules['{library}'] = None", "try:", f"    import rumor.integrations.{name}"]
    source = "\n".join([*lines, "except ImportError as error:", "    print(error)"])
    done = warm.run(["-c", source], tmp_path)
    assert done.stdout.endswith(f"rumor.integrations.{name} needs pip install 'rumor[{name}]'\n"), done


@pytest.mark.processes
def test_importing_rumor_imports_none_of_them(tmp_path: Path) -> None:
    libraries = ["lightning", "transformers", "accelerate", "ray", "tensorboard", "safetensors"]
    run(["-c", f"import sys, rumor, rumor.integrations; assert not set({libraries}) & set(sys.modules)"], tmp_path)
