"""Things that break: killed nodes, cut links, slow nodes, models that are not finite, uneven data, signals.

All tests use real processes and have a deadline. docs/reliability.md says what a user sees in each case,
and docs/contributing-tests.md names the test.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rumor
from rumor.engines.processes import liveness
from tests import warm
from tests.cluster import Cluster
from tests.problems import ALGORITHMS, N, flat, network
from tests.test_bed import needs_shaping

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from bed import Bed, free_port  # noqa: E402

RING = rumor.ring(N)


# ---- on hosts of their own -----------------------------------------------------------------------------------------------------------

NODE = """
import datetime, json, os, signal, sys, time
import torch, torch.distributed as dist
import rumor

what, timeout, said = sys.argv[1], float(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(300, 300)
averager = rumor.Averager(model, rumor.gossip_pga(rumor.ring(dist.get_world_size()), H=6))
end = {"rank": rank, "error": None}
try:
    for step in range(60):
        if step == 7:
            open(said + f".{rank}.running", "w").close()
        if rank == 1 and what == "dies gossiping" and step == 8 or what == "dies averaging" and rank == 1 and step == 11:
            averager.engine.transport.wait = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # after its messages are posted
        with torch.no_grad():
            model.weight += 0.01 * rank * torch.sin(torch.arange(300.0) + step)
        averager.step()
        time.sleep(0.05 if step < 50 and what.startswith("link") else 0.0)
    averager.finish()
except ConnectionError as error:
    end["error"] = str(error)
end["sum"] = model.weight.double().sum().item()
with open(said + f".{rank}.part", "w") as file:
    json.dump(end, file)
os.replace(said + f".{rank}.part", said + f".{rank}.json")
os._exit(0 if end["error"] is None else 3)
"""


def on_hosts(bed: Bed, what: str, timeout: float, tmp_path: Path, disturb: Any = None) -> dict[int, dict[str, Any]]:
    """Run NODE on every host, call `disturb` when all of them are training, and return what each has written at its end."""
    said = tmp_path / what.replace(" ", "-")
    env = {"WORLD_SIZE": str(bed.hosts), "MASTER_PORT": str(free_port()), "MASTER_ADDR": bed.address(0)}
    env["GLOO_SOCKET_IFNAME"] = "eth0"
    command = ["-c", NODE, what, str(timeout), str(said)]
    jobs = [warm.Job(command, {**env, "RANK": str(i), "LOCAL_RANK": "0"}, bed._host(i)) for i in range(bed.hosts)]
    try:
        ends = time.monotonic() + warm.DEADLINE
        if disturb is not None:
            while not all(Path(f"{said}.{i}.running").exists() for i in range(bed.hosts)):
                assert time.monotonic() < ends, "they never got going"
                time.sleep(0.05)
            disturb()
        for job in jobs:
            job.wait(max(0.1, ends - time.monotonic()))
    finally:
        for job in jobs:
            job.kill()
    found = [json.loads(path.read_text()) for path in tmp_path.glob(f"{said.name}.*.json")]
    return {end["rank"]: end for end in found}


@pytest.mark.processes
@pytest.mark.parametrize(("what", "step"), [("dies gossiping", 8), ("dies averaging", 11)])
def test_all_survivors_name_the_node_that_was_killed_and_the_step(what: str, step: int, tmp_path: Path) -> None:
    needs_shaping()
    with Bed(4, "500mbit") as bed:
        ends = on_hosts(bed, what, 5.0, tmp_path)
    assert sorted(ends) == [0, 2, 3]
    for end in ends.values():
        assert "node 1 is lost (its process is gone)" in end["error"], end
        (at,) = re.findall(r"(?:gossiping|averaging globally) at step (\d+)", end["error"])
        assert step <= int(at) <= step + 2  # a message that was on its way may have arrived
    assert what == "dies gossiping" or any("averaging globally at step 11" in end["error"] for end in ends.values())


@pytest.mark.processes
def test_a_link_that_is_cut_is_an_error_at_the_time_out(tmp_path: Path) -> None:
    needs_shaping()
    with Bed(4, "500mbit") as bed:
        ends = on_hosts(bed, "link cut", 3.0, tmp_path, lambda: bed.cut(2))
    assert sorted(ends) == [0, 1, 2, 3]
    for rank in (0, 1, 3):
        assert "node 2 is lost (its host does not answer)" in ends[rank]["error"], ends[rank]
    assert all(f"node {rank} is lost (its host does not answer)" in ends[2]["error"] for rank in (0, 1, 3)), ends[2]


@pytest.mark.processes
def test_a_link_that_heals_within_the_time_out_changes_nothing(tmp_path: Path) -> None:
    needs_shaping()

    def cut_for_a_while() -> None:
        bed.cut(2)
        time.sleep(1.0)
        bed.cut(2, mend=True)

    with Bed(4, "500mbit") as bed:
        whole = on_hosts(bed, "link whole", 100.0, tmp_path)
        healed = on_hosts(bed, "link healed", 100.0, tmp_path, cut_for_a_while)
    assert all(end["error"] is None for end in healed.values()), healed
    assert {rank: end["sum"] for rank, end in healed.items()} == {rank: end["sum"] for rank, end in whole.items()}


# ---- torchrun starts it again --------------------------------------------------------------------------------------------------------


OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # or restarted processes find the addresses of those before them


def accuracy_of(said: str) -> float:
    return float(re.search(r"accuracy of the mean model: ([\d.]+)%", said).group(1))  # type: ignore[union-attr]


FORKED = ["--run-path", "--start-method", "fork"]  # options of torchrun: its processes do not import torch again


def started(folder: Path, as_typed: bool, *options: str, steps: int = 200) -> warm.Job:
    torchrun = [*warm.TORCHRUN, "4", *options, *([] if as_typed else FORKED)]
    return warm.Job([*torchrun, ROOT / "examples" / "restart.py", "--folder", folder, "--steps", str(steps)], OWN_STORE, fresh=as_typed)


def undisturbed_job(folder: Path, steps: int = 200) -> str:
    """Return the output of the same job if nothing happens to it."""
    done = warm.torchrun(4, [ROOT / "examples" / "restart.py", "--folder", folder, "--steps", str(steps)])
    assert done.returncode == 0, done.stderr
    return done.stdout


def latest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "latest.json").read_text())
    return found


def saved_models(folder: Path) -> list[Tensor]:
    """Return the models of all nodes in the latest checkpoint."""
    paths = sorted((folder / latest(folder)["name"]).glob("node-*.pt"))
    states = [torch.load(path, weights_only=True)["model"] for path in paths]
    return [torch.cat([t.flatten() for t in state.values()]) for state in states]


def latest_step(folder: Path) -> int:
    return int(latest(folder)["step"])


def wait_for_step(folder: Path, step: int) -> None:
    ends = time.monotonic() + warm.DEADLINE
    while not (folder / "latest.json").exists() or latest_step(folder) < step:
        assert time.monotonic() < ends, "no checkpoint"
        time.sleep(0.02)


LAST_STEP = """
import sys, time, torch, torch.distributed as dist, rumor
dist.init_process_group("gloo")
model = torch.nn.Linear(20, 10)
averager = rumor.Averager(model, rumor.gossip_sgd(rumor.one_peer_exponential, bits=int(sys.argv[1])))
for step in range(6):
    if step == 5 and dist.get_rank() == 0:  # what is done last in a step comes when the others are gone
        runner = averager.replica.runner
        last = runner._post_receives
        runner._post_receives = lambda: (time.sleep(1.0), last())
    averager.step()
print("done")
"""


@pytest.mark.processes
@pytest.mark.parametrize("bits", ["32", "16"])
def test_a_script_may_end_after_its_last_step_while_others_are_still_in_it(bits: str, tmp_path: Path) -> None:
    """Without finish(), and without a barrier."""
    (tmp_path / "script.py").write_text(LAST_STEP)
    done = warm.torchrun(4, ["script.py", bits], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 4


@pytest.mark.processes
@warm.both_ways
def test_a_killed_job_goes_on_from_its_last_checkpoint(as_typed: bool, tmp_path: Path) -> None:
    undisturbed = accuracy_of(undisturbed_job(tmp_path / "undisturbed"))
    with started(tmp_path / "killed", as_typed, "--max-restarts", "2") as job:
        wait_for_step(tmp_path / "killed", 40)
        at_least = latest_step(tmp_path / "killed")
        os.kill(warm.children(job.pid)[1], signal.SIGKILL)
        assert job.wait() == 0
        said = job.output()
    starts = [int(step) for step in re.findall(r"4 nodes, from step (\d+)", said)]
    assert starts[0] == 0
    assert at_least <= starts[1] < 200  # so less than an interval was lost
    assert accuracy_of(said) == undisturbed
    ends = zip(saved_models(tmp_path / "killed"), saved_models(tmp_path / "undisturbed"), strict=True)
    assert all(torch.equal(*both) for both in ends)  # the state of chance is in a checkpoint, too


ELASTIC_STEPS = 400
ELASTIC = ["--nnodes", "3:4", "--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-id", "job"]


def lose_power(bed: Bed) -> None:
    """Kill all processes of the host at once, also torchrun's agent. The other agents notice after 15 s."""
    bed.kill(2)


def cut(bed: Bed) -> None:
    bed.cut(2)


def cut_for_longer_than_the_time_out(bed: Bed) -> None:
    bed.cut(2)
    time.sleep(20)
    bed.cut(2, mend=True)


def elastic_job(bed: Bed, folder: Path, disturb: Callable[[Bed], None]) -> tuple[list[int], str]:
    """Run examples/restart.py on 4 hosts and disturb the third one. Return the exit codes of the others, and the output of all."""
    meeting, agents = f"{bed.address(0)}:{free_port()}", []
    try:
        for i in range(4):
            conf = f"last_call_timeout=20,is_host={int(i == 0)}"
            where = ["--rdzv-endpoint", meeting, "--rdzv-conf", conf, "--local-addr", bed.address(i)]
            script = [ROOT / "examples" / "restart.py", "--folder", folder, "--steps", str(ELASTIC_STEPS), "--timeout", "8"]
            command = ["-m", "torch.distributed.run", *ELASTIC, *where, *FORKED, *script]
            agents.append(warm.Job(command, {**OWN_STORE, "GLOO_SOCKET_IFNAME": "eth0"}, bed._host(i)))
        wait_for_step(folder, 60)
        disturb(bed)
        codes = [agents[i].wait(2 * warm.DEADLINE) for i in (0, 1, 3)]
        return codes, "".join(agent.output() for agent in agents)
    finally:
        for i in range(4):
            bed.kill(i)
        for agent in agents:
            agent.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Accuracy of the same job if nothing happens to it."""
    return accuracy_of(undisturbed_job(tmp_path_factory.mktemp("undisturbed"), ELASTIC_STEPS))


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("disturb", [lose_power, cut, cut_for_longer_than_the_time_out])
def test_a_job_goes_on_with_the_hosts_that_are_there(disturb: Callable[[Bed], None], undisturbed: float, tmp_path: Path) -> None:
    needs_shaping()
    with Bed(4, "500mbit") as bed:
        codes, said = elastic_job(bed, tmp_path, disturb)
    assert codes == [0, 0, 0]
    starts = [(int(nodes), int(step)) for nodes, step in re.findall(r"(\d) nodes, from step (\d+)", said)]
    assert (4, 0) in starts
    later = [(nodes, step) for nodes, step in starts if step >= 60]
    assert later
    assert disturb is cut_for_longer_than_the_time_out or {nodes for nodes, _ in later} == {3}
    assert abs(accuracy_of(said) - undisturbed) < 3  # points: with other nodes, chance starts anew


@pytest.mark.processes
@warm.both_ways
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_told_to_end_leaves_no_process(number: signal.Signals, as_typed: bool, tmp_path: Path) -> None:
    with started(tmp_path, as_typed) as job:
        wait_for_step(tmp_path, 20)
        workers = warm.children(job.pid)
        assert len(workers) == 4
        os.kill(job.pid, number)
        assert job.wait() != 0
        assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


# ---- a slow node ---------------------------------------------------------------------------------------------------------------------


def steps_with_a_slow_node(rank: int, seconds: float) -> tuple[Tensor, dict[int, float]]:
    model = network()
    averager = rumor.Averager(model, rumor.gossip_pga(RING, 6))
    for step in range(14):
        time.sleep(10 * seconds if rank == 2 else seconds)
        with torch.no_grad():
            model[0].weight += 0.01 * (rank + step)
        averager.step()
    averager.finish()
    return flat(model), averager.metrics.waited_for


def test_a_slow_node_changes_nothing_and_its_neighbours_say_that_they_wait_for_it(four: Cluster) -> None:
    usual, slow = four.run(steps_with_a_slow_node, 0.0), four.run(steps_with_a_slow_node, 0.01)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(usual, slow, strict=True))
    for rank in (1, 3):
        waited = slow[rank][1]
        assert set(waited) == {0, 2}
        assert waited[2] > 1.5 * waited[0], waited


# ---- a model that is not finite ------------------------------------------------------------------------------------------------------


def rescued(rank: int, name: str, bad_nodes: tuple[int, ...]) -> tuple[list[bool], float, int, int]:
    """Some nodes' models, and their momentum, go bad at step 5."""
    model = network(torch.float32)
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    averager = rumor.Averager(model, ALGORITHMS[name](), rescue=opt)
    finite = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if rank in bad_nodes else "error")
        for k in range(24):
            loss = model(torch.full((2, 5), rank + 0.1 * k)).square().mean()
            opt.zero_grad()
            loss.backward()
            if rank in bad_nodes and k == 5:
                model[0].weight.grad[0, 0] = float("nan")
            opt.step()
            averager.step(loss, lr=0.01)
            finite.append(bool(flat(model).isfinite().all()))
    averager.finish()
    return finite, float(flat(model).double().sum()), averager.metrics.rescues, averager.steps


