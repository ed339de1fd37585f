"""DDP with gradients in a few bits."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rumor
from tests import warm
from tests.cluster import Cluster
from tests.problems import N, batches, flat, loss_fn, network

STEPS = 60


def model_in_ddp(bits: int, **options: Any) -> tuple[DistributedDataParallel, rumor.ddp.DDPHookState | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 90), nn.Tanh(), nn.Linear(90, 3))
    ddp = DistributedDataParallel(model, **{"bucket_cap_mb": 0.02, **options})  # several buckets
    state = None
    if bits < 32:
        state = rumor.ddp_hook_state(bits=bits, model=ddp)
        ddp.register_comm_hook(state, rumor.ddp_hook)
    return ddp, state


def trained(rank: int, bits: int, steps: int = STEPS, accumulate: int = 1) -> tuple[Tensor, float, float]:
    """Returns the model, the mean loss over the last ten steps, and the bytes sent per step."""
    ddp, state = model_in_ddp(bits)
    opt = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
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


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_ddp_trains_as_well_with_few_bits(four: Cluster, bits: int) -> None:
    """With AdamW and clipping, which see the averaged gradient as in plain DDP."""
    plain, coded = (four.run(trained, b) for b in (32, bits))
    parameters = plain[0][0].numel()
    for model, loss, sent in coded:
        assert torch.equal(model, coded[0][0]), "all ranks take the same step"
        assert not torch.equal(model, plain[0][0])
        assert abs(loss - plain[0][1]) < 0.01
        assert sent < 1.2 * bits / 8 * 2 * (N - 1) / N * parameters


def test_gradients_may_be_accumulated(four: Cluster) -> None:
    found = four.run(trained, 4, 30, 3)
    assert all(torch.equal(model, found[0][0]) for model, _, _ in found)


def errors_of_the_mean(rank: int, bits: int) -> tuple[Tensor, Tensor]:
    """With the same gradients over and over, the sum of the averages after 1 and after 50 steps, relative to the exact one."""
    ddp, _ = model_in_ddp(bits)
    x, y = (part[0, rank] for part in batches(1))
    total = exact = torch.zeros(1)
    found = []
    for k in range(50):
        ddp.zero_grad()
        loss_fn(ddp, x.float(), y).backward()
        got = torch.cat([p.grad.flatten() for p in ddp.parameters()])
        if k == 0:
            own = torch.autograd.grad(loss_fn(ddp.module, x.float(), y), list(ddp.module.parameters()))
            exact = torch.cat([g.flatten() for g in own])
            dist.all_reduce(exact)
            exact /= N
        total = total + got
        found.append((total / (k + 1) - exact).norm() / exact.norm())
    return found[0], found[-1]


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_nothing_of_a_gradient_is_lost(four: Cluster, bits: int) -> None:
    for first, last in four.run(errors_of_the_mean, bits):
        assert last < first / 20, "what is left out of one average is part of the next"


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


def mistakes(rank: int) -> list[str]:
    found = []
    for bits in (32, 5, True):
        with pytest.raises(ValueError, match="bits must be 16, 8 or 4"):
            rumor.ddp_hook_state(bits=bits)
    with pytest.raises(ValueError, match=r"ranks disagree on the number of bits of the hook: rank 0 has 8, rank 1 has 4") as error:
        rumor.ddp_hook_state(bits=8 if rank == 0 else 4)
    found.append(str(error.value))
    with pytest.raises(ValueError, match="needs the names of the parameters"):
        rumor.ddp_hook_state(bits=4).state_dict()
    with pytest.raises(ValueError, match=r"has 7 numbers of 0.weight, but the model here has 30 numbers"):
        rumor.ddp_hook_state(bits=4, model=network()).load_state_dict({"left_out": {"0.weight": torch.zeros(7)}})
    return found


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
