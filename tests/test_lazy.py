"""lazy=True: messages arrive under the next forward, and nothing but the time changes."""

import copy
import gc
import io

import pytest
import torch
from torch import Tensor, nn

import rumor
from tests.cluster import Cluster
from tests.problems import ALGORITHMS, OPTIMIZERS, batches, decayed, flat

STEPS = 10
AT_ONCE = [name for name, build in ALGORITHMS.items() if build().delay == 0]


class Attention(nn.Module):
    """Uses parameters in every way that is allowed: its own, a child's, and those of a child that only nn.MultiheadAttention reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Sequential(nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, :, None] * self.scale + torch.zeros(6)
        return self.out(self.attend(tokens, tokens, tokens)[0].mean(dim=1))


MODELS = {
    "batchnorm": lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 8), nn.Linear(8, 3)),
    "attention": Attention,
}


def train(rank: int, model_name: str, name: str, lazy: bool, stop: int | None = None) -> Tensor:
    torch.manual_seed(1)
    model = MODELS[model_name]()
    averager = rumor.Averager(model, ALGORITHMS[name](), lazy=lazy)
    opt = OPTIMIZERS["nesterov"](model.parameters())
    x, y = batches(STEPS)
    for k in range(STEPS):
        if k == stop:  # goes on from what it has saved, in another Averager
            state, own = averager.state_dict(), copy.deepcopy(model.state_dict())
            averager = rumor.Averager(model, ALGORITHMS[name](), lazy=lazy)
            model.load_state_dict(own)
            averager.load_state_dict(state)
        lr = decayed(opt, k)
        loss = nn.functional.cross_entropy(model(x[k, rank].float()), y[k, rank])
        loss.backward()
        opt.step()
        opt.zero_grad()
        averager.step(loss, lr=lr)
    averager.settle()
    return torch.cat([flat(model), *(b.reshape(-1).float() for b in model.buffers())])


@pytest.mark.parametrize("name", AT_ONCE)
@pytest.mark.parametrize("model_name", MODELS)
def test_lazy_is_bitwise_the_same(four: Cluster, model_name: str, name: str) -> None:
    for there, lazily in zip(four.run(train, model_name, name, False), four.run(train, model_name, name, True), strict=True):
        assert torch.equal(there, lazily)


def saves_and_loads(rank: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    model = MODELS["batchnorm"]()
    averager = rumor.Averager(model, ALGORITHMS["gossip_pga"](), lazy=True)
    for p in model.parameters():
        p.data.add_(rank)
    averager.step()
    with averager.averaged():
        mean = flat(model)
    distance = averager.consensus_distance()
    averager.step()
    assert averager.state_dict()["schedule"]["k"] == 2
    averager.finish()
    assert distance > 0.1
    return mean, flat(model)


def test_all_that_looks_at_the_model_waits_for_it(four: Cluster) -> None:
    for mean, end in four.run(saves_and_loads):
        assert (mean - end).abs().max() < 1e-5


def reads_early(rank: int) -> list[float]:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    averager = rumor.Averager(model, ALGORITHMS["gossip_sgd"](), lazy=True)
    model.weight.data.fill_(rank)
    averager.step()
    seen = [model.weight.flatten()[0].item()]
    averager.settle()
    return [*seen, model.weight.flatten()[0].item()]


def test_without_settle_the_model_is_as_it_was(four: Cluster) -> None:
    assert [seen[0] for seen in four.run(reads_early)] == [0, 1, 2, 3]
    assert [seen[1] for seen in four.run(reads_early)] == pytest.approx([4 / 3, 1, 2, 5 / 3])


class LeavesOneOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.borrowed = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + x @ self.borrowed.weight.T


def leaves_one_out(rank: int) -> None:
    model = LeavesOneOut()
    averager = rumor.Averager(model, ALGORITHMS["gossip_sgd"](), lazy=True)
    averager.step()
    try:
        model(torch.ones(2, 5))
    finally:
        averager.settle()


def test_a_module_that_is_left_out_is_an_error(four: Cluster) -> None:
    for kind, text in four.errors(leaves_one_out):
        assert kind is RuntimeError
        assert "without a forward of borrowed" in text


def saved_early(rank: int) -> list[float]:
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    averager = rumor.Averager(model, rumor.gossip_sgd(rumor.complete(4)), lazy=True)
    model[0].weight.data.fill_(rank)
    averager.step()
    part = model[0].state_dict()["weight"].flatten()[0].item()
    model[0].weight.data.fill_(rank)
    averager.step()
    return [part, model.state_dict()["0.weight"].flatten()[0].item()]


def test_a_saved_model_is_a_mixed_one(four: Cluster) -> None:
    assert four.run(saved_early) == [[1.5, 1.5]] * 4


def copies(rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    averager = rumor.Averager(model, ALGORITHMS["gossip_sgd"](), lazy=True)
    averager.step()
    averager.settle()
    file, x = io.BytesIO(), torch.ones(1, 2)
    torch.save(model, file)
    file.seek(0)
    return [one(x).detach() for one in (model, copy.deepcopy(model), torch.load(file, weights_only=False))]


def test_copies_of_the_model_run_by_themselves(four: Cluster) -> None:
    for own, copied, loaded in four.run(copies):
        assert torch.equal(own, copied)
        assert torch.equal(own, loaded)


class TrainOnlyHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) if self.training else self.body(x)


def evaluated(rank: int) -> bool:
    model = TrainOnlyHead()
    averager = rumor.Averager(model, ALGORITHMS["gossip_sgd"](), lazy=True)
    averager.step()
    with averager.averaged():
        return bool(model.eval()(torch.ones(2, 5)).isfinite().all())


def test_a_module_may_be_left_out_where_nothing_is_under_way(four: Cluster) -> None:
    assert four.run(evaluated) == [True] * 4


def early_hook(rank: int) -> list[float]:
    """A hook that was there before, and reads parameters, as weight_norm's does."""
    model, seen = nn.Sequential(nn.Linear(2, 1, bias=False)), []
    model[0].register_forward_pre_hook(lambda module, inputs: seen.append(module.weight.flatten()[0].item()))
    averager = rumor.Averager(model, rumor.gossip_sgd(rumor.complete(4)), lazy=True)
    model[0].weight.data.fill_(rank)
    averager.step()
    model(torch.ones(1, 2))
    return seen