RESCUED = ["gossip_sgd", "gossip_pga", "gossip_pga delayed", "gossip_aga", "parallel_sgd", "slowmo", "diloco", "osgp"]
RESCUED += ["gossip_pga by learning rate", "gossip_pga 4 bits", "gossip_pga 4 bits delayed", "parallel_sgd 4 bits"]


@pytest.mark.parametrize("name", RESCUED)
def test_a_node_that_is_not_finite_goes_on_from_the_others(four: Cluster, name: str) -> None:
    ends = four.run(rescued, name, (2,))
    assert len({total for _, total, _, _ in ends}) == 1
    for rank, (finite, _, rescues, steps) in enumerate(ends):
        assert all(finite[10:])
        assert all(finite) or rank == 2
        assert rescues == (rank == 2)
        assert steps == 24


def test_two_nodes_may_be_rescued_at_once(four: Cluster) -> None:
    assert [rescues for _, _, rescues, _ in four.run(rescued, "gossip_pga", (1, 2))] == [0, 1, 1, 0]


def rescued_outside_of_steps(rank: int, bad: float, when: str) -> tuple[Tensor, Tensor, int]:
    """Node 1 goes bad just before a collective that is no step. What that shows, what comes after it, and rescues."""
    model = network(torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float(rank))
    averager = rumor.Averager(model, rumor.gossip_pga(RING, 50), rescue=torch.optim.SGD(model.parameters()))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float(rank) if rank != 1 else bad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if rank == 1 else "error")
        if when == "averaged()":
            with averager.averaged():
                shown = flat(model).clone()
        else:
            averager.finish()
            shown = flat(model).clone()
    return shown, flat(model), averager.metrics.rescues


