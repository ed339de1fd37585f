"""Codes of a few bits: what they are, and what methods that send them keep."""

import gc
import itertools
from collections.abc import Callable
from fractions import Fraction
from types import FunctionType, ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rumor
from rumor.engines import Buffer, Engine, StackedBuckets, codes
from rumor.engines.code_kernels import Plain
from rumor.engines.codes import BLOCK, CODES, WIDTHS, blocks_of
from rumor.engines.engine import rounded
from rumor.engines.owners import owned_by_each
from rumor.engines.processes.coded_mean import CodedMean
from rumor.engines.processes.pending import _negated_sum
from rumor.engines.processes.process_group import ProcessGroup
from rumor.methods import Nodes
from rumor.model import buckets
from rumor.model.buckets import FlatBuckets
from tests.cluster import Cluster, bytes_in_use
from tests.problems import N, flat
from tests.test_mixing import mass

BITS = tuple(CODES)
SIZES = (1e-41, 1e-30, 1e-7, 1.0, 1e30)
BLOCKS: dict[str, Tensor] = {
    "zeros": torch.zeros(BLOCK),
    "negative zeros": torch.full((BLOCK,), -0.0),
    "equal numbers": torch.full((BLOCK,), 0.7),
    "one huge number": torch.cat([torch.full((BLOCK - 1,), 1e-3), torch.tensor([1e30])]),
    "the largest": torch.full((BLOCK,), 3.38e38),
    "large and both signs": 3e38 * torch.linspace(-1, 1, BLOCK),
    "denormals": torch.linspace(-1e-40, 1e-40, BLOCK),
    "one denormal": torch.full((BLOCK,), 1e-45),
    "a shifted block": torch.linspace(1.0, 1.001, BLOCK),
}


