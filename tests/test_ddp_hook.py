"""DDP with gradients in a few bits."""

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rumor
from rumor.model.ddp_layout import in_order_of
from tests import warm
from tests.cluster import Cluster
from tests.problems import N, batches, flat, loss_fn, network
from tests.test_codes import bytes_held_by

STEPS = 60


def model_in_ddp(
    bits: int, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[DistributedDataParallel, rumor.ddp.DDPHookState | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 90), nn.Tanh(), nn.Linear(90, 3))
    ddp = DistributedDataParallel(model.to(dtype), **{"bucket_cap_mb": 0.02, **options})  # several buckets
    state = None
    if bits < 32:
        state = rumor.ddp_hook_state(bits=bits, model=ddp)
        ddp.register_comm_hook(state, rumor.ddp_hook)
    return ddp, state


def trained(rank: int, bits: int, steps: int = STEPS, accumulate: int = 1, follows_moments: bool = False) -> tuple[Tensor, float, float]:
    """Returns the model, the mean loss over the last ten steps, and the bytes sent per step."""
    ddp, state = model_in_ddp(bits)
    opt = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    if state is not None and follows_moments:
        state._optimizer, state._knows_model = opt, False
    losses = []
    for k, (x, y) in enumerate(zip(*batches(steps), strict=True)):
        loss = loss_fn(ddp, x[rank].float(), y[rank])
        if (k + 1) % accumulate:
            with ddp.no_sync():
                loss_fn(ddp, x[rank].float(), y[rank]).backward()
            continue
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses[-10:]).mean()
    dist.all_reduce(mean)
    return flat(ddp), mean.item() / N, 0.0 if state is None else state.metrics.bytes_sent / len(losses)


def timeout_of_the_hook(rank: int) -> float:
    state = rumor.ddp_hook_state(bits=4)
    seconds: float = state._transport.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def test_the_hook_waits_no_longer_than_the_group(four: Cluster) -> None:
    assert four.run(timeout_of_the_hook) == [60.0] * N


@pytest.mark.parametrize(("bits", "follows_moments"), [(16, False), (8, False), (4, False), (4, True)])
def test_ddp_trains_as_well_with_few_bits(four: Cluster, bits: int, follows_moments: bool) -> None:
    """With AdamW and clipping, which see the averaged gradient as in plain DDP."""
    plain, coded = (four.run(trained, b, STEPS, 1, follows_moments) for b in (32, bits))
    parameters = plain[0][0].numel()
    for model, loss, sent in coded:
        assert torch.equal(model, coded[0][0]), "all ranks take the same step"
        assert not torch.equal(model, plain[0][0])
        assert abs(loss - plain[0][1]) < 0.01
        assert sent < 1.2 * bits / 8 * 2 * (N - 1) / N * parameters


def test_gradients_may_be_accumulated(four: Cluster) -> None:
    found = four.run(trained, 4, 30, 3)
    assert all(torch.equal(model, found[0][0]) for model, _, _ in found)


