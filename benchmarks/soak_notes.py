"""What the notes of the nodes of benchmarks/soak.py say: steps taken, lost and repeated, memory, and how soon averages went on.

A *life* is one process: a line for each of its steps, with the time, the number of steps that the job has taken, the number of members and
the memory of the process.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

SETTLED = 100  # steps after which a process has allocated what it needs


class Note(NamedTuple):
    time: float
    step: int
    members: int
    memory: int


class Kill(NamedTuple):
    """One kill: when, of which node, of which process, and the last step that this process had noted."""

    time: float
    node: int
    pid: int
    step: int


@dataclass(frozen=True)
class Life:
    pid: int
    notes: list[Note]

    @property
    def first(self) -> Note:
        return self.notes[0]

    @property
    def last(self) -> Note:
        return self.notes[-1]

    def jumps(self) -> int:
        """Steps of this process that the job lost or repeated: its count went back, or jumped ahead to that of the others."""
        return sum(abs(after.step - before.step - 1) for before, after in pairwise(self.notes))

    def growth(self) -> float | None:
        """Growth of its memory from SETTLED steps after its start to its end, as a share; None if it ended earlier."""
        settled = [note.memory for note in self.notes[SETTLED:]]
        return settled[-1] / settled[0] - 1 if len(settled) > 1 else None

    def next_average(self, after: float, H: int) -> float | None:
        """Time of its first global average after that time, if it has noted one that succeeded."""
        reached = max((note.step for note in self.notes if note.time <= after), default=-1)
        return next((note.time for note in self.notes if note.time > after and note.step % H == 0 and note.step > reached), None)


def read_note(line: str) -> Note:
    time, step, members, memory = line.split()
    return Note(float(time), int(step), int(members), int(memory))


def read_lives(folder: Path) -> list[Life]:
    lives = []
    for path in folder.glob("*.txt"):
        lines = path.read_text().splitlines(keepends=True)
        notes = [read_note(line) for line in lines if line.endswith("\n")]
        if notes:
            lives.append(Life(int(path.stem), notes))
    return sorted(lives, key=lambda life: life.first.time)


def findings(lives: list[Life], kills: list[Kill], nodes: int, steps: int, H: int) -> dict[str, Any]:
    """The figures of one job. Its time begins with its first step."""
    began, ended = min(life.first.time for life in lives), max(life.last.time for life in lives)
    seconds, killed = ended - began, {kill.pid for kill in kills}
    restarted = [life for life in lives if life.pid not in killed and life.last.step < steps - H]
    lost = sum(life.jumps() for life in lives) + sum(_repeated(life, lives) for life in restarted)
    late = [life.first.time - began for life in lives[:nodes]]
    away = seconds_away(lives[nodes:], kills, ended)
    gaps = [gap for kill in kills if (gap := seconds_to_average(kill, kills, lives, restarted, H)) is not None]
    taken = sum(len(life.notes) for life in lives) - lost
    memory = [growth for life in lives if life.pid not in killed and (growth := life.growth()) is not None]
    return {
        "seconds": seconds,
        "job_steps_a_second": steps / seconds,
        "steps_a_second_of_node_life": taken / (nodes * seconds - sum(late) - sum(away)),
        "kills": [kill._asdict() | {"time": kill.time - began} for kill in kills],
        "restarts_of_survivors": len(restarted),
        "steps_of_survivors_lost": lost,
        "memory_growth": max(memory, default=None),
        "seconds_to_next_average": gaps,
        "median_seconds_to_next_average": statistics.median(gaps) if gaps else None,
        "seconds_away": away,
    }


def _repeated(life: Life, lives: list[Life]) -> int:
    """Steps that a survivor had taken and that were taken again by the process that followed it."""
    following = next((other for other in lives if other.first.time > life.last.time), None)
    return 0 if following is None else max(0, life.last.step - following.first.step + 1)


def seconds_away(later: list[Life], kills: list[Kill], ended: float) -> list[float]:
    """How long each victim's place was empty: from the kill to the first step of a process that was started later."""
    left, away = list(later), []
    for kill in kills:
        back = next((life for life in left if life.first.time > kill.time), None)
        if back is not None:
            left.remove(back)
        away.append((ended if back is None else back.first.time) - kill.time)
    return away


def seconds_to_average(kill: Kill, kills: list[Kill], lives: list[Life], restarted: list[Life], H: int) -> float | None:
    """Seconds from a kill to the next global average of all survivors; if all were restarted, to the first one of a new process."""
    gone = {other.pid for other in kills if other.time <= kill.time} | {life.pid for life in restarted}
    before = [life for life in lives if life.first.time <= kill.time and life.pid not in gone]
    after = [life for life in lives if life.first.time > kill.time]
    times = [[at for life in group if (at := life.next_average(kill.time, H)) is not None] for group in (before, after)]
    if times[0]:
        return max(times[0]) - kill.time
    return min(times[1]) - kill.time if times[1] else None
