"""Methods read from text: as written in Python, as they print, and what is refused."""

from functools import partial

import pytest

import rumor
from tests.problems import ALGORITHMS

WRITTEN = {
    "gossip_pga(one_peer_exponential, H=6, bits=4)": rumor.gossip_pga(rumor.one_peer_exponential, H=6, bits=4),
    "gossip_pga(one-peer-exponential, H=6)": rumor.gossip_pga(rumor.one_peer_exponential, H=6),
    "gossip_pga('ring', H=6)": rumor.gossip_pga(rumor.ring, H=6),
    'gossip pga("one peer exponential", H=6)': rumor.gossip_pga(rumor.one_peer_exponential, H=6),
    "gossip-sgd(rumor.base-graph(6))": rumor.gossip_sgd(rumor.base_graph(6)),
    "gossip_pga(ring)": rumor.gossip_pga(rumor.ring, 6),
    " rumor.gossip_pga(rumor.ring(8), 3, delay=1) ": rumor.gossip_pga(rumor.ring(8), 3, delay=1),
    "parallel_sgd": rumor.parallel_sgd(),
    "local_sgd(H=4)": rumor.local_sgd(H=4),
    "gossip_aga(grid(6, shape=(2, 3)), warmup=10, exponent=0.25)": rumor.gossip_aga(rumor.grid(6, (2, 3)), 10, exponent=0.25),
    "gossip_sgd(partial(base_graph, peers=2))": rumor.gossip_sgd(partial(rumor.base_graph, peers=2)),
    "gossip_sgd(functools.partial(rumor.base_graph, peers=2))": rumor.gossip_sgd(partial(rumor.base_graph, peers=2)),
    "gossip_pga(ring, H=LearningRate(3, 24, power=2.0))": rumor.gossip_pga(rumor.ring, H=rumor.LearningRate(3, 24, 2.0)),
    "gossip_pga(ring, average_rounds=None)": rumor.gossip_pga(rumor.ring),
    "diloco(H=100, outer_lr=1e-1)": rumor.diloco(H=100, outer_lr=0.1),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_a_method_is_read_as_it_is_written_in_python(text: str) -> None:
    assert rumor.method(text) == WRITTEN[text]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_a_method_prints_can_be_read_back(name: str) -> None:
    algorithm = ALGORITHMS[name]()
    if "<" in repr(algorithm):  # a matrix of one's own
        with pytest.raises(ValueError, match="a graph or a matrix of your own can't be read from text: build the method in code"):
            rumor.method(repr(algorithm))
    else:
        assert rumor.method(repr(algorithm)) == algorithm
        assert repr(rumor.method(repr(algorithm))) == repr(algorithm)


def test_the_period_of_gossip_pga_is_6_unless_it_is_given() -> None:
    assert rumor.gossip_pga(rumor.ring).schedule == rumor.Periodic(6)


REFUSED = {
    "gossip_pga(rnig)": r"there is no 'rnig'. Did you mean ring\? There are ring, grid, .*; parallel_sgd, .* \(methods\); Never, ",
    "gossip(ring)": "there is no 'gossip'. Did you mean gossip_sgd",
    "gossip_pga(ring, h=6)": "gossip_pga: got an unexpected keyword argument 'h'; it takes topology, H, delay, average_rounds, bits",
    "Gossip-PGA": r"there is no 'Gossip_PGA'. Did you mean gossip_pga\?",
    "Gossip PGA(ring, H=6)": r"there is no 'Gossip_PGA'. Did you mean gossip_pga\?",
    "local_sgd(Ring)": r"there is no 'Ring'. Did you mean ring\?",
    "SlowMo(ring, H=6)": r"it takes topology, schedule, .*\. Did you mean slowmo\?",
    "GossipPGA": r"Did you mean gossip_pga\?",
    "gossip_pga('ring(8)')": r"'ring\(8\)' is in quotes: leave them out",
    "'gossip_pga(ring)'": "is in quotes: leave them out",
    "slowmo(ring)": "slowmo: missing a required argument: 'H'; it takes topology, H, momentum",
    "gossip_pga(ring, H=0)": "H must be a whole number >= 1, got H=0",
    "gossip_pga(ring, bits=5)": "bits must be 32, 16, 8 or 4, got bits=5",
    "ring(8)": "is no method: the methods are parallel_sgd, local_sgd, ",
    "partial(ring)": "is no method",
    "gossip_pga(partial(slowmo, 3))": "partial takes a topology and its options",
    "gossip_pga(ring": 'write it as in Python, "gossip_pga',
    "": 'write it as in Python, "gossip_pga',
    "gossip_pga(one-pear-exponential)": "there is no 'one_pear_exponential'. Did you mean one_peer_exponential",
    "gossip_pga(ring, H=6-ring)": "6 - ring is neither a number nor a name",
    "gossip_sgd(from_matrix(3))": "a graph or a matrix of your own can't be read from text",
    "x" * 2000: "a text of 2000 characters",
    "(" * 900: "write it as in Python",
    "-" * 900 + "1": "write it as in Python",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:40])
def test_what_is_no_method_is_refused_by_naming_what_there_is(text: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[text]):
        rumor.method(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('false')",
        "gossip_pga(ring.__class__)",
        "gossip_pga(ring.__globals__['x'])",
        "gossip_pga(**{'topology': ring})",
        "gossip_pga(*[ring])",
        "gossip_pga(ring, H=2**9)",
        "gossip_pga((lambda n: ring(n)))",
        "[gossip_pga(ring) for _ in (1,)]",
        "gossip_pga(ring, H='6')",
        "gossip_pga(topology:=ring)",
        "(partial)(print, 1)",
    ],
)
def test_no_code_is_run(text: str) -> None:
    with pytest.raises(ValueError, match="can't be read as a method"):
        rumor.method(text)


def test_something_other_than_text_is_refused() -> None:
    with pytest.raises(TypeError, match=r'read from text such as "gossip_pga\(ring, H=6\)", got GossipPGA'):
        rumor.method(rumor.gossip_pga(rumor.ring))  # type: ignore[arg-type]
