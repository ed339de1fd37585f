"""Stop, save, start new processes, load: the rest of the run is bitwise the one that was not interrupted."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rumor
from tests.cluster import Cluster
from tests.problems import ALGORITHMS, FIVE_NODES, OPTIMIZERS, N, batches, decayed, flat, loss_fn

STEPS = 22
STOPS = [1, 7, 13]  # in the middle of a period, and of the adaptive runs' warm-up; with delay 1 a message is always in flight
AFTER = 9  # steps from a stop to the end of the comparison; the longest period is 8


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def train(model: nn.Module, averager: rumor.Averager, opt: torch.optim.Optimizer, rank: int, first: int, last: int) -> Tensor:
    x, y = batches(STEPS)
    for k in range(first, last):
        lr = decayed(opt, k)
        loss = loss_fn(model, x[k, rank].float(), y[k, rank])
        loss.backward()
        opt.step()
        opt.zero_grad()
        averager.step(loss, lr=lr)
    return torch.cat([flat(model), *(b.reshape(-1).float() for b in model.buffers())])


def uninterrupted(rank: int, folder: Path) -> dict[tuple[str, int], Tensor]:
    """Runs every algorithm to the end, leaving a checkpoint at each stop. The models AFTER steps from each stop, by algorithm and stop."""
    ends = {}
    for name, build in ALGORITHMS.items():
        model = network()
        averager = rumor.Averager(model, build())
        opt = OPTIMIZERS["nesterov"](model.parameters())
        first = 0
        for last in sorted({*STOPS, *(stop + AFTER for stop in STOPS)}):
            ends[name, last - AFTER] = train(model, averager, opt, rank, first, last)
            if last in STOPS:
                state = {"model": model.state_dict(), "optimizer": opt.state_dict(), "averager": averager.state_dict()}
                path = folder / f"{name}-{last}-{rank}.pt"
                torch.save(state, path.with_suffix(".tmp"))
                os.replace(path.with_suffix(".tmp"), path)
            first = last
        averager.finish()
    return ends


def resumed(rank: int, folder: Path, stop: int) -> dict[str, Tensor]:
    """Goes on from a checkpoint, in processes that have seen nothing of the run before."""
    ends = {}
    for name, build in ALGORITHMS.items():
        model = network()
        averager = rumor.Averager(model, build())
        opt = OPTIMIZERS["nesterov"](model.parameters())
        state = torch.load(folder / f"{name}-{stop}-{rank}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
        averager.load_state_dict(state["averager"])
        assert sum(averager.metrics.rounds.values()) == stop
        ends[name] = train(model, averager, opt, rank, stop, stop + AFTER)
        averager.finish()
    return ends


def test_resume_matches_uninterrupted_bitwise(four: Cluster, tmp_path: Path) -> None:
    expected = four.run(uninterrupted, tmp_path)
    fresh = Cluster(4)
    try:
        for stop in STOPS:
            for rank, ends in enumerate(fresh.run(resumed, tmp_path, stop)):
                for name in ALGORITHMS:
                    assert torch.equal(ends[name], expected[rank][name, stop]), f"{name}, stopped at step {stop}, rank {rank}"
    finally:
        fresh.stop()


def test_the_stops_fall_where_they_should() -> None:
    aga = ALGORITHMS["gossip_aga"]()
    assert aga.schedule.warmup == 9, "stops 1 and 7 are within the warm-up, 13 is after it"
    assert all(stop % 3 for stop in STOPS), "periods of 3 are cut"
    assert max(STOPS) + AFTER == STEPS


@pytest.mark.parametrize("name", ALGORITHMS | FIVE_NODES)
def test_the_simulator_resumes_bitwise(name: str, tmp_path: Path) -> None:
    def start() -> tuple[rumor.Simulator, torch.optim.Optimizer]:
        sim = rumor.Simulator(network(), (ALGORITHMS | FIVE_NODES)[name]())
        return sim, OPTIMIZERS["adamw"](list(sim.parameters()))

    def run(sim: rumor.Simulator, opt: torch.optim.Optimizer, first: int, last: int) -> None:
        x, y = batches(STEPS, sim.n)
        for k in range(first, last):
            losses = sim(loss_fn, x[k].float(), y[k])
            losses.sum().backward()
            opt.step()
            opt.zero_grad()
            sim.step(losses, lr=0.01)

    sim, opt = start()
    run(sim, opt, 0, 7)
    torch.save({"sim": sim.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "state.pt")
    run(sim, opt, 7, STEPS)

    again, opt = start()
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again.load_state_dict(state["sim"])
    opt.load_state_dict(state["optimizer"])
    run(again, opt, 7, STEPS)
    assert torch.equal(sim.X, again.X)
    counts = [{name: value for name, value in s.metrics.as_dict().items() if "seconds" not in name} for s in (sim, again)]
    assert counts[0] == counts[1]


def test_a_foreign_state_is_refused() -> None:
    sims = [rumor.Simulator(network(), ALGORITHMS[name]()) for name in ("gossip_pga", "slowmo")]
    with pytest.raises(ValueError, match=r"this state is of SlowMo\(.*, but the algorithm here is GossipPGA\("):
        sims[0].load_state_dict(sims[1].state_dict())
    for foreign in ({}, {"weight": torch.zeros(2)}, None):
        with pytest.raises(ValueError, match="not a state of the Simulator"):
            sims[0].load_state_dict(foreign)  # type: ignore[arg-type]
    larger = rumor.Simulator(nn.Linear(50, 5), ALGORITHMS["slowmo"]())
    with pytest.raises(ValueError, match="this state is of another model: its parameters are"):
        larger.load_state_dict(sims[1].state_dict())
    assert N == 4


def of_two_dtypes(rank: int) -> list[Tensor]:
    """The model after three steps with relayed messages, whole and resumed after the first."""
    ends = []
    for is_resumed in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(64, 1), nn.Linear(64, 1).bfloat16()])
        method = rumor.gossip_pga(rumor.ring, H=2, delay=1, average_rounds=2)
        averager = rumor.Averager(model, method)
        for k in range(3):
            for p in model.parameters():
                p.data.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(rank)))
            averager.step()
            if is_resumed and k == 0:
                saved, before = averager.state_dict(), [p.data.clone() for p in model.parameters()]
                averager = rumor.Averager(model, method)
                for p, value in zip(model.parameters(), before, strict=True):
                    p.data.copy_(value)
                averager.load_state_dict(saved)
        ends.append(torch.cat([p.detach().double().flatten() for p in model.parameters()]))
        averager.finish()
    return ends


def test_a_model_of_two_dtypes_resumes_exactly_while_messages_are_relayed(four: Cluster) -> None:
    for whole, resumed in four.run(of_two_dtypes):
        assert torch.equal(whole, resumed)
