"""Explains a recommendation in words, with the numbers behind it."""

from __future__ import annotations

from dataclasses import dataclass

from rumor.cost.network import Link, Network, Workload, degree, in_python, kind, method_text
from rumor.cost.prediction import GLOBAL_SHARE, Prediction
from rumor.topology import Topology

WORTH_IT = 0.10  # Parallel SGD is the better choice up to this much slower
SAME_ORDER = 2.0  # transient stages are without constants: below this ratio they count as equally long
DELAY_MISSES = "with delay=1 in float32 the accuracy ended a little lower (docs/performance.md)"
DEFAULT_PERIOD = 6  # of gossip_pga
TIE = 0.02  # gossip steps within this share of each other count as equally fast
LONGEST = 64  # the longest period to recommend (Gossip-AGA's own limit)
MOST_ACCURATE = "gossip_pga(one_peer_exponential, H=LearningRate(1, 24, power=0.48), bits=4)"  # of what sends so little (docs/beyond.md)
ITS_LONGEST = 24  # its longest period


@dataclass(frozen=True)
class Comparison:
    """The candidates of a recommendation.

    Attributes:
        topology: the topology of `best`.
        best: the best Gossip-PGA.
        parallel: Parallel SGD.
        local: Local SGD with the same period as `best`.
        gossip: seconds of a gossip step on this topology, including the computing.
        rival: the same method on the fastest of the other topologies; None if there is no other.
        rival_gossip: seconds of a gossip step on that topology, including the computing.
        mean: seconds of an all-reduce.
        longest: the longest period allowed.
        is_given: whether the period was asked for.
        bits: the number of bits of a number in a message.
        plain: the same candidates with messages in float32, if these have fewer bits.
        coded: the same candidates with codes, if these are in float32 and there are times for codes.
    """

    workload: Workload
    network: Network
    topology: Topology
    best: Prediction
    parallel: Prediction
    local: Prediction
    gossip: float
    rival: Prediction | None
    rival_gossip: float
    mean: float
    longest: int
    is_given: bool
    iid: bool
    bits: int = 32
    plain: Comparison | None = None
    coded: Comparison | None = None

    @property
    def H(self) -> int:
        return self.best.H or 1

    @property
    def added(self) -> float:
        """The time that global averages add to a gossip step, as a share of the gossip step."""
        return (self.workload.compute + self.mean - self.gossip) / self.H / self.gossip


def takes_parallel(compared: Comparison) -> bool:
    """Whether Parallel SGD is the better choice. (Gossip-PGA with H = 1 is Parallel SGD.)"""
    return not _gossip_is_faster(compared) or compared.H == 1 or is_predicted_pair(compared)


def is_predicted_pair(compared: Comparison) -> bool:
    """Whether there are two nodes whose times are predicted. Then gossip is no reason to leave DDP.

    Between 2 nodes, an all-reduce sends as many bytes as a gossip step. Gossip can only save latency and the work of coding. The time model
    guesses that work, so only measured times can show that gossip is faster.
    """
    return compared.topology.n == 2 and isinstance(compared.network, Link)


def seconds_to_expect(compared: Comparison) -> float:
    """Seconds of the fastest step that may be recommended."""
    return compared.parallel.seconds if is_predicted_pair(compared) else min(compared.best.seconds, compared.parallel.seconds)


def fastest_gossip(compared: Comparison) -> Prediction | None:
    """The fastest Gossip-PGA that may be recommended, in float32 or with codes; None if that is Parallel SGD (H = 1)."""
    rows = [each.best for each in (compared, compared.coded) if each is not None]
    if compared.H == 1:
        rows = [row for row in rows if row.seconds < compared.parallel.seconds]
    return min((row for row in rows if (row.H or 1) > 1), key=lambda row: row.seconds, default=None)


def _gossip_is_faster(compared: Comparison) -> bool:
    fastest = min(row.seconds for row in (compared.best, fastest_gossip(compared)) if row is not None)
    return compared.parallel.seconds > (1 + WORTH_IT) * fastest


def takes_own_parallel(compared: Comparison) -> bool:
    """Whether Rumor's own Parallel SGD is clearly faster than DDP, which was timed."""
    return compared.H == 1 and compared.parallel.is_measured and _gossip_is_faster(compared)