def errors_of_the_mean(rank: int, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """With the same gradients over and over, the sum of the averages after 1 and after 50 steps, relative to the exact one."""
    ddp, _ = model_in_ddp(bits, dtype)
    x, y = (part[0, rank] for part in batches(1))
    total = exact = torch.zeros(1)
    found = []
    for k in range(50):
        ddp.zero_grad()
        loss_fn(ddp, x.to(dtype), y).backward()
        got = torch.cat([p.grad.flatten() for p in ddp.parameters()])
        if k == 0:
            own = torch.autograd.grad(loss_fn(ddp.module, x.to(dtype), y), list(ddp.module.parameters()))
            exact = torch.cat([g.flatten() for g in own])
            dist.all_reduce(exact)
            exact /= N
        total = total + got
        found.append((total / (k + 1) - exact).norm() / exact.norm())
    return found[0], found[-1]


@pytest.mark.parametrize(("bits", "dtype"), [(16, torch.float32), (8, torch.float32), (4, torch.float32), (4, torch.float64)])
def test_nothing_of_a_gradient_is_lost(four: Cluster, bits: int, dtype: torch.dtype) -> None:
    for first, last in four.run(errors_of_the_mean, bits, dtype):
        assert last < first / 20, "what is left out of one average is part of the next"


def error_of_small_numbers(rank: int, follows_moments: bool) -> tuple[Tensor, Tensor]:
    """Every other number of a gradient is ten times smaller. Returns the last gradient, and the relative error of these numbers."""
    torch.manual_seed(rank)
    sizes = torch.tensor([1.0, 0.1]).repeat(640)
    ddp = DistributedDataParallel(nn.Linear(len(sizes), 1, bias=False))
    weight = ddp.module.weight
    opt = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    ddp.register_comm_hook(rumor.ddp_hook_state(bits=4, optimizer=opt if follows_moments else None), rumor.ddp_hook)
    errors = []
    for _ in range(20):
        own = sizes * torch.randn(len(sizes))
        exact = own.clone()
        dist.all_reduce(exact)
        opt.zero_grad()
        ddp(own).sum().backward()  # its gradient is `own`
        errors.append(((weight.grad.flatten() * N - exact)[1::2].norm() / exact[1::2].norm()).item())
        opt.step()
    return weight.grad, torch.tensor(errors[-10:]).mean()


def test_with_an_optimizer_the_error_follows_its_second_moments(four: Cluster) -> None:
    plain, scaled = (four.run(error_of_small_numbers, follows) for follows in (False, True))
    for gradient, error in scaled:
        assert torch.equal(gradient, scaled[0][0]), "all ranks take the same step"
        assert error < 0.5
    assert min(error for _, error in plain) > 1.5


class Odd(nn.Module):
    """Parameters of every kind: of one number, not trained, and of two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 300), nn.Linear(300, 3)
        self.temperature, self.unused = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.temperature * self.head(self.body(x).tanh())


def odd_model(rank: int) -> tuple[Tensor, list[bool], list[int]]:
    """Trains with an overflow on one rank, and with a state that is saved and loaded. Returns the model, which buckets have scales at the
    end, and the steps that were skipped.
    """
    torch.manual_seed(0)
    model = Odd()
    ddp = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.002)
    adam = torch.optim.Adam([*model.body.parameters(), model.temperature], lr=1e-3)
    sgd = torch.optim.SGD(model.head.parameters(), lr=0.1)
    state = rumor.ddp_hook_state(bits=4, model=ddp, optimizer=adam)
    ddp.register_comm_hook(state, rumor.ddp_hook)
    skipped = []
    for k, (x, y) in enumerate(zip(*batches(20), strict=True)):
        ddp.zero_grad()
        (loss_fn(ddp, x[rank].float(), y[rank]) * (torch.inf if rank == 2 and k == 5 else 1.0)).backward()
        if any(p.grad.isnan().any() for p in ddp.parameters() if p.grad is not None):
            skipped.append(k)
            continue
        adam.step()
        sgd.step()
        if k == 10:
            saved = state.state_dict()
            state.load_state_dict(saved)
            assert all(torch.equal(state.state_dict()["left_out"][name], left) for name, left in saved["left_out"].items())
    return flat(ddp), [memory.scales is not None for memory in state._memories.values()], skipped


def test_models_of_every_kind_train_with_scales(four: Cluster) -> None:
    found = four.run(odd_model)
    for model, have_scales, skipped in found:
        assert torch.equal(model, found[0][0])
        assert model.isfinite().all()
        assert any(have_scales)
        assert skipped == [5]


class Strange(nn.Module):
    """A complex parameter, and one of another dtype without any numbers, which has a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.ones(300, dtype=torch.complex64))
        self.bias, self.empty = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.wave * x).abs().mean() + self.bias + self.empty.sum()


