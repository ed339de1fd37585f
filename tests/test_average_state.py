"""Averager(..., average_state=) and sim.average_state(): the optimizer's state is mixed like the model."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rumor
from rumor.model.optimizer_state import OptimizerState
from tests.cluster import Cluster
from tests.nodes import STEPS as NODE_STEPS
from tests.nodes import groups, links, whole, wrapped
from tests.oracle import coded
from tests.problems import OPTIMIZERS, N, batches, decayed, flat, loss_fn, network, trained

STEPS = 20
MODES = ("global", "always")

METHODS: dict[str, Callable[[], Any]] = {
    "gossip_pga": lambda: rumor.gossip_pga(rumor.ring(N), 3),
    "gossip_pga delayed": lambda: rumor.gossip_pga(rumor.one_peer_exponential(N), 3, delay=1),
    "gossip_pga by gossip": lambda: rumor.gossip_pga(rumor.ring(N), 3, average_rounds=2),
    "gossip_pga 4 bits": lambda: rumor.gossip_pga(rumor.one_peer_exponential(N), 3, bits=4),
    "gossip_pga 8 bits delayed": lambda: rumor.gossip_pga(rumor.ring(N), 3, bits=8, delay=1),
    "gossip_pga by learning rate 4 bits": lambda: rumor.gossip_pga(
        rumor.one_peer_exponential(N), rumor.LearningRate(1, 24, power=0.48), bits=4
    ),
    "gossip_aga": lambda: rumor.gossip_aga(rumor.ring(N), warmup=9, H_init=2, H_max=8),
    "local_sgd 8 bits": lambda: rumor.local_sgd(N, 3, bits=8),
    "slowmo": lambda: rumor.slowmo(rumor.ring(N), 3, momentum=0.6, slow_lr=0.9),
    "slowmo 4 bits": lambda: rumor.slowmo(rumor.ring(N), 3, momentum=0.6, slow_lr=0.9, bits=4),
    "diloco": lambda: rumor.diloco(N, 3),
    "diloco gossip 8 bits": lambda: rumor.diloco(N, 3, topology=rumor.ring, bits=8),
}


def mode_of(name: str, optimizer: str, mode: str) -> tuple[str, str]:
    """An optimizer and a mode that go together: AdamW's squares take no delay, and codes only at global rounds, where they are left out."""
    algorithm = METHODS[name]()
    if optimizer == "adamw":
        optimizer = "nesterov" if algorithm.delay else optimizer
        mode = "global" if algorithm.bits < 32 else mode
    return optimizer, mode


def simulator(algorithm: Any, optimizer: str, mode: Any) -> tuple[rumor.Simulator, torch.optim.Optimizer]:
    sim = rumor.Simulator(network(), algorithm)
    opt = OPTIMIZERS[optimizer](list(sim.parameters()))
    sim.average_state(opt, mode)
    return sim, opt


def run(sim: rumor.Simulator, opt: torch.optim.Optimizer, first: int, last: int) -> Tensor:
    """The iterates [steps, n, d]."""
    x, y = batches(STEPS)
    iterates = []
    for k in range(first, last):
        lr = decayed(opt, k)
        losses = sim(loss_fn, x[k], y[k])
        losses.sum().backward()
        opt.step()
        opt.zero_grad()
        sim.step(losses, lr=lr)
        iterates.append(sim.X)
    return torch.stack(iterates)


# ---- the equations ----------------------------------------------------------------------------------------------------------------