def why(compared: Comparison) -> str:
    """The reason for the recommendation."""
    if not takes_parallel(compared):
        return _why_gossip_pga(compared)
    if takes_own_parallel(compared):
        return (
            f"an all-reduce takes {milliseconds(compared.mean)} and a gossip step "
            f"{milliseconds(compared.gossip - compared.workload.compute)}, so a step that averages all nodes costs at most 10% more than a "
            f"gossip step. DDP was timed at {milliseconds(compared.parallel.seconds)}, but rumor.parallel_sgd takes only "
            f"{milliseconds(compared.best.seconds)}"
        )
    if compared.plain is not None:
        return _why_coded_parallel(compared, compared.plain)
    if _gossip_is_faster(compared):
        return f"its step takes {milliseconds(compared.parallel.seconds)}, and it is exact. {_on_a_pair(compared)}"
    if (fastest := fastest_gossip(compared)) is not None:
        other, seconds = "that of Gossip-PGA", fastest.seconds
    else:  # Gossip-PGA with H = 1 is Parallel SGD, so compare with a gossip step, which is within the 10 % as well
        other, seconds = f"a gossip step ({in_python(kind(compared.topology))}: {milliseconds(compared.gossip)})", compared.gossip
    slower = compared.parallel.seconds / seconds - 1
    how = f"only {slower:.1%} slower than" if slower > 0.0005 else "no slower than"
    is_fast = compared.parallel.seconds <= 1.5 * compared.workload.compute
    cause = "The network is fast compared with the computation" if is_fast else "An all-reduce costs little more than gossip here"
    if compared.parallel.is_measured and not is_fast:
        cause = "DDP hides much of its all-reduce behind the backward pass"
    hidden = "" if compared.parallel.is_measured else ". DDP also hides part of the all-reduce, which is not counted here"
    return f"its step is {how} {other}, and it is exact. {cause}{hidden}"


def _why_coded_parallel(compared: Comparison, plain: Comparison) -> str:
    hook = f"ddp.register_comm_hook({_hook_state(compared.bits)}, rumor.ddp_hook)"
    is_slower = compared.best.seconds > compared.parallel.seconds
    gossip = f"{compared.best.text} {'is not' if is_slower else 'would hardly be'} faster: {milliseconds(compared.best.seconds)}"
    if _gossip_is_faster(compared):
        gossip = _on_a_pair(compared)
    return (
        f"{_why_codes(compared, plain, compared.parallel)} {gossip}. The line to add is {hook}. "
        f"With Adam or AdamW, give the hook the optimizer: {_hook_state(compared.bits, has_moments=True)}"
    )


def _on_a_pair(compared: Comparison) -> str:
    """Why DDP is taken, though gossip is predicted to be faster: there are two nodes."""
    return (
        f"Gossip-PGA is predicted to take {milliseconds(compared.best.seconds)}. But between 2 nodes it sends as many bytes as DDP, so "
        "time both with `rumor probe` before you leave DDP"
    )


def ddp_with(bits: int) -> str:
    """The name of DDP with codes of so many bits."""
    return f"DDP with {bits} bits (rumor.ddp_hook)"


def _hook_state(bits: int, has_moments: bool = False) -> str:
    """The state of DDP's hook. SGD has no second moments, so the hook refuses to take it."""
    return f"rumor.ddp_hook_state(bits={bits}{', optimizer=opt' if has_moments else ''})"


def _why_codes(compared: Comparison, plain: Comparison, chosen: Prediction) -> str:
    parallel, same = plain.parallel.seconds, plain.parallel if chosen.method == "Parallel SGD" else plain.best
    without = "" if same is plain.parallel else f" ({same.method} in float32, H = {plain.H}: {milliseconds(same.seconds)})"
    return (
        f"with messages of {compared.bits} bits, its step takes {milliseconds(chosen.seconds)}, {1 - chosen.seconds / parallel:.0%} less "
        f"than the {milliseconds(parallel)} of DDP in float32{without}."
    )


def _why_gossip_pga(compared: Comparison) -> str:
    best, parallel = compared.best.seconds, compared.parallel.seconds
    start = f"its step takes {milliseconds(best)}, {1 - best / parallel:.0%} less than DDP's {milliseconds(parallel)}."
    if compared.plain is not None:
        start = _why_codes(compared, compared.plain, compared.best)
    elif compared.coded is not None and compared.coded.best.seconds < best:
        start += (
            f" With messages of {compared.coded.bits} bits it would be less than 10% faster, {milliseconds(compared.coded.best.seconds)}."
        )
    return f"{start} {_why_topology(compared)} {_why_period(compared)} {_why_not_local(compared)}"