@pytest.mark.parametrize("when", ["averaged()", "finish()"])
@pytest.mark.parametrize("bad", [float("nan"), 1e25], ids=["not a number", "squares that overflow"])
def test_a_rescue_is_not_for_steps_alone(four: Cluster, bad: float, when: str) -> None:
    for rank, (shown, after, rescues) in enumerate(four.run(rescued_outside_of_steps, bad, when)):
        assert torch.allclose(shown, torch.full_like(shown, 5 / 3))  # of nodes 0, 2 and 3
        assert torch.equal(shown, after)
        assert rescues == (rank == 1)


def rescued_statistics(rank: int) -> tuple[Tensor, int]:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    opt = torch.optim.SGD(model.parameters())
    averager = rumor.Averager(model, rumor.gossip_pga(RING, 4), rescue=opt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if rank == 1 else "error")
        for step in range(4):
            model[1].running_mean.fill_(float("nan") if rank == 1 and step >= 2 else float(rank + step))
            averager.step()
    return model[1].running_mean.clone(), averager.metrics.rescues


def test_statistics_are_rescued_too(four: Cluster) -> None:
    for rank, (statistics, rescues) in enumerate(four.run(rescued_statistics)):
        assert torch.allclose(statistics, torch.full((3,), 3 + 5 / 3))  # of nodes 0, 2 and 3, at the last step
        assert rescues == (rank == 1)