def strange_gradients(rank: int) -> list[tuple[Tensor, Tensor]]:
    """The gradients of each step, and the mean of the ranks' own."""
    model = Strange()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    opt = torch.optim.Adam(ddp.parameters())
    ddp.register_comm_hook(rumor.ddp_hook_state(bits=8, model=ddp, optimizer=opt), rumor.ddp_hook)
    torch.manual_seed(rank)
    found = []
    for _ in range(3):
        opt.zero_grad()
        x = torch.randn(300, dtype=torch.complex64)
        (own,) = torch.autograd.grad(model(x), [model.wave])
        ddp(x).backward()
        dist.all_reduce(torch.view_as_real(own))
        found.append((model.wave.grad.clone(), own / N))
        opt.step()
    return found


def test_complex_and_empty_parameters_are_averaged(four: Cluster) -> None:
    for found in four.run(strange_gradients):
        for gradient, exact in found:
            assert (gradient - exact).norm() < 0.02 * exact.norm()


def sparse_gradient(rank: int) -> str:
    ddp = DistributedDataParallel(nn.Embedding(30, 4, sparse=True))
    ddp.register_comm_hook(rumor.ddp_hook_state(), rumor.ddp_hook)
    with pytest.raises((ValueError, RuntimeError), match="can't average sparse gradients") as error:
        ddp(torch.tensor([1, 2])).sum().backward()
    return str(error.value)


def test_sparse_gradients_are_refused(four: Cluster) -> None:
    assert all("sparse=False" in found for found in four.run(sparse_gradient))


def state_in_another_layout(rank: int) -> tuple[Tensor, Tensor]:
    """What was left out of a weight, saved with one order in memory and loaded with another."""
    found = []
    for layout in (torch.channels_last, torch.contiguous_format):
        torch.manual_seed(rank)
        ddp = DistributedDataParallel(nn.Conv2d(3, 50, 3, bias=False).to(memory_format=layout))
        state = rumor.ddp_hook_state(model=ddp)
        ddp.register_comm_hook(state, rumor.ddp_hook)
        for _ in range(2):
            if found:
                state.load_state_dict({"bits": 4, "left_out": {"weight": found[0].contiguous()}})
                for other in ({"bits": 8}, {"bits": 4, "rank": rank + 1}):
                    with pytest.raises(ValueError, match=r"is of (bits=8, but here it is bits=4|rank=\d, but here it is rank=\d)"):
                        state.load_state_dict({**other, "left_out": {}})
            else:
                ddp(torch.randn(2, 3, 8, 8)).sum().backward()
        found.append(state.state_dict()["left_out"]["weight"])
    return found[0], found[1]


def test_a_state_is_loaded_into_a_model_with_another_layout(four: Cluster) -> None:
    for saved, loaded in four.run(state_in_another_layout):
        assert saved.shape == (50, 3, 3, 3)
        assert saved.any()
        assert torch.equal(saved, loaded)


def largest_gradient(rank: int) -> Tensor:
    """The mean gradient, of numbers whose squares are too large for float32."""
    ddp = DistributedDataParallel(nn.Linear(300, 1, bias=False))
    ddp.register_comm_hook(rumor.ddp_hook_state(bits=8), rumor.ddp_hook)
    ddp(torch.full((1, 300), 1e30 * (rank + 1))).sum().backward()
    return flat_gradient(ddp)


def flat_gradient(ddp: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])


def test_large_gradients_stay_finite(four: Cluster) -> None:
    for gradient in four.run(largest_gradient):
        assert gradient / 1e30 == pytest.approx(torch.full((300,), 2.5), rel=1e-2)


