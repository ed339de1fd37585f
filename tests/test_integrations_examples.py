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


def test_the_slurm_script_starts_torchrun_on_a_script_that_exists() -> None:
    script = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    text = script.read_text()
    assert "--ntasks-per-node=1" in text, "one torchrun a node"
    assert re.search(r"^srun .*torchrun", text, re.M)
    (called,) = re.findall(r"^\s+(examples/\S+\.py)$", text, re.M)
    assert (ROOT / called).exists()


def test_the_slurm_script_hands_torchrun_what_slurm_says(tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands and torchrun, which print what they are called with."""
    for name, body in {"scontrol": "echo host-a; echo host-b", "srun": 'shift; exec "$@"', "torchrun": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "host-[a-b]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "17"}
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(EXAMPLES / "slurm.sh")],
        env={**warm.environment(), **slurm, **path},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    rendezvous = "--rdzv-id 17 --rdzv-backend c10d --rdzv-endpoint host-a:29500"
    assert done.stdout.split() == f"--nnodes 2 --nproc-per-node 4 {rendezvous} examples/from_ddp.py".split()


def test_the_kubernetes_job_finds_its_pods() -> None:
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))
    service, job = (next(d for d in documents if d["kind"] == kind) for kind in ("Service", "Job"))
    spec, name = job["spec"], job["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["clusterIP"] == "None", "headless"
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert pod["restartPolicy"] == "Never"
    options = dict(option.removeprefix("--").split("=") for option in container["command"] if option.startswith("--"))
    assert options["nnodes"] == str(spec["completions"])
    assert options["master-addr"] == f"{name}-0.{service['metadata']['name']}"
    assert int(options["master-port"]) == service["spec"]["ports"][0]["port"] == container["ports"][0]["containerPort"]
    assert options["node-rank"] == "$(JOB_COMPLETION_INDEX)"
    assert "JOB_COMPLETION_INDEX" in [variable["name"] for variable in container["env"]]
    threads = next(variable["value"] for variable in container["env"] if variable["name"] == "OMP_NUM_THREADS")
    assert container["resources"]["requests"]["cpu"] == container["resources"]["limits"]["cpu"] == threads
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount == {"name": volume["name"], "mountPath": "/dev/shm"}
    assert volume["emptyDir"] == {"medium": "Memory"}
    assert container["command"][0] == "torchrun"
    assert (ROOT / container["command"][-1]).exists()


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