def rescue_on_one_rank(rank: int) -> None:
    model = network()
    rumor.Averager(model, rumor.gossip_pga(RING, 4), rescue=torch.optim.SGD(model.parameters()) if rank == 2 else None)


def test_a_rescue_on_one_rank_alone_is_named(four: Cluster) -> None:
    for _, text in four.errors(rescue_on_one_rank):
        assert "ranks disagree on the use of rescue=: rank 0 has False, rank 2 has True" in text


def all_bad(rank: int) -> None:
    model = network(torch.float32)
    averager = rumor.Averager(model, rumor.gossip_pga(RING, 4), rescue=torch.optim.SGD(model.parameters()))
    with torch.no_grad():
        model[0].bias[0] = float("nan")
    for _ in range(8):
        averager.step()


def test_where_no_model_is_finite_there_is_no_rescue(four: Cluster) -> None:
    for kind, text in four.errors(all_bad):
        assert issubclass(kind, FloatingPointError)
        assert "was not finite" in text


def rescue_of_the_wrong_kind(rank: int, lazy: bool) -> None:
    model = network()
    rumor.Averager(model, rumor.gossip_pga(RING, 4), lazy=lazy, rescue=torch.optim.SGD(model.parameters()) if lazy else model)  # type: ignore[arg-type]