def in_two_groups(rank: int) -> Tensor:
    """The mean gradient of a pair of ranks, whose inputs are 1 and 2, or 3 and 4."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = DistributedDataParallel(nn.Linear(300, 1, bias=False), process_group=pairs[rank // 2])
    ddp.register_comm_hook(rumor.ddp_hook_state(bits=16, model=ddp), rumor.ddp_hook)
    ddp(torch.full((1, 300), rank + 1.0)).sum().backward()
    return flat_gradient(ddp)


def test_the_hook_averages_over_the_group_of_its_model(four: Cluster) -> None:
    for rank, gradient in enumerate(four.run(in_two_groups)):
        assert torch.equal(gradient, torch.full((300,), 1.5 if rank < 2 else 3.5))


def different_moments(rank: int) -> list[str]:
    """The optimizer's state is loaded on rank 0 alone, or the optimizer is given on rank 0 alone."""
    found = []
    for alone in ("state", "optimizer"):
        ddp = DistributedDataParallel(nn.Linear(30, 20))
        opt = torch.optim.Adam(ddp.parameters())
        if alone == "optimizer":
            with pytest.raises(ValueError, match="ranks disagree on the optimizer of the hook: rank 0 has Adam, rank 1 has none") as error:
                rumor.ddp_hook_state(optimizer=opt if rank == 0 else None)
        else:
            ddp.register_comm_hook(rumor.ddp_hook_state(optimizer=opt), rumor.ddp_hook)
            for p in ddp.parameters() if rank == 0 else []:
                opt.state[p] = {"exp_avg_sq": torch.rand(p.shape)}
            with pytest.raises(RuntimeError, match="second moments of the hook's optimizer differ between ranks") as error:
                ddp(torch.randn(4, 30)).sum().backward()
            assert "Unable to cast" not in str(error.value), "DDP shows the error itself"
        found.append(str(error.value))
    return found


def test_ranks_with_other_second_moments_are_noticed(four: Cluster) -> None:
    assert all(len(found) == 2 for found in four.run(different_moments))


def order_of_buckets(rank: int) -> list[bool]:
    """Whether second moments are read in the order of DDP's buckets, for strides of every kind."""
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        conv = nn.Conv2d(3, 5, 2, bias=False).to(memory_format=layout)
        seen = []
        ddp = DistributedDataParallel(conv)
        ddp.register_comm_hook(None, lambda _, bucket, seen=seen: record(bucket, seen))
        ddp(torch.randn(2, 3, 8, 8)).sum().backward()
        found.append(torch.equal(in_order_of(conv.weight, conv.weight.grad.contiguous()), seen[0]))
    return found


def record(bucket: dist.GradBucket, seen: list[Tensor]) -> torch.futures.Future[Tensor]:
    seen.append(bucket.buffer().clone())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def test_scales_are_in_the_order_of_the_gradients(four: Cluster) -> None:
    assert four.run(order_of_buckets) == [[True, True]] * N


def with_overflow(rank: int) -> tuple[bool, bool]:
    """One rank's gradient overflows. Returns whether all of the averaged gradient is NaN, and whether the next one is finite."""
    ddp, _ = model_in_ddp(4)
    x, y = (part[0, rank] for part in batches(1))
    results = []
    for k in range(2):
        ddp.zero_grad()
        scale = float("inf") if rank == 2 and k == 0 else 1.0
        (loss_fn(ddp, x.float(), y) * scale).backward()
        gradients = torch.cat([p.grad.flatten() for p in ddp.parameters()])
        results.append(bool(gradients.isnan().any()) if k == 0 else bool(gradients.isfinite().all()))
    return results[0], results[1]


def test_an_overflow_on_one_rank_is_seen_by_all(four: Cluster) -> None:
    """So GradScaler skips the step on every rank, and the next step is an ordinary one."""
    assert four.run(with_overflow) == [(True, True)] * N


def gradients_of(rank: int, bits: int, dtype: torch.dtype, sizes: list[float]) -> list[Tensor]:
    """The averaged gradients, if rank 1 has gradients of these sizes, step by step, and the others of size 1."""
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(nn.Linear(600, 1, bias=False).to(dtype))
    ddp.register_comm_hook(rumor.ddp_hook_state(bits=bits), rumor.ddp_hook)
    found = []
    for size in sizes:
        ddp.zero_grad()
        x = (torch.rand(1, 600, dtype=dtype) + 0.5) * (size if rank == 1 else 1.0)
        ddp(x.clamp(max=torch.finfo(dtype).max)).sum().backward()  # the gradient is the input
        found.append(flat_gradient(ddp).clone())
    return found


