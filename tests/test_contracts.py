"""The contracts between methods, engines and buckets, each of which was broken once."""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rumor
from rumor.engines import Buckets, Buffer, Lerp, StackedBuckets
from rumor.engines.processes import transport
from rumor.engines.processes.message import MOST_SCALARS, Message, labels_agree
from rumor.methods import Kind, Nodes, State
from rumor.model.buckets import FlatBuckets
from tests.cluster import Cluster
from tests.problems import N, batches, decayed, loss_fn, network, trained

RING = rumor.ring(N)

# ---- buckets: one contract for both engines ---------------------------------------------------------------------------------------


def stacked(values: Tensor) -> tuple[Buckets, Callable[[], Tensor]]:
    x = values.clone().repeat(3, 1)  # three nodes with the same model
    return StackedBuckets([x]), lambda: x[1]


def flat(values: Tensor) -> tuple[Buckets, Callable[[], Tensor]]:
    pieces = [values[:5].clone(), values[5:].clone()]
    return FlatBuckets(pieces, lambda shape, dtype, device: Buffer(torch.empty(shape, dtype=dtype, device=device))), lambda: torch.cat(
        pieces
    )


@pytest.fixture(params=[stacked, flat])
def case(request: pytest.FixtureRequest) -> tuple[Tensor, Buckets, Callable[[], Tensor]]:
    values = torch.arange(12, dtype=torch.float32)
    return values, *request.param(values)


Case = tuple[Tensor, Buckets, Callable[[], Tensor]]


