"""The Averager among real processes: all kinds of parameters, AMP, accumulation, compile, buffers, metrics."""

import gc
import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rumor
from tests.cluster import Cluster
from tests.problems import ALGORITHMS, N, batches, flat, loss_fn, network

RING = rumor.ring(N)


def gathered(x: Tensor) -> Tensor:
    """[n, ...]: the tensors of all ranks."""
    everyone = [torch.empty_like(x) for _ in range(N)]
    dist.all_gather(everyone, x.contiguous())
    return torch.stack(everyone)


class Zoo(nn.Module):
    """One of each: bf16 beside fp32 and fp64, tied, frozen, non-contiguous, a scalar, empty, complex, never used, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.brief = nn.Parameter(torch.randn(300, dtype=torch.bfloat16))
        self.long = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.strided = nn.Parameter(torch.randn(6, 4).t())
        self.image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.unused = nn.Parameter(torch.randn(2))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("running", torch.randn(3))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([True, False]))


def zoo(rank: int, average: bool) -> None:
    torch.manual_seed(rank)  # every rank starts elsewhere ...
    model = Zoo()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    algorithm = rumor.gossip_pga(RING, 1) if average else rumor.gossip_sgd(RING)
    averager = rumor.Averager(model, algorithm)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, t in tensors.items():  # ... and takes rank 0's
        together = gathered(torch.view_as_real(t.detach()) if t.is_complex() else t.detach().to(torch.float64))
        assert (together == together[0]).all(), name
    with torch.no_grad():
        for t in tensors.values():
            if t.requires_grad or (t.is_floating_point() and t is not model.frozen):
                t.add_(rank if t.dim() else 2 * rank)
        model.count += rank
    sent = {name: t.detach().clone() for name, t in tensors.items()}
    averager.step()
    W = torch.full((N, N), 1 / N, dtype=torch.float64) if average else RING.W()
    for name, t in tensors.items():
        as_double = torch.complex128 if t.is_complex() else torch.float64
        was = torch.view_as_real(sent[name].to(as_double)) if t.is_complex() else sent[name].to(as_double)
        now = torch.view_as_real(t.detach().to(as_double)) if t.is_complex() else t.detach().to(as_double)
        mixes = t.requires_grad or (average and name == "running")
        expected = torch.tensordot(W[rank], gathered(was), 1) if mixes else was
        exact = expected.to(t.dtype).to(torch.float64) if t.dtype == torch.bfloat16 else expected
        assert torch.allclose(now, exact, rtol=0, atol=1e-2 if t.dtype == torch.bfloat16 else 1e-6), name
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("average", [True, False], ids=["global", "gossip"])
def test_all_kinds_of_parameters_and_buffers(four: Cluster, average: bool) -> None:
    four.run(zoo, average)


def half_precision(rank: int, delay: int) -> float:
    """The largest difference, in units of bf16's rounding, from gossip that is summed in float64."""
    model = nn.Linear(40, 40, dtype=torch.bfloat16)
    averager = rumor.Averager(model, rumor.gossip_sgd(rumor.exponential(N), delay=delay))
    worst = 0.0
    for _ in range(5):
        before = gathered(flat(model)).double()
        with torch.no_grad():
            for p in model.parameters():
                p += torch.randn(p.shape, generator=torch.Generator().manual_seed(rank)).bfloat16()
        half = gathered(flat(model)).double()
        averager.step()
        W = rumor.exponential(N).W()
        expected = (W @ half if delay == 0 else half + (W - torch.eye(N)) @ before)[rank]
        error = (flat(model).double() - expected).abs() / expected.abs().clamp(min=1e-2)
        worst = max(worst, error.max().item() * 2**8)
    return worst


@pytest.mark.parametrize("delay", [0, 1])
def test_half_precision_is_summed_in_float32(four: Cluster, delay: int) -> None:
    assert max(four.run(half_precision, delay)) <= 1.01  # one rounding, at the end


def mixed_precision(rank: int, overflow: bool, bits: int = 32) -> tuple[list[int], float]:
    """AMP with GradScaler; the gradients of rank 1 overflow at some steps. Returns the steps it skipped, and the final distance."""
    model = network(torch.float32)
    averager = rumor.Averager(model, rumor.gossip_aga(RING, warmup=4, H_init=3, bits=bits))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    skipped = []
    x, y = batches(12)
    for k in range(12):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_fn(model, x[k, rank].float(), y[k, rank])
        bad = overflow and rank == 1 and k in (2, 5, 6)
        scaler.scale(loss * float("inf") if bad else loss).backward()
        scale, before = scaler.get_scale(), flat(model)
        scaler.step(opt)
        scaler.update()
        if scaler.get_scale() < scale:
            assert torch.equal(before, flat(model))
            skipped.append(k)
        opt.zero_grad()
        averager.step(loss)
    averager.finish()
    return skipped, averager.consensus_distance()