@pytest.mark.parametrize(("bits", "dtype", "size"), [(16, torch.float32, 3e38), (4, torch.float64, 1e300), (8, torch.float64, 1e39)])
def test_a_number_too_large_for_its_code_is_nan_on_all_ranks_once(four: Cluster, bits: int, dtype: torch.dtype, size: float) -> None:
    for before, there, after in four.run(gradients_of, bits, dtype, [1.0, size, 1.0]):
        assert before.isfinite().all()
        assert there.isnan().all()
        assert after == pytest.approx(torch.ones(600), abs=0.6)


def errors_by_step(rank: int, bits: int, sizes: list[float], of_all: bool) -> list[float]:
    """The error of the mean, relative to it, for gradients of these sizes on rank 1, or on all ranks."""
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(nn.Linear(6000, 1, bias=False))
    ddp.register_comm_hook(rumor.ddp_hook_state(bits=bits), rumor.ddp_hook)
    found = []
    for size in sizes:
        ddp.zero_grad()
        x = torch.randn(1, 6000) * (size if of_all or rank == 1 else 1.0)
        ddp(x).sum().backward()  # the gradient is the input
        dist.all_reduce(x)
        found.append(((flat_gradient(ddp) - x[0] / N).norm() * N / x.norm()).item())
    return found


@pytest.mark.parametrize("of_all", [True, False])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_spike_does_not_drown_the_gradients_after_it(four: Cluster, bits: int, of_all: bool) -> None:
    """What a code leaves out of a spike is larger than a usual gradient."""
    for usual, *_, first, second in four.run(errors_by_step, bits, [1.0, 1e5, 1e5, 1e5, 1.0, 1.0], of_all):
        assert first < 6 * usual
        assert second < 2 * usual


def after_a_skipped_step(rank: int) -> tuple[list[bool], Tensor]:
    """The last layer's gradient overflows on one rank, and the next gradient is zero. Returns which means were NaN, and the next ones."""
    ddp, _ = model_in_ddp(4)
    last = list(ddp.parameters())[-1]
    for k, (x, y) in enumerate(zip(*batches(4), strict=True)):
        ddp.zero_grad()
        hook = last.register_hook(lambda gradient: gradient * torch.inf) if rank == 2 and k == 2 else None
        (loss_fn(ddp, x[rank].float(), y[rank]) * (k < 3)).backward()
        if hook is not None:
            hook.remove()
        if k == 2:
            skipped = [bool(p.grad.isnan().any()) for p in ddp.parameters()]
    return skipped, flat_gradient(ddp)


def test_what_was_left_out_of_a_skipped_step_is_forgotten(four: Cluster) -> None:
    for skipped, gradient in four.run(after_a_skipped_step):
        assert any(skipped)
        assert not all(skipped), "other buckets were finite"
        assert not gradient.any()


def memory_of_the_hook(rank: int, follows_moments: bool) -> tuple[float, float]:
    """What the hook keeps after four steps, in copies of the gradients, and what its threads keep besides, in MB."""
    model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(20)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.5)
    opt = torch.optim.Adam(ddp.parameters())
    state = rumor.ddp_hook_state(optimizer=opt if follows_moments else None)
    ddp.register_comm_hook(state, rumor.ddp_hook)
    for _ in range(4):
        ddp(torch.randn(4, 300)).square().sum().backward()
        opt.step()
        opt.zero_grad()
    state._optimizer = None  # so that only its own memory is counted
    parameters = sum(p.nbytes for p in model.parameters())
    own, all_of_it = (bytes_held_by(owner, besides=torch.empty(0)) - parameters for owner in (list(state._memories.values()), state))
    return own / parameters, (all_of_it - own) / 1e6


@pytest.mark.parametrize(("follows_moments", "copies"), [(False, 1.4), (True, 2.4)])
def test_memory_of_the_hook_is_what_the_docs_say(four: Cluster, follows_moments: bool, copies: float) -> None:
    """In docs/training.md, "DDP with fewer bits"."""
    for own, of_threads in four.run(memory_of_the_hook, follows_moments):
        assert own == pytest.approx(copies, abs=0.05)
        assert of_threads < 3 * 2.5