def test_hooks_of_others_see_mixed_parameters(four: Cluster) -> None:
    assert four.run(early_hook) == [[1.5]] * 4


def refused(rank: int) -> None:
    rumor.Averager(nn.Linear(2, 2), ALGORITHMS["gossip_sgd delayed"](), lazy=True)


def test_lazy_and_delay_are_refused_together(four: Cluster) -> None:
    assert all(kind is ValueError and "nothing to gain with delay=1" in text for kind, text in four.errors(refused))


def hooks_left(rank: int) -> int:
    model = nn.Linear(2, 2)
    averager = rumor.Averager(model, ALGORITHMS["gossip_sgd"](), lazy=True)
    averager.step()
    averager.finish()
    del averager
    gc.collect()
    return len(model._forward_pre_hooks) + len(model._forward_hooks)


def test_a_dropped_averager_takes_its_hooks_along(four: Cluster) -> None:
    assert four.run(hooks_left) == [0] * 4


def resumed(rank: int, name: str) -> tuple[Tensor, Tensor]:
    """With receives posted for the next step, and another Averager that goes on."""
    return train(rank, "batchnorm", name, True), train(rank, "batchnorm", name, True, stop=4)


@pytest.mark.parametrize("name", ["gossip_sgd one-peer", "gossip_pga", "gossip_pga by learning rate", "slowmo", "diloco"])
def test_another_averager_goes_on(four: Cluster, name: str) -> None:
    assert all(torch.equal(whole, cut) for whole, cut in four.run(resumed, name))