def step_of(x: Tensor, bits: int) -> Tensor:
    """The distance of two levels of each block, [N, 1]; of bfloat16s, twice their precision."""
    blocks = x.view(-1, BLOCK).double()
    largest = blocks.abs().amax(1, keepdim=True)
    return largest * 2**-7 if bits == 16 else (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / (2**bits - 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_a_number_comes_back_within_half_a_step(bits: int, size: float) -> None:
    x = torch.randn(300, BLOCK) * size
    back = CODES[bits].round_trip(x.clone())
    smallest = {16: 1e-40, 8: 255 * 1.5e-45, 4: 3e-45}[bits]  # bfloat16, 255 steps, and float32 have no smaller numbers
    assert ((back - x).abs() <= 0.501 * step_of(x, bits) + smallest).all()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("bits", BITS)
def test_every_kind_of_block_survives(bits: int, name: str) -> None:
    x = BLOCKS[name]
    back = CODES[bits].round_trip(x.clone())
    precision = 2**-7 if bits == 16 else 2**-11 if bits == 4 else 2**-22  # of low and step
    assert back.isfinite().all()
    assert (
        (back - x).abs() <= 0.501 * step_of(x, bits)[0] + precision * x.abs().max() + {16: 1e-40, 8: 255 * 1.5e-45, 4: 3e-45}[bits]
    ).all()
    if not x.any():
        assert not back.any()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [8, 4])
def test_torchs_operators_give_what_the_definition_gives(bits: int, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.cat([torch.randn(300, BLOCK) * size, torch.stack(list(BLOCKS.values())) * min(size, 0.4)])
    found, _ = CODES[bits].pack(x)
    decoded = CODES[bits].unpack(found)
    monkeypatch.setattr(codes, "kernels_on", lambda _: Plain)
    defined, _ = CODES[bits].pack(x)
    if bits == 4:
        assert all(torch.equal(a, b) for a, b in zip(found, defined, strict=True))
        assert torch.equal(decoded, CODES[bits].unpack(defined))
    else:  # where a number is in the middle of two levels, it may be rounded up or down
        differ = (found[0] != defined[0])[:, :BLOCK]
        assert differ.float().mean() < 1e-3
        assert ((decoded - CODES[bits].unpack(defined)).abs() <= 1.001 * step_of(x, bits) + 1e-6 * x.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d", [1, 255, 256, 257, 5000])
@pytest.mark.parametrize("bits", BITS)
def test_a_message_holds_what_the_round_trip_gives(bits: int, d: int, dtype: torch.dtype) -> None:
    code, x = CODES[bits], torch.randn(3, d).to(dtype)
    message = torch.zeros(code.nbytes(d), dtype=torch.uint8)
    assert code.encode(x[1], code.places(message)).isfinite()
    decoded = code.decode(code.places(message), torch.empty(d, dtype=dtype))
    assert torch.equal(decoded, code.round_trip(x.clone())[1]), "each row has blocks of its own"
    assert len(message) <= (bits / 8 + 0.05) * BLOCK * blocks_of(d)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bits", BITS)
def test_a_number_that_is_not_finite_does_not_hide(bits: int, bad: float) -> None:
    code, x = CODES[bits], torch.randn(1000)
    x[700] = bad
    assert not code.encode(x, code.places(torch.zeros(code.nbytes(1000), dtype=torch.uint8))).isfinite()


@pytest.mark.parametrize("kernels", [None, Plain], ids=["torch's operators", "the definition"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bits", BITS)
def test_it_stays_so_when_it_is_decoded(bits: int, bad: float, kernels: type[Plain] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels is not None:
        monkeypatch.setattr(codes, "kernels_on", lambda _: kernels)
    code, x = CODES[bits], torch.randn(1000)
    x[700] = bad
    parts = code.places(torch.zeros(code.nbytes(1000), dtype=torch.uint8))
    code.encode(x, parts)
    in_half = torch.zeros(1000, dtype=torch.bool)
    in_half[700 if bits == 16 else slice(512, 768)] = True  # with 8 and 4 bits, all of its block
    for found in (
        code.round_trip(x.clone()),
        code.decode(parts, torch.empty(1000)),
        code.weighted_sum([parts, parts], [0.5, 0.25], torch.empty(1000)),
        code.weighted_sum([parts, parts], [0.5, 0.25], torch.empty(1000, dtype=torch.float64)),
    ):
        assert torch.equal(~found.isfinite(), in_half)


@pytest.mark.parametrize("count", [2, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", BITS)
def test_a_sum_of_codes_is_the_sum_of_what_they_decode_to(bits: int, dtype: torch.dtype, count: int) -> None:
    """Also of so many that they are summed in several runs."""
    code, d = CODES[bits], (codes.SUMMED // 70 + 3) * BLOCK + 5
    sent = [code.places(torch.zeros(code.nbytes(d), dtype=torch.uint8)) for _ in range(count)]
    weights, expected = [1 / (j + 3) for j in range(count)], torch.zeros(d, dtype=torch.float64)
    for parts, weight in zip(sent, weights, strict=True):
        code.encode(torch.randn(d), parts)
        expected += weight * code.decode(parts, torch.empty(d, dtype=torch.float64))
    found = code.weighted_sum(sent, weights, torch.full((d,), torch.nan, dtype=dtype))
    assert found.dtype == dtype
    assert (found - expected).abs().max() < (1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", BITS)
def test_a_long_message_is_encoded_in_runs_like_a_short_one(bits: int, dtype: torch.dtype) -> None:
    code, x = CODES[bits], torch.randn(2 * codes.ENCODED * BLOCK + 300, dtype=dtype)
    parts, rest = code.places(torch.zeros(code.nbytes(len(x)), dtype=torch.uint8)), x.clone()
    code.encode(rest, parts, leave_rest=True)
    expected, _ = code.pack(codes.as_blocks(x))
    assert all(torch.equal(found, part) for found, part in zip(parts, expected, strict=True))
    assert torch.equal(rest, x - code.decode(parts, torch.empty_like(x)))
    assert torch.equal(code.decode(parts, torch.empty_like(x)), code.round_trip(x.clone()))
    x[-1] = torch.nan
    assert not code.encode(x, parts).isfinite()


@pytest.mark.parametrize("n", [1, 2, 5, 50])
@pytest.mark.parametrize("sizes", [[1], [256], [257, 3], [10_000, 512, 700]])
def test_every_number_has_one_owner(sizes: list[int], n: int) -> None:
    shares = owned_by_each(sizes, n)
    owned = [torch.zeros(d, dtype=torch.int64) for d in sizes]
    for b, start, end in itertools.chain(*shares):
        owned[b][start:end] += 1
        assert start % BLOCK == 0
        assert end % BLOCK == 0 or end == sizes[b]
    assert all((one == 1).all() for one in owned)
    counts = [sum(blocks_of(end - start) for _, start, end in share) for share in shares]
    assert max(counts) - min(counts) <= 1


# ---- methods -----------------------------------------------------------------------------------------------------------------------

METHODS: dict[str, Callable[[int], rumor.GossipPGA]] = {
    "parallel": lambda bits: rumor.parallel_sgd(bits=bits),
    "ring": lambda bits: rumor.gossip_pga(rumor.ring, H=10**9, bits=bits),
    "one-peer": lambda bits: rumor.gossip_pga(rumor.one_peer_exponential, H=10**9, bits=bits),
    "ring delayed": lambda bits: rumor.gossip_pga(rumor.ring, H=10**9, delay=1, bits=bits),
    "one-peer delayed": lambda bits: rumor.gossip_pga(rumor.one_peer_exponential, H=10**9, delay=1, bits=bits),
    "PGA": lambda bits: rumor.gossip_pga(rumor.ring, H=6, bits=bits),
    "PGA delayed": lambda bits: rumor.gossip_pga(rumor.one_peer_exponential, H=6, delay=1, bits=bits),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("bits", BITS)
def test_a_thousand_steps_of_consensus_keep_the_mean_and_end_within_a_level(bits: int, name: str) -> None:
    """Without gradients. What separates the nodes in the end is what codes can't express; it must not grow."""
    n, d = 8, 600
    algorithm = METHODS[name](bits).bind(n)
    x = torch.randn(1, d, dtype=torch.float64).repeat(n, 1)
    nodes = Nodes(StackedBuckets([x]), StackedBuckets([]), rumor.Stacked(n))
    state = algorithm.start(nodes)
    start = torch.randn(n, d, dtype=torch.float64)
    x += start
    mean = x.mean(dim=0)
    for k in range(1000):
        algorithm.step(nodes, state)
        assert (mass(x, state).mean(dim=0) - mean).abs().max() < 1e-9, k
    level = (start.max() - start.min()).item() / (2**bits - 1 if bits < 16 else 2**8)
    assert (x - mean).abs().max() < level


def lone_steps(rank: int, bits: int, delay: int) -> tuple[Tensor, Tensor]:
    """The model as it will be once what is in flight has arrived, and what was left out of it, before and after each step."""
    torch.manual_seed(0)
    model = nn.Linear(40, 90)
    averager = rumor.Averager(model, rumor.gossip_pga(rumor.ring, H=3, bits=bits, delay=delay))
    generator, seen = torch.Generator().manual_seed(rank), []
    for _ in range(7):
        with torch.no_grad():
            for p in model.parameters():
                p += torch.randn(p.shape, generator=generator)
        for is_after in (False, True):
            if is_after:
                averager.step()
            state = averager.replica.runner.state
            flight = [] if state.in_flight is None else list(zip(state.in_flight.pending, state.in_flight.sent, strict=True))
            change = torch.cat([message.wait().x - sent.tensor for message, sent in flight]) if flight else torch.zeros(1)
            seen.append(flat(model).double() + change + torch.cat(state.buckets["left_out"]))
    return torch.stack(seen[0::2]), torch.stack(seen[1::2])


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("bits", BITS)
def test_real_processes_keep_the_mean(four: Cluster, bits: int, delay: int) -> None:
    before, after = (torch.stack(parts).mean(dim=0) for parts in zip(*four.run(lone_steps, bits, delay), strict=True))
    assert (after - before).abs().max() < 3e-6  # of numbers up to 10, in float32


def large_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(31, 300), nn.Tanh(), nn.Linear(300, 230), nn.Tanh(), nn.Linear(230, 7)).to(dtype)


def trained_large(rank: int | None, bits: int, delay: int, dtype: torch.dtype) -> Tensor:
    """Train a model of many blocks and several buckets: one rank among processes, or all nodes in a Simulator if `rank` is None."""
    algorithm, x = rumor.gossip_pga(rumor.ring, H=3, bits=bits, delay=delay), torch.randn(8, N, 5, 31, dtype=dtype)
    model = large_model(dtype)
    sim = rumor.Simulator(model, algorithm, n=N) if rank is None else None
    averager = rumor.Averager(model, algorithm) if sim is None else sim
    opt = torch.optim.SGD(model.parameters() if sim is None else sim.parameters(), lr=0.1, momentum=0.9)
    for batch in x:
        opt.zero_grad()
        loss = averager(large_loss, batch) if sim is not None else large_loss(model, batch[rank])
        loss.sum().backward()
        opt.step()
        averager.step(loss)
    return sim.X if sim is not None else flat(model)


def large_loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :7]).square().mean()


def rank_of_large(rank: int, *arguments: object) -> Tensor:
    torch.manual_seed(4)
    return trained_large(rank, *arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("bits", BITS)
def test_engines_agree_on_a_model_of_many_blocks(four: Cluster, bits: int, delay: int) -> None:
    torch.manual_seed(4)
    expected = trained_large(None, bits, delay, torch.float64)
    assert blocks_of(expected.shape[1]) > 300
    assert (torch.stack(four.run(rank_of_large, bits, delay, torch.float64)) - expected).abs().max() < 1e-9


class OddLayout(nn.Module):
    """Parameters of two dtypes in turns, four of them not contiguous and larger than a bucket, and none of them of whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.wide = nn.Parameter(torch.randn(300)), nn.Parameter(torch.randn(70, 31).t())
        self.narrow, self.last = nn.Parameter(torch.randn(333).bfloat16()), nn.Parameter(torch.randn(7, 301))
        self.odd = nn.ParameterList(nn.Parameter(torch.randn(17, 29, 3).permute(2, 0, 1)) for _ in range(3))
        self.empty = nn.Parameter(torch.zeros(0).half())
        self.other_narrow = nn.Parameter(torch.randn(70).bfloat16())

    def drift(self, rank: int, k: int) -> None:
        random = torch.Generator().manual_seed(100 * k + rank)
        with torch.no_grad():
            for p in self.parameters():
                p += (0.1 * torch.randn(p.shape, generator=random)).to(p.dtype)


def odd_layout(rank: int, bits: int) -> Tensor:
    model = OddLayout()
    averager = rumor.Averager(model, rumor.gossip_pga(rumor.ring, H=3, bits=bits))
    for k in range(5):
        model.drift(rank, k)
        averager.step()
    return flat(model)


@pytest.mark.parametrize("bits", BITS)
def test_engines_cut_the_same_blocks_from_parameters_of_any_layout_and_dtype(four: Cluster, bits: int) -> None:
    sim = rumor.Simulator(OddLayout(), rumor.gossip_pga(rumor.ring, H=3, bits=bits), n=N)
    for k in range(5):
        nodes = [sim.node_model(rank) for rank in range(N)]
        for rank, node in enumerate(nodes):
            node.drift(rank, k)
        with torch.no_grad():
            for leaf, *parts in zip(sim.parameters(), *(node.parameters() for node in nodes), strict=True):
                leaf.copy_(torch.stack(parts))
        sim.step()
    away = (torch.stack(four.run(odd_layout, bits)) - torch.stack([flat(sim.node_model(rank)) for rank in range(N)])).abs()
    is_half = torch.cat([torch.full((p.numel(),), p.dtype == torch.bfloat16) for p in OddLayout().parameters()])
    assert away[:, ~is_half].max() < 1e-5
    assert (away[:, is_half] > 0).float().mean() < 0.1, "sums in another order may be rounded to the next bfloat16 at times"
    assert away[:, is_half].max() < 0.02


def test_buckets_keep_their_size_whatever_the_layout() -> None:
    tensors = [torch.randn(7, 301, 40).permute(2, 0, 1) for _ in range(30)]
    buckets = FlatBuckets(tensors, lambda shape, dtype, device: Buffer(torch.empty(shape, dtype=dtype, device=device)), bits=4)
    sizes = [buckets.read(b).tensor.numel() for b in range(len(buckets))]
    assert len(set(sizes[:-1])) == 1
    assert sizes[-1] <= sizes[0]
    assert all(size % BLOCK == 0 for size in sizes[:-1])
    assert len(sizes) > 2
    assert torch.equal(torch.cat([buckets.read(b).tensor for b in range(len(buckets))]), torch.cat([t.reshape(-1) for t in tensors]))


@pytest.mark.parametrize("seed", range(4))
def test_a_simulator_with_parameters_of_two_dtypes_resumes_bitwise(seed: int) -> None:
    """With delay=1, while messages are in flight. Their differences to the last global average are kept in both dtypes."""

    def start() -> rumor.Simulator:
        torch.manual_seed(seed)
        model = nn.ParameterList([nn.Parameter(torch.randn(300)), nn.Parameter(torch.randn(20).double())])
        return rumor.Simulator(model, rumor.gossip_pga(rumor.ring, H=3, bits=4, delay=1), n=N)

    def run(sim: rumor.Simulator, first: int, end: int) -> None:
        for k in range(first, end):
            random = torch.Generator().manual_seed(k)
            with torch.no_grad():
                for leaf in sim.parameters():
                    leaf += 0.1 * torch.randn(leaf.shape, generator=random, dtype=leaf.dtype)
            sim.step()

    whole, first, second = start(), start(), start()
    run(whole, 0, 9)
    run(first, 0, 5)
    second.load_state_dict(first.state_dict())
    run(second, 5, 9)
    assert torch.equal(whole.X, second.X)


def half_precision(rank: int, bits: int, delay: int) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(40, 90).bfloat16()
    averager = rumor.Averager(model, rumor.gossip_pga(rumor.ring, H=3, bits=bits, delay=delay))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(7 if delay == 0 else 6):
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn(p.shape, generator=generator).bfloat16()
        averager.step()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    return flat(model).float()


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("bits", BITS)
def test_models_in_half_precision_stay_close_to_those_with_plain_messages(four: Cluster, bits: int, delay: int) -> None:
    plain, coded = (torch.stack(four.run(half_precision, b, delay)) for b in (32, bits))
    error = (coded - plain).abs().max()
    assert 0 < error < 0.1, "a step adds 0.1, and codes are finer than that"


def test_what_codes_can_not_do_is_refused_with_a_reason() -> None:
    for build in (
        lambda: rumor.gossip_sgd(rumor.ring, bits=4),
        lambda: rumor.gossip_sgd(rumor.ring(4), bits=8),
        lambda: rumor.gossip_pga(rumor.ring, 6, average_rounds=3, bits=4),
    ):
        with pytest.raises(ValueError, match=r"needs global averages by an all-reduce.*Use bits=16 or 32"):
            build()
    for bits in (0, 1, 2, 5, 64, 4.5, 4.0, torch.tensor(4), "4", True, None):
        with pytest.raises(ValueError, match="bits must be 32, 16, 8 or 4, got"):
            rumor.parallel_sgd(bits=bits)
        with pytest.raises(ValueError, match="bits must be 32, 16, 8 or 4, got"):
            rumor.osgp(rumor.ring, bits=bits)
    with pytest.raises(ValueError, match=r"osgp has no bits=4.*Use gossip_pga\(topology, H=..., delay=1, bits=4\)"):
        rumor.osgp(rumor.ring, bits=4)


def refusals(engine: Engine, x: Tensor) -> list[str]:
    """What an engine says to codes with scalars, without the node's own part, of a width that there is not, and without memory."""
    said = []
    for options in ({"scalars": torch.zeros(*x.shape[:-1], 1)}, {"own": False}):
        with pytest.raises(ValueError, match="bits=4 takes no") as error:
            engine.gossip(x, rumor.ring(4), 0, bits=4, **options)  # type: ignore[arg-type]
        said.append(str(error.value))
    with pytest.raises(ValueError, match="bits must be 32, 16, 8 or 4, got bits=5"):
        engine.gossip(x, rumor.ring(4), 0, bits=5)
    with pytest.raises(ValueError, match="an average with bits=4 needs left_out=, a tensor for each of 1 buckets"):
        engine.mean([x], 0, bits=4)
    return said


def refusals_of_a_rank(rank: int) -> list[str]:
    return refusals(ProcessGroup(), torch.zeros(300))


def test_engines_refuse_what_codes_can_not_do(four: Cluster) -> None:
    scalars, own = refusals(rumor.Stacked(4), torch.zeros(4, 300))
    assert "Use bits=32 for scalars" in scalars
    assert "Use bits=32 for own=False" in own
    assert four.run(refusals_of_a_rank) == [[scalars, own]] * 4


def test_the_number_of_bits_is_part_of_the_method() -> None:
    four, eight, plain = (rumor.gossip_pga(rumor.ring(4), 6, bits=bits) for bits in (4, 8, 32))
    assert four != eight
    assert repr(four).endswith("bits=4)")
    assert "bits" not in repr(plain), "checkpoints of earlier versions still fit"


def test_theory_has_no_answer_for_codes() -> None:
    with pytest.raises(ValueError, match="no theory of bits=4: build the same method with bits=32"):
        rumor.theory.transient_stage(rumor.gossip_pga(rumor.ring(8), 6, bits=4))


def bytes_of_a_period(rank: int, bits: int) -> int:
    averager = rumor.Averager(nn.Linear(1000, 100), rumor.gossip_pga(rumor.one_peer_exponential, H=6, bits=bits))
    for _ in range(12):
        averager.step()
    return averager.metrics.bytes_sent


@pytest.mark.parametrize("bits", BITS)
def test_bytes_that_are_counted_are_those_that_travel(four: Cluster, bits: int) -> None:
    parameters, steps, rounds = 100_100, 10, 2
    limit = parameters * bits / 8 * (steps + rounds * 2 * (N - 1) / N)
    for found in four.run(bytes_of_a_period, bits):
        assert limit < found < 1.06 * limit
    sim = rumor.Simulator(nn.Linear(1000, 100), rumor.gossip_pga(rumor.one_peer_exponential, H=6, bits=bits), n=N)
    for _ in range(12):
        sim.step()
    assert limit < sim.metrics.bytes_sent < 1.06 * limit


def test_two_copies_of_the_parameters_are_all_that_codes_keep() -> None:
    sim = rumor.Simulator(nn.Linear(100, 100), rumor.gossip_pga(rumor.ring, H=6, bits=4), n=4)
    kept = sum(tensor.numel() for tensors in sim._runner.state.buckets.values() for tensor in tensors)
    assert kept == 2 * sim.X.numel()


def one_rank_reads(rank: int, bits: int, how: str) -> float:
    """Rank 0 alone waits for the global average that is under way, then all meet. Returns the consensus distance at the end."""
    torch.manual_seed(rank)
    model = nn.Linear(100, 30)
    method = rumor.gossip_pga(rumor.ring, H=2, bits=bits, delay=int(how == "delay"))
    averager = rumor.Averager(model, method, lazy=how != "delay")
    for _ in range(3 if how == "delay" else 2):  # with delay=1, it has left at the end of the step before
        model.weight.data.add_(torch.randn(30, 100))
        averager.step()
    if rank == 0 and how == "lazy, forward":
        model(torch.zeros(1, 100))
    elif rank == 0:
        averager.state_dict()
    dist.barrier()  # the others come here without waiting for it
    averager.step()
    averager.finish()
    return averager.consensus_distance()


@pytest.mark.parametrize("how", ["delay", "lazy", "lazy, forward"])
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_an_average_needs_nobody_to_wait_for_it(four: Cluster, bits: int, how: str) -> None:
    assert max(four.run(one_rank_reads, bits, how)) < 1e-10


def test_one_node_alone_rounds_nothing() -> None:
    sim = rumor.Simulator(nn.Linear(30, 20), rumor.parallel_sgd(bits=4), n=1)
    moved = torch.randn_like(sim.X)
    for leaf, part in zip(sim.parameters(), torch.split(moved, [600, 20], dim=1), strict=True):
        leaf.data.add_(part.view_as(leaf))
    before = sim.X.clone()
    sim.step()
    assert torch.allclose(sim.X, before, atol=1e-6)
    assert sim.metrics.bytes_sent == 0


def bytes_left_by_averages(rank: int) -> int:
    """Averages tensors that are not buckets of a method, as a method of a user's own may do. Returns the bytes that 20 averages leave."""
    engine = rumor.Averager(nn.Linear(2, 2), rumor.parallel_sgd()).engine
    x, left_out, in_use = torch.randn(100_000), [torch.zeros(100_000)], []
    for k in range(22):
        engine.mean([x], k, bits=4, left_out=left_out)[0].wait()
        gc.collect()
        in_use.append(bytes_in_use())
    return in_use[-1] - in_use[1]


def test_averages_of_other_tensors_leave_no_memory(four: Cluster) -> None:
    assert max(four.run(bytes_left_by_averages)) < 400_000


@pytest.mark.parametrize("ends", ["finish", "a new epoch"])
def test_an_average_that_was_dropped_leaves_nothing_behind(ends: str) -> None:
    """With delay=1, what codes leave out of an average is known when it is sent. If it is then dropped, nothing was left out."""
    sim = rumor.Simulator(nn.Linear(40, 90), rumor.gossip_pga(rumor.ring(N), H=3, bits=4, delay=1))
    rest = sim._runner.state.buckets["left_out"][0]
    for step in range(8):  # the messages of step 8, which is global, are under way then
        sim.step()
        with torch.no_grad():
            for leaf in sim.parameters():
                leaf += torch.randn_like(leaf)
        if step == 6:
            dropped_a_gossip_step = rest.clone()
            sim._runner.drop_in_flight()
            assert torch.equal(rest, dropped_a_gossip_step)
            assert rest.abs().max() > 0, "left out of the average in step 5"
    if ends == "finish":
        sim.finish()
    else:
        sim._runner.shared_state()
    assert not rest.any()


@pytest.mark.parametrize("topology", [rumor.exponential(32), rumor.exponential(50), rumor.torus(25), rumor.base_graph(5)], ids=str)
def test_weights_of_codes_sum_to_zero(topology: rumor.Topology) -> None:
    """Those that float32 arithmetic uses: else the mean of all nodes would drift, always in the same direction."""
    for k in range(topology.period):
        for node in range(topology.n):
            weights = list(topology.neighbors(node, k).values())
            used = [rounded(w) for w in weights] + _negated_sum(weights)
            assert sum(map(Fraction, used)) == 0
            assert used == [rounded(w) for w in used]
    assert len(_negated_sum([0.5])) == len(_negated_sum([1 / 3, 1 / 3])) == 1, "one is enough where it is exact: each takes time"


def differences_to_the_simulator(rank: int, bits: int) -> float:
    """The largest one, in float64, over some averages of models that move."""
    model, method = nn.Linear(1000, 4, bias=False).double(), rumor.local_sgd(H=1, bits=bits)
    nn.init.zeros_(model.weight)
    sim, averager, worst = rumor.Simulator(model, method, n=5), rumor.Averager(model, method), 0.0
    (leaf,) = sim.parameters()
    for k in range(12):
        moves = torch.randn(5, 4, 1000, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        leaf.data.add_(moves)
        model.weight.data.add_(moves[rank])
        sim.step()
        averager.step()
        worst = max(worst, (leaf[rank] - model.weight).abs().max().item())
    return worst


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_engines_agree_on_averages_of_five_nodes(five: Cluster, bits: int) -> None:
    """1/5 is not exact, so an average depends on the order of its sum."""
    assert max(five.run(differences_to_the_simulator, bits)) < 1e-12


# ---- memory ------------------------------------------------------------------------------------------------------------------------

# docs/algorithms.md, "bits": copies of the parameters that a rank keeps, with 4 nodes and one neighbour at a time
COPIES = {torch.float32: {32: 3.0, 16: 3.0, 8: 2.5, 4: 2.3}, torch.bfloat16: {32: 4.0, 16: 5.0, 8: 4.0, 4: 3.5}}


def bytes_held_by(owner: object, besides: Tensor) -> int:
    """The memory of all tensors that an object leads to, but for one."""
    seen, found, left = {id(owner)}, {}, [owner]
    while left:
        one = left.pop()
        if issubclass(type(one), Tensor):
            storage = one.untyped_storage()  # type: ignore[attr-defined]
            found[storage.data_ptr()] = storage.nbytes()
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, type | ModuleType | FunctionType):
                seen.add(id(other))
                left.append(other)
    return sum(found.values()) - found.get(besides.untyped_storage().data_ptr(), 0)


def copies_kept(rank: int, bits: int, dtype: torch.dtype, delay: int) -> float:
    """What an Averager keeps after 9 steps, in copies of the parameters. The model is cut into 40 buckets, so each is small."""
    model = nn.Linear(1000, 1000, bias=False).to(dtype)
    pieces, buckets.PIECES = buckets.PIECES, 40
    try:
        averager = rumor.Averager(model, rumor.gossip_pga(rumor.one_peer_exponential, H=3, bits=bits, delay=delay))
        for _ in range(9):
            averager.step()
        return bytes_held_by(averager, besides=model.weight) / model.weight.nbytes
    finally:
        buckets.PIECES = pieces


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("dtype", COPIES)
@pytest.mark.parametrize("bits", WIDTHS)
def test_memory_is_what_the_docs_say(four: Cluster, bits: int, dtype: torch.dtype, delay: int) -> None:
    """Beside it, there are a few buckets that all others share."""
    documented = COPIES[dtype][bits]
    if delay == 1 and bits < 32:
        documented += 1 if dtype == torch.float32 else 2
    for found in four.run(copies_kept, bits, dtype, delay):
        assert documented - 0.05 < found < documented + 0.15


def goes_on_from_another_state(rank: int, bits: int) -> tuple[Tensor, Tensor, list[int]]:
    """Averages globally after a step that has posted receives for a gossip step, whose messages are in the same memory.

    Returns the models of an undisturbed run and of this one, and how many receives were still posted when averages began.
    """

    def drift(model: nn.Module, k: int) -> None:
        random = torch.Generator().manual_seed(100 * k + rank)
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn(p.shape, generator=random)

    def start() -> tuple[nn.Module, rumor.Averager]:
        torch.manual_seed(0)
        model = nn.Linear(300, 50)
        return model, rumor.Averager(model, rumor.gossip_pga(rumor.ring, H=3, bits=bits))

    model, averager = start()
    for k in range(2):
        drift(model, k)
        averager.step()
    weights, state = {name: p.clone() for name, p in model.state_dict().items()}, averager.state_dict()
    other_model, other = start()
    drift(other_model, 10)
    other.step()
    other_model.load_state_dict(weights)
    other.load_state_dict(state)
    posted, post = [posted_ahead(other)], CodedMean.post

    def counted(average: CodedMean) -> None:
        posted.append(posted_ahead(other))
        post(average)

    CodedMean.post = counted  # type: ignore[method-assign]
    try:
        for k in range(2, 8):
            for each, its in ((model, averager), (other_model, other)):
                drift(each, k)
                its.step()
    finally:
        CodedMean.post = post  # type: ignore[method-assign]
    return flat(model), flat(other_model), posted


def posted_ahead(averager: rumor.Averager) -> int:
    return sum(len(channel.expected) for channel in averager.replica.runner.state.send_buffers)  # type: ignore[attr-defined]


@pytest.mark.parametrize("bits", BITS)
def test_an_average_may_follow_receives_that_were_posted_ahead(four: Cluster, bits: int) -> None:
    for expected, found, posted in four.run(goes_on_from_another_state, bits):
        assert torch.equal(found, expected)
        assert posted[0] > 0
        assert not any(posted[2:]), "the first is of the undisturbed run"