def resumed(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The model after 12 steps, without interruption, resumed after 6, and resumed without the hook's state."""
    found = []
    for how in ("whole", "resumed", "forgotten"):
        ddp, state = model_in_ddp(4)
        opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for k, (x, y) in enumerate(zip(*batches(12), strict=True)):
            if k == 6 and how != "whole":
                saved = {name: t.clone() for name, t in ddp.module.state_dict().items()}, state.state_dict()
                ddp, state = model_in_ddp(4)
                ddp.module.load_state_dict(saved[0])
                if how == "resumed":
                    state.load_state_dict(saved[1])
                opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
            loss_fn(ddp, x[rank].float(), y[rank]).backward()
            opt.step()
            opt.zero_grad()
        found.append(flat(ddp))
    return found[0], found[1], found[2]


def test_what_was_left_out_can_be_saved(four: Cluster) -> None:
    """New DDP buckets are cut in another way for one step, so the codes of that step differ; without its memory the hook is further off."""
    for whole, again, forgotten in four.run(resumed):
        assert (again - whole).norm() < (forgotten - whole).norm()


def alone_in_its_group(rank: int) -> tuple[bool, float]:
    groups = [dist.new_group([r]) for r in range(N)]
    alike = []
    for with_hook in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(300, 90), process_group=groups[rank])
        if with_hook:
            state = rumor.ddp_hook_state(bits=4, model=ddp)
            ddp.register_comm_hook(state, rumor.ddp_hook)
        ddp(torch.ones(2, 300)).square().sum().backward()
        alike.append(torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None]))
    return torch.equal(*alike), state.metrics.bytes_sent


def test_one_rank_alone_rounds_nothing(four: Cluster) -> None:
    assert four.run(alone_in_its_group) == [(True, 0)] * N


def mistakes(rank: int) -> list[str]:
    found = []
    for bits in (32, 5, True, 4.0):
        with pytest.raises(ValueError, match="bits must be 16, 8 or 4"):
            rumor.ddp_hook_state(bits=bits)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model= must be the model in DDP, got 'net'"):
        rumor.ddp_hook_state(model="net")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ranks disagree on the number of bits of the hook: rank 0 has 8, rank 1 has 4") as error:
        rumor.ddp_hook_state(bits=8 if rank == 0 else 4)
    found.append(str(error.value))
    with pytest.raises(ValueError, match="needs the names of the parameters"):
        rumor.ddp_hook_state(bits=4).state_dict()
    with pytest.raises(ValueError, match=r"has 7 numbers of 0.weight, but the model here has 30 numbers"):
        rumor.ddp_hook_state(bits=4, model=network()).load_state_dict({"left_out": {"0.weight": torch.zeros(7)}})
    return found


def loads(rank: int) -> tuple[int, list[str]]:
    """One rank alone loads its state. Returns the number of open files that 20 states leave, and errors."""
    ddp, state = model_in_ddp(4)
    x, y = (part[0, rank] for part in batches(1))
    for k in range(3):
        loss_fn(ddp, x.float(), y).backward()
        if k == 1 and rank == 1:
            saved = state.state_dict()
            assert set(saved["left_out"]) == {name for name, _ in ddp.module.named_parameters()}
            state.load_state_dict(saved)
    open_before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        rumor.ddp_hook_state(bits=4)
    left = len(os.listdir("/proc/self/fd")) - open_before
    found = []
    for wrong in ({}, None):
        with pytest.raises(ValueError, match=r"this is not a state of rumor.ddp_hook: load what state_dict") as error:
            state.load_state_dict(wrong)  # type: ignore[arg-type]
        found.append(str(error.value))
    state._model = network()
    with pytest.raises(ValueError, match="another model than DDP trains") as error:
        state.state_dict()
    return left, [*found, str(error.value)]


