"""experiments/adamw.py: AdamW on a GPT, with second moments that are corrected for noise."""

import argparse
import csv
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests import warm

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

import adamw  # noqa: E402
import rumor  # noqa: E402
from text import gpt  # noqa: E402


def test_the_study_of_adamw_runs_and_does_not_run_again_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "enwik8").write_bytes(bytes(range(97, 123)) * 400_000)
    script = ROOT / "experiments" / "adamw.py"
    small = ["--batch", "1", "--steps", "7", "--length", "16", "--width", "32", "--layers", "1", "--evaluated", "4", "--lr", "0.001"]
    for methods in (["DDP", "Gossip-PGA"], ["Gossip-PGA", "Gossip-PGA, corrected"]):
        done = warm.run([script, "--data", tmp_path, "--out", tmp_path / "found.csv", *small, "--methods", *methods])
        assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "found.csv").read_text().splitlines()))
    assert [row["method"] for row in rows] == ["DDP", "Gossip-PGA", "Gossip-PGA, corrected"]
    assert len({row["loss"] for row in rows}) == 3
    assert "best minus DDP's best" in done.stdout


def small_options(**others: object) -> argparse.Namespace:
    small = {"nodes": 4, "steps": 8, "batch": 1, "length": 16, "width": 32, "layers": 1, "evaluated": 4, "optimizer": "adamw"}
    return argparse.Namespace(**{**small, **others})


@pytest.fixture
def letters() -> Tensor:
    return torch.randint(97, 123, (gpt.HELD_OUT + 10_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_a_run_is_the_same_after_another_run_of_the_same_nodes(letters: Tensor) -> None:
    options = small_options()
    nodes = adamw.Nodes(letters, options)
    for name in ("DDP, 4 bits, optimizer=", "DDP, 4 bits, then Gossip-PGA from 1/2"):
        first, _, again = (adamw.train(nodes, each, 1e-3, 0, letters, options)[:2] for each in (name, "Gossip-PGA", name))
        assert first == again


def test_gradients_are_averaged_first_and_models_at_the_end(letters: Tensor) -> None:
    options = small_options()
    nodes, first, both = adamw.Nodes(letters, options), "DDP, 4 bits, optimizer=", "DDP, 4 bits, then Gossip-PGA from 1/2"
    sent = {name: adamw.train(nodes, name, 1e-3, 0, letters, options)[1] for name in (first, both)}
    nodes.start(0, adamw.pga(4), None)
    for _ in range(options.steps // 2):
        nodes.sim.step(nodes.backward())
    assert sent[both] == pytest.approx(sent[first] / 2 + nodes.sim.metrics.bytes_sent / 1e6)


def test_further_seeds_take_the_best_rate_of_the_first() -> None:
    rows = [
        {"method": "DDP", "seed": "0", "lr": lr, "loss": loss} for lr, loss in (("1.0", "nan"), ("2.0", "3"), ("4.0", "2"), ("8.0", "1"))
    ]
    assert adamw.best_rate(rows, "DDP", [1.0, 2.0, 4.0]) == 4.0


def test_the_layers_of_the_gpt_compute_what_torchs_compute() -> None:
    model = adamw.GPT(length=12, width=16, layers=2).double()
    hidden = torch.randn(3, 12, 16, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(12, dtype=torch.float64)
    for layer in model.layers.layers:
        torch.testing.assert_close(gpt.advanced(layer, hidden), layer(hidden, src_mask=mask, is_causal=True))


def test_corrected_second_moments_are_those_of_the_mean_gradient() -> None:
    n, steps, noise = 4, 200, 2.0
    g = torch.linspace(0.5, 3.0, 2_000)
    corrected, plain, ddp = (nn.Parameter(torch.zeros(n if own else 1, len(g))) for own in (True, True, False))
    opts = [torch.optim.Adam([leaf], lr=1e-3, betas=adamw.BETAS) for leaf in (corrected, plain, ddp)]
    moments = adamw.SecondMoments(opts[0], [corrected], n)
    for step in range(steps):
        grads = g + noise * torch.randn(n, len(g))
        corrected.grad, plain.grad, ddp.grad = grads.clone(), grads.clone(), grads.mean(0, keepdim=True)
        for opt in opts:
            opt.step()
        moments.correct(step + 1)
        moments.remember()
    means = [float(opt.state[leaf]["exp_avg_sq"].mean()) for opt, leaf in zip(opts, (corrected, plain, ddp), strict=True)]
    assert means[2] == pytest.approx(float(g.square().mean()) + noise**2 / n, rel=0.05)
    assert means[0] == pytest.approx(means[2], rel=0.06)
    assert means[1] == pytest.approx(float(g.square().mean()) + noise**2, rel=0.05), "which is far more"


@pytest.mark.parametrize(("mixing", "bits"), [("mean", 32), ("coded mean", 4), ("scaled coded mean", 4), ("gossip", 4)])
def test_gradients_are_mixed_before_the_step(mixing: adamw.Mixing, bits: int) -> None:
    """Gossip with one peer is a mean of two nodes. Codes keep the mean of all nodes, but for what a coded mean leaves to its next one."""
    n = 4
    sim = rumor.Simulator(nn.Linear(255, 4), adamw.alone(n))
    grads = torch.randn(n, 1024)
    for leaf, own in zip(sim.parameters(), grads.split([1020, 4], dim=1), strict=True):
        leaf.grad = own.reshape(leaf.shape).clone()
    adamw.Gradients(sim, mixing, torch.optim.AdamW(sim.parameters())).mix(k=0)
    mixed = torch.cat([leaf.grad.flatten(1) for leaf in sim.parameters() if leaf.grad is not None], dim=1)
    expected = (grads + grads.roll(1, 0)) / 2 if mixing == "gossip" else grads.mean(0).expand_as(grads)
    assert min((mixed - other).abs().max() for other in (expected, expected.roll(-1, 0))) < (1e-6 if bits == 32 else 0.6)
    torch.testing.assert_close(mixed.mean(0), grads.mean(0), rtol=0, atol=0.3 if "coded mean" in mixing else 1e-6)
    messages = 1 if mixing == "gossip" else 2 * (n - 1) / n
    assert sim.metrics.bytes_sent == pytest.approx(messages * 1024 * bits / 8, rel=0.05)
