"""Members that come and go, on real processes: nodes die, hang, leave and join, and the others go on."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import rumor
from rumor.membership import limits
from tests import warm
from tests.elastic import METHODS, Job, Model, survivors_kept_their_steps
from tests.elastic_faults import Faults
from tests.test_bed import needs_shaping

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from bed import Bed, free_port

pytestmark = pytest.mark.processes
ALL = ("a", "b", "c", "d")


@pytest.mark.parametrize("method", METHODS)
def test_a_newcomer_takes_over_the_members_state(tmp_path: Path, method: str) -> None:
    with Job(tmp_path, method=method) as job:
        job.begin("a", "b")
        job.wait_until("a", 12)
        job.start("c")
        job.finish("a", "b", "c")
        joined = job.rows("c")[0]
        assert 12 <= joined["joined"] < job.step_of("a")
        at = next(row for row in job.rows("a") if row.get("now") == joined["joined"])
        if "delay" not in method:  # with delay=1 members differ by their last step
            assert joined["after"] == at["after"]
        assert joined["momentum"]
        assert "c" in at["members"]
        assert survivors_kept_their_steps(job, "ab")
        if "delay" not in method:
            assert job.check_means("a", "b", "c", exact=method in ("pga", "ring", "aga", "local", "parallel")) > 8


def test_a_newcomer_comes_in_while_momentum_is_local(tmp_path: Path) -> None:
    """With H = 1, average_state="global" leaves SGD's momentum where it is."""
    with Job(tmp_path, method="parallel", average_state="global") as job:
        job.begin("a", "b")
        job.wait_until("a", 12)
        job.start("c")
        job.finish("a", "b", "c")
        joined = job.rows("c")[0]
        assert joined["after"] == next(row for row in job.rows("a") if row.get("now") == joined["joined"])["after"]
        assert joined["momentum"]
        assert job.check_means("a", "b", "c", exact=True) > 8
        assert survivors_kept_their_steps(job, "ab")


@pytest.mark.parametrize("where", ["sending", "averaging", "arriving", "connecting", "handing over", "taking over", "attaching"])
def test_the_others_go_on_when_a_node_is_killed(tmp_path: Path, where: str) -> None:
    """Rank 0 dies, or whoever gets there: it holds the store, and hands over the state."""
    with Job(tmp_path) as job:
        die = {"where": where, "after": 25 if where == "sending" else 2 if where in ("averaging", "arriving") else 1}
        if where == "taking over":
            job.begin("a", "b", "c")
            job.wait_until("a", 8)
            job.start("x", die={**die, "after": 0})
        else:
            limits.JOIN_WINDOW = 1_000.0  # x is here first, and will be rank 0
            job.start("x", die=die)
            job.wait_until_here("x")
            job.begin("a", "b", "c")
        if where in ("connecting", "handing over", "attaching"):
            job.wait_until("a", 8)
            job.start("d")
        job.wait(lambda: job.nodes["x"].exitcode == -signal.SIGKILL, "x dies")
        job.start("e")
        names = [name for name in job.nodes if name != "x"]
        job.finish(*names)
        assert survivors_kept_their_steps(job, "abc")
        assert job.check_means(*job.nodes) > 10


@pytest.mark.parametrize("method", ["8 bits", "4 bits, delay"])
def test_two_nodes_die_at_once_and_come_back(tmp_path: Path, method: str) -> None:
    with Job(tmp_path, method=method) as job:
        job.begin(*ALL)
        job.wait_until("a", 10)
        job.signal("b", signal.SIGKILL)
        job.signal("c", signal.SIGKILL)
        job.start("b2", "c2")
        job.finish("a", "d", "b2", "c2", more=90)
        assert survivors_kept_their_steps(job, "ad")
        if method == "8 bits":  # with delay=1 members differ by their last step
            assert job.check_means(*job.nodes, exact=False) > 20


@pytest.mark.parametrize("method", ["pga", "8 bits", "delay"])
def test_four_newcomers_come_in_together(tmp_path: Path, method: str) -> None:
    with Job(tmp_path, method=method) as job:
        job.start("a")
        job.wait_until("a", 10)
        job.start("b", "c", "d", "e")
        job.finish("a", "b", "c", "d", "e", more=140)
        assert len(job.last_row("a")["members"]) == 5
        if method != "delay":
            assert job.check_means(*job.nodes, exact=method == "pga") > 30