def test_read_copy_and_peek_give_the_values(case: Case) -> None:
    values, x, _ = case
    assert len(x) == 1
    for tensor in (x.read(0).tensor, x.copy(0).tensor, x.peek(0)):
        assert torch.equal(tensor, values.expand_as(tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_difference_fills_memory_of_the_callers_in_its_dtype(case: Case, dtype: torch.dtype) -> None:
    values, x, model = case
    minus = torch.full_like(x.peek(0), 3.0)
    found = torch.empty_like(minus, dtype=dtype)
    x.difference(0, minus, found)
    assert torch.equal(found, (values - 3).to(dtype).expand_as(found))
    assert torch.equal(model(), values)
    assert (minus == 3.0).all()


def test_what_copy_returns_may_be_changed(case: Case) -> None:
    values, x, model = case
    x.copy(0).tensor.fill_(-1.0)
    assert torch.equal(model(), values)


def test_copy_outlives_a_change_of_the_model(case: Case) -> None:
    values, x, _ = case
    kept = x.copy(0).tensor
    x.write(0, torch.zeros_like(kept))
    assert torch.equal(kept, values.expand_as(kept))


def test_peek_leaves_what_is_in_flight_alone(case: Case) -> None:
    values, x, _ = case
    in_flight = x.copy(0).tensor
    x.write(0, torch.zeros_like(in_flight))
    assert not x.peek(0).any()
    assert torch.equal(in_flight, values.expand_as(in_flight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_write_takes_any_float(case: Case, dtype: torch.dtype) -> None:
    _, x, model = case
    x.write(0, torch.full_like(x.peek(0), 0.5, dtype=dtype))
    assert torch.equal(model(), torch.full((12,), 0.5))


@pytest.mark.parametrize("weight", [1.0, 0.25])
@pytest.mark.parametrize("finite", [None, True, False])
def test_lerp_moves_the_model_by_the_weight(case: Case, weight: float, finite: bool | None) -> None:
    values, x, model = case
    end = torch.full_like(x.peek(0), float("nan") if finite is False else 8.0)
    x.lerp(0, Lerp(end, weight, None if finite is None else torch.tensor([finite])))
    assert torch.allclose(model(), values if finite is False else torch.lerp(values, torch.full_like(values, 8.0), weight))


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_lerp_counts_from_what_was_sent_and_leaves_it_alone(case: Case, weight: float) -> None:
    values, x, model = case
    sent = x.peek(0).clone() + 1
    before = sent.clone()
    x.lerp(0, Lerp(torch.full_like(sent, 8.0), weight), sent)
    assert torch.allclose(model(), values + weight * (8.0 - (values + 1)))
    assert torch.equal(sent, before)


# ---- messages ---------------------------------------------------------------------------------------------------------------------


def summed_heads(n: int, odd_one: int | None, doing: str = "averaging globally at step 3") -> list[float]:
    """The head of a sum over n nodes in float32; the label of one of them is `odd_one` higher or lower."""
    total = torch.zeros(8)
    for node in range(n):
        message = Message(4, torch.float32, torch.device("cpu"), head=torch.float32)
        message.write_sum_head(torch.zeros(1), doing, n)
        if odd_one is not None and node == n - 1:
            label = message.head[0] + odd_one
            message.head[0], message.head[-1] = label, label**2
        total += message.head
    return total.tolist()


@pytest.mark.parametrize("n", [2, 16, 256, 5_000])
def test_a_rank_that_is_out_of_step_is_noticed_however_close_its_label_is(n: int) -> None:
    doings = [f"averaging globally at step {k}" for k in range(20)]
    for doing in doings if n < 1_000 else doings[:2]:
        assert labels_agree(summed_heads(n, None, doing), n)
        assert not labels_agree(summed_heads(n, 1, doing), n)
        assert not labels_agree(summed_heads(n, -1, doing), n)


def test_a_fifth_scalar_is_refused() -> None:
    message = Message(4, torch.float32, torch.device("cpu"))
    assert len(message.scalars(MOST_SCALARS)) == 4
    message.head[-2:] = 7.0  # news and step
    message.scalars(4).fill_(1.0)
    assert message.head[-2:].tolist() == [7.0, 7.0]
    with pytest.raises(ValueError, match="at most 4 scalars, got 5"):
        message.scalars(5)


def gossip_of_a_slice(rank: int) -> tuple[Tensor, Tensor, str]:
    engine = rumor.ProcessGroup()
    buffer = engine.allocate(torch.Size([100]), torch.float64, torch.device("cpu"))
    buffer.tensor.copy_(torch.arange(100) + 100.0 * rank)
    part = engine.gossip(buffer.tensor[10:20], RING, 0).wait().x.clone()
    whole = engine.gossip(buffer, RING, 1).wait().x.clone()
    try:
        engine.gossip(buffer, RING, 2, scalars=torch.zeros(6, dtype=torch.float64))
    except ValueError as error:
        return part, whole, str(error)
    return part, whole, "not refused"


def test_a_slice_of_a_buffer_is_sent_as_a_slice(four: Cluster) -> None:
    for rank, (part, whole, refused) in enumerate(four.run(gossip_of_a_slice)):
        offset = sum(100.0 * w * node for node, w in RING.neighbors(rank).items()) + 100.0 * rank * RING.self_weight(rank)
        assert torch.allclose(part, torch.arange(10, 20, dtype=torch.float64) + offset)
        assert torch.allclose(whole, torch.arange(100, dtype=torch.float64) + offset)
        assert "at most 4 scalars" in refused


# ---- memory that only grew --------------------------------------------------------------------------------------------------------


def test_messages_that_never_come_are_dropped_with_their_group() -> None:
    before = list(transport._unclaimed)
    try:
        transport._unclaimed.clear()
        alive, gone = (lambda: object()), (lambda: None)
        transport.keep_unclaimed(gone, [([], "a")])
        transport.keep_unclaimed(alive, [([], "b")])
        transport.keep_unclaimed(alive, [([], "c")], have_arrived=lambda: True)
        transport.keep_unclaimed(alive, [])
        assert [entry.posted[1] for entry in transport._unclaimed] == ["b"]
    finally:
        transport._unclaimed[:] = before


def loops_that_are_left(rank: int) -> list[int]:
    averager = rumor.Averager(network(), rumor.gossip_sgd(RING))
    held = []
    for _ in range(5):
        for _ in averager.join(range(10)):
            averager.step()
            break
        held.append(len(transport._unclaimed))
    averager.finish()
    return [count - held[0] for count in held]


def test_loops_that_are_left_leave_no_more_than_the_last_votes_behind(four: Cluster) -> None:
    for held in four.run(loops_that_are_left):
        assert max(held) <= 1, held


def loops_that_are_left_at_different_places(rank: int) -> int:
    averager = rumor.Averager(network(), rumor.gossip_sgd(RING))
    for k in averager.join(range(10)):
        if k < 2:
            averager.step()
        if k == (2 if rank == 0 else 3):
            break
    for _ in averager.join(range(3)):
        averager.step()
    averager.finish()
    return int(averager.steps)


def test_a_loop_may_be_left_at_another_place_after_as_many_steps(four: Cluster) -> None:
    assert four.run(loops_that_are_left_at_different_places) == [5] * 4


# ---- one decision a step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted(rumor.GossipPGA):
    """Counts how often the kind of a round is worked out."""

    def kind(self, state: State) -> Kind:
        COUNTS.append(state.schedule.k)
        return super().kind(state)


COUNTS: list[int] = []


def decisions(rank: int, delay: int) -> list[int]:
    averager = rumor.Averager(network(), Counted(RING, rumor.Periodic(3), delay))
    found = []
    for _ in range(6):
        COUNTS.clear()
        averager.step()
        found.append(len(COUNTS))
    averager.finish()
    return found


@pytest.mark.parametrize("delay", [0, 1])
def test_a_step_decides_once_and_looks_ahead_once(four: Cluster, delay: int) -> None:
    for found in four.run(decisions, delay):
        assert max(found) <= 2, found


@dataclass(frozen=True)
class NeedsLr(rumor.GossipPGA):
    """A method that needs the learning rate for reasons of its own."""

    @property
    def needs_lr(self) -> bool:
        return True

    def decide(self, state: State, loss: Tensor | None = None, lr: float | None = None) -> Any:
        if lr is None:
            raise ValueError("NeedsLr scales by the learning rate: call step(loss, lr=...)")
        return super().decide(state, loss, lr)


def test_a_method_says_itself_what_it_needs() -> None:
    sim = rumor.Simulator(network(), NeedsLr(RING, rumor.Periodic(3)))
    with pytest.raises(ValueError, match=r"^NeedsLr scales by the learning rate"):
        sim.step()


def test_a_function_hides_no_module() -> None:
    assert callable(rumor.slowmo)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rumor.slowmo")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rumor.methods.slowmo")


# ---- lazy and compiled ------------------------------------------------------------------------------------------------------------


def compiled(compile: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it first imports its compiler
        return compile()


def lazy_and_compiled(rank: int, how: str) -> None:
    model = network(torch.float32)
    if how == "torch.compile(model)":
        rumor.Averager(compiled(lambda: torch.compile(model)), rumor.gossip_sgd(RING), lazy=True)
    elif how == "model.compile()":
        compiled(model.compile)
        rumor.Averager(model, rumor.gossip_sgd(RING), lazy=True)
    else:
        averager = rumor.Averager(model, rumor.gossip_pga(RING, 2), lazy=True)
        averager.step()
        compiled(model[0].compile)
        averager.step()


@pytest.mark.parametrize("how", ["torch.compile(model)", "model.compile()", "compiled later"])
def test_lazy_refuses_compiled_models(four: Cluster, how: str) -> None:
    for kind, text in four.errors(lazy_and_compiled, how):
        assert kind is ValueError
        assert "lazy=True does not go with torch.compile" in text


# ---- methods on the engine alone --------------------------------------------------------------------------------------------------


def test_a_method_runs_on_an_engine_without_a_model() -> None:
    x = torch.randn(N, 3, dtype=torch.float64)
    mean = x.mean(dim=0)
    nodes = Nodes(StackedBuckets([x]), StackedBuckets([]), rumor.Stacked(N))
    algorithm = rumor.gossip_pga(RING, 2)
    state = algorithm.start(nodes)
    assert [algorithm.step(nodes, state).kind for _ in range(4)] == ["gossip", "global", "gossip", "global"]
    assert torch.allclose(x, mean.expand_as(x))


# ---- delayed buffers --------------------------------------------------------------------------------------------------------------


def with_batchnorm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


def delayed_buffers(rank: int) -> Tensor:
    model, (x, y) = with_batchnorm(), batches(7)
    averager = rumor.Averager(model, rumor.gossip_pga(RING, 2, delay=1))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in trained(model, averager, opt, rank, x, y):
        pass
    return torch.cat([model[1].running_mean, model[1].running_var])


def test_buffers_of_a_delayed_global_round_are_those_that_were_sent(four: Cluster) -> None:
    """The forward of the next step changes BatchNorm's statistics while their average travels."""
    sim = rumor.Simulator(with_batchnorm(), rumor.gossip_pga(RING, 2, delay=1))
    opt = torch.optim.SGD(sim.parameters(), lr=0.05)
    for k, (x, y) in enumerate(zip(*batches(7), strict=True)):
        decayed(opt, k)
        opt.zero_grad()
        losses = sim(loss_fn, x, y)
        losses.sum().backward()
        opt.step()
        sim.step(losses)
    here = torch.cat([sim.state_dict()["buffers"][f"1.running_{what}"] for what in ("mean", "var")], dim=1)
    for rank, there in enumerate(four.run(delayed_buffers)):
        assert (there - here[rank]).abs().max() < 1e-12


# ---- what ranks compare -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WithFunction(rumor.GossipPGA):
    """A method with a function of the user's."""

    compress: Callable[[Tensor], Tensor] = torch.clone


def with_a_function(rank: int) -> str:
    unlike = [object() for _ in range(rank)]  # so that addresses differ
    averager = rumor.Averager(network(), WithFunction(RING, rumor.Periodic(3), compress=lambda x: x + len(unlike)))
    return str(averager.state_dict()["algorithm"])


def test_a_function_in_a_method_is_compared_without_its_address(four: Cluster) -> None:
    texts = four.run(with_a_function)
    assert len(set(texts)) == 1
    assert "0x" not in texts[0]


# ---- a parameter that was replaced, noticed at a global round ---------------------------------------------------------------------


def replaced_parameter(rank: int) -> None:
    model = network()
    averager = rumor.Averager(model, rumor.gossip_pga(RING, 2))
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    averager.finish()


def test_a_replaced_parameter_is_told_from_a_new_one(four: Cluster) -> None:
    assert all("has been replaced, or has moved in memory" in text for _, text in four.errors(replaced_parameter))
