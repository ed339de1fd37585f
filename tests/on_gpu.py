"""Checks that need a GPU, which CI has none of: `PYTHONPATH=src:. python -m tests.on_gpu`, by hand, on a machine with one.

Simulator on the GPU against the CPU; several gloo processes that share the GPU against the Simulator; the NCCL path as far as one GPU can
show it: a group of one rank, and a neighbour that answers with an echo, to see that a gossip step never waits for the device.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import rumor
import rumor.engines.processes.process_group as engine_of_processes
from rumor.engines import Buffer, Lerp, StackedBuckets
from rumor.engines.codes import CODES
from rumor.model.buckets import FlatBuckets
from tests.cluster import Cluster
from tests.nodes import ALGORITHMS as NODES
from tests.nodes import MODELS, averager_of, train_here, wrapped
from tests.problems import OPTIMIZERS, batches, flat, trained

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("benchmarks", "experiments"))

from gpu import Echo

N = 4
CUDA = torch.device("cuda")


def algorithms() -> dict[str, Any]:
    ring, peer = rumor.ring(N), rumor.one_peer_exponential(N)
    return {
        "parallel_sgd": rumor.parallel_sgd(N),
        "local_sgd": rumor.local_sgd(N, 3),
        "gossip_sgd": rumor.gossip_sgd(ring),
        "gossip_pga": rumor.gossip_pga(ring, 3),
        "gossip_pga delayed": rumor.gossip_pga(peer, 3, delay=1),
        "gossip_pga by gossip": rumor.gossip_pga(ring, 3, average_rounds=2),
        "gossip_aga": rumor.gossip_aga(ring, 9, H_init=2),
        "gossip_pga by learning rate": rumor.gossip_pga(ring, rumor.LearningRate(2, 8)),
        "slowmo": rumor.slowmo(ring, 3),
        "diloco": rumor.diloco(N, 3),
        "diloco gossip 4 bits": rumor.diloco(N, 3, topology=ring, bits=4),
        "parallel_sgd 4 bits": rumor.parallel_sgd(N, bits=4),
        "gossip_pga 4 bits": rumor.gossip_pga(ring, 3, bits=4),
        "gossip_pga 4 bits delayed": rumor.gossip_pga(peer, 3, delay=1, bits=4),
        "gossip_pga 16 bits": rumor.gossip_pga(peer, 3, bits=16),
        "gossip_aga 8 bits": rumor.gossip_aga(ring, 9, H_init=2, bits=8),
        "slowmo 4 bits": rumor.slowmo(ring, 3, bits=4),
        "osgp": rumor.osgp(peer),
        "sgp": rumor.osgp(ring, delay=0),
    }


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def data(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(steps, N, 8, 5, generator=generator, dtype=torch.float64)
    return x, (x[..., 0] > 0).long() + torch.arange(N)[:, None] % 2


def simulate(algorithm: Any, device: torch.device, steps: int = 30) -> torch.Tensor:
    sim = rumor.Simulator(network().to(device), algorithm)
    opt = torch.optim.SGD(sim.parameters(), lr=0.05, momentum=0.9)
    for x, y in zip(*(part.to(device) for part in data(steps)), strict=True):
        losses = sim(loss_fn, x, y)
        losses.sum().backward()
        opt.step()
        opt.zero_grad()
        sim.step(losses, lr=0.05)
    return sim.X.cpu()


def simulator_on_the_gpu_equals_the_cpu() -> None:
    for name, algorithm in algorithms().items():
        difference = (simulate(algorithm, CUDA) - simulate(algorithm, torch.device("cpu"))).abs().max().item()
        print(f"    {name:<22} {difference:.1e}")
        assert difference < 1e-9


def one_rank(rank: int, name: str) -> torch.Tensor:
    model = network().cuda()
    averager = rumor.Averager(model, algorithms()[name])
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = (part.cuda() for part in data(30))
    for k in range(30):
        loss = loss_fn(model, x[k, rank], y[k, rank])
        loss.backward()
        opt.step()
        opt.zero_grad()
        averager.step(loss, lr=0.05)
    return looked_at(model, averager)


def looked_at(model: nn.Module, averager: rumor.Averager) -> torch.Tensor:
    """The model at the end, after all that only looks at it."""
    averager.consensus_distance()
    with averager.averaged():
        pass
    averager.state_dict()
    return flat(model).cpu()


def processes_that_share_the_gpu_equal_the_simulator() -> None:
    cluster = Cluster(N)
    try:
        for name, algorithm in algorithms().items():
            expected = simulate(algorithm, torch.device("cpu"))
            difference = (torch.stack(cluster.run(one_rank, name)) - expected).abs().max().item()
            print(f"    {name:<22} {difference:.1e}")
            assert difference < 1e-9
    finally:
        cluster.stop()


def one_rank_of_two(rank: int, name: str) -> torch.Tensor:
    model = wrapped(MODELS["network"]().cuda(), "ddp", 2)
    averager = averager_of(model, NODES[name](2), 2)
    opt = OPTIMIZERS["nesterov"](model.parameters())
    for _ in trained(model, averager, opt, rank, *(part.cuda() for part in batches(11, 4))):
        pass
    return looked_at(model, averager)


def nodes_of_two_that_share_the_gpu_equal_the_simulator() -> None:
    cluster = Cluster(4)
    try:
        for name in NODES:
            expected = train_here(2, 2, "network", name)["x"][:, -1].repeat_interleave(2, dim=0)  # of node 0, 0, 1, 1
            difference = (torch.stack(cluster.run(one_rank_of_two, name)) - expected).abs().max().item()
            print(f"    {name:<22} {difference:.1e}")
            assert difference < 1e-9
    finally:
        cluster.stop()


def one_fused_pass_equals_several() -> None:
    """Every dtype, pieces of odd sizes and places, with and without what was sent, finite or not."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        whole = torch.randn(40_000, device=CUDA).to(dtype)
        cuts = [0, 1, 8, 4105, 4106, 20_000, 20_013, 40_000]
        for sent, finite, weight in itertools.product((False, True), (None, True, False), (0.5, 1 / 3)):
            pieces = [whole[a:b].clone() for a, b in itertools.pairwise(cuts)]
            x = FlatBuckets(pieces, lambda shape, dtype, device: Buffer(torch.empty(shape, dtype=dtype, device=device)))
            towards, gone = (torch.randn(40_000, device=CUDA).to(dtype) for _ in range(2))
            assert x._buckets[0].one_pass is not None
            assert len(x) == 1
            assert torch.equal(x.read(0).tensor, whole)
            flag = None if finite is None else torch.tensor([finite], device=CUDA)
            if finite is False:
                towards[7] = float("nan")
            change = (towards.double() - (gone if sent else whole).double()) * (0 if finite is False else weight)
            expected = whole.double() + (torch.zeros_like(change) if finite is False else change)
            x.lerp(0, Lerp(towards, weight, flag), gone if sent else None)
            found = torch.cat(pieces).double()
            assert (found - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max(), (dtype, sent, finite, weight)
            x.write(0, gone)
            assert torch.equal(torch.cat(pieces), gone)
        print(f"    {dtype}")


def codes_on_the_gpu_are_those_of_the_cpu() -> None:
    """Every number of bits, numbers of any size, rows that end inside a block. A tie may be rounded the other way."""
    for bits, size, d in itertools.product((16, 8, 4), (1e-40, 1e-7, 1.0, 1e30), (256, 1000, 100_003)):
        code, x = CODES[bits], torch.randn(3, d) * size
        for part in (x[0], x[0].double()):
            messages, decoded = [], []
            for device in ("cpu", "cuda"):
                on = part.to(device)
                message = torch.zeros(code.nbytes(d), dtype=torch.uint8, device=device)
                assert code.encode(on, code.places(message)).isfinite()
                messages.append(message.cpu())
                decoded.append(code.decode(code.places(message), torch.empty_like(on)).cpu())
            step = (part.max() - part.min()).item() / (2**bits - 1)
            assert (messages[0] != messages[1]).float().mean() <= (1e-3 if bits < 16 else 0), (bits, size, d)
            assert (decoded[0] - decoded[1]).abs().max() <= (1.01 * step if bits < 16 else 0), (bits, size, d)
        assert torch.equal(code.round_trip(x[:1].cuda())[0].cpu(), decoded[1].float())
        assert torch.equal(code.round_trip(x[:, : d // 2].cuda()), code.round_trip(x[:, : d // 2].cuda().contiguous()))
        bad = x[0].cuda()
        bad[d // 3] = float("nan")
        assert not code.encode(bad, code.places(torch.zeros(code.nbytes(d), dtype=torch.uint8, device=CUDA))).isfinite()
    x = torch.randn(32, 2_000_000, device=CUDA)
    times = {bits: seconds(lambda bits=bits: CODES[bits].round_trip(x)) for bits in CODES}  # type: ignore[misc]
    copy = seconds(lambda: x.clone())
    print(f"    32 x 2 M numbers: copy {copy * 1e6:.0f} us, " + ", ".join(f"{b} bits {t * 1e6:.0f} us" for b, t in times.items()))


def one_rank_with_the_hook(rank: int) -> list[torch.Tensor]:
    """The model after some steps of DDP with gradients of 4 bits, on the CPU and on the GPU."""
    found = []
    for device in ("cpu", "cuda"):
        ddp = nn.parallel.DistributedDataParallel(network().to(device), bucket_cap_mb=1e-4)  # several buckets
        ddp.register_comm_hook(rumor.ddp_hook_state(bits=4), rumor.ddp_hook)
        opt = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        x, y = (part.to(device) for part in data(30))
        for k in range(30):
            loss_fn(ddp, x[k, rank], y[k, rank]).backward()
            opt.step()
            opt.zero_grad()
        found.append(flat(ddp).cpu())
    return found


def the_hook_of_ddp_on_the_gpu_equals_the_cpu() -> None:
    cluster = Cluster(N)
    try:
        results = cluster.run(one_rank_with_the_hook)
    finally:
        cluster.stop()
    for on_cpu, on_gpu in results:
        assert torch.equal(on_gpu, results[0][1]), "all ranks take the same steps"
        difference = (on_cpu - on_gpu).abs().max().item()
        assert difference < 1e-6, difference
    print(f"    {difference:.1e}")


def stacked_gossip_on_the_gpu() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for topology in (rumor.ring(64), rumor.one_peer_exponential(50), rumor.exponential(33)):
            x = torch.randn(3, topology.n, 100, device=CUDA).to(dtype)
            expected, most = topology.W(1).to(CUDA) @ x.double(), 1e-12 if dtype == torch.float64 else 1e-5
            for triton, csr in ((True, True), (False, True), (False, False)):
                engine = rumor.Stacked(topology.n, CUDA)
                assert engine._use_triton
                engine._use_triton, engine._use_csr = triton, csr
                mixed = engine.gossip(x, topology, 1).wait().x
                assert (mixed.double() - expected).abs().max() < most
                leaves = StackedBuckets([x.clone()])
                engine.gossip(leaves.read(0), topology, 1).mix_into(leaves, 0)
                assert (leaves.peek(0).double() - expected).abs().max() < max(most, 4 * torch.finfo(dtype).eps)
    x = torch.randn(8, 30_000_001, device=CUDA)  # more columns than cuSPARSE takes at once
    mixed = rumor.Stacked(8, CUDA).gossip(x, rumor.ring(8), 0).wait().x
    assert (mixed - rumor.ring(8).W(0).to(x) @ x).abs().max() < 1e-5
    x = torch.randn(10_000, 1000, device=CUDA)
    engine, topology, other = rumor.Stacked(10_000, CUDA), rumor.ring(10_000), torch.empty_like(x)
    leaves = StackedBuckets([x])
    gossip = seconds(lambda: engine.gossip(x, topology, 0).wait())
    step = seconds(lambda: leaves.write(0, engine.gossip(x, topology, 0).wait().x))
    copy = seconds(lambda: other.copy_(x))
    print(f"    ring of 10,000, d = 1,000: copy {copy * 1e6:.0f} us, gossip {gossip * 1e6:.0f} us, written back {step * 1e6:.0f} us")


def seconds(run: Any, repeats: int = 50) -> float:
    for _ in range(3):
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


def nccl_path_never_waits_for_the_device_on_a_gossip_step() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    dist.init_process_group("nccl", rank=0, world_size=1)
    world = dist.group.WORLD
    for local_group in (None, world):
        alone = rumor.Averager(network().cuda(), rumor.gossip_pga(rumor.ring(1), 2), group=world, local_group=local_group)
        for _ in range(4):
            alone.step()
        alone.finish()
        assert alone.consensus_distance() == 0
    real, engine_of_processes.Transport = engine_of_processes.Transport, Echo  # type: ignore[misc]
    several, one = (rumor.ring(4), rumor.exponential(4)), rumor.one_peer_exponential(4)
    methods = (rumor.gossip_sgd(several[0]), rumor.gossip_sgd(several[1], delay=1), rumor.osgp(several[0]))
    methods += (rumor.gossip_sgd(one), rumor.gossip_sgd(one, delay=1))
    for algorithm, local_group in itertools.product(methods, (None, world)):  # inside a node, too, it must not wait
        model = nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 20)).cuda()
        averager = rumor.Averager(model, algorithm, group=world, local_group=local_group)
        averager.step()
        averager.step()
        before = [p.detach().clone() for p in model.parameters()]
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(5):
            averager.step()
        torch.cuda.set_sync_debug_mode("default")
        if algorithm.delay == 0:  # an echo leaves the model as it is
            assert all(torch.allclose(p, was, atol=1e-6) for p, was in zip(model.parameters(), before, strict=True))
        assert not math.isfinite(float(averager.engine.alarm.as_tensor()))
        with torch.no_grad():
            model[0].bias[3] = float("nan")
        raised = ""
        for _ in range(20):
            try:
                averager.step()
            except FloatingPointError as error:
                raised = str(error)
                break
            torch.cuda.synchronize()
        assert "model of node" in raised, "the host hears of it, though it never waits"
        print(f"    {algorithm}: no synchronisation; a bad model is noted, and raised")
    engine_of_processes.Transport = real  # type: ignore[misc]
    dist.destroy_process_group()


def the_convex_study_replayed_on_the_gpu_equals_the_cpu() -> None:
    from logistic.problem import synthetic
    from logistic.run import Walk, learning_rates, run

    steps, problem = 1_500, synthetic(20, iid=False)
    algorithms = [rumor.parallel_sgd(20), rumor.gossip_sgd(rumor.exponential(20)), rumor.gossip_pga(rumor.one_peer_exponential(20), 6)]
    results = run(problem.to("cuda"), algorithms, trials=4, steps=steps, seed=3)
    draw = torch.Generator("cuda").manual_seed(3)
    samples = torch.randint(8000, (steps, 4, 20), generator=draw, dtype=torch.int16, device="cuda").cpu()
    errors, _ = Walk(problem, algorithms, 4).walk(0, samples, learning_rates(steps))
    for m, (algorithm, result) in enumerate(zip(algorithms, results, strict=True)):
        worst = float(((result.node_error - errors[:, m]) / errors[:, m]).abs().max())
        assert worst < 1e-10, (algorithm, worst)
        print(f"    {algorithm.topology}: {worst:.1e}")


def convolutions_of_all_nodes_are_torchs() -> None:
    """Result and gradients, in shapes of the image study's network, as far from float64 as cuDNN's own in bfloat16 are."""
    from images.convolution import convolution

    def torchs(x: torch.Tensor, w: torch.Tensor, padding: int) -> torch.Tensor:
        return nn.functional.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), padding=padding).permute(0, 2, 3, 1)

    random = torch.Generator(CUDA).manual_seed(0)
    for side, channels, out, size, padding in (
        (32, 3, 24, 2, 0),
        (31, 24, 64, 3, 1),
        (15, 64, 256, 3, 1),
        (7, 256, 256, 3, 1),
        (3, 5, 7, 3, 1),
    ):
        x = torch.randn(N, 8, side, side, channels, device=CUDA, generator=random).bfloat16()
        w = (torch.randn(N, out, size, size, channels, device=CUDA, generator=random) / (size * channels**0.5)).bfloat16()
        found = []
        for function, dtype in ((convolution, torch.bfloat16), (torchs, torch.bfloat16), (torchs, torch.float64)):
            inputs = [t.detach().clone().to(dtype).requires_grad_() for t in (x, w)]
            y = torch.func.vmap(lambda x, w, function=function, padding=padding: function(x, w, padding))(*inputs)
            y.float().square().sum().backward()
            found.append([t.detach().double() for t in (y, *(t.grad for t in inputs))])
        ours, cudnns, exact = found
        errors = [[float((a - b).norm() / b.norm()) for a, b in zip(one, exact, strict=True)] for one in (ours, cudnns)]
        assert all(mine < 1.5 * theirs + 1e-4 for mine, theirs in zip(*errors, strict=True)), errors
        print(f"    {side} x {side}, {channels} to {out}: {max(errors[0]):.1e} (cuDNN {max(errors[1]):.1e})")


def compiled_lamb_captured_in_a_graph_takes_the_same_steps() -> None:
    from networks.engines import captured
    from text.lamb import Lamb

    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, device=CUDA)) for shape in ((N, 40, 30), (N, 30))]
        opt = Lamb(params, lr=torch.tensor(0.01, device=CUDA), stacked=True, compiled=compiled)

        def step(params: list[nn.Parameter] = params, opt: Lamb = opt) -> torch.Tensor:
            opt.zero_grad()
            loss = sum((p.sin() ** 2).sum() for p in params)
            loss.backward()
            opt.step()
            return loss.detach()

        take = captured(step) if compiled else step  # which takes three steps to warm up
        for _ in range(8 if compiled else 11):
            loss = take()
        results.append([p.detach() for p in params] + [loss])
    worst = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    assert worst < 1e-3, worst
    print(f"    {worst:.1e}")