@pytest.mark.parametrize("bits", [32, 4])
def test_overflow_on_one_node_does_not_deadlock(four: Cluster, bits: int) -> None:
    results = four.run(mixed_precision, True, bits)
    assert [skipped for skipped, _ in results] == [[], [2, 5, 6], [], []]
    assert all(distance < 1e-12 for _, distance in results)


def accumulated(rank: int) -> Tensor:
    model = network()
    averager = rumor.Averager(model, rumor.parallel_sgd(N))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batches(12)
    for k in range(12):
        (loss_fn(model, x[k, rank], y[k, rank]) / 4).backward()
        if (k + 1) % 4 == 0:
            opt.step()
            opt.zero_grad()
            averager.step()
    return flat(model)


def test_gradient_accumulation_is_one_step_per_optimizer_step(four: Cluster) -> None:
    model, (x, y) = network(), batches(12)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(12):
        sum(loss_fn(model, x[k, i], y[k, i]) / (4 * N) for i in range(N)).backward()
        if (k + 1) % 4 == 0:
            opt.step()
            opt.zero_grad()
    for result in four.run(accumulated):
        assert (result - flat(model)).abs().max() < 1e-12


def several_groups(rank: int, compiled: bool) -> Tensor:
    model = network()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    averager = rumor.Averager(run, rumor.gossip_pga(RING, 3, delay=1))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.01}]
    opt = torch.optim.SGD(groups, momentum=0.9)
    x, y = batches(7)
    for k in range(7):
        loss = loss_fn(run, x[k, rank], y[k, rank])
        loss.backward()
        opt.step()
        opt.zero_grad()
        averager.step(loss)
    assert averager.metrics.rounds == {"gossip": 5, "global": 2}  # steps are counted once, however many groups there are
    return flat(model)


def test_compiled_models_and_parameter_groups(four: Cluster) -> None:
    plain, compiled = four.run(several_groups, False), four.run(several_groups, True)
    for one, other in zip(plain, compiled, strict=True):
        assert (one - other).abs().max() < 1e-12