@pytest.fixture
def soon_silent() -> Iterator[None]:
    """Let the coordinator lose patience with a silent member after a second."""
    usual, limits.SILENCE = limits.SILENCE, 1.0
    yield
    limits.SILENCE = usual


@pytest.mark.parametrize("silence", [1.0, 100.0])  # it notices that it was stopped, or hears it from the coordinator
@pytest.mark.usefixtures("soon_silent")
def test_a_stopped_node_is_left_behind_and_comes_back_with_the_others_model(tmp_path: Path, silence: float) -> None:
    with Job(tmp_path, silence=silence) as job:
        job.begin("a", "b", "c")
        job.wait_until("b", 10)
        job.signal("b", signal.SIGSTOP)
        stopped_at = job.step_of("b")
        job.wait_until("a", stopped_at + 20)
        job.signal("b", signal.SIGCONT)
        job.finish("a", "b", "c", more=220)
        assert survivors_kept_their_steps(job, "ac")
        jump = next(row for row in job.rows("b") if row.get("now", 0) > row.get("k", 0) + 1)
        assert jump["after"] == next(row for row in job.rows("a") if row.get("now") == jump["now"])["after"]
        assert job.check_means("a", "b", "c") > 50
        said = (tmp_path / "b.err").read_text()
        assert "this node is no longer a member" in said
        assert "lost the coordinator" not in said  # the node was stopped, not the coordinator
        assert "is back" not in said
        assert said.startswith("rumor: 3 members: ")  # without a step: a checkpoint may be loaded next


def test_a_slow_node_is_waited_for(tmp_path: Path) -> None:
    with Job(tmp_path, steps=40) as job:
        limits.JOIN_WINDOW = 1_000.0
        job.start("c", slow_from=20)
        job.begin("a", "b")
        job.finish("a", "b", "c")
        assert survivors_kept_their_steps(job, "abc")
        assert not any("dropped" in line for line in job.lines), job.lines


@pytest.mark.parametrize(("fault", "option"), [({"slow_from": 20}, {"drop_slow": 5.0}), ({"hangs_at": 20}, {"timeout": 2.0})])
def test_a_slow_or_hung_node_is_dropped_where_asked(tmp_path: Path, fault: dict[str, int], option: dict[str, float]) -> None:
    with Job(tmp_path, steps=40, pause=0.15 if "slow_from" in fault else 0.01, **option) as job:
        limits.JOIN_WINDOW = 1_000.0
        job.start("c", **fault)
        job.begin("a", "b")
        job.wait(lambda: any("c is dropped: others have waited for it" in line for line in job.lines), "c is dropped")
        job.wait_until("a", 36)
        assert survivors_kept_their_steps(job, "ab")


def test_a_model_that_is_not_finite_is_called_by_its_name_on_all_nodes(tmp_path: Path) -> None:
    with Job(tmp_path, steps=200) as job:
        job.start("c", nan_at=10)
        job.begin("a", "b")
        for name in "abc":
            said = tmp_path / f"{name}.err"
            job.wait(lambda said=said: "Traceback" in said.read_text(), f"{name} stops")  # type: ignore[misc]
            job.nodes[name].join(30)
            assert "FloatingPointError: the model of node c was not finite" in said.read_text()