def by_the_equations(mode: str, delay: int, bits: int) -> np.ndarray:
    """SGD with momentum on the ring, H = 3: the model and the momentum buffers, side by side, are what is mixed. Iterates [steps, n, d]."""
    W, J, identity = rumor.ring(N).W().numpy(), np.ones((N, N)) / N, np.eye(N)
    model, (x_all, y_all) = network(), batches(STEPS)
    shapes = [p.shape for p in model.parameters()]

    def gradient(k: int, i: int, x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            for p, part in zip(model.parameters(), torch.split(torch.from_numpy(x), [s.numel() for s in shapes]), strict=True):
                p.copy_(part.view(p.shape))
        model.zero_grad()
        loss_fn(model, x_all[k, i], y_all[k, i]).backward()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy()

    x = np.tile(flat(model).numpy(), (N, 1))
    parts = [x, np.zeros_like(x)]  # models, momentum
    refs, left_out = [part[0].copy() for part in parts], [np.zeros_like(x), np.zeros_like(x)]
    found = []
    for k in range(STEPS):
        before = [part.copy() for part in parts]
        g = np.array([gradient(k, i, parts[0][i]) for i in range(N)])
        parts[1] = 0.9 * parts[1] + g
        parts[0] = parts[0] - 0.05 * 0.5 ** (k // 10) * parts[1]
        is_global = (k + 1) % 3 == 0
        for p, half in enumerate(parts):
            sent = half if delay == 0 else before[p]
            if (p == 1 and mode == "global" and not is_global) or (delay == 1 and k == 0):
                continue
            if bits == 32:
                parts[p] = half + ((J if is_global else W) - identity) @ sent
            elif is_global:
                wanted = sent - refs[p] + left_out[p]
                codes = np.array([coded(row, bits) for row in wanted])
                result = coded(codes.mean(axis=0), bits)
                left_out[p] = wanted - codes
                # both vectors are shorter than a block of 256: of the two blocks, node 1 owns the first and node 3 the second
                left_out[p][(1, 3)[p]] += N * (codes.mean(axis=0) - result)
                refs[p] = refs[p] + result
                parts[p] = half + refs[p] - sent
            else:
                parts[p] = half + (W - identity) @ np.array([coded(row - refs[p], bits) for row in sent])
        found.append(parts[0])
    return np.array(found)


@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_it_follows_the_equations(mode: str, delay: int, bits: int) -> None:
    sim = rumor.Simulator(network(), rumor.gossip_pga(rumor.ring(N), 3, delay=delay, bits=bits))
    opt = torch.optim.SGD(list(sim.parameters()), lr=0.05, momentum=0.9)
    sim.average_state(opt, mode)
    difference = run(sim, opt, 0, STEPS) - torch.from_numpy(by_the_equations(mode, delay, bits))
    assert difference.abs().max() < 1e-12


def test_averaged_momentum_changes_nothing_in_parallel_sgd_and_something_elsewhere() -> None:
    for algorithm, is_same in ((rumor.parallel_sgd(N), True), (rumor.gossip_pga(rumor.ring(N), 3), False)):
        runs = [run(*simulator(algorithm, "nesterov", "always"), 0, STEPS)]
        sim = rumor.Simulator(network(), algorithm)
        runs.append(run(sim, OPTIMIZERS["nesterov"](list(sim.parameters())), 0, STEPS))
        means = [x.mean(dim=1) for x in runs]
        assert (float((means[0] - means[1]).abs().max()) < 1e-12) == is_same


@pytest.mark.parametrize("bits", [32, 4])
def test_momentum_stays_local_while_every_step_averages_the_models(bits: int) -> None:
    """Averaging it would not move the mean model. Once the period is longer, it is averaged."""
    method = rumor.gossip_pga(rumor.one_peer_exponential(N), rumor.LearningRate(1, 4, power=2), bits=bits)  # H = 4 from step 11 on
    sim, opt = simulator(method, "nesterov", "global")
    plain = rumor.Simulator(network(), method)
    means = run(sim, opt, 0, 11).mean(dim=1), run(plain, OPTIMIZERS["nesterov"](list(plain.parameters())), 0, 11).mean(dim=1)
    torch.testing.assert_close(*means, rtol=0, atol=1e-12)
    assert sim.metrics.bytes_sent == plain.metrics.bytes_sent
    momentum = opt.state[next(sim.parameters())]["momentum_buffer"]
    assert not torch.allclose(momentum[0], momentum[1])
    run(sim, opt, 11, 15)
    assert sim.metrics.H == 4
    assert torch.equal(momentum[0], momentum[1])


@pytest.mark.parametrize("options", [{"delay": 1}, {"average_rounds": 2}], ids=str)
def test_momentum_is_averaged_where_nodes_differ_after_an_average(options: dict[str, int]) -> None:
    method = rumor.gossip_pga(rumor.ring(N), 1, **options)
    sim, opt = simulator(method, "nesterov", "global")
    run(sim, opt, 0, 5)
    plain = rumor.Simulator(network(), method)
    run(plain, OPTIMIZERS["nesterov"](list(plain.parameters())), 0, 5)
    assert sim.metrics.bytes_sent == 2 * plain.metrics.bytes_sent


class SignOfMomentum(torch.optim.Optimizer):
    """Like Lion: its step is not linear in the momentum."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
            if p.grad is not None:
                momentum.lerp_(p.grad, 0.1)
            p.sub_(self.param_groups[0]["lr"] * momentum.sign())


def test_momentum_of_a_step_that_is_not_linear_is_averaged_at_every_global_average() -> None:
    sim = rumor.Simulator(network(), rumor.local_sgd(N, 1))
    opt = SignOfMomentum(list(sim.parameters()))
    sim.average_state(opt, "global")
    run(sim, opt, 0, 3)
    momentum = opt.state[next(sim.parameters())]["exp_avg"]
    assert momentum.any()
    torch.testing.assert_close(momentum, momentum[:1].expand_as(momentum))


@pytest.mark.parametrize("name", ["gossip_pga 4 bits", "gossip_pga 8 bits delayed", "gossip_pga"])
def test_mixing_keeps_the_mean_of_the_state(name: str) -> None:
    sim, opt = simulator(METHODS[name](), "nesterov", "always")
    run(sim, opt, 0, 4)
    momentum = [opt.state[p]["momentum_buffer"] for p in sim.parameters()]
    before = [m.mean(dim=0) for m in momentum]
    sim.step(torch.ones(N))  # a gossip step, without a step of the optimizer
    assert all((m.mean(dim=0) - was).abs().max() < 1e-12 for m, was in zip(momentum, before, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_no_step_of_adam_is_huge_where_a_node_has_seen_no_gradient(name: str) -> None:
    """Each node sees its own rows of an embedding. As codes, or mixed apart, the moments of the others would give steps of 1e5 lr."""
    algorithm, lr = METHODS[name](), 1e-3
    if algorithm.delay:
        return
    sim = rumor.Simulator(nn.Embedding(64, 16).double(), algorithm)
    opt = torch.optim.Adam(list(sim.parameters()), lr=lr)
    sim.average_state(opt, mode_of(name, "adamw", "always")[1])  # type: ignore[arg-type]
    (weight,) = sim.parameters()
    for _ in range(12):
        rows = torch.arange(N)[:, None] * 8 + torch.randint(8, (N, 5))  # half of all rows are never seen
        losses = sim(lambda model, rows: model(rows).square().mean(), rows)
        losses.sum().backward()
        before = weight.detach().clone()
        opt.step()
        assert (weight - before).abs().max() < 5 * lr
        opt.zero_grad()
        sim.step(losses, lr=lr)
        assert float(opt.state[weight]["exp_avg_sq"].min()) >= 0


@pytest.mark.parametrize("bits", [32, 4])
def test_adams_moments_are_averaged_in_full_at_global_rounds(bits: int) -> None:
    sim, opt = simulator(rumor.gossip_pga(rumor.ring(N), 3, bits=bits), "adamw", "global")
    run(sim, opt, 0, 2)
    moments = [opt.state[p][name] for p in sim.parameters() for name in ("exp_avg", "exp_avg_sq")]
    assert all((v - v[:1]).abs().max() > 0 for v in moments), "gossip leaves them alone"
    mean = [v.mean(dim=0, keepdim=True).clone() for v in moments]
    sim.step(torch.ones(N))  # global, without a step of the optimizer
    assert all(torch.allclose(v, was.expand_as(v), rtol=1e-12, atol=1e-15) for v, was in zip(moments, mean, strict=True))


# ---- two engines, resume ----------------------------------------------------------------------------------------------------------


def train_there(rank: int, name: str, optimizer: str, mode: Any) -> Tensor:
    model = network()
    opt = OPTIMIZERS[optimizer](model.parameters())
    averager = rumor.Averager(model, METHODS[name](), optimizer=opt, average_state=mode)
    return torch.stack([flat(model) for _ in trained(model, averager, opt, rank, *batches(STEPS))])


@pytest.mark.parametrize(("optimizer", "mode"), [("nesterov", "global"), ("adamw", "always")])
@pytest.mark.parametrize("name", METHODS)
def test_real_processes_and_stacked_engine_agree(four: Cluster, name: str, optimizer: str, mode: str) -> None:
    optimizer, mode = mode_of(name, optimizer, mode)
    expected = run(*simulator(METHODS[name](), optimizer, mode), 0, STEPS)
    for rank, there in enumerate(four.run(train_there, name, optimizer, mode)):
        assert (there - expected[:, rank]).abs().max() < 1e-9


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", METHODS)
def test_the_simulator_resumes_bitwise(name: str, mode: str, tmp_path: Path) -> None:
    optimizer, mode = mode_of(name, "adamw", mode)
    sim, opt = simulator(METHODS[name](), optimizer, mode)
    run(sim, opt, 0, 7)
    torch.save({"sim": sim.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "state.pt")
    expected = run(sim, opt, 7, STEPS)
    again, opt = simulator(METHODS[name](), optimizer, mode)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    opt.load_state_dict(state["optimizer"])
    again.load_state_dict(state["sim"])
    assert torch.equal(run(again, opt, 7, STEPS), expected)


def resumed(rank: int, folder: Path, name: str, mode: Any) -> bool:
    """Saves at step 7 and goes on; then loads into new objects and goes on from there."""
    ends, (x, y) = [], batches(STEPS)
    optimizer, mode = mode_of(name, "adamw", mode)
    for first in (0, 7):
        model = network()
        opt = OPTIMIZERS[optimizer](model.parameters())
        averager = rumor.Averager(model, METHODS[name](), optimizer=opt, average_state=mode)  # type: ignore[arg-type]
        if first:
            assert rumor.load(folder, averager, optimizer=opt) == 7
        for k in range(first, STEPS):
            if k == 7 and not first:
                rumor.save(folder, averager, 7, optimizer=opt)
            lr = decayed(opt, k)
            loss = loss_fn(model, x[k, rank], y[k, rank])
            loss.backward()
            opt.step()
            opt.zero_grad()
            averager.step(loss, lr=lr)
        ends.append(flat(model))
        averager.finish()
    return torch.equal(*ends)


@pytest.mark.parametrize("mode", MODES)
def test_real_processes_resume_bitwise(four: Cluster, mode: str, tmp_path: Path) -> None:
    for name in METHODS:
        assert all(four.run(resumed, tmp_path / name, name, mode)), name


# ---- nodes of several ranks, half precision, what goes wrong ---------------------------------------------------------------------


def train_in_nodes(rank: int, how: str, mode: Any, bits: int) -> Tensor:
    model = wrapped(network(), how, 2)
    opt = OPTIMIZERS["nesterov"](model.parameters())
    across, inside, _ = groups(2)
    algorithm = rumor.gossip_pga(links(2), 3, bits=bits)
    averager = rumor.Averager(model, algorithm, group=across, local_group=inside, optimizer=opt, average_state=mode)
    return torch.stack([whole(model) for _ in trained(model, averager, opt, rank, *batches(NODE_STEPS, 4))])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_nodes_of_two_are_plain_nodes(four: Cluster, how: str, mode: Any) -> None:
    sim = rumor.Simulator(network(), rumor.gossip_pga(links(2), 3))
    opt = OPTIMIZERS["nesterov"](list(sim.parameters()))
    sim.average_state(opt, mode)
    expected, (x, y) = [], batches(NODE_STEPS, 4)
    for k in range(NODE_STEPS):
        decayed(opt, k)
        losses = sim(loss_fn, x[k].reshape(2, -1, 5), y[k].reshape(2, -1))
        losses.sum().backward()
        opt.step()
        opt.zero_grad()
        sim.step(losses)
        expected.append(sim.X)
    moved = (expected[-1] - expected[0]).abs().max()
    for bits, tolerance in ((32, 1e-9), (8, 0.1 * float(moved))):
        for rank, found in enumerate(four.run(train_in_nodes, how, mode, bits)):
            assert (found - torch.stack(expected)[:, rank // 2]).abs().max() < tolerance


def skips_its_first_step(rank: int) -> Tensor:
    """As GradScaler does if the gradients of one node overflow: its optimizer has no state of its own making by then."""
    model = network()
    opt = OPTIMIZERS["adamw"](model.parameters())
    averager = rumor.Averager(model, rumor.gossip_pga(rumor.ring(N), 3, bits=4), optimizer=opt, average_state="global")
    x, y = batches(STEPS)
    for k in range(6):
        loss = loss_fn(model, x[k, rank], y[k, rank])
        loss.backward()
        if k or rank != 1:
            opt.step()
        opt.zero_grad()
        averager.step(loss)
    return torch.cat([flat(model), *(opt.state[p]["exp_avg"].reshape(-1) for p in model.parameters())])


def test_a_node_that_skips_its_first_step_does_not_deadlock(four: Cluster) -> None:
    found = four.run(skips_its_first_step)
    assert all(torch.equal(found[0], other) for other in found[1:]), "step 5 was global: all have the same model and moments"


def rescued(rank: int) -> Tensor:
    model = network()
    opt = OPTIMIZERS["adamw"](model.parameters())
    averager = rumor.Averager(model, rumor.gossip_pga(rumor.ring(N), 3), optimizer=opt, average_state="global", rescue=opt)
    x, y = batches(STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the rescue
        for k in range(12):
            loss = loss_fn(model, x[k, rank], y[k, rank])
            loss.backward()
            opt.step()
            opt.zero_grad()
            if (k, rank) == (4, 2):
                next(iter(model.parameters())).data.fill_(torch.nan)
            averager.step(loss)
    assert all(len(opt.state[p]) == 3 for p in model.parameters())
    return flat(model)


def test_a_rescued_node_takes_part_again(four: Cluster) -> None:
    found = four.run(rescued)
    assert all(torch.isfinite(x).all() and torch.equal(x, found[0]) for x in found)


def test_state_that_is_created_ahead_changes_no_step() -> None:
    for build in (*OPTIMIZERS.values(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)):
        ends = []
        for ahead in (False, True):
            model = network()
            opt = build(model.parameters())
            next(iter(model.parameters())).grad = torch.ones_like(next(iter(model.parameters())))
            if ahead:
                before = flat(model)
                OptimizerState(opt, list(model.parameters()), rumor.parallel_sgd(N), "global")
                assert torch.equal(flat(model), before)
                assert [p.grad is not None for p in model.parameters()] == [True, False, False, False]
                assert all(not float(t.abs().sum()) for state in opt.state.values() for t in state.values())
            for x, y in zip(*(b[:5, 0] for b in batches(5)), strict=True):
                opt.zero_grad()
                loss_fn(model, x, y).backward()
                opt.step()
            ends.append(flat(model))
        assert torch.equal(*ends)


def test_mistakes_get_one_clear_line() -> None:
    def attempt(algorithm: Any, mode: Any = "global", build: Any = OPTIMIZERS["nesterov"]) -> None:
        sim = rumor.Simulator(network(), algorithm)
        sim.average_state(build(list(sim.parameters())), mode)

    pga = rumor.gossip_pga(rumor.ring(N), 3)
    with pytest.raises(ValueError, match="PushSum does not average the optimizer's state: leave out average_state"):
        attempt(rumor.osgp(rumor.ring(N)))
    with pytest.raises(ValueError, match='has no effect here, because there are no global averages: use "always"'):
        attempt(rumor.gossip_sgd(rumor.ring(N)))
    with pytest.raises(ValueError, match=r'average_state must be "global" .* got True'):
        attempt(pga, True)
    with pytest.raises(ValueError, match="SGD keeps no state that nodes could average"):
        attempt(pga, build=lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(ValueError, match="average_state does not know prev, step_size of Rprop"):
        attempt(pga, build=torch.optim.Rprop)
    with pytest.raises(ValueError, match="average_state does not know mu_product of NAdam"):
        attempt(pga, build=torch.optim.NAdam)
    with pytest.raises(ValueError, match="Adam keeps means of squares, which messages of a step ago could make negative: use delay=0"):
        attempt(rumor.gossip_pga(rumor.ring(N), 3, delay=1), build=torch.optim.Adam)
    with pytest.raises(ValueError, match="RMSprop divides by means of squares, and the error of a code of 4 bits can be larger"):
        attempt(rumor.gossip_pga(rumor.ring(N), 3, bits=4), "always", torch.optim.RMSprop)
    with pytest.raises(ValueError, match="optimizer= has none of the model's parameters"):
        attempt(pga, build=lambda _: torch.optim.Adam([nn.Parameter(torch.zeros(3))]))
    with pytest.raises(TypeError, match=r"optimizer takes the model's torch\.optim\.Optimizer, got list"):
        attempt(pga, build=list)
    sim, opt = simulator(pga, "nesterov", "always")
    run(sim, opt, 0, 1)
    with pytest.raises(RuntimeError, match="comes before the first step, and 1 steps were taken"):
        sim.average_state(opt, "global")
    with pytest.raises(ValueError, match="average_state='always', but here it is 'global'"):
        simulator(pga, "nesterov", "global")[0].load_state_dict(sim.state_dict())


def mistakes(rank: int) -> list[str]:
    model = network()
    opt = OPTIMIZERS["nesterov"](model.parameters())
    said = []
    for options in (
        {"average_state": "global"},
        {"average_state": "always", "optimizer": opt, "lazy": True},
        {"average_state": MODES[rank % 2], "optimizer": opt},
    ):
        with pytest.raises(ValueError, match="average_state") as error:
            rumor.Averager(model, rumor.gossip_pga(rumor.ring(N), 3), **options)  # type: ignore[arg-type]
        said.append(str(error.value))
    return said


def test_mistakes_in_real_processes(four: Cluster) -> None:
    needs, lazy, disagree = four.run(mistakes)[0]
    assert "needs the optimizer whose state it is" in needs
    assert "lazy=True does not go with average_state='always'" in lazy
    assert "ranks disagree on the average_state: rank 0 has global (momentum_buffer: 57 numbers" in disagree


def test_a_refused_optimizer_is_left_as_it_was() -> None:
    model = network()
    opt = torch.optim.NAdam(model.parameters())
    with pytest.raises(ValueError, match="mu_product"):
        OptimizerState(opt, list(model.parameters()), rumor.parallel_sgd(N), "global")
    assert not opt.state


def test_the_state_of_a_scalar_parameter_survives_a_resume() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    state = OptimizerState(opt, [model.scale], rumor.parallel_sgd(N), "global")
    for _ in range(3):
        opt.zero_grad()
        model.scale.square().backward()
        opt.step()
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert state.has_changed()
    assert float(opt.state[model.scale]["step"]) == 3
    assert float(opt.state[model.scale]["exp_avg"]) > 0


def test_a_simulator_restarts_with_a_new_optimizer_state() -> None:
    sim, opt = simulator(rumor.gossip_pga(rumor.ring(N), 3, bits=4), "nesterov", "always")
    expected = run(sim, opt, 0, 5)
    opt.state.clear()
    sim.restart(rumor.gossip_pga(rumor.ring, 3, bits=4))
    assert torch.equal(run(sim, opt, 0, 5), expected)
    with pytest.raises(ValueError, match="PushSum does not average the optimizer's state"):
        sim.restart(rumor.osgp(rumor.ring))
    sim.restart(rumor.local_sgd(H=2))
    sim.average_state(opt, None)
    run(sim, opt, 0, 2)
    momentum = opt.state[next(iter(sim.parameters()))]["momentum_buffer"]
    assert (momentum - momentum[:1]).abs().max() > 0, "it stays local again"


def overflows(rank: int) -> Tensor:
    """One gradient of 1e30: the second moment of that node overflows, while its model stays finite."""
    model = network(torch.float32)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    averager = rumor.Averager(model, rumor.gossip_pga(rumor.ring(N), 3), optimizer=opt, average_state="global", rescue=opt)
    x, y = batches(STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the rescue
        for k in range(9):
            loss = loss_fn(model, x[k, rank].float(), y[k, rank])
            loss.backward()
            if (k, rank) == (4, 1):
                next(iter(model.parameters())).grad.fill_(1e30)  # type: ignore[union-attr]
            opt.step()
            opt.zero_grad()
            averager.step(loss)
    averager.finish()
    assert all(torch.isfinite(opt.state[p]["exp_avg_sq"]).all() for p in model.parameters())
    return flat(model)


def test_an_overflow_in_the_state_alone_is_rescued_and_does_not_spread(four: Cluster) -> None:
    found = four.run(overflows)
    assert all(torch.isfinite(x).all() and torch.equal(x, found[0]) for x in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_diloco_sends_codes_of_half_precision_models(dtype: torch.dtype) -> None:
    sim = rumor.Simulator(network(dtype), rumor.diloco(N, 2, bits=4))
    opt = torch.optim.SGD(list(sim.parameters()), lr=0.05)
    x, y = batches(4)
    for k in range(4):
        losses = sim(loss_fn, x[k].to(dtype), y[k])
        losses.sum().backward()
        opt.step()
        opt.zero_grad()
        sim.step(losses)
    assert torch.isfinite(sim.X).all()
