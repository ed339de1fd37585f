"""`rumor demo --kill`: shows a node that dies and comes back, live."""

from __future__ import annotations

import argparse
from pathlib import Path

from rumor.cli.progress import Progress
from rumor.cli.table import paragraph
from rumor.demo.digits import split_by_label
from rumor.demo.elastic import PAUSE, Story, kill_and_restart
from rumor.demo.elastic_picture import draw
from rumor.demo.methods import RECOMMENDED
from rumor.demo.processes import ProcessError, Processes
from rumor.demo.results import write

NODES, STEPS, FEWEST_STEPS = 4, 300, 100
NOT_HERE = ("method", "topology", "H", "delay", "rate", "modelled")


def prepare(options: argparse.Namespace) -> None:
    """Checks the options."""
    for name in NOT_HERE:
        if getattr(options, name) not in (None, False):
            raise ValueError(f"--kill always runs {RECOMMENDED} on this machine's own network: leave out --{name}")
    if options.steps < FEWEST_STEPS:
        raise ValueError(f"--kill needs at least {FEWEST_STEPS} steps, so that there is time to die and to come back: got {options.steps}")


def run(options: argparse.Namespace, prepared: None, folder: Path, with_picture: bool) -> None:
    story = _train(options)
    print(_summary(story))
    settings = {name: getattr(options, name) for name in ("nodes", "steps", "seed")}
    settings |= {"method": RECOMMENDED, "seconds_asleep_in_each_step": PAUSE}
    write(folder / "kill.json", settings, {"story": story.as_dict()})
    print(f"\nwrote {folder / 'kill.json'}")
    if with_picture:
        draw(story, folder / "kill.png")
        print(f"wrote {folder / 'kill.png'}, a picture of what happened")


def _train(options: argparse.Namespace) -> Story:
    (digits,) = split_by_label(1, options.seed)  # all of them: the members divide them
    live, story = _Live(options.steps), None
    try:
        with Processes(options.nodes + 1) as processes:
            live.line.say(f"starting {options.nodes} nodes, which takes a few seconds ...")
            processes.wait_until_ready()
            for story in kill_and_restart(processes, options.nodes, digits, options.steps, options.seed):
                live.show(story)
    finally:
        live.line.clear()
    if story is None or story.back is None:
        raise ProcessError("the node did not come back before the job ended: give more --steps")
    return story


class _Live:
    """Prints a line when something happens. On a terminal, a bar below it moves."""

    def __init__(self, steps: int):
        self.line, self._steps, self._told = Progress(), steps, 0

    def show(self, story: Story) -> None:
        events = _events(story)
        for event in events[self._told :]:
            self.line.clear()
            print(paragraph(event, " " * 9), flush=True)
        self._told = len(events)
        last = story.moments[-1]
        if self.line.is_live:
            found = f", accuracy {story.averages[-1].accuracy:.1%}" if story.averages else ""
            self.line.bar(f"step {last.step} of {self._steps}", last.step / self._steps, f"{last.members} members{found}")


def _events(story: Story) -> list[str]:
    """What has happened so far, a line each, in order."""
    found = [f"{0.0:5.1f} s  {story.n} nodes train with {RECOMMENDED}"]
    if story.killed is not None:
        found.append(f"{story.killed[0]:5.1f} s  step {story.killed[1]}: node {story.victim} is killed (SIGKILL)")
        if (seconds := story.next_average) is not None:
            at = story.killed[0] + seconds
            found.append(f"{at:5.1f} s  the others have made their next global average, {seconds:.2f} s after the death")
    if story.restarted is not None:
        found.append(f"{story.restarted:5.1f} s  another process starts in its place, without a checkpoint")
    if story.back is not None:
        found.append(f"{story.back[0]:5.1f} s  step {story.back[1]}: node {story.victim} is back, with the others' model and step count")
    return found


def _summary(story: Story) -> str:
    assert story.restarted is not None
    assert story.back is not None
    end, last = story.averages[-1], max(story.seconds(moment.at) for moment in story.moments)
    return paragraph(
        f"{last:5.1f} s  the end: accuracy {end.accuracy:.1%}. The survivors repeated or left out {story.lost_steps} steps. Node "
        f"{story.victim} was back {story.back[0] - story.restarted:.2f} s after its start (Python and torch had been imported before).",
        " " * 9,
    )