def batch_norm(rank: int, delay: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Buffers before and after a global round, and what the averaged model's are off the mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double()
    averager = rumor.Averager(model, rumor.gossip_pga(RING, 2, delay=delay))
    x, _ = batches(3)
    history = [model[1].running_var.clone()]
    for k in range(2):
        model(x[k, rank])
        history.append(model[1].running_var.clone())
        averager.step()
    after = model[1].running_var.clone()
    model(x[2, rank])
    own = model[1].running_var.clone()
    with averager.averaged():
        inside = model[1].running_var.clone()
    assert torch.equal(model[1].running_var, own)
    assert (gathered(own) - inside).abs().max() > 1e-3
    return torch.stack(history), after, gathered(own).mean(dim=0) - inside, int(model[1].num_batches_tracked)


@pytest.mark.parametrize("delay", [0, 1])
def test_float_buffers_are_averaged_at_global_rounds_alone(four: Cluster, delay: int) -> None:
    results = four.run(batch_norm, delay)
    history = torch.stack([result[0] for result in results])  # [n, 3, 4]
    assert (history[:, 1] - history[0, 1]).abs().max() > 1e-3, "a gossip round must leave the nodes' statistics apart"
    # with delay 1 they become the mean of what was sent, one step before
    expected = history[:, 2 - delay].mean(dim=0)
    for _, after, inside, count in results:
        assert (after - expected).abs().max() < 1e-12
        assert inside.abs().max() < 1e-12
        assert count == 3


class Counting(nn.Module):
    """Replaces its buffer instead of changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x
        return self.weight * self.seen


def replaced_buffers(rank: int, delay: int) -> Tensor:
    model = Counting()
    averager = rumor.Averager(model, rumor.gossip_pga(RING, 2, delay=delay))
    for _ in range(2):
        model(torch.full((3,), float(rank)))
        averager.step()
    with averager.averaged():
        assert (gathered(model.seen) == model.seen).all()
    return model.seen


@pytest.mark.parametrize("delay", [0, 1])
def test_buffers_that_a_model_replaces_are_averaged_too(four: Cluster, delay: int) -> None:
    for seen in four.run(replaced_buffers, delay):
        assert torch.equal(seen, torch.full((3,), 1.5 if delay else 3.0))


def loaded_in_flight(rank: int) -> Tensor:
    """Loading a state over an Averager whose messages are under way."""
    model = network()
    averager = rumor.Averager(model, rumor.gossip_sgd(RING, delay=1))
    ends = []
    for attempt in range(2):
        if attempt == 0:
            start = model.state_dict(), averager.state_dict()
            start = {name: t.clone() for name, t in start[0].items()}, start[1]
        else:
            model.load_state_dict(start[0])
            averager.load_state_dict(start[1])
        for _ in range(3):
            with torch.no_grad():
                model[0].weight += rank
            averager.step()
        ends.append(flat(model))
    assert torch.equal(ends[0], ends[1])
    return ends[0]


def test_a_state_may_be_loaded_while_messages_are_in_flight(four: Cluster) -> None:
    ends = four.run(loaded_in_flight)
    assert not torch.equal(ends[0], ends[1])


def receives_ahead(rank: int, topology: rumor.Topology) -> list[int]:
    averager = rumor.Averager(network(), rumor.gossip_sgd(topology))
    averager.step()
    ahead = [len(channel.expected) for channel in averager.engine._channels]
    averager.finish()
    return ahead


@pytest.mark.parametrize(("topology", "neighbours"), [(RING, 2), (rumor.complete(N), 0)])  # whose W = J goes by all-reduce
def test_receives_are_posted_ahead_only_where_messages_will_come(four: Cluster, topology: rumor.Topology, neighbours: int) -> None:
    for ahead in four.run(receives_ahead, topology):
        assert set(ahead) == {neighbours}


def evaluate(rank: int, name: str) -> None:
    model = network()
    averager = rumor.Averager(model, ALGORITHMS[name]())
    for step in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p += rank + step
        averager.step(1.0, lr=0.1)
    own = flat(model)
    together = gathered(own)
    expected = (together - together.mean(dim=0)).square().sum(dim=1).mean().item()
    assert averager.consensus_distance() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert averager.metrics.consensus_distance == averager.consensus_distance()
    with averager.averaged():
        mean = flat(model)
    if "sgp" not in name:  # there, models in flight count too
        assert (mean - together.mean(dim=0)).abs().max() < 1e-12
    assert torch.equal(flat(model), own)
    with pytest.raises(KeyError), averager.averaged():
        raise KeyError
    assert torch.equal(flat(model), own), "also after an error inside"
    averager.finish()
    final = gathered(flat(model))
    assert (final - final[0]).abs().max() == 0
    assert (final[0] - mean).abs().max() < 1e-12, "what was evaluated is what one ends with"
    assert averager.consensus_distance() == pytest.approx(0, abs=1e-20)
    averager.step(1.0, lr=0.1)  # training may go on from there
    after = gathered(flat(model))
    assert (after - after[0]).abs().max() < 1e-12


@pytest.mark.parametrize("name", ALGORITHMS)
def test_averaged_distance_and_finish(four: Cluster, name: str) -> None:
    four.run(evaluate, name)


def metrics(rank: int, algorithm: Any) -> dict[str, Any]:
    model = nn.Linear(99, 100, dtype=torch.float32)  # 10,000 numbers
    averager = rumor.Averager(model, algorithm)
    for _ in range(12):
        averager.step(1.0)
    averager.finish()
    return averager.metrics.as_dict()


def where_time_goes(rank: int, lazy: bool) -> tuple[dict[str, Any], float]:
    """Rank 0 is the slow one: others wait for it."""
    model = nn.Linear(99, 100)
    averager = rumor.Averager(model, rumor.gossip_sgd(RING), lazy=lazy)
    began = time.perf_counter()
    for _ in range(6):
        averager.step()
        model(torch.ones(1, 99))
        time.sleep(0.15 if rank == 0 else 0.0)
    averager.settle()
    return averager.metrics.as_dict(), time.perf_counter() - began


@pytest.mark.parametrize("lazy", [False, True])
def test_metrics_tell_computing_from_waiting_and_packing(four: Cluster, lazy: bool) -> None:
    found = four.run(where_time_goes, lazy)
    for rank, (metrics, whole) in enumerate(found):
        parts = metrics["seconds_computing"], metrics["seconds_waiting"], metrics["seconds_packing"]
        assert min(parts) > 0
        assert sum(parts) <= whole
        assert parts[0] > 0.75 or rank != 0, "five times 150 ms between steps"
        assert parts[0] < found[0][0]["seconds_computing"] or rank == 0
        assert parts[1] > 0.2 or rank in (0, 2), "its neighbours wait for it"


INFERENCE = {"gossip_pga": lambda: rumor.gossip_pga(rumor.ring(4), 3), "osgp": lambda: rumor.osgp(rumor.ring(4))}


def evaluates_in_inference_mode(rank: int, name: str) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    averager = rumor.Averager(model, INFERENCE[name]())
    averager.step()
    with torch.inference_mode():
        with averager.averaged():
            model(torch.ones(3, 2))
        averager.state_dict()
        averager.consensus_distance()
        averager.finish()
    for _ in range(4):
        averager.step()
    return flat(model)


@pytest.mark.parametrize("name", INFERENCE)
def test_evaluation_in_inference_mode_leaves_training_alone(four: Cluster, name: str) -> None:
    assert all(model.isfinite().all() for model in four.run(evaluates_in_inference_mode, name))


def in_averaged(rank: int, what: str) -> None:
    averager = rumor.Averager(nn.Linear(2, 1), INFERENCE["osgp"]())
    with averager.averaged():
        if what == "averaged()":
            with averager.averaged():
                pass
        getattr(averager, what[:-2])()


@pytest.mark.parametrize("what", ["step()", "finish()", "averaged()"])
def test_what_the_end_of_averaged_would_undo_is_refused(four: Cluster, what: str) -> None:
    for kind, text in four.errors(in_averaged, what):
        assert kind is RuntimeError
        assert f"{what} inside averaged(), where the model is the mean of all nodes" in text


def another_module(rank: int, how: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    averager = rumor.Averager(model, INFERENCE["gossip_pga"]())
    if how == "added":
        model.append(nn.Linear(1, 1))
    elif how == "replaced":
        model[1] = nn.Linear(2, 1)
    else:
        model[1].bias = None
    averager.finish()


@pytest.mark.parametrize(
    ("how", "says"), [("added", "2.weight, 2.bias came after"), ("replaced", "1.weight, 1.bias came after"), ("gone", "has been replaced")]
)
def test_other_modules_are_noticed(four: Cluster, how: str, says: str) -> None:
    for kind, text in four.errors(another_module, how):
        assert kind is RuntimeError
        assert says in text


def built_and_dropped(rank: int) -> int:
    for _ in range(3):
        averager = rumor.Averager(nn.Linear(2, 1), rumor.gossip_sgd(rumor.one_peer_exponential(4)))
        for _ in range(3):
            averager.step()
        averager.finish()
        averager.step()
        averager.finish()
        del averager
        gc.collect()
    return len(rumor.engines.processes.transport._unclaimed)


def test_a_finished_averager_leaves_nothing_behind(four: Cluster) -> None:
    before = four.run(kept)
    assert four.run(built_and_dropped) == before


def kept(rank: int) -> int:
    return len(rumor.engines.processes.transport._unclaimed)


def test_metrics_count_rounds_bytes_and_waiting(four: Cluster) -> None:
    d = 40_000  # bytes
    found = four.run(metrics, rumor.gossip_pga(RING, 4))[0]
    assert found["rounds"] == {"gossip": 9, "global": 3}
    assert found["bytes_sent"] == pytest.approx(10 * 2 * d + 4 * 1.5 * d, rel=0.02)  # to finish: what is expected, and an average
    assert 0 < found["seconds_waiting"] < 60
    assert found["H"] == 4
    assert found["consensus_distance"] is None
    assert four.run(metrics, rumor.gossip_sgd(rumor.one_peer_exponential(N)))[0]["bytes_sent"] == pytest.approx(13 * d + 1.5 * d, rel=0.02)
    local = four.run(metrics, rumor.local_sgd(N, 6))[0]
    assert local["rounds"] == {"none": 10, "global": 2}
    assert local["bytes_sent"] == pytest.approx(3 * 1.5 * d, rel=0.02)


class Allocations(TorchDispatchMode):
    """The largest memory, in bytes, that an operation returned and was not given; and all such memory together."""

    largest = total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, t.untyped_storage().nbytes())
                self.total += t.untyped_storage().nbytes()
        return result


def allocations(rank: int, name: str) -> tuple[int, int, int]:
    """The largest allocation during the first period, and during 8 steps after it; and all allocations of these."""
    model = nn.Sequential(nn.Linear(300, 400), nn.BatchNorm1d(400), nn.Linear(400, 50))
    averager = rumor.Averager(model, ALGORITHMS[name]())
    found = []
    for _ in range(2):
        with Allocations() as mode:
            for _ in range(8):
                averager.step(1.0, lr=0.1)
        found.append(mode)
    return found[0].largest, found[1].largest, found[1].total


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_allocation_per_step_after_the_first_period(four: Cluster, name: str) -> None:
    """Nothing of the size of a bucket is allocated, only a few scalars.

    torch's operators for codes return new memory: at most a bucket at a time, and at most three models in a step.
    """
    bucket = 4 * 35_328  # bytes; the model has four
    for first, later, total in four.run(allocations, name):
        assert first > 2**14, "the count must see allocations where there are some"
        assert later < 1024 if "bits" not in name else later <= bucket
        assert total < 8 * (20_000 if "bits" not in name else 3 * 4 * bucket)


def subgroup(rank: int) -> tuple[float, float]:
    """Two groups of two, each averaging on its own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = network()
    averager = rumor.Averager(model, rumor.gossip_pga(rumor.ring(2), 2), group=groups[rank // 2])
    for _ in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p += rank
        averager.step()
    together = gathered(flat(model))
    return (together[0] - together[1]).abs().max().item(), (together[1] - together[2]).abs().max().item()


def test_a_group_may_be_part_of_the_world(four: Cluster) -> None:
    for inside, across in four.run(subgroup):
        assert inside == 0
        assert across > 1


def with_ddp_in_memory(rank: int) -> int:
    """A DDP of another model, one of this model that is gone, and one beside a method that sends nothing."""
    model, other = network(), network()
    kept = nn.parallel.DistributedDataParallel(other)
    gone = nn.parallel.DistributedDataParallel(model)
    gone.itself = [gone]  # type: ignore[assignment]  # only the garbage collector can find it
    del gone
    averager = rumor.Averager(model, rumor.gossip_pga(rumor.ring(4), 2))
    averager.step()
    counts_only = rumor.Averager(other, rumor.gossip_sgd(rumor.isolated(4)))
    counts_only.step()
    return averager.steps + counts_only.steps + (kept.module is other)


def test_a_ddp_that_does_not_train_this_model_is_no_obstacle(four: Cluster) -> None:
    assert four.run(with_ddp_in_memory) == [3] * 4


def nodes_of_two(rank: int) -> tuple[Tensor, int | None]:
    """2 nodes x 2 ranks: DDP inside a node, Gossip-AGA across."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = network()
    ddp = nn.parallel.DistributedDataParallel(model, process_group=inside)
    averager = rumor.Averager(ddp, rumor.gossip_aga(rumor.ring(2), warmup=4, H_init=2), group=across, local_group=inside)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = batches(20)
    for k in range(20):
        loss = loss_fn(ddp, x[k, rank], y[k, rank])
        opt.zero_grad()
        loss.backward()
        opt.step()
        averager.step(loss)
    return flat(model), averager.metrics.H


def test_a_node_may_be_several_ranks(four: Cluster) -> None:
    """Equal to 2 plain nodes with twice the batch."""
    sim = rumor.Simulator(network(), rumor.gossip_aga(rumor.ring(2), warmup=4, H_init=2))
    opt = torch.optim.SGD(sim.parameters(), lr=0.1, momentum=0.9)
    x, y = batches(20)
    for k in range(20):
        losses = sim(loss_fn, x[k].reshape(2, 16, 5), y[k].reshape(2, 16))
        opt.zero_grad()
        losses.sum().backward()
        opt.step()
        sim.step(losses)
    for rank, (model, H) in enumerate(four.run(nodes_of_two)):
        assert (model - sim.X[rank // 2]).abs().max() < 1e-9
        assert sim.metrics.H == H


def profiled(rank: int, delay: int) -> list[set[str]]:
    model = nn.Linear(99, 100)
    averager = rumor.Averager(model, rumor.gossip_pga(RING, 3, delay=delay))
    averager.step()  # messages begin before the profiler does, and end after it
    seen = []
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(4):
                averager.step()
        seen.append({event.name for event in profiler.events()})
        gc.collect()
    averager.finish()
    return seen


@pytest.mark.parametrize("delay", [0, 1])
def test_the_profiler_sees_named_parts_and_no_message_that_outlives_it(four: Cluster, delay: int) -> None:
    for names in itertools.chain(*four.run(profiled, delay)):
        assert {"rumor::gossip", "rumor::global", "rumor::wait", "rumor::pack", "rumor::mix"} <= names
        assert not [name for name in names if name.startswith("gloo:")]