@pytest.mark.parametrize(("lazy", "says"), [(True, "rescue= does not go with lazy=True"), (False, "takes the optimizer .* got Sequential")])
def test_a_rescue_that_can_not_be_is_refused(four: Cluster, lazy: bool, says: str) -> None:
    assert all(re.search(says, text) for _, text in four.errors(rescue_of_the_wrong_kind, lazy))


# ---- uneven data ---------------------------------------------------------------------------------------------------------------------


def uneven(rank: int, lengths: list[int]) -> tuple[list[int], float]:
    model = network()
    averager = rumor.Averager(model, rumor.gossip_pga(RING, 4))
    seen = []
    for batch in averager.join(iter(range(lengths[rank]))):  # an iterator: nobody can know its length
        seen.append(batch)
        averager.step()
    averager.finish()
    return seen, averager.consensus_distance()


def joins_of_all_kinds(rank: int) -> dict[str, Any]:
    """Inside each other, left early, taken up again, side by side; begun in inference mode; with a step that one rank settles alone."""
    model = network()
    averager = rumor.Averager(model, rumor.gossip_pga(RING, 4), lazy=True)
    with torch.inference_mode():
        found: dict[str, Any] = {"inference": list(averager.join(range(3 + rank)))}
    found["outer"], found["inner"] = [], []
    for batch in averager.join(range(5 + rank)):
        averager.step()
        if rank == 1:
            averager.settle()
        found["outer"].append(batch)
        found["inner"].append(len(list(averager.join(range(4 - rank % 2)))))
        for _ in averager.join(range(9)):
            break
    begun = averager.join(range(6 - rank))
    found["begun"] = [next(begun), list(averager.join(range(2))), list(begun)]
    found["zip"] = list(zip(averager.join(range(4)), averager.join(range(3 + rank)), strict=False))
    averager.finish()
    return found


