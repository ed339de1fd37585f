"""Roster: decides who the members are, and when the next epoch begins. It has no sockets and no clock, so tests can drive it.

Rules:

- Members change at global averages only. If nodes are lost, the others meet *before* their next global average, and those that get
  there average. If newcomers wait, all members stop *after* a global average, when they have the same model, and let them in.
- If a node dies in the middle of a global average, some may have completed it and others not. Those that have not go on alone, and
  average with the others at the next one. If the others wait for newcomers, they join again like these.
- A member is lost when its connection ends or when it is silent. A slow member is not lost, unless it keeps others waiting for too long.
- Members that finish wait for each other, and then average once more. If others take further steps, they go on without it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from rumor.membership import limits
from rumor.membership.member import Epoch, Member, Ready, difference, greeting, is_further, is_loopback, is_past, limit_of, progress
from rumor.membership.protocol import PROTOCOL, Message, Stage

Send = Callable[[str, str, Message], None]  # to this member: kind, values
Log = Callable[[str], None]


class Roster:
    """Who is here, who is a member, and who waits.

    Args:
        send: sends a message to a member.
        log: prints one line.
        min_nodes: how many nodes there must be for training to go on.
    """

    def __init__(self, send: Send, log: Log, min_nodes: int = 1):
        self._send, self._log, self._min_nodes = send, log, min_nodes
        self.nodes: dict[str, Member] = {}
        self.epoch: Epoch | None = None
        self.over_at: int | None = None
        self._over_setup: dict[str, str] = {}  # of the job that has ended
        self._last_hello = 0.0
        self._started: float | None = None  # when this coordinator was
        self._last_number = 0
        self._lineage = ""  # names the job by its first epoch: coordinators that were started again count epochs anew
        self._told: tuple[int, int, int] | None = None  # the last news

    # ---- what nodes say ----------------------------------------------------------------------------------------------------------

    def hello(self, message: Message, now: float) -> bool:
        """A node introduces itself, or comes back. Returns whether it may stay."""
        if self.over_at is not None and message["epoch"] is not None and message["k"] >= self.over_at:  # it has not heard
            self._send(message["uid"], "over", {"k": self.over_at})
            return False
        if self.over_at is not None and difference(self._over_setup, message["setup"]) is None:
            self._log(f"{message['name']} has come after the end")
            self._send(message["uid"], "ended", {"k": self.over_at})
            return False
        if (problem := self._problem(message)) is not None:
            self._log(f"refused {message.get('name')}: {problem}")
            self._send(message["uid"], "refused", {"why": problem})
            return False
        uid = message["uid"]
        came_back = uid in self.nodes
        self.nodes[uid] = Member.of(message, now, self.nodes.get(uid))
        self._last_hello = now
        self._send(uid, "welcome", {})
        number = message["epoch"]
        if number is not None and (self.epoch is None or self._is_behind(message)):  # this coordinator was started again
            for other in self.epoch.uids if self.epoch is not None else ():  # they were left behind, or began a job of their own
                if other not in message["members"]:
                    self._send(other, "dropped", {"why": "others have come further"})
            self.epoch = Epoch(number, list(message["members"]), absent=dict.fromkeys(message["members"], now + limits.SILENCE))
            self._last_number, self._lineage = max(self._last_number, number), message.get("lineage") or ""
            self._refuse_strangers(message["setup"])
        if self.epoch is not None:
            self.epoch.absent.pop(uid, None)
        if self._is_member(uid) and not self._is_member(uid, number):  # it has not heard of this epoch
            self._remove(uid, f"{message['name']} has lost its connection")
        if number is not None and not self._is_member(uid, number):
            self._send(uid, "dropped", {"why": "the others went on without it"})
        if not came_back:
            self._log(greeting(self.nodes[uid], self.nodes.values()))
        self._tell_news()
        return True

    def beat(self, uid: str, message: Message, now: float) -> None:
        node = self.nodes[uid]
        node.heard = now
        if (message["k"], message["computing"], message["moved"]) != (node.k, node.computing, node.moved):
            node.progressed = now
        node.moved = message["moved"]
        node.k, node.computing, node.step_seconds = message["k"], message["computing"], message["step_seconds"]
        node.schedule, node.stepping = message["schedule"], message["stepping"]
        self._send(uid, "beat", {})
        self._let_waiting_go()
        self._let_finished_go(now)
        self._tell_passed(now)

    def ready(self, uid: str, message: Message, now: float) -> None:
        node = self.nodes[uid]
        node.heard = node.progressed = now
        node.k, node.computing = message["k"], False
        node.ready = Ready(message["k"], message["stage"], message["is_connected"])
        node.schedule, node.average, node.stepping = message["schedule"], message["average"], message["stepping"]
        self._tell_news()
        self._let_finished_go(now)
        self._tell_passed(now)
        self._form(now)

    def failed(self, uid: str, number: int, now: float) -> None:
        """A member could not connect to the others: all of them try again, and newcomers a little later if it happens again."""
        if not self._is_member(uid, number) or self.epoch is None:
            return
        is_lost = self.epoch.is_broken  # the reason is another node's death
        joining = [] if is_lost else [self.nodes[one] for one in self.epoch.joining if one in self.nodes]
        self._break(f"{self.nodes[uid].name} could not connect to the others")
        self.epoch.joining = []
        for node in joining:
            node.failures += 1
            node.retry_at = now + limits.RETRY_AFTER * (node.failures - 1)
            self.epoch.uids.remove(node.uid)
            if node.failures >= limits.FAILURES:
                why = "this node and the members can't connect to each other: look for a firewall, or set GLOO_SOCKET_IFNAME"
                self._log(f"refused {node.name}: {why}")
                self._send(node.uid, "refused", {"why": why})
                del self.nodes[node.uid]

    def gone(self, uid: str, why: str, now: float) -> None:
        """A node's connection has ended, or it is silent, or it has left."""
        node = self.nodes.pop(uid, None)
        if node is None:
            return
        self._log(f"{node.name} {why}")
        self._remove(uid, f"{node.name} {why}")
        self._tell_news()
        self._form(now)

    def tick(self, now: float) -> None:
        """Call this a few times a second."""
        self._started = now if self._started is None else self._started
        for node in list(self.nodes.values()):
            if now - node.heard > (limit := node.silence):
                self._send(node.uid, "dropped", {"why": f"it was silent for {limit:.0f} s"})
                self.gone(node.uid, "is lost: it is silent", now)
        if self.epoch is not None:
            for uid in [uid for uid, until in self.epoch.absent.items() if now > until]:
                del self.epoch.absent[uid]
                self._remove(uid, "a member is lost: it has not come back")
        for node in self.nodes.values():
            if node.retry_at and now >= node.retry_at:
                node.retry_at = 0.0
                self._tell_news()
        self._look_for_hung_nodes(now)
        self._form(now)

    # ---- who may take part -------------------------------------------------------------------------------------------------------

    def _problem(self, message: Message) -> str | None:
        """Return why a node may not take part."""
        if message.get("protocol") != PROTOCOL:
            return f"the coordinator speaks version {PROTOCOL} of the protocol, this node version {message.get('protocol')}"
        if self.over_at is not None:
            return f"the job has ended at step {self.over_at}: start another coordinator for a new job"
        is_member = message["epoch"] is not None and self.epoch is None  # of a job that this coordinator does not know yet
        others = [node for node in self.nodes.values() if node.uid != message["uid"]]
        first = min(others, key=lambda node: not self._is_member(node.uid), default=None)  # a member, if there is one
        if first is None or is_member:
            return None
        hosts = str(first.store[0]), str(message["store"][0])
        if is_loopback(hosts[0]) != is_loopback(hosts[1]):
            return (
                f"the others are at {hosts[0]}, this node is at {hosts[1]}, and one of these is known on its own host alone: let all nodes "
                "name the coordinator's host by an address that all of them can reach"
            )
        return difference(first.setup, message["setup"])

    def _refuse_strangers(self, setup: dict[str, str]) -> None:
        """Refuse newcomers that came before the members told this coordinator of their job, and do not fit it."""
        for node in list(self.nodes.values()):
            if not self._is_member(node.uid) and (problem := difference(setup, node.setup)) is not None:
                self._log(f"refused {node.name}: {problem}")
                self._send(node.uid, "refused", {"why": problem})
                del self.nodes[node.uid]

    def _is_member(self, uid: str, number: int | None = None) -> bool:
        return self.epoch is not None and uid in self.epoch.uids and number in (None, self.epoch.number)

    def _remove(self, uid: str, why: str) -> None:
        """Take a member out of the epoch, and tell the others that it is broken."""
        if self.epoch is not None and uid in self.epoch.uids:
            self.epoch.uids.remove(uid)
            self._break(why)
            if not self.epoch.uids:
                self.epoch = None

    def _break(self, why: str) -> None:
        assert self.epoch is not None
        self.epoch.is_broken = True
        for uid in self.epoch.uids:
            self._send(uid, "lost", {"epoch": self.epoch.number, "why": why})

    def _drop(self, node: Member, why: str, now: float) -> None:
        """Go on without a member that is alive. It may join again."""
        self._log(f"{node.name} is dropped: {why}")
        self._send(node.uid, "dropped", {"why": why})
        self._remove(node.uid, f"{node.name} is dropped: {why}")
        self._form(now)

    def _look_for_hung_nodes(self, now: float) -> None:
        members = self._members()
        waiting = [node for node in members if not node.computing]
        for node in members:
            others = [other for other in members if other is not node]
            if node.computing and any(other in waiting for other in others) and now - node.progressed > (limit := limit_of(node, others)):
                pause = node.pause(now)
                again = f". It may come back in {pause:.0f} s" if pause else ""
                self._drop(node, f"others have waited for it for {limit:.1f} s{again}", now)
        if len(waiting) == len(members) > 1 and not all(node.ready for node in members) and self.epoch is not None:
            stuck = min(now - node.progressed for node in members)
            for node in [
                node for node in waiting if self.epoch.is_broken and node.ready is None and now - node.progressed > node.stuck_after
            ]:
                self._drop(node, "it has not noticed that its epoch is broken", now)
            if self.epoch is not None and not self.epoch.is_broken and stuck > max(limit_of(node, members) for node in members):
                self._break(f"all members have waited for each other for {stuck:.0f} s")

    def _is_behind(self, message: Message) -> bool:
        return is_further(message, self._last_number, self._lineage, self._members())

    def _members(self) -> list[Member]:
        return [self.nodes[uid] for uid in self.epoch.uids if uid in self.nodes] if self.epoch is not None else []

    def _let_finished_go(self, now: float) -> None:
        """Go on without members that have finished while others take further steps."""
        for node in self._members():
            at = node.ready
            if at is not None and at.stage == "finish" and any(other.stepping >= at.k for other in self._members()):
                del self.nodes[node.uid]
                self._send(node.uid, "alone", {"k": at.k})
                self._log(f"{node.name} has finished at step {at.k}, and the others go on")
                self._remove(node.uid, f"{node.name} has finished at step {at.k}")
                self._form(now)

    def _let_waiting_go(self) -> None:
        """Let members go on that wait after an average, if others did so while there was no coordinator."""
        if self.epoch is None or self.epoch.is_broken:
            return
        for node in self._members():
            at = node.ready
            if at is not None and at.stage == "after" and at.is_connected and any(other.stepping >= at.k for other in self._members()):
                node.ready = None
                self._send(node.uid, "same", {})

    def _tell_passed(self, now: float) -> None:
        """Let members go on that wait for a global average which others have completed."""
        early: tuple[Stage, ...] = ("between", "before")
        on_their_way = (None, *early, "finish")
        for node in [node for node in self._members() if node.ready is not None and node.ready.stage in early]:
            others = [other for other in self._members() if other.schedule and (other.ready and other.ready.stage) in on_their_way]
            ahead = [other for other in others if is_past(other, node)]
            if ahead:
                node.ready, node.progressed = None, now
                self._send(node.uid, "passed", {"schedule": max(ahead, key=lambda other: other.schedule[0] or 0).schedule})

    # ---- the next epoch ----------------------------------------------------------------------------------------------------------

    def _form(self, now: float) -> None:
        """Begin the next epoch if all members wait for it."""
        members = self._members()
        if self.epoch is not None and (self.epoch.absent or any(node.ready is None for node in members)):
            return
        waiting = [node for node in self.nodes.values() if node not in members and node.ready is not None]
        newcomers = [node for node in waiting if now >= node.retry_at]
        is_end = bool(members) and all(node.ready is not None and node.ready.stage in ("finish", "end") for node in members)
        if not self._are_enough(len(members) + len(newcomers)):  # then a slow one is better than none
            newcomers = [node for node in waiting if now >= node.retry_at or node.drops]
            for node in newcomers:
                node.retry_at = 0.0
        if not is_end and not self._are_enough(len(members) + len(newcomers)):
            return
        if members:
            self._go_on(members, newcomers)
        elif newcomers and self._may_begin(now):
            first = max(newcomers, key=lambda node: node.k)  # the first of those that have come furthest; all start from its model
            self._lineage = first.lineage or secrets.token_hex(8)
            self._begin([first], [node for node in newcomers if node is not first])

    def _may_begin(self, now: float) -> bool:
        return self._started is not None and now - self._started >= limits.START_GRACE and now - self._last_hello >= limits.JOIN_WINDOW

    def _are_enough(self, count: int) -> bool:
        return count >= self._needed()

    def _needed(self) -> int:
        return max([self._min_nodes, *(node.min_nodes for node in self._members() or self.nodes.values())])

    def _go_on(self, members: list[Member], newcomers: list[Member]) -> None:
        assert self.epoch is not None
        furthest = max(progress(node) for node in members)
        ahead = [node for node in members if progress(node) == furthest]
        behind = [node for node in members if progress(node) != furthest]
        stages = {node.ready.stage for node in ahead if node.ready is not None}
        is_whole = not (behind or self.epoch.is_broken) and all(node.ready is not None and node.ready.is_connected for node in members)
        if stages == {"end"} and not behind:
            self._end(furthest[0])
        elif is_whole and (stages == {"finish"} or (stages == {"after"} and not newcomers)):
            for node in members:
                node.ready = None
                self._send(node.uid, "same", {})
        elif stages & {"before", "between", "finish"}:  # those that are behind, and newcomers, come in after this global average
            self._begin(ahead, [])
        else:
            self._begin(ahead, [*behind, *newcomers], at_end=stages == {"end"})

    def _begin(self, holders: list[Member], joining: list[Member], at_end: bool = False) -> None:
        """Begin an epoch. The `holders` have the job's state, and the first of them hands it to those that are `joining`."""
        self._last_number += 1
        everyone = [*sorted(holders, key=lambda node: -node.average), *joining]
        new = sum(not self._is_member(node.uid) for node in everyone)  # in the first epoch, the one that hands over its model is new, too
        self.epoch = Epoch(self._last_number, [node.uid for node in everyone], [node.uid for node in joining])
        members = [{"uid": node.uid, "name": node.name, "store": node.store, "average": node.average} for node in everyone]
        offer = {"number": self._last_number, "token": secrets.token_hex(8), "members": members}
        offer |= {"holders": len(holders), "at_end": at_end, "lineage": self._lineage}
        for node in everyone:
            node.ready = None
            self._send(node.uid, "epoch", offer)
        self._log(f"epoch {self._last_number}: {', '.join(node.name for node in everyone)}" + (f"; {new} new" if new else ""))
        self._told = None
        self._tell_news()

    def _end(self, k: int) -> None:
        self._log(f"the job has ended at step {k}")
        self.over_at = k
        for node in self.nodes.values():
            self._over_setup = node.setup
            self._send(node.uid, "over" if self._is_member(node.uid) else "ended", {"k": k})
        self.nodes.clear()
        self.epoch = None

    def _tell_news(self) -> None:
        """Tell all nodes how many newcomers wait to be let in, if that has changed."""
        newcomers = sum(node.ready is not None and not node.retry_at and not self._is_member(node.uid) for node in self.nodes.values())
        needed = self._needed()
        news = newcomers, len(self.nodes), needed
        if news == self._told:
            return
        self._told = news
        for uid in self.nodes:
            self._send(uid, "news", {"newcomers": newcomers, "here": len(self.nodes), "needed": needed})
