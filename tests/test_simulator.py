"""The Simulator: stacked leaves, vmap, buffers, randomness, optimizers, modules to look at."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rumor
from tests.problems import N, batches, flat, loss_fn, network

RING = rumor.ring(N)


def test_leaves_are_stacked_contiguous_and_start_alike() -> None:
    model = network()
    sim = rumor.Simulator(model, rumor.gossip_sgd(RING))
    for (name, leaf), p in zip(sim.named_parameters(), model.parameters(), strict=True):
        assert leaf.shape == (N, *p.shape), name
        assert leaf.is_contiguous()
        assert leaf.is_leaf
        assert torch.equal(leaf[2], p)
    assert sim.X.shape == (N, flat(model).numel())
    assert torch.equal(sim.X[1], flat(model))


def test_losses_and_gradients_are_those_of_each_node_alone() -> None:
    model = network()
    sim = rumor.Simulator(model, rumor.gossip_sgd(RING))
    x, y = (part[0] for part in batches(1))
    losses = sim(loss_fn, x, y)
    losses.sum().backward()
    assert losses.shape == (N,)
    for i in range(N):
        model.zero_grad()
        loss = loss_fn(model, x[i], y[i])
        loss.backward()
        assert torch.allclose(losses[i], loss)
        for leaf, p in zip(sim.parameters(), model.parameters(), strict=True):
            assert torch.allclose(leaf.grad[i], p.grad, atol=1e-12)
    assert all(torch.equal(sim.X[i], flat(model)) for i in range(N)), "the model itself is left alone"


class Odd(nn.Module):
    """A tied weight, a frozen one, dropout, a buffer that is replaced and one that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("seen", torch.zeros(5))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().mean(dim=0)
        return self.second(self.norm(self.first(x))) * self.frozen


@pytest.mark.parametrize("vmap", [True, False])
def test_buffers_are_each_nodes_own_and_averaged_at_global_rounds(vmap: bool) -> None:
    torch.manual_seed(0)
    model = Odd().double()
    sim = rumor.Simulator(model, rumor.gossip_pga(RING, 2), vmap=vmap)
    opt = torch.optim.SGD(sim.parameters(), lr=0.1)
    x, y = batches(2)
    alone = [Odd().double() for _ in range(N)]
    for i in range(N):
        alone[i].load_state_dict(model.state_dict())
        loss_fn(alone[i], x[0, i], y[0, i])
    for k in range(2):
        losses = sim(loss_fn, x[k], y[k])
        losses.sum().backward()
        opt.step()
        opt.zero_grad()
        sim.step(losses)
        if k == 0:
            for i in range(N):
                for (name, mine), theirs in zip(sim.node_model(i).named_buffers(), alone[i].buffers(), strict=True):
                    assert torch.allclose(mine, theirs, atol=1e-12), name
    state = sim.state_dict()["buffers"]
    assert (state["norm.running_mean"] == state["norm.running_mean"][0]).all(), "step 1 was global"
    assert state["norm.num_batches_tracked"].tolist() == [2] * N
    assert (state["seen"] == state["seen"][0]).all()
    assert torch.equal(model.seen, torch.zeros(5, dtype=torch.float64)), "the model itself is left alone"
    assert (sim.mean_model().frozen == 1).all()


@pytest.mark.parametrize("vmap", [True, False])
def test_dropout_differs_between_nodes(vmap: bool) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False))
    sim = rumor.Simulator(model, rumor.gossip_sgd(RING), vmap=vmap)
    losses = sim(lambda m, x: m(x).sum(), torch.ones(N, 1, 64))
    assert len(set(losses.tolist())) == N
    model.eval()
    assert len(set(sim(lambda m, x: m(x).sum(), torch.ones(N, 1, 64)).tolist())) == 1