def the_image_study_trains_on_both_engines() -> None:
    """As far as one GPU can show it: one rank over NCCL. A toy, which checks that nothing breaks, not what comes out."""
    from tests.test_accuracy import write_data

    script = Path(__file__).parents[1] / "experiments" / "image_classification.py"
    options = ["--net", "tiny", "--table", "quick", "--epochs", "1", "--batch", "8", "--device", "cuda", "--nodes", "1"]
    for engine, under in (("simulated", ()), ("processes", ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"))):
        with tempfile.TemporaryDirectory() as folder:
            write_data(Path(folder))
            out = Path(folder) / "found.csv"
            named = ["--data", folder, "--engine", engine, "--out", str(out)]
            subprocess.run([sys.executable, *under, str(script), *options, *named], check=True, capture_output=True, timeout=300)
            rows = out.read_text().splitlines()
            assert len(rows) == 1 + 5, rows
            print(f"    {engine}: {len(rows) - 1} runs")


def main() -> None:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for check in (
        simulator_on_the_gpu_equals_the_cpu,
        one_fused_pass_equals_several,
        codes_on_the_gpu_are_those_of_the_cpu,
        the_hook_of_ddp_on_the_gpu_equals_the_cpu,
        stacked_gossip_on_the_gpu,
        processes_that_share_the_gpu_equal_the_simulator,
        nodes_of_two_that_share_the_gpu_equal_the_simulator,
        nccl_path_never_waits_for_the_device_on_a_gossip_step,
        the_convex_study_replayed_on_the_gpu_equals_the_cpu,
        convolutions_of_all_nodes_are_torchs,
        compiled_lamb_captured_in_a_graph_takes_the_same_steps,
        the_image_study_trains_on_both_engines,
    ):
        print(check.__name__.replace("_", " "))
        check()
    print("all passed")


if __name__ == "__main__":
    main()