def test_joins_may_be_nested_left_and_mixed(four: Cluster) -> None:
    for found in four.run(joins_of_all_kinds):
        assert found["inference"] == [0, 1, 2]
        assert found["outer"] == [0, 1, 2, 3, 4]
        assert found["inner"] == [3] * 5
        assert found["begun"] == [0, [0, 1], [1, 2]]
        assert found["zip"] == [(0, 0), (1, 1), (2, 2)]


def rescued_in_a_loop(rank: int, joins: bool) -> tuple[int, int]:
    model = network(torch.float32)
    averager = rumor.Averager(model, rumor.gossip_sgd(RING), rescue=torch.optim.SGD(model.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if rank == 0 else "error")
        for batch in averager.join(range(20)) if joins else range(20):
            if rank == 0 and batch == 3:
                with torch.no_grad():
                    model[0].weight.fill_(float("nan"))
            averager.step()
    return averager.metrics.rescues, averager.metrics.bytes_sent


def test_a_rescue_in_a_join_is_one(four: Cluster) -> None:
    votes = 21 * (N - 1) * 16  # bytes
    joined, plain = four.run(rescued_in_a_loop, True), four.run(rescued_in_a_loop, False)
    assert [rescues for rescues, _ in joined] == [1, 0, 0, 0]
    assert [sent - votes for _, sent in joined] == [sent for _, sent in plain]  # as many means


@pytest.mark.parametrize("lengths", [[9, 7, 12, 8], [5, 5, 5, 5], [3, 0, 4, 1]])
def test_all_loops_end_with_the_shortest(four: Cluster, lengths: list[int]) -> None:
    for seen, distance in four.run(uneven, lengths):
        assert seen == list(range(min(lengths)))
        assert distance < 1e-20


# ---- ranks that disagree -------------------------------------------------------------------------------------------------------------


def other_version(rank: int) -> None:
    import rumor.averager.setup

    rumor.averager.setup.VERSION = "0.1.0" if rank else "0.0.9"
    try:
        rumor.Averager(network(), rumor.gossip_sgd(RING))
    finally:
        rumor.averager.setup.VERSION = rumor.__version__


def test_another_version_is_named(four: Cluster) -> None:
    for _, text in four.errors(other_version):
        assert "ranks disagree on the version of Rumor: rank 0 has 0.0.9, rank 1 has 0.1.0" in text


def other_dtype(rank: int) -> None:
    rumor.Averager(nn.Linear(2, 2, dtype=torch.float64 if rank == 3 else torch.float32), rumor.gossip_sgd(RING))


def test_another_dtype_is_named(four: Cluster) -> None:
    for _, text in four.errors(other_dtype):
        assert re.search(
            r"ranks disagree on the model: rank 0 has weight \[2, 2\] torch.float32.*rank 3 has weight \[2, 2\] torch.float64", text
        )


# ---- doors ---------------------------------------------------------------------------------------------------------------------------


def test_many_callers_do_not_make_a_living_process_look_lost() -> None:
    for _ in range(4):
        assert liveness.lost_processes({str(i): liveness.address() for i in range(200)}) == {}


def test_a_door_of_another_host_that_calls_itself_loopback_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        gone = closed_soon.getsockname()
    assert liveness.lost_processes({"node 0": gone}) == {"node 0": "its process is gone"}
    monkeypatch.setattr(liveness, "address", lambda: ("10.0.0.7", 1))
    assert liveness.lost_processes({"node 0": gone}) == {}


def test_a_forked_process_opens_a_door_of_its_own() -> None:
    ours = liveness.address()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, str(liveness.address() not in (None, ours)).encode())
        os._exit(0)
    assert os.read(read, 10) == b"True"
    os.waitpid(child, 0)


