"""The soak's figures are those of the nodes' notes, its kills are the same for all contestants, and it runs."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests import warm

sys.path.insert(0, str(warm.ROOT / "benchmarks"))

from soak import compared, plans
from soak_notes import Kill, Life, Note, findings, read_lives
from soak_tables import jobs, kept, soak_headline

H, STEPS = 6, 60


def life(pid: int, first: float, steps: range, memory: int = 100, every: float = 0.1) -> Life:
    """A process that takes a step every 0.1 s."""
    return Life(pid, [Note(first + every * i, step, 3, memory) for i, step in enumerate(steps)])


def test_kills_are_repeatable_and_apart() -> None:
    found = plans(2_000, 8, seed=3)
    assert found == plans(2_000, 8, seed=3) != plans(2_000, 8, seed=4)
    gaps = [b.step - a.step for a, b in pairwise(found)]
    assert 100 <= found[0].step <= 200
    assert min(gaps) >= 100
    assert max(gaps) <= 200
    assert found[-1].step <= 1_900
    assert {plan.node for plan in found} <= set(range(8))


def test_an_undisturbed_job() -> None:
    found = findings([life(pid, 0.0, range(1, STEPS + 1)) for pid in range(3)], [], 3, STEPS, H)
    assert found["seconds"] == pytest.approx(5.9)
    assert found["steps_a_second_of_node_life"] == pytest.approx(3 * STEPS / (3 * 5.9))
    assert (found["restarts_of_survivors"], found["steps_of_survivors_lost"], found["kills"]) == (0, 0, [])


def test_survivors_that_go_on_lose_nothing_and_the_dead_node_does_not_count() -> None:
    """Node 2 dies after step 20 and is back at step 43. The others do not wait for it."""
    lives = [life(0, 0.0, range(1, STEPS + 1)), life(1, 0.0, range(1, STEPS + 1)), life(2, 0.0, range(1, 21))]
    lives.append(life(3, 4.2, range(43, STEPS + 1)))
    found = findings(lives, [Kill(1.95, 2, 2, 20)], 3, STEPS, H)
    assert (found["restarts_of_survivors"], found["steps_of_survivors_lost"]) == (0, 0)
    assert found["seconds_away"] == pytest.approx([2.25])
    assert found["steps_a_second_of_node_life"] == pytest.approx((60 + 60 + 20 + 18) / (3 * 5.9 - 2.25))
    assert found["seconds_to_next_average"] == pytest.approx([2.3 - 1.95])  # step 24


def test_a_restart_of_all_counts_the_steps_that_are_repeated() -> None:
    """One of three dies after step 25, and all start again from step 20, 4 s later."""
    lives = [life(pid, 0.0, range(1, 26)) for pid in range(3)] + [life(3 + pid, 6.0, range(21, STEPS + 1)) for pid in range(3)]
    found = findings(lives, [Kill(2.45, 1, 1, 25)], 3, STEPS, H)
    assert found["restarts_of_survivors"] == 2
    assert found["steps_of_survivors_lost"] == 2 * 5
    assert found["seconds_to_next_average"] == pytest.approx([6.3 - 2.45])  # step 24 again


def test_steps_that_did_not_count_are_lost() -> None:
    """A survivor whose average failed counts steps 25 to 30 again, and one that fell behind jumps ahead."""
    repeats = Life(0, [*life(0, 0.0, range(1, 30)).notes, *life(0, 2.9, range(24, STEPS + 1)).notes])
    behind = Life(1, [*life(1, 0.0, range(1, 30)).notes, *life(1, 2.9, range(36, STEPS + 1)).notes])
    assert (repeats.jumps(), behind.jumps()) == (6, 6)
    assert repeats.next_average(2.85, H) == pytest.approx(2.9 + 0.6)  # step 30: the note of step 24 was of an average that failed


def test_memory_is_compared_after_a_while() -> None:
    notes = [Note(0.1 * step, step, 3, 50 if step < 100 else 100 + step // 100) for step in range(1, 201)]
    assert Life(0, notes).growth() == pytest.approx(102 / 101 - 1)
    assert life(0, 0.0, range(50)).growth() is None


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "7.txt").write_text("1.5 3 8 100\n1.6 4 8 10")
    assert read_lives(tmp_path) == [Life(7, [Note(1.5, 3, 8, 100)])]


def test_the_table_shows_what_is_kept() -> None:
    lives = [life(pid, 0.0, range(1, STEPS + 1)) for pid in range(2)]
    killed = findings(lives, [Kill(1.95, 1, 1, 20)], 2, STEPS, H)
    both = compared(findings(lives, [], 2, STEPS, H) | {"accuracy": 0.9}, killed | {"accuracy": 0.8})
    results = {"processes": 2, "steps": STEPS, "plan": [[20, 1, 0.5]], "found": {"ours": both, "theirs": both}}
    share = f"{100 * both['throughput_kept']:.0f} %"
    assert "2 nodes, 60 steps, 1 kills" in kept(results)
    assert f"**{share}**" in kept(results)
    assert "| 90.0 %, 80.0 % |" in jobs(results)
    assert f"keeps **{share} of its throughput**. The same kills leave {share} (theirs)." in soak_headline(results)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_survivors_of_a_short_soak_are_never_restarted(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    options = ["--processes", "3", "--steps", "90", "--apart", "30", "40", "--minutes", "4", "--only", "rumor.elastic"]
    done = warm.run([str(warm.ROOT / "benchmarks" / "soak.py"), "--out", str(out), *options], tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    killed = json.loads(out.read_text())["found"]["rumor.elastic"]["killed"]
    assert (len(killed["kills"]), killed["restarts_of_survivors"]) == (1, 0)
