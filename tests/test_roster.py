"""Who the members are, decided without sockets and clocks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import rumor
from rumor.membership.coordinator import Coordinator
from rumor.membership.limits import (
    DROPPED_FIRST,
    FAILURES,
    FIRST_STEP,
    FORGIVEN_AFTER,
    HUNG_LEAST,
    HUNG_MOST,
    JOIN_WINDOW,
    RETRY_AFTER,
    SILENCE,
    START_GRACE,
    STUCK,
)
from rumor.membership.member import Member, difference, limit_of, shortened, silence_of
from rumor.membership.protocol import LONGEST_LINE, PROTOCOL, Address, decode, encode, parse_address
from rumor.membership.roster import Roster

BEGIN = max(START_GRACE, JOIN_WINDOW)


class Room:
    """A roster, and what it has told each node."""

    def __init__(self, min_nodes: int = 1):
        self.said: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        self.lines: list[str] = []
        self.roster = Roster(lambda uid, kind, values: self.said.setdefault(uid, []).append((kind, values)), self.lines.append, min_nodes)
        self.now = 0.0
        self.roster.tick(self.now)

    def hello(self, uid: str, epoch: int | None = None, members: tuple[str, ...] = (), setup: str = "x", **values: Any) -> None:
        message = {"protocol": PROTOCOL, "uid": uid, "name": uid, "setup": {"model": setup}, "store": ["h", 1], "min_nodes": 1, "k": 0}
        message |= {"timeout": None, "drop_slow": None, "epoch": epoch, "members": list(members), **values}
        self.roster.hello(message, self.now)

    def ready(self, uid: str, stage: str, k: int = 0, average: int = -1, is_connected: bool = True) -> None:
        message = {"k": k, "stage": stage, "schedule": [k, 0], "average": average, "is_connected": is_connected}
        self.roster.ready(uid, message | {"stepping": k if stage == "before" else -1}, self.now)

    def beat(self, uid: str, k: int, computing: bool = True, stepping: int = -1) -> None:
        message = {"k": k, "computing": computing, "stepping": stepping, "step_seconds": 0.1, "schedule": [k, 2], "moved": 0}
        self.roster.beat(uid, message, self.now)

    def later(self, seconds: float, *beating: str, k: int = 0, computing: bool = True) -> None:
        """Let time pass in small parts. Those that are beating stay at step k."""
        ends = self.now + seconds
        while self.now < ends:
            self.now = min(ends, self.now + 0.5)
            for uid in beating:
                self.beat(uid, k, computing)
            self.roster.tick(self.now)

    def last(self, uid: str, kind: str) -> dict[str, Any] | None:
        return next((values for said, values in reversed(self.said.get(uid, [])) if said == kind), None)

    def members(self, uid: str) -> list[str]:
        """Return the members of the epoch that was last offered to this node; those that take over the state have a '+'."""
        offer = self.last(uid, "epoch")
        assert offer is not None, self.said.get(uid)
        return [peer["name"] + "+" * (i >= offer["holders"]) for i, peer in enumerate(offer["members"])]

    def began(self, *uids: str) -> Room:
        for uid in uids:
            self.hello(uid)
            self.ready(uid, "join")
        self.later(BEGIN, *uids)
        assert self.members(uids[0]) == [uids[0], *(f"{uid}+" for uid in uids[1:])]
        return self


def test_all_start_from_the_first_once_nobody_else_comes() -> None:
    room = Room()
    room.hello("a")
    room.ready("a", "join")
    room.later(BEGIN - 0.5, "a")
    room.hello("b")
    room.ready("b", "join")
    room.roster.tick(room.now)
    assert room.last("a", "epoch") is None
    room.later(JOIN_WINDOW, "a", "b")
    assert room.members("a") == room.members("b") == ["a", "b+"]


def test_the_coordinator_says_how_many_members_are_new() -> None:
    room = Room().began("a", "b")
    room.hello("c")
    for uid, stage in {"c": "join", "a": "after", "b": "after"}.items():
        room.ready(uid, stage, 6)
    room.roster.gone("c", "is lost", room.now)
    room.ready("a", "before", 11)
    room.ready("b", "before", 11)
    epochs = [line for line in room.lines if line.startswith("epoch")]
    assert epochs == ["epoch 1: a, b; 2 new", "epoch 2: a, b, c; 1 new", "epoch 3: a, b"]


def test_survivors_meet_before_an_average_and_newcomers_come_in_after_it() -> None:
    room = Room().began("a", "b", "c")
    room.hello("d")
    room.ready("d", "join")
    assert room.last("a", "news") == {"newcomers": 1, "here": 4, "needed": 1}
    room.roster.gone("b", "is lost", room.now)
    assert room.last("a", "lost") == {"epoch": 1, "why": "b is lost"}
    room.ready("a", "before", 5)
    assert room.last("a", "epoch") == room.last("b", "epoch")  # still the first
    room.ready("c", "before", 5)
    assert room.members("c") == ["a", "c"]
    room.ready("a", "after", 6)
    room.ready("c", "after", 6)
    assert room.members("d") == ["a", "c", "d+"]


def test_if_newcomers_are_gone_again_the_members_stay_the_same() -> None:
    room = Room().began("a", "b")
    room.ready("a", "after", 6)
    room.ready("b", "after", 6)
    assert room.last("a", "same") == {}
    assert room.roster.epoch is not None
    assert room.roster.epoch.number == 1


def test_one_that_missed_an_average_goes_on_alone_and_takes_over_the_methods_state_later() -> None:
    room = Room().began("a", "b", "c")
    room.beat("a", 5)
    room.roster.gone("c", "is lost", room.now)
    room.ready("b", "before", 5)
    assert room.last("b", "passed") is None
    room.beat("a", 7)  # it has completed the average of step 5
    assert room.last("b", "passed") == {"schedule": [7, 2]}
    room.ready("b", "before", 11, average=-1)
    room.ready("a", "before", 11, average=5)
    assert room.members("a") == ["a", "b"]
    assert [peer["average"] for peer in room.last("b", "epoch")["members"]] == [5, -1]  # type: ignore[index]


def test_one_that_missed_an_average_joins_again_if_the_others_wait() -> None:
    room = Room().began("a", "b", "c")
    room.roster.gone("c", "is lost", room.now)
    room.ready("b", "before", 5)
    room.ready("a", "after", 6, average=5)
    assert room.members("b") == ["a", "b+"]


def test_below_min_nodes_all_wait() -> None:
    room = Room(min_nodes=2).began("a", "b")
    room.roster.gone("b", "is lost", room.now)
    room.ready("a", "before", 5)
    assert len(room.members("a")) == 2
    assert room.last("a", "news") == {"newcomers": 0, "here": 1, "needed": 2}
    room.hello("c")
    room.ready("c", "join")
    assert room.members("a") == ["a"]  # it averages, and then lets c in
    room.ready("a", "after", 6)
    assert room.members("c") == ["a", "c+"]


def test_the_job_ends_when_all_are_at_the_end() -> None:
    room = Room().began("a", "b")
    room.ready("a", "end", 10)
    assert room.last("a", "over") is None
    room.ready("b", "before", 10)  # its last average has failed
    assert room.members("b") == ["a", "b+"]
    assert room.last("b", "epoch")["at_end"]  # type: ignore[index]
    room.ready("a", "end", 10)
    room.ready("b", "end", 10)
    assert room.last("a", "over") == {"k": 10}
    room.hello("c")
    assert room.last("c", "ended") == {"k": 10}
    room.hello("d", setup="another job")
    assert "the job has ended at step 10" in room.last("d", "refused")["why"]  # type: ignore[index]


def test_members_that_finish_wait_for_each_other_and_for_no_newcomer() -> None:
    room = Room(min_nodes=2).began("a", "b")
    room.hello("c")
    room.ready("c", "join")
    room.ready("a", "finish", 10)
    room.beat("b", 9, computing=False, stepping=9)  # it has not come so far
    assert room.last("a", "same") is None
    room.ready("b", "finish", 10)
    assert room.last("a", "same") == room.last("b", "same") == {}
    room.ready("a", "end", 10)
    room.ready("b", "end", 10)
    assert room.last("a", "over") == room.last("c", "ended") == {"k": 10}


@pytest.mark.parametrize("stepping", [10, 13])
def test_others_go_on_without_a_member_that_finishes_early(stepping: int) -> None:
    room = Room().began("a", "b", "c")
    room.ready("a", "finish", 10)
    room.beat("b", 10, computing=True)
    assert room.last("a", "alone") is None
    room.beat("b", stepping, computing=False, stepping=stepping)
    assert room.last("a", "alone") == {"k": 10}
    assert room.last("b", "lost") == {"epoch": 1, "why": "a has finished at step 10"}
    room.ready("b", "before", 11)
    room.ready("c", "before", 11)
    assert room.members("b") == ["b", "c"]


def test_the_last_one_finishes_whatever_min_nodes_says() -> None:
    room = Room(min_nodes=2).began("a", "b")
    room.roster.gone("b", "has ended without averager.finish() or leave()", room.now)
    room.ready("a", "finish", 10, is_connected=False)
    assert room.members("a") == ["a"]
    room.ready("a", "finish", 10)
    assert room.last("a", "same") == {}
    room.ready("a", "end", 10)
    assert room.last("a", "over") == {"k": 10}


def test_members_that_have_lost_each_other_but_not_the_coordinator_connect_anew_to_finish() -> None:
    room = Room().began("a", "b")
    room.ready("a", "finish", 10, is_connected=False)
    room.ready("b", "finish", 10)
    assert room.last("a", "same") is None
    assert room.members("b") == ["a", "b"]
    assert room.roster.epoch is not None
    assert room.roster.epoch.number == 2


def test_a_silent_node_is_lost_and_a_slow_one_is_not() -> None:
    room = Room().began("a", "b", "c")
    room.later(SILENCE + 1, "a", "b", k=3)
    assert room.last("a", "lost") == {"epoch": 1, "why": "c is lost: it is silent"}
    room.beat("a", 4, computing=False)
    room.later(HUNG_LEAST - 5, "b", k=3)
    assert not any("dropped" in line for line in room.lines if line.startswith("b"))


@pytest.mark.parametrize(("options", "limit"), [({}, HUNG_LEAST), ({"timeout": 7.0}, 7.0), ({"drop_slow": 30.0}, 3.0)])
def test_a_node_that_keeps_others_waiting_is_dropped(options: dict[str, float], limit: float) -> None:
    room = Room()
    for uid in "ab":
        room.hello(uid, **options)
        room.ready(uid, "join")
    room.later(BEGIN, "a", "b")
    for seconds, is_dropped in ((limit - 1.0, False), (2.0, True)):
        ends = room.now + seconds
        while room.now < ends:
            room.now += 0.5
            room.beat("a", 3, computing=False)
            room.beat("b", 3, computing=True)
            room.roster.tick(room.now)
        assert (room.last("b", "dropped") is not None) == is_dropped
    assert "b is dropped" in room.last("a", "lost")["why"]  # type: ignore[index]


def test_members_that_all_wait_for_each_other_are_told_to_go_on() -> None:
    room = Room().began("a", "b")
    room.later(HUNG_LEAST + 2, "a", "b", k=3, computing=False)
    assert "all members have waited for each other" in room.last("a", "lost")["why"]  # type: ignore[index]


def test_a_coordinator_that_is_started_again_learns_who_the_members_are() -> None:
    room = Room()
    room.hello("new")
    room.ready("new", "join")
    room.hello("a", epoch=7, members=("a", "b", "c"))
    room.hello("b", epoch=7, members=("a", "b", "c"))
    room.later(BEGIN, "a", "b", "new")
    assert room.last("new", "epoch") is None
    room.later(SILENCE, "a", "b", "new")
    assert "has not come back" in room.last("a", "lost")["why"]  # type: ignore[index]
    room.ready("a", "before", 9)
    room.ready("b", "before", 9)
    assert room.members("b") == ["a", "b"]
    assert room.last("a", "epoch")["number"] == 8  # type: ignore[index]
    room.hello("c", epoch=7, members=("a", "b", "c"))
    assert room.last("c", "dropped") == {"why": "the others went on without it"}


def test_a_stranger_that_is_first_at_a_coordinator_that_was_started_again_has_to_go() -> None:
    room = Room()
    room.hello("s", setup="y")
    room.ready("s", "join")
    room.hello("a", epoch=7, members=("a", "b"))
    assert room.last("a", "welcome") is not None
    assert room.last("s", "refused") == {"why": "nodes disagree on the model: the others have x, this node has y"}
    room.hello("t", setup="y")
    room.hello("b", epoch=7, members=("a", "b"))
    assert room.last("t", "refused") is not None
    assert list(room.roster.nodes) == ["a", "b"]


def test_a_member_that_has_not_heard_of_its_epoch_is_left_out() -> None:
    room = Room().began("a", "b", "c")
    room.ready("a", "after", 6)
    room.ready("b", "after", 6)
    room.roster.gone("c", "is lost", room.now)
    assert room.members("a") == ["a", "b"]
    room.hello("b", epoch=1, members=("a", "b", "c"))
    assert room.last("a", "lost")["epoch"] == 2  # type: ignore[index]
    assert room.last("b", "dropped") is not None


def test_two_nodes_of_the_same_name_take_part_and_the_coordinator_says_so() -> None:
    room = Room()
    for uid in ("first", "second"):
        room.hello(uid, name="a")
        room.ready(uid, "join")
    assert room.lines == ["a is here", "a is here. Another node has the same name: both take part, but messages can't tell them apart"]
    room.later(BEGIN, "first", "second")
    assert room.members("first") == room.members("second") == ["a", "a+"]


def test_a_node_that_died_comes_back_with_its_name() -> None:
    room = Room()
    for uid in ("first", "second"):
        room.hello(uid, name="a")
        room.roster.gone(uid, "is lost", room.now)
    assert room.lines == ["a is here", "a is lost", "a is here", "a is lost"]


def test_a_stranger_is_refused_with_both_values() -> None:
    room = Room().began("a")
    room.hello("s", setup="y")
    assert room.last("s", "refused") == {"why": "nodes disagree on the model: the others have x, this node has y"}
    room.hello("t", protocol=0)
    assert f"version {PROTOCOL} of the protocol, this node version 0" in room.last("t", "refused")["why"]  # type: ignore[index]
    assert list(room.roster.nodes) == ["a"]


def test_addresses_that_other_hosts_can_not_reach_are_refused() -> None:
    room = Room()
    room.hello("a", store=["127.0.0.1", 5])
    room.hello("b", store=["10.0.0.2", 5])
    assert "the others are at 127.0.0.1, this node is at 10.0.0.2" in room.last("b", "refused")["why"]  # type: ignore[index]
    room.hello("c", store=["127.0.0.1", 6])
    assert list(room.roster.nodes) == ["a", "c"]


@pytest.mark.parametrize("text", ["", ":5", "host:port", "host:70000", "host:-1"])
def test_a_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_address(text)


def test_a_port_alone_is_no_address() -> None:
    with pytest.raises(TypeError, match='address is a string, such as "node0:29510", got 29510'):
        rumor.elastic(29510)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"name must be a string, got 29510\. A port is part of the address"):
        rumor.elastic("node0", 29510)  # type: ignore[arg-type]


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"a": 1}', b"\xff\xfe", b"[" * 100_000])
def test_garbage_is_no_message(line: bytes) -> None:
    with pytest.raises(ValueError, match="not a message of Rumor"):
        decode(line)


def test_a_newcomer_that_can_not_connect_does_not_hold_up_the_members() -> None:
    room = Room().began("a", "b")
    room.hello("x")
    room.ready("x", "join")
    for attempt in range(1, FAILURES + 1):
        room.ready("a", "after", 6)
        room.ready("b", "after", 6)
        assert room.members("x") == ["a", "b", "x+"]
        room.roster.failed("x", room.last("x", "epoch")["number"], room.now)  # type: ignore[index]
        for uid in list(room.roster.nodes):
            room.ready(uid, "join" if uid == "x" else "after", 6)
        if attempt > 1:  # the first time, another node's death may have been the reason
            assert room.members("a") == ["a", "b"]
            room.later(RETRY_AFTER * attempt, *room.roster.nodes)
    assert "can't connect to each other" in room.last("x", "refused")["why"]  # type: ignore[index]
    assert list(room.roster.nodes) == ["a", "b"]


def test_one_that_waits_between_steps_does_not_meet_one_that_averages() -> None:
    room = Room().began("a", "b", "c")
    room.roster.gone("c", "is lost", room.now)
    room.ready("b", "between", 5)
    room.ready("a", "before", 5)
    assert room.last("b", "passed") == {"schedule": [5, 0]}
    room.ready("b", "before", 5)
    assert room.members("b") == ["a", "b"]


def test_one_that_was_left_behind_does_not_take_a_new_coordinator_back_to_its_epoch() -> None:
    room = Room()
    room.hello("old", epoch=7, members=("old", "a", "b"), k=100)
    room.hello("a", epoch=8, members=("a", "b"), k=5_000)
    room.hello("b", epoch=8, members=("a", "b"), k=5_000)
    assert room.last("old", "dropped") is not None
    assert room.last("a", "dropped") is None
    room.ready("a", "before", 5_000)
    room.ready("b", "before", 5_000)
    assert room.members("a") == ["a", "b"]


def test_a_member_that_has_not_heard_of_the_end_is_told() -> None:
    room = Room(min_nodes=2).began("a", "b")
    room.ready("b", "end", 10)
    room.roster.gone("a", "is lost", room.now)  # fewer than min_nodes are left, but the job is done
    assert room.last("b", "over") == {"k": 10}
    room.hello("a", epoch=1, members=("a", "b"), k=10)
    assert room.last("a", "over") == {"k": 10}


def test_state_that_travels_is_progress_and_a_member_that_is_stuck_is_dropped() -> None:
    room = Room().began("a", "b", "c")
    for moved in range(200):
        room.now += 0.5
        for uid in "abc":
            message = {"k": 3, "computing": False, "stepping": 3, "step_seconds": 0.1, "schedule": [3, 2], "moved": moved}
            room.roster.beat(uid, message, room.now)
        room.roster.tick(room.now)
    assert room.last("a", "lost") is None
    room.roster.gone("c", "is lost", room.now)
    room.ready("a", "before", 3)
    room.later(STUCK + 1, "a", "b", k=3, computing=False)
    assert "has not noticed" in room.last("b", "dropped")["why"]  # type: ignore[index]
    assert room.members("a") == ["a"]


def member(step_seconds: float, **options: float) -> Member:
    given: dict[str, Any] = {"timeout": None, "drop_slow": None, **options}
    return Member("a", "a", {}, [], 1, given["timeout"], given["drop_slow"], 0.0, 0.0, step_seconds=step_seconds)


@pytest.mark.parametrize(("step", "silent", "hung"), [(0.01, 5.0, 60.0), (3.0, 6.0, 60.0), (30.0, 30.0, 300.0), (300.0, 30.0, HUNG_MOST)])
def test_limits_follow_the_step_time(step: float, silent: float, hung: float) -> None:
    assert silence_of(step) == silent
    assert limit_of(member(step), [member(step)]) == hung
    assert limit_of(member(0.01), [member(step)]) == hung  # the slowest counts
    assert limit_of(member(step, drop_slow=5.0), [member(step)]) == max(1.0, 5 * step)


def test_a_first_step_may_take_longer() -> None:
    """It compiles, or a GPU warms up."""
    assert limit_of(member(0.0), [member(0.01)]) == limit_of(member(0.0, drop_slow=5.0), [member(0.01)]) == FIRST_STEP
    assert limit_of(member(0.0, timeout=7.0), [member(0.01)]) == 7.0


def test_a_slow_node_that_is_dropped_again_stays_out_longer_each_time() -> None:
    room = Room()
    for uid in "abc":
        room.hello(uid, drop_slow=10.0)
        room.ready(uid, "join")
    room.later(BEGIN, *"abc")
    pauses = []
    for _ in range(4):
        drops = len([kind for kind, _ in room.said["c"] if kind == "dropped"])
        while len([kind for kind, _ in room.said["c"] if kind == "dropped"]) == drops:
            room.now += 0.5
            for uid in "abc":
                room.beat(uid, 3, computing=uid == "c")
            room.roster.tick(room.now)
        dropped_at = room.now
        room.ready("c", "join")
        while room.last("a", "news")["newcomers"] == 0:  # type: ignore[index]
            room.later(0.5, *"abc", k=3)
        pauses.append(room.now - dropped_at)
        for stage in ("before", "after"):
            for uid in "ab":
                room.ready(uid, stage, 4)
        assert room.members("c") == ["a", "b", "c+"]
    assert pauses == [0.0, DROPPED_FIRST, 2 * DROPPED_FIRST, 4 * DROPPED_FIRST]
    assert room.last("c", "dropped")["why"].endswith("It may come back in 40 s")  # type: ignore[index]
    slow = room.roster.nodes["c"]
    assert slow.pause(room.now + FORGIVEN_AFTER + 1) == 0.0


def test_a_slow_node_is_let_in_at_once_if_there_are_not_enough_without_it() -> None:
    room = Room(min_nodes=2).began("a", "b")
    slow = room.roster.nodes["b"]
    slow.drops, slow.dropped_at = 3, room.now
    room.roster._drop(slow, "it is slow", room.now)
    slow.pause(room.now)
    room.ready("a", "before", 5)
    assert len(room.members("a")) == 2
    room.ready("b", "join")
    assert room.members("a") == ["a"]
    assert room.last("a", "news")["newcomers"] == 1  # type: ignore[index]


def test_one_that_waits_after_an_average_goes_on_if_others_did_so_without_a_coordinator() -> None:
    room = Room()
    room.hello("a", epoch=7, members=("a", "b"))
    room.hello("b", epoch=7, members=("a", "b"))
    room.ready("a", "after", 6)
    room.beat("b", 6, stepping=-1)
    assert room.last("a", "same") is None
    room.beat("b", 6, computing=False, stepping=6)
    assert room.last("a", "same") == {}


def test_members_that_went_on_alone_meet_where_the_furthest_is() -> None:
    room = Room()
    for uid in "abc":
        room.hello(uid, epoch=7, members=("a", "b", "c"))
    room.ready("a", "before", 103)
    room.ready("b", "before", 43)
    assert room.last("b", "passed") == {"schedule": [103, 0]}
    room.ready("c", "before", 91)
    assert room.last("c", "passed") == {"schedule": [103, 0]}
    for uid in "bc":
        room.ready(uid, "before", 103)
    assert room.members("a") == ["a", "b", "c"]


def test_a_model_of_thousands_of_tensors_is_compared_in_one_short_line() -> None:
    tensors = [f"layers.{i}.weight [1024, 1024] torch.float32" for i in range(100_000)]
    texts = [", ".join(tensors), ", ".join([*tensors[:50], "other [1]", *tensors[51:]]), ", ".join([*tensors[:-1], "other [1]"])]
    setups = [{"model": shortened(text)} for text in texts]
    assert all(len(encode("hello", setup=setup)) < LONGEST_LINE / 8 for setup in setups)
    assert difference(setups[0], setups[0]) is None
    early, late = difference(setups[0], setups[1]), difference(setups[0], setups[2])
    assert early is not None
    assert early.startswith("nodes disagree on the model: the others have ... layers.50.weight [1024, 1024]")
    assert "this node has ... other [1], layers.51.weight" in early
    assert late is not None
    assert late.count("sha256") == 2
    assert max(len(early), len(late)) < 600


def test_a_job_that_has_come_far_is_not_lost_to_one_that_began_at_a_restarted_coordinator() -> None:
    """A newcomer was faster at the new coordinator than the members, and has begun a job of its own, with the same number of an epoch."""
    room = Room().began("new")
    room.beat("new", 7)
    epoch = room.last("new", "epoch")
    assert epoch is not None
    room.hello("a", epoch["number"], ("a", "b"), k=50_000, lineage="old")
    assert "come further" in room.last("new", "dropped")["why"]  # type: ignore[index]
    room.hello("b", epoch["number"], ("a", "b"), k=50_000, lineage="old")
    assert room.last("a", "dropped") is None
    assert room.last("b", "dropped") is None
    room.ready("new", "join")
    for uid in ("a", "b"):
        room.ready(uid, "after", 50_000)
    assert room.members("a") == ["a", "b", "new+"]
    assert room.last("a", "epoch")["lineage"] == "old"  # type: ignore[index]


def test_a_job_that_has_just_begun_elsewhere_takes_over_the_one_that_has_come_further() -> None:
    room = Room().began("a", "b")
    for uid in ("a", "b"):
        room.beat(uid, 100)
    room.hello("c", 9, ("c",), k=20, lineage="other")
    assert "went on without it" in room.last("c", "dropped")["why"]  # type: ignore[index]
    assert room.last("a", "dropped") is None


def test_a_coordinator_may_exit_once_the_job_has_ended() -> None:
    """A node that is still there keeps it, and so does a job that has not ended."""
    coordinator = Coordinator(Address("127.0.0.1", 0), log=lambda _: None, exit_after=0.3)

    async def served(seconds: float) -> None:
        await asyncio.wait_for(coordinator.serve(), seconds)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(served(1.0))
    coordinator.roster.over_at = 7
    asyncio.run(served(20.0))