@pytest.mark.processes
def test_a_door_is_open_while_its_process_lives() -> None:
    source = "from rumor.engines.processes import liveness; import sys; print(*liveness.address(), flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        host, port = child.stdout.readline().split()
        at = (host, int(port))
        assert liveness.lost_processes({"node 0": at, "node 1": None, "node 2": liveness.address()}) == {}
    finally:
        child.kill()
        child.communicate()
    assert liveness.lost_processes({"node 0": liveness.address(), "node 1": at}) == {"node 1": "its process is gone"}


def test_a_process_that_is_ending_is_waited_for() -> None:
    """Its connections may be closed before its door; a time-out says nothing of that kind."""
    hung_up, slow = RuntimeError("[.../pair.cc:547] Connection closed by peer [127.0.0.1]:5"), RuntimeError("Timed out waiting 5000ms")
    with socket.create_server(("127.0.0.1", 0)) as door:
        at = {"node 1": door.getsockname()}
        assert "no process is gone" in liveness.likely_reason(at, slow)
        closing = threading.Timer(0.5, door.close)
        closing.start()
        assert "node 1 is lost (its process is gone)" in liveness.likely_reason(at, hung_up)
        closing.join()


def test_what_torchrun_has_ended_since_is_told_from_the_first_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        doors = {"node 1": first.getsockname(), "node 2": second.getsockname()}
    says = "one of them was lost first, and torchrun has ended others"
    for name, run_id, is_said in (("node 1", "x", False), (None, None, False), (None, "x", True)):
        if run_id is None:
            monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        else:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        reason = liveness.likely_reason(doors if name is None else {name: doors[name]}, RuntimeError("Timed out waiting 5000ms"))
        assert "node 1 is lost (its process is gone)" in reason
        assert (says in reason) == is_said


def test_the_first_loss_is_named_by_a_rank_that_saw_it_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        doors = {"node 1": first.getsockname(), "node 2": second.getsockname()}
    slow, store = RuntimeError("Timed out waiting 5000ms"), torch.distributed.HashStore()
    assert "ended after it" not in liveness.likely_reason(doors, slow, store)  # nobody has seen one of them alone
    assert liveness.likely_reason({"node 2": doors["node 2"]}, slow, store).startswith("node 2 is lost (its process is gone); the earliest")
    late = liveness.likely_reason(doors, slow, store)
    assert late.startswith("node 2 is lost (its process is gone); node 1 ended after it, probably by the launcher; the earliest")


def test_a_store_that_does_not_answer_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        door = {"node 1": first.getsockname()}

    class Lost:
        def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
            time.sleep(60)
            raise AssertionError("nobody waits for this")

    began = time.monotonic()
    assert "node 1 is lost" in liveness.likely_reason(door, RuntimeError("Timed out waiting 5000ms"), Lost())
    assert time.monotonic() - began < 30


OUTLIVED = """
from pathlib import Path

import torch
import torch.distributed as dist

import rumor


def threads_of_gloo():
    return [name for path in Path("/proc/self/task").iterdir() if "gloo" in (name := (path / "comm").read_text())]


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 1)
averager = rumor.Averager(model, rumor.gossip_pga(rumor.ring(1), 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)  # whose first step imports much of torch, with defaults that may hold the group
for _ in range(2):
    model(torch.ones(2)).sum().backward()
    opt.step()
    averager.step()
print(len(threads_of_gloo()))
dist.destroy_process_group()
print(len(threads_of_gloo()))
try:
    averager.engine.group
except ValueError as error:
    print(error)
"""


@pytest.mark.processes
def test_an_averager_keeps_no_thread_of_a_group_that_was_destroyed() -> None:
    """One that is there when the interpreter ends can abort the process, after all was done."""
    done = subprocess.run([sys.executable, "-c", OUTLIVED], capture_output=True, text=True, timeout=warm.DEADLINE, check=True)
    before, after, error = done.stdout.splitlines()
    assert int(before) > int(after) == 0
    assert "was destroyed: make a new one" in error