def _why_topology(compared: Comparison) -> str:
    messages, rival = degree(compared.topology), compared.rival
    name = f"{in_python(kind(compared.topology))} ({messages:g} message{'s' * (messages != 1)} per step)"
    took = "" if compared.best.is_measured else f", {milliseconds(compared.gossip)}"  # a sum of parts, which would not fit to a whole step
    if rival is None:
        return f"All topologies are the same for {compared.topology.n} nodes."
    if compared.gossip < compared.rival_gossip:
        return f"{name} has the fastest gossip step{took}."
    if compared.gossip == compared.rival_gossip:
        return f"No topology has a faster gossip step than {name}{took}."
    merit = " It sends less." if compared.best.bytes < rival.bytes else ""
    if SAME_ORDER * compared.best.stage(compared.iid) < rival.stage(compared.iid):
        merit = " Its transient stage is much shorter."
    took = took.replace(",", " of")
    if compared.gossip <= (1 + TIE) * compared.rival_gossip:
        return f"{name} has a gossip step{took} close to the fastest.{merit}"
    if compared.best.is_measured:  # the probe chose it, from parts that it had timed before
        return f"`rumor probe` timed whole steps on {name}.{merit}"
    return f"{name} has a gossip step{took}, {in_python(rival.topology or '')} one of {milliseconds(compared.rival_gossip)}.{merit}"


def _why_period(compared: Comparison) -> str:
    """What the global averages cost, and why the period is not the default."""
    H = compared.H
    cost = f"Global averages add {_percent(compared.added)} to a gossip step."
    if compared.added <= 0:
        cost = "An all-reduce takes no longer than a gossip step here, so global averages have no measurable cost."
    if H == DEFAULT_PERIOD:
        return cost
    shorter = compared.added * H / (H - 1) if H > 1 else 0.0  # the share that global averages add with H - 1
    start = f"H is {H} and not the default {DEFAULT_PERIOD}, because"
    if compared.is_given:
        return f"{start} you gave this period. {cost}"
    if compared.added <= GLOBAL_SHARE + 1e-9 < shorter:
        return (
            f"{start} it is the smallest period whose global averages add at most {GLOBAL_SHARE:.0%} to a gossip step: "
            f"{_percent(compared.added)} (H = {H - 1}: {_percent(shorter)})."
        )
    if compared.added > GLOBAL_SHARE and compared.longest == H:
        return f"{start} no longer period is {'recommended' if H == LONGEST else 'allowed'}. {cost}"
    return f"{start} `rumor probe` timed this period. {cost}"


def _why_not_local(compared: Comparison) -> str:
    if compared.local.seconds >= compared.best.seconds:  # a sum of parts, and above a measured step
        return "Local SGD with the same H would not be faster"
    start = f"Local SGD with the same H would take {milliseconds(compared.local.seconds)}"
    theirs, ours = compared.local.stage(compared.iid), compared.best.stage(compared.iid)
    if theirs > SAME_ORDER * ours:
        instead = f"of {ours:.1e}" if ours else "of none at all"
        return (
            f"{start}, but its transient stage (steps until it is as good as DDP) is of the order of {theirs:.1e} steps instead {instead}"
        )
    # For example, contraction(l) = 1 for l < log2(n) at the worst phase of a one-peer cycle: then the bound ignores gossip.
    return (
        f"{start}. Theory does not separate the two here (its bounds on their transient stages are {theirs:.1e} and {ours:.1e} steps). But "
        "the paper's ResNet-50 lost 2 points of accuracy with Local SGD, and none with Gossip-PGA"
    )


def notes(compared: Comparison) -> tuple[str, ...]:
    """Remarks on the recommendation."""
    found = [*_note_on_unmeasured_ddp(compared), *_note_on_delay(compared)]
    if not takes_parallel(compared):
        found += [*_note_on_elastic(compared), *_note_on_accuracy(compared), _note_on_adam(compared), *_note_on_period(compared)]
        if compared.best.note:
            found.append(f"{in_python(kind(compared.topology))}: {compared.best.note}")
    elif takes_own_parallel(compared):  # it averages models after the optimizer's step, which is not DDP for Adam
        found.append(_note_on_adam(compared))
    if compared.workload.bytes_per_parameter < 4 and compared.bits == 32:
        found.append(
            "gossip sends the parameters in their own precision; global averages sum in float32, and so they send 4 bytes per parameter"
        )
    return tuple(found)