def test_states_of_the_hook_load_on_their_own_and_leave_no_files_open(four: Cluster) -> None:
    assert all(left == 0 and len(errors) == 3 for left, errors in four.run(loads))


def wrong_optimizers(rank: int) -> list[str]:
    found = []
    ddp = DistributedDataParallel(nn.Linear(30, 20))
    with pytest.raises(ValueError, match=r"optimizer= is for Adam and its like, .* got SGD: leave it out"):
        rumor.ddp_hook_state(optimizer=torch.optim.SGD(ddp.parameters(), lr=0.1))
    other = torch.optim.Adam([nn.Parameter(torch.zeros(3))])
    ddp.register_comm_hook(rumor.ddp_hook_state(optimizer=other), rumor.ddp_hook)
    ddp(torch.randn(4, 30)).sum().backward()  # shows all buckets
    with pytest.raises(Exception, match="optimizer= has no parameters of this model") as error:
        ddp(torch.randn(4, 30)).sum().backward()
    found.append(str(error.value))
    ddp = DistributedDataParallel(nn.Linear(30, 20))
    ddp.register_comm_hook(None, rumor.ddp_hook)
    with pytest.raises(Exception, match=r"must be what rumor.ddp_hook_state\(bits=4\) returns, got None") as error:
        ddp(torch.randn(4, 30)).sum().backward()
    found.append(str(error.value))
    return found


def test_an_optimizer_of_no_use_is_refused(four: Cluster) -> None:
    assert all(len(found) == 2 for found in four.run(wrong_optimizers))


def test_mistakes_are_one_clear_line(four: Cluster) -> None:
    assert all(len(found) == 1 for found in four.run(mistakes))


def compiled_and_mixed(rank: int, compiled: bool, mixed: bool) -> Tensor:
    """Trains with torch.compile (without a C++ compiler), with autocast and a GradScaler that skips one step, or both."""
    ddp, _ = model_in_ddp(4, bucket_cap_mb=25)  # torch.compile asks for at least that of DDP's first bucket
    opt = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    model = torch.compile(ddp, backend="aot_eager") if compiled else ddp
    scaler = torch.amp.GradScaler("cpu", enabled=mixed, init_scale=2.0**10)
    skipped = []
    for k, (x, y) in enumerate(zip(*batches(8), strict=True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = loss_fn(model, x[rank].float(), y[rank])
        scaler.scale(loss * (torch.inf if mixed and k == 3 and rank == 1 else 1.0)).backward()
        before, scale = flat(ddp).clone(), scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        skipped.append(scaler.get_scale() < scale)
        assert torch.equal(before, flat(ddp)) == skipped[-1]
    assert skipped == [mixed and k == 3 for k in range(8)], "one bad gradient skips the step of all ranks"
    return flat(ddp)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_hook_works_in_a_compiled_model_and_in_mixed_precision(four: Cluster, mixed: bool) -> None:
    plain, compiled = (four.run(compiled_and_mixed, compile, mixed) for compile in (False, True))
    for model in (*plain, *compiled):
        assert torch.allclose(model, plain[0], atol=1e-2 if mixed else 1e-5)
    assert all(torch.equal(model, compiled[0]) for model in compiled)


def test_the_study_of_hooks_runs_and_does_not_run_again_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "enwik8").write_bytes(bytes(range(97, 123)) * 400_000)
    script = Path(__file__).parents[1] / "experiments" / "ddp_hooks.py"
    options = ["--data", tmp_path, "--out", tmp_path / "found.csv", "--batch", "1", "--steps", "3", "--seeds", "1", "--evaluated", "2"]
    for hooks in (["none", "4 bits"], ["4 bits", "bf16"]):
        done = warm.torchrun(2, [script, *options, "--hooks", *hooks])
        assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "found.csv").read_text().splitlines()))
    assert [row["hook"] for row in rows] == ["none", "4 bits", "bf16"]
    losses = [float(row["loss"]) for row in rows]
    assert max(losses) - min(losses) < 0.05
    assert "held-out loss" in done.stdout