def test_training_goes_on_without_the_coordinator_and_newcomers_come_in_when_it_is_back(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.begin("a", "b", "c")
        job.wait_until("a", 10)
        job.stop_coordinator()
        job.wait_until("a", job.step_of("a") + 40)
        assert job.start_coordinator(job.address) == job.address
        job.start("d")
        job.wait(lambda: job.rows("d"), "d joins")
        job.signal("b", signal.SIGKILL)
        job.finish("a", "c", "d", more=380)
        assert survivors_kept_their_steps(job, "acd")
        assert job.check_means(*job.nodes) > 90


@pytest.mark.parametrize("method", ["pga", "aga", "slowmo"])
@pytest.mark.usefixtures("soon_silent")
def test_a_member_dies_while_there_is_no_coordinator_and_the_others_train_on_and_meet_when_it_is_back(tmp_path: Path, method: str) -> None:
    def have_met(name: str) -> bool:
        by = [row["by"] for row in job.rows(name) if "by" in row]
        return None in by and by[-1] is not None and {*by[-1]} == {"a", "b"}  # ranks follow the order of arrival

    with Job(tmp_path, method=method, min_nodes=2, alone_after=0.5) as job:
        job.begin("a", "b", "c")
        job.wait_until("a", 10)
        job.stop_coordinator()
        job.signal("c", signal.SIGKILL)
        job.wait_until("a", job.step_of("a") + 60)
        job.wait_until("b", job.step_of("b") + 60)
        assert len(job.last_row("a")["members"]) == 3  # of its last epoch
        job.start_coordinator(job.address)
        job.wait(lambda: have_met("a") and have_met("b"), "they average together again")
        job.finish("a", "b", more=100)
        assert survivors_kept_their_steps(job, "ab")
        said = (tmp_path / "a.err").read_text()
        assert said.count("there is no coordinator. Until it is back") == 1
        assert said.count("lost the coordinator at") == said.count(f"the coordinator at {job.address} is back") == 1
        assert sum("by" in row and row["by"] is None for row in job.rows("a")) > 3
        assert job.check_means("a", "b", "c", exact=method != "slowmo") > 10


def test_without_a_coordinator_the_last_of_two_nodes_waits_as_min_nodes_says(tmp_path: Path) -> None:
    with Job(tmp_path, steps=60, min_nodes=2, alone_after=0.2) as job:
        job.begin("a", "b", min_nodes=2)
        job.wait_until("a", 10)
        job.stop_coordinator()
        job.signal("b", signal.SIGKILL)
        time.sleep(1.5)
        assert job.step_of("a") < 20
        job.start_coordinator(job.address)
        job.start("b2")
        job.finish("a", "b2")
        assert survivors_kept_their_steps(job, "a")


@pytest.mark.parametrize("min_nodes", [1, 2])
def test_the_last_node_goes_on_or_waits_as_min_nodes_says(tmp_path: Path, min_nodes: int) -> None:
    with Job(tmp_path, steps=120, min_nodes=min_nodes) as job:
        job.begin("a", "b")
        job.wait_until("a", 10)
        job.signal("b", signal.SIGKILL)
        if min_nodes == 1:
            job.finish("a")
        else:
            job.wait(lambda: "b is lost: its connection has ended" in job.lines, "b is lost")
            time.sleep(1.0)
            assert job.step_of("a") < 20
            job.start("b2")
            job.finish("a", "b2")
        assert survivors_kept_their_steps(job, "a")


def test_strangers_are_refused_and_garbage_is_ignored(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.begin("a", "b")
        job.wait_until("a", 10)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 3000 + b"\n", b'{"kind": "hello"}\n', b"[" * 100_000 + b"\n"):
            with socket.create_connection(job.address) as stranger:
                stranger.sendall(garbage)
        job.start("other", method="local")
        job.wait((tmp_path / "other.refused").exists, "other is refused")
        said = (tmp_path / "other.refused").read_text()
        assert "nodes disagree on the algorithm" in said
        assert "one_peer_exponential" in said
        assert "isolated" in said
        job.finish("a", "b")
        assert sum(line.startswith("epoch") for line in job.lines) == 1  # the members were not disturbed
        assert sum("closed a connection" in line for line in job.lines) == 4
        job.start("late")
        job.wait((tmp_path / "late.refused").exists, "late is refused")
        assert f"the job has ended at step {(tmp_path / 'ends_at').read_text()}" in (tmp_path / "late.refused").read_text()
        job.nodes["late"].join(30)
        assert job.nodes["late"].exitcode == 0  # a supervisor must not start it again
        assert job.nodes["other"].exitcode == 1


def test_a_node_that_finishes_early_leaves_the_others_and_one_that_ends_without_finish_is_named(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.begin("a", "b")
        job.wait_until("a", 10)
        job.start("short", steps=5)  # it comes in beyond its own end
        job.nodes["short"].join(60)
        assert job.nodes["short"].exitcode == 0, job.story()
        assert "the others go on: this node ends with its own model" in (tmp_path / "short.err").read_text()
        job.finish("a", "b")
        assert survivors_kept_their_steps(job, "ab")
        assert any("short has finished at step" in line for line in job.lines)


def test_the_last_node_finishes_though_it_is_alone(tmp_path: Path) -> None:
    with Job(tmp_path, steps=41, min_nodes=2) as job:  # after 41 steps, no global average is due
        job.begin("a")
        job.start("b", steps=41, hangs_at=40)
        job.wait_until("a", 40)
        job.wait_until("b", 40)
        job.signal("b", signal.SIGKILL)
        job.finish("a")


def test_what_does_not_fit_is_refused_before_a_connection(tmp_path: Path) -> None:
    model, group = torch.nn.Linear(2, 1), rumor.elastic("127.0.0.1:1")
    for method, why in (
        (rumor.gossip_pga(rumor.ring(4), H=4), "pass a builder"),
        (rumor.gossip_sgd(rumor.ring), "no global averages"),
        (rumor.osgp(rumor.ring), "no global averages"),
        (rumor.gossip_pga(rumor.ring, H=4, average_rounds=3), "no global averages"),
    ):
        with pytest.raises(ValueError, match=why):
            rumor.Averager(model, method, group=group)
    with pytest.raises(TypeError, match=r"pass group=rumor.elastic\('host:29510'\)"):
        rumor.Averager(model, rumor.local_sgd(H=4), group="host:29510")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"HOST:PORT, such as node0:29510, got 'http://node0:29510'"):
        rumor.elastic("http://node0:29510")
    with pytest.raises(ValueError, match=r"lazy=True does not go with rumor\.elastic"):
        rumor.Averager(model, rumor.local_sgd(H=4), group=group, lazy=True)
    usual, limits.CONNECT_WITHIN = limits.CONNECT_WITHIN, 0.5
    try:
        with pytest.raises(ConnectionError, match=r"no coordinator at 127.0.0.1:1.*rumor coordinator --bind"):
            rumor.Averager(model, rumor.local_sgd(H=4), group=group)
        with pytest.raises(ConnectionError, match=r"does not know the host 'no.such.host'"):
            rumor.Averager(model, rumor.local_sgd(H=4), group=rumor.elastic("no.such.host:29510"))
    finally:
        limits.CONNECT_WITHIN = usual
    for options, why in (({"min_nodes": 0}, "min_nodes"), ({"timeout": 0}, "timeout"), ({"drop_slow": 1.0}, "drop_slow")):
        with pytest.raises(ValueError, match=why):
            rumor.elastic("host", **options)


def saving_node(address: str, name: str, folder: str, steps: int) -> None:
    torch.set_num_threads(1)
    model = Model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    averager = rumor.Averager(model, METHODS["pga"](), group=rumor.elastic(address, name), optimizer=opt)
    before = averager.share_of(1_000)
    first = rumor.load(f"{folder}/checkpoints", averager, optimizer=opt) or 0
    Path(folder, f"{name}.first").write_text(str(first))
    after = averager.share_of(2_000)
    Path(folder, f"{name}.positions").write_text(f"{before.position} {after.position}")
    draws = [iter(before), iter(after)]
    while averager.steps < steps:
        for draw in draws:
            next(draw)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
        time.sleep(0.01)
        averager.step()
        if averager.steps % 10 == 0:
            rumor.save(f"{folder}/checkpoints", averager, optimizer=opt)
            with averager.averaged():
                Path(folder, f"{name}.step").write_text(str(averager.steps))
    averager.finish()
    with averager.averaged():  # also after the end
        Path(folder, f"{name}.end").write_text(str(model.flat()))


def test_checkpoints_work_as_members_change_and_start_a_job_whose_nodes_are_all_lost(tmp_path: Path) -> None:
    def reached(name: str) -> int:
        path = tmp_path / f"{name}.step"
        return int(path.read_text() or 0) if path.exists() else 0

    for names, steps in (("abc", 10**9), ("xyz", 200)):
        with Job(tmp_path, steps) as job:
            limits.JOIN_WINDOW = 1_000.0
            for name in names:
                job.nodes[name] = warm.context.Process(target=saving_node, args=(str(job.address), name, str(tmp_path), steps), daemon=True)
                job.nodes[name].start()
            job.wait_until_here(*names)
            limits.JOIN_WINDOW = 0.0
            if names == "abc":
                job.wait(lambda: reached("a") >= 40, "a saves")
                job.signal("b", signal.SIGKILL)
                job.wait(lambda: reached("a") >= 80, "a saves again")
            else:
                for name in names:
                    job.nodes[name].join(60)
    first = [int((tmp_path / f"{name}.first").read_text()) for name in "xyz"]
    assert first[0] >= 80
    assert len({*first}) == 1
    positions = {(tmp_path / f"{name}.positions").read_text() for name in "xyz"}
    assert len(positions) == 1
    for position in map(int, positions.pop().split()):  # of 2 or 3 members at each step
        assert 2 * first[0] <= position <= 3 * first[0] + 3
    assert len({(tmp_path / f"{name}.end").read_text() for name in "xyz"}) == 1


def node_with_its_own_disk(address: str, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    rumor.checkpoint.checkpoint.LOOKS = 2
    averager = rumor.Averager(Model(), METHODS["pga"](), group=rumor.elastic(address, name, min_nodes=2))
    try:
        rumor.save(f"{folder}/{name}/checkpoints", averager)
    except ValueError as error:
        Path(folder, f"{name}.error").write_text(str(error))
    averager.finish()


def test_members_that_do_not_share_a_folder_can_not_save(tmp_path: Path) -> None:
    with Job(tmp_path, 0) as job:
        for name in "ab":
            arguments = (str(job.address), name, str(tmp_path))
            job.nodes[name] = warm.context.Process(target=node_with_its_own_disk, args=arguments, daemon=True)
            job.nodes[name].start()
        for process in job.nodes.values():
            process.join(60)
            assert process.exitcode == 0
    for name in "ab":
        assert "rank 0 sees 1 of its 2 files" in (tmp_path / f"{name}.error").read_text()
    assert not list(tmp_path.rglob("latest.json"))


@pytest.mark.parametrize("method", ["pga", "aga", "slowmo"])
def test_nodes_of_several_ranks_come_and_go_as_a_whole(tmp_path: Path, method: str) -> None:
    def start(job: Job, name: str) -> None:
        job.start(name, local_rank=0)
        job.start(f"{name}.1", local_rank=1)

    with Job(tmp_path, method=method, average_state="global") as job:
        limits.JOIN_WINDOW = 1_000.0
        for name in "ab":
            start(job, name)
        job.wait_until_here("a", "b")
        limits.JOIN_WINDOW = 0.0
        job.wait_until("a.1", 10)
        start(job, "c")
        job.wait_until("c.1", 20)
        for name in ("b", "b.1"):
            job.signal(name, signal.SIGKILL)
        job.finish("a", "a.1", "c", "c.1", more=110)
        for name in "ac":
            first, second = (
                {row["k"]: row["after"] for row in job.rows(rank) if "after" in row and "k" in row} for rank in (name, f"{name}.1")
            )
            assert len(first) > 3
            assert first == second
            assert job.rows(name)[0]["momentum"] == job.rows(f"{name}.1")[0]["momentum"]
            assert job.rows(name)[-1]["momentum"] == job.rows(f"{name}.1")[-1]["momentum"]
        assert job.check_means("a", "b", "c", exact=method != "slowmo") > 15
        assert survivors_kept_their_steps(job, ["a", "a.1"])


@pytest.mark.long
def test_nodes_under_torchrun_wait_for_others_longer_than_their_time_out_and_come_and_go(tmp_path: Path) -> None:
    options = {"steps": 500, "pause": 0.02, "min_nodes": 2, "local_timeout": 10, "silence": 1.0}

    def start(name: str) -> warm.Job:
        module = ["-m", "tests.elastic", str(job.address), name, str(tmp_path), json.dumps(options)]
        node = warm.Job([*warm.TORCHRUN, "2", "--max-restarts", "3", *module], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, fresh=True)
        return nodes.enter_context(node)

    def says(name: str, what: str) -> bool:
        return what in (tmp_path / f"{name}.err").read_text()

    with Job(tmp_path, steps=500, min_nodes=2) as job, ExitStack() as nodes:
        a = start("a")
        job.wait_until_here("a")
        job.wait(lambda: says("a", "waiting for nodes: 1 here, 2 needed"), "a waits")
        time.sleep(5.0)  # longer than its ranks may wait for each other, all in all
        b = start("b")
        job.wait_until("b.1", 20)
        for pid in (b.pid, *warm.children(b.pid)):  # the whole node
            os.kill(pid, signal.SIGKILL)
        job.wait(lambda: "b is lost: its connection has ended" in job.lines, "b is lost")
        c = start("c")
        job.wait_until("c.1", job.step_of("a") + 20)
        os.kill(warm.children(c.pid)[-1], signal.SIGKILL)  # one rank: torchrun starts its node again
        job.wait(lambda: sum(line == "c is here" for line in job.lines) == 2, "c is back")
        assert [a.wait(), c.wait()] == [0, 0], f"{a.output()} {c.output()} {job.story()}"
        assert survivors_kept_their_steps(job, ["a", "a.1"])
        ends = [job.rows(name)[-1] for name in ("a", "a.1", "c", "c.1")]
        assert all(end["finished"] == 500 and end["after"] == ends[0]["after"] for end in ends)


def forking_node(address: str, folder: str, then: str) -> None:
    torch.set_num_threads(1)
    model = Model()
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    averager = rumor.Averager(model, METHODS["pga"](), group=rumor.elastic(address, "x"), optimizer=opt)
    for _ in range(6):
        averager.step()
    if then == "fork":  # as a data loader's worker, which outlives its parent for a while
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    if then == "leave":
        averager.leave()
        Path(folder, "left").touch()
    raise SystemExit(7)


@pytest.mark.parametrize("then", ["fork", "leave", "end"])
def test_a_node_that_ends_in_any_way_is_gone_at_once(tmp_path: Path, then: str) -> None:
    with Job(tmp_path, steps=60) as job:
        limits.JOIN_WINDOW = 1_000.0
        job.nodes["x"] = warm.context.Process(target=forking_node, args=(str(job.address), str(tmp_path), then))
        job.nodes["x"].start()
        job.wait_until_here("x")
        job.begin("a", "b")
        job.finish("a", "b")
        job.nodes["x"].join(15)
        assert job.nodes["x"].exitcode == (-signal.SIGKILL if then == "fork" else 7)
        said = {"fork": "is lost: its connection has ended", "leave": "has left", "end": "has ended without averager.finish() or leave()"}
        assert f"x {said[then]}" in job.lines
        assert survivors_kept_their_steps(job, "ab")


@pytest.mark.long
def test_a_host_whose_link_is_cut_is_left_behind_and_comes_back_when_it_is_mended(tmp_path: Path) -> None:
    needs_shaping()
    options = json.dumps({"steps": 1_500, "pause": 0.02})
    with Bed(3, "500mbit") as bed, ExitStack() as jobs:
        address = f"{bed.address(0)}:{free_port()}"
        jobs.enter_context(warm.Job(["-m", "rumor", "coordinator", "--bind", address, "--min-nodes", "2"], {}, bed._host(0)))
        nodes = [warm.Job(["-m", "tests.elastic", address, f"h{i}", str(tmp_path), options], {}, bed._host(i)) for i in range(3)]
        for node in nodes:
            jobs.enter_context(node)
        seen = Job.__new__(Job)
        seen.folder, seen.nodes, seen.lines = tmp_path, {}, []
        seen.wait(lambda: len(seen.last_row("h0").get("members", [])) == 3, "all are members")
        bed.cut(2)
        at = seen.step_of("h0")
        seen.wait(lambda: seen.step_of("h0") > at + 20 and len(seen.last_row("h0")["members"]) == 2, "the others go on")
        bed.cut(2, mend=True)
        seen.wait(lambda: len(seen.last_row("h0")["members"]) == 3 and seen.step_of("h2") > at + 20, "h2 is back")
        assert [node.wait() for node in nodes] == [0, 0, 0]
        assert survivors_kept_their_steps(seen, ["h0", "h1"])
        assert seen.check_means("h0", "h1", "h2") > 200


@pytest.mark.usefixtures("soon_silent")
@pytest.mark.parametrize("faults", [5, pytest.param(40, marks=pytest.mark.long)])
def test_random_faults_end_as_they_should(tmp_path: Path, faults: int) -> None:
    with Job(tmp_path, steps=10**9, pause=0.02) as job:
        found = Faults(job, seed=faults).run(faults)
        assert found["averages_checked"]


@pytest.mark.long
def test_a_node_with_long_steps_may_be_silent_for_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SILENCE", 1.0)
    with Job(tmp_path, steps=8, pause=2.0, silence=1.0) as job:
        job.begin("a", "b")
        job.wait(lambda: job.step_of("b") >= 3, "some steps")
        job.signal("b", signal.SIGSTOP)
        time.sleep(2.0)  # more than SILENCE, and less than SILENCE_STEPS of its steps
        job.signal("b", signal.SIGCONT)
        job.wait(lambda: "the job has ended at step 8" in job.lines, "the end")
        assert sum(line.startswith("epoch") for line in job.lines) == 1, job.story()