def _note_on_period(compared: Comparison) -> list[str]:
    if compared.added <= GLOBAL_SHARE + 1e-9:
        return []
    slow = f"an all-reduce takes {milliseconds(compared.mean)}, so global averages still add {_percent(compared.added)} at H = {compared.H}"
    bound = "the longest allowed (max_period)" if compared.longest < LONGEST else "the longest recommended"
    n, gossip = compared.topology.n, compared.gossip - compared.workload.compute
    rounds = max(1, (n - 1).bit_length())  # ceil(log2 n), the length of a one-peer cycle
    instead = ""
    if kind(compared.topology) == "one-peer-exponential" and rounds * gossip < compared.mean and compared.bits == 32:
        left = compared.topology.contraction(rounds)
        exact = f"leaves {left:.0%} of the disagreement" if left else "is just as exact"
        instead = (
            f"use average_rounds={rounds}, which replaces the all-reduce by {rounds} gossip steps, takes {milliseconds(rounds * gossip)} "
            f"and {exact}; or "
        )
    return [f"{slow}, {bound}. To reduce this, {instead}use gossip_aga, which lets the period grow as the loss falls"]


def _note_on_unmeasured_ddp(compared: Comparison) -> list[str]:
    parallel, best = (compared.plain or compared).parallel, compared.best
    if takes_parallel(compared) and compared.plain is None:  # DDP itself is recommended
        return []
    if best.is_measured and not parallel.is_measured:
        return ["DDP was not timed, so this may be slower: let the probe's step() take the model, and probe again"]
    if parallel.is_measured or not parallel.seconds > (1 + WORTH_IT) * best.seconds >= parallel.seconds_overlapped:
        return []
    return [
        "Time DDP before you change to this: it may hide a part of its all-reduce behind the backward pass, which is not counted here. If "
        f"it hid all of it, its step would take {milliseconds(parallel.seconds_overlapped)}. `rumor probe` times it"
    ]


def _note_on_delay(compared: Comparison) -> list[str]:
    """delay=1 is faster, but was not shown to be as good: so it is never recommended."""
    best, is_parallel = compared.best, takes_parallel(compared)
    chosen = min(compared.parallel.seconds, best.seconds) if is_parallel else best.seconds
    measured = compared.network.step(method_text(best.topology, compared.H, best.bits, delay=1))
    seconds = best.seconds_overlapped if measured is None else measured
    if chosen <= (1 + WORTH_IT) * seconds or (is_parallel and measured is None):
        return []
    how = f"is faster, a step of {milliseconds(seconds)}"
    if measured is None:
        how = f"may be faster ({milliseconds(seconds)} if all messages travel while the nodes compute)"
    return [f"{best.text[:-1]}, delay=1) {how}, but was not shown to be as good: {DELAY_MISSES}"]


def _note_on_elastic(compared: Comparison) -> list[str]:
    text = compared.best.text
    fixed, elastic = compared.network.step(text), compared.network.step(text, is_elastic=True)
    if fixed is None or elastic is None:
        return []
    return [f"in an elastic group, where nodes may die and join (rumor.elastic), this step takes {milliseconds(elastic)}"]


def _note_on_accuracy(compared: Comparison) -> list[str]:
    """The setting without a visible loss of accuracy at an eleventh of Parallel SGD's bytes."""
    if compared.bits != 4 or compared.longest < ITS_LONGEST:
        return []
    return [
        f"for more accuracy with SGD and a learning rate that falls, take {MOST_ACCURATE} and Averager(..., optimizer=opt). It averages "
        "globally at every step while the learning rate is at its highest, which takes more bytes. On CIFAR-10 no difference to Parallel "
        "SGD's accuracy was seen: see docs/beyond.md"
    ]


def _note_on_adam(compared: Comparison) -> str:
    plain, coded = (compared.plain or compared).parallel, (compared if compared.plain else compared.coded)
    form, seconds, hook = "DDP", plain.seconds, ""
    if coded is not None and coded.parallel.seconds < plain.seconds:
        form, seconds = ddp_with(coded.bits), coded.parallel.seconds
        hook = f", and give the hook the optimizer: {_hook_state(coded.bits, has_moments=True)}"
    return f"this is for SGD. With Adam or AdamW, take {form}, {milliseconds(seconds)} a step{hook}. See docs/choosing.md"


def milliseconds(seconds: float) -> str:
    """Formats a time in milliseconds, or in seconds if it is long."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _percent(share: float) -> str:
    if 0 < share < 0.001:
        return "less than 0.1%"
    return f"{share:.1%}" if share < 1 else f"{share:.0%}"