class Recurrent(nn.Module):
    """What vmap can't take: an LSTM, and a branch on data."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x[:, None])
        return out[:, -1] if out.sum().item() > 0 else -out[:, -1]


def test_a_model_that_vmap_cannot_take_runs_node_by_node() -> None:
    sim = rumor.Simulator(Recurrent().double(), rumor.gossip_pga(RING, 2), vmap=False)
    opt = torch.optim.SGD(sim.parameters(), lr=0.5)
    x, y = batches(10)
    history = []
    for k in range(10):
        losses = sim(loss_fn, x[0], y[0])
        losses.sum().backward()
        opt.step()
        opt.zero_grad()
        sim.step(losses)
        history.append(losses.mean().item())
        assert (k + 1) % 2 or sim.consensus_distance() < 1e-20
    assert history[-1] < history[0]


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
        lambda p: torch.optim.Adamax(p, lr=0.01),
        lambda p: torch.optim.Rprop(p, lr=0.01),
    ],
    ids=["SGD", "SGD fused", "Adam", "AdamW fused", "RMSprop", "Adagrad", "Adamax", "Rprop"],
)
def test_elementwise_optimizers_work_on_stacked_leaves(build: Any) -> None:
    """Four nodes without communication are four separate runs."""
    sim = rumor.Simulator(network(), rumor.gossip_pga(rumor.isolated(N), 10**6))
    opt = build(list(sim.parameters()))
    alone = [network() for _ in range(N)]
    opts = [build(list(model.parameters())) for model in alone]
    x, y = batches(8)
    for k in range(8):
        opt.zero_grad()
        sim(loss_fn, x[k], y[k]).sum().backward()
        opt.step()
        sim.step()
        for i in range(N):
            opts[i].zero_grad()
            loss_fn(alone[i], x[k, i], y[k, i]).backward()
            opts[i].step()
    assert (sim.X - torch.stack([flat(model) for model in alone])).abs().max() < 1e-9


def test_mixed_dtypes_are_simulated_too() -> None:
    model = nn.ModuleDict({"a": nn.Linear(5, 3).bfloat16(), "b": nn.Linear(5, 3)})
    sim = rumor.Simulator(model, rumor.gossip_pga(RING, 2))
    opt = torch.optim.SGD(sim.parameters(), lr=0.1)
    x, y = (part[0] for part in batches(1))
    for _ in range(2):
        losses = sim(lambda m, x, y: nn.functional.cross_entropy(m["a"](x.bfloat16()).float() + m["b"](x), y), x.float(), y)
        losses.sum().backward()
        opt.step()
        opt.zero_grad()
        sim.step(losses)
    assert sim.consensus_distance() < 1e-12
    assert sim.mean_model()["a"].weight.dtype == torch.bfloat16


def test_mean_model_node_model_and_distance() -> None:
    sim = rumor.Simulator(network(), rumor.gossip_sgd(RING))
    with torch.no_grad():
        for leaf in sim.parameters():
            leaf += torch.randn(leaf.shape, dtype=torch.float64)
    assert torch.allclose(flat(sim.mean_model()), sim.X.mean(dim=0))
    assert torch.equal(flat(sim.node_model(2)), sim.X[2])
    expected = (sim.X - sim.X.mean(dim=0)).square().sum(dim=1).mean().item()
    assert sim.consensus_distance() == pytest.approx(expected, rel=1e-12)
    assert sim.metrics.consensus_distance == sim.consensus_distance()
    sim.finish()
    assert sim.consensus_distance() < 1e-25


def test_metrics_tell_what_the_average_node_would_send() -> None:
    sim = rumor.Simulator(nn.Linear(99, 100), rumor.gossip_pga(RING, 4))
    for _ in range(12):
        sim.step()
    d = 40_000
    assert sim.metrics.as_dict()["rounds"] == {"gossip": 9, "global": 3}
    assert sim.metrics.bytes_sent == pytest.approx(9 * 2 * d + 3 * 1.5 * d, rel=1e-6)


def test_a_bad_node_is_named() -> None:
    sim = rumor.Simulator(network(), rumor.gossip_sgd(RING))
    sim.step()
    with torch.no_grad():
        next(sim.parameters())[2, 0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"model of node 2 was not finite .* at step 1"):
        sim.step()


def test_a_node_with_bad_statistics_is_named_and_a_mask_is_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    sim = rumor.Simulator(model, rumor.parallel_sgd(4))
    sim.step()
    x = torch.ones(4, 3, 2)
    x[2] = math.inf  # and the optimizer's step is left out
    sim(lambda m, x: m(x).sum(), x)
    with pytest.raises(FloatingPointError, match=r"model of node 2 was not finite .* at step 1"):
        sim.step()
    model.register_buffer("mask", torch.full((2, 2), -math.inf))
    masked = rumor.Simulator(model, rumor.parallel_sgd(4))
    masked.step()
    assert masked.metrics.rounds["global"] == 1


def test_an_empty_parameter_is_no_matter() -> None:
    model = nn.Linear(2, 2)
    model.none = nn.Parameter(torch.zeros(0))
    sim = rumor.Simulator(model, rumor.gossip_pga(RING, 2))
    for _ in range(2):
        sim.step()
    assert sim.metrics.rounds == {"gossip": 1, "global": 1}


def test_wrong_input_is_refused() -> None:
    sim = rumor.Simulator(network(), rumor.gossip_aga(RING, 4))
    x, y = (part[0] for part in batches(1))
    with pytest.raises(ValueError, match=r"\[n, \.\.\.\] with n = 4, one row a node, got \[3, 8, 5\]"):
        sim(loss_fn, x[:3], y)
    with pytest.raises(ValueError, match="one number for its node, got a tensor of shape \\[8\\]"):
        sim(lambda m, x, y: nn.functional.cross_entropy(m(x), y, reduction="none"), x, y)
    with pytest.raises(ValueError, match=r"losses of all nodes, a tensor \[4\], got shape \[\]"):
        sim.step(torch.tensor(1.0))
    with pytest.raises(ValueError, match="adapts its period to the loss"):
        sim.step()
    with pytest.raises(ValueError, match="learning rate"):
        rumor.Simulator(network(), rumor.slowmo(RING, 4)).step()
    for wrong in (loss_fn, nn.Linear, rumor.gossip_sgd(RING)):
        with pytest.raises(TypeError, match=r"the model comes first and must be a torch\.nn\.Module, got "):
            rumor.Simulator(wrong, rumor.gossip_sgd(RING))  # type: ignore[arg-type]
    for wrong, shown in ((network(), "Sequential$"), (nn.Linear, "<class")):
        with pytest.raises(TypeError, match=f"a builder such as rumor.ring, got {shown}"):
            rumor.gossip_pga(wrong)
    with pytest.raises(ValueError, match="no parameters that train"):
        rumor.Simulator(nn.ReLU(), rumor.gossip_sgd(RING))


def trained(sim: rumor.Simulator, losses_of: Any, steps: int) -> Tensor:
    opt = torch.optim.SGD(sim.parameters(), lr=0.1)
    for x, y in zip(*batches(steps), strict=True):
        opt.zero_grad()
        losses = losses_of(x, y)
        losses.sum().backward()
        opt.step()
        sim.step(losses)
    return sim.X


def test_a_restarted_simulator_is_as_good_as_a_new_one() -> None:
    model, other = network(), rumor.gossip_aga(rumor.one_peer_exponential(N), 3)
    sim = rumor.Simulator(model, rumor.gossip_pga(RING, 3, delay=1))
    leaves = list(sim.parameters())
    trained(sim, partial(sim, loss_fn), 5)
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    sim.restart(other)
    assert all(a is b for a, b in zip(leaves, sim.parameters(), strict=True)), "a captured step reads where they were"
    new = rumor.Simulator(model, other)
    assert torch.equal(trained(sim, partial(sim, loss_fn), 7), trained(new, partial(new, loss_fn), 7))
    assert sim.metrics.rounds == new.metrics.rounds
    with pytest.raises(ValueError, match=r"has 4 nodes, and ring\(5\) is for 5: build another one"):
        sim.restart(rumor.gossip_sgd(rumor.ring(5)))


def test_a_compiled_simulator_trains_alike() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    plain, compiled = (rumor.Simulator(model, rumor.gossip_pga(RING, 3)) for _ in range(2))
    losses_of = compiled.compiled(loss_fn, fullgraph=True, backend="aot_eager")  # traced as a whole; no compiler needed
    assert torch.allclose(trained(compiled, losses_of, 5), trained(plain, partial(plain, loss_fn), 5), atol=1e-12)
    assert all(torch.allclose(a, b) for a, b in zip(compiled.mean_model().buffers(), plain.mean_model().buffers(), strict=True))
    with pytest.raises(ValueError, match=r"with n = 4, one row a node, got \[3, 8, 5\]"):
        losses_of(torch.zeros(3, 8, 5), torch.zeros(3, 8))


def test_a_ring_of_ten_thousand_nodes_is_practical() -> None:
    sim = rumor.Simulator(nn.Linear(10, 1), rumor.gossip_pga(rumor.ring(10_000), 8))
    opt = torch.optim.SGD(sim.parameters(), lr=0.1)
    x = torch.randn(10_000, 2, 10)
    for _ in range(8):
        losses = sim(lambda m, x: (m(x) - 1).square().mean(), x)
        losses.sum().backward()
        opt.step()
        opt.zero_grad()
        sim.step(losses)
    assert sim.consensus_distance() < 1e-9


class Interleaved(nn.Module):
    """Parameters whose dtypes take turns."""

    def __init__(self) -> None:
        super().__init__()
        for i, dtype in enumerate((torch.float32, torch.float64, torch.float32)):
            self.register_parameter(f"p{i}", nn.Parameter(torch.full((i + 1,), float(i), dtype=dtype)))


@pytest.mark.parametrize("bits", [32, 4])
def test_the_mean_model_has_each_parameter_in_its_place(bits: int) -> None:
    sim = rumor.Simulator(Interleaved(), rumor.gossip_pga(rumor.ring(3), H=2, bits=bits))
    assert [p.tolist() for p in sim.mean_model().parameters()] == [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]
