"""Estimators of sigma^2, b^2 and L, on problems where all three are known."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rumor
from rumor import theory


def dot(model: nn.Module, g: Tensor) -> Tensor:
    """A loss whose gradient is `g`, plus a constant curvature."""
    return sum((p * p).sum() for p in model.parameters()) / 2 + (model.weight * g).sum()


def test_sigma2_and_b2_are_unbiased() -> None:
    """Gradients a_i + noise with ||a_i||^2 and E||noise||^2 known; K = 2, so that the noise's share must be taken off."""
    n, K, d, sigma2 = 6, 2, 4000, 3.0
    a = torch.randn(n, 1, d, dtype=torch.float64) * 0.02
    a -= a.mean(dim=0)
    b2 = float(a.square().sum(dim=-1).mean())  # about 1.3, below the noise's share of about 1.25 + 1.3
    batches = [[(g,) for g in node] for node in a + torch.randn(n, K, d, dtype=torch.float64) * math.sqrt(sigma2 / d)]
    found = theory.estimate(nn.Linear(d, 1, bias=False, dtype=torch.float64), dot, batches)
    assert found.n == n
    assert found.sigma2 == pytest.approx(sigma2, rel=0.05)
    assert found.b2 == pytest.approx(b2, rel=0.1)
    assert pytest.approx(1.0, rel=1e-6) == found.L


def test_equal_nodes_have_no_b2_and_equal_batches_no_sigma2() -> None:
    d = 50
    model = nn.Linear(d, 1, bias=False, dtype=torch.float64)
    noisy = [[(torch.randn(d, dtype=torch.float64),) for _ in range(4)] for _ in range(5)]
    assert theory.estimate(model, dot, noisy).b2 < 0.1 * 50 / 4
    same = [[(torch.ones(d, dtype=torch.float64) * i,)] * 3 for i in range(3)]
    found = theory.estimate(model, dot, same)
    assert found.sigma2 == pytest.approx(0, abs=1e-20)
    assert found.b2 == pytest.approx(d * 2 / 3)


def logistic_loss(model: nn.Module, h: Tensor, y: Tensor) -> Tensor:
    return nn.functional.softplus(-y * model(h).squeeze(-1)).mean()


def test_logistic_regression_at_the_origin_against_numpy() -> None:
    """At x = 0 every sample's gradient is -y h / 2 and the Hessian h h' / 4: all can be had in numpy, and L is the L of all x."""
    n, K, batch, d = 5, 6, 7, 8
    generator = np.random.default_rng(1)
    h = generator.standard_normal((n, K, batch, d)) * np.linspace(0.5, 2, n)[:, None, None, None]
    y = np.sign(generator.standard_normal((n, K, batch)) + 0.5)
    model = nn.Linear(d, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    batches = [[(torch.from_numpy(h[i, k]), torch.from_numpy(y[i, k])) for k in range(K)] for i in range(n)]
    found = theory.estimate(model, logistic_loss, batches, tolerance=1e-9)
    g = -(h * y[..., None]).mean(axis=2) / 2  # [n, K, d]
    sigma2 = g.var(axis=1, ddof=1).sum(axis=-1).mean()
    naive = ((g.mean(axis=1) - g.mean(axis=(0, 1))) ** 2).sum(axis=-1).mean()
    L = [np.linalg.eigvalsh(hi.reshape(-1, d).T @ hi.reshape(-1, d) / (K * batch) / 4)[-1] for hi in h]
    assert found.sigma2 == pytest.approx(sigma2)
    assert found.b2 == pytest.approx(naive - (1 - 1 / n) * sigma2 / K)
    assert pytest.approx(max(L), rel=1e-6) == found.L
    assert found.loss == pytest.approx(math.log(2))
    all_of_them = h.reshape(-1, d)
    of_the_mean = theory.smoothness(model, logistic_loss, [batch for node in batches for batch in node], tolerance=1e-9)
    assert of_the_mean == pytest.approx(np.linalg.eigvalsh(all_of_them.T @ all_of_them / len(all_of_them) / 4)[-1], rel=1e-6)
    assert of_the_mean < found.L
    guarantee = theory.theorem_2(rumor.local_sgd(n, 4), L=found.L, sigma2=found.sigma2, b2=found.b2, F_0=found.loss)
    assert 0 < guarantee.step_size(T=10**6) < 1 / (12 * found.L * 4)


def network_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def data(n: int, K: int, inputs: int, classes: int) -> list[list[tuple[Tensor, Tensor]]]:
    return [[(torch.randn(16, inputs), torch.randint(classes, (16,))) for _ in range(K)] for _ in range(n)]


def test_L_of_a_network_is_the_spectral_norm_of_its_full_hessian() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    batches = [(x.double(), y) for x, y in data(1, 3, 4, 3)[0]]
    names = [name for name, _ in model.named_parameters()]

    def loss(*x: Tensor) -> Tensor:
        parameters = dict(zip(names, x, strict=True))
        return sum(nn.functional.cross_entropy(torch.func.functional_call(model, parameters, (h,)), y) for h, y in batches) / 3  # type: ignore[return-value]

    rows: Any = torch.autograd.functional.hessian(loss, tuple(p.detach() for p in model.parameters()))
    sizes = [p.numel() for p in model.parameters()]
    hessian = torch.cat(
        [torch.cat([block.reshape(a, b) for block, b in zip(row, sizes, strict=True)], 1) for row, a in zip(rows, sizes, strict=True)]
    )
    found = theory.smoothness(model, network_loss, batches, tolerance=1e-8)
    assert found == pytest.approx(float(torch.linalg.eigvalsh(hessian).abs().max()), rel=1e-5)


def test_the_model_is_left_as_it_was_and_the_numbers_repeat() -> None:
    """Batch norm's statistics, dropout's random numbers, gradients, the mode and a frozen layer."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model[3].requires_grad_(False)
    model[0].weight.grad = torch.ones(8, 6)
    batches = data(3, 2, 6, 3)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    random = torch.get_rng_state()
    first = theory.estimate(model, network_loss, batches)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert model[3].weight.grad is None
    assert model[5].weight.grad is None
    assert torch.equal(model[0].weight.grad, torch.ones(8, 6))
    torch.randn(5)
    with torch.no_grad():
        assert theory.estimate(model, network_loss, batches) == first
    assert theory.estimate(model, network_loss, batches, seed=1) != first
    assert first.sigma2 > 0
    assert first.L > 0


def test_attention_and_unused_parameters_are_no_obstacle() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.head, self.unused = nn.Linear(8, 3), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = x.view(16, 4, 8)
            mixed: Tensor = self.attention(x, x, x, need_weights=False)[0]
            return self.head(mixed.mean(dim=1))  # type: ignore[no-any-return]

    found = theory.estimate(Attending(), network_loss, data(2, 2, 32, 3))
    assert found.L > 0


def test_a_loss_without_curvature_has_L_0() -> None:
    model = nn.Linear(3, 1, bias=False)
    found = theory.estimate(model, lambda model, x: model(x).sum(), [[torch.ones(2, 3), torch.zeros(2, 3)]])
    assert found.L == 0
    assert found.sigma2 == pytest.approx(2 * 3)
    assert found.b2 == 0


def test_what_gives_no_estimate_is_refused() -> None:
    model, x = nn.Linear(3, 1), torch.ones(2, 3)
    with pytest.raises(ValueError, match="at least 2 batches of each node, node 1 has 1"):
        theory.estimate(model, lambda model, x: model(x).sum(), [[x, x], [x]])
    with pytest.raises(ValueError, match="batches is empty"):
        theory.estimate(model, lambda model, x: model(x).sum(), [])
    with pytest.raises(ValueError, match=r"one number, got a tensor of shape \[2, 1\]"):
        theory.estimate(model, lambda model, x: model(x), [[x, x]])
    with pytest.raises(ValueError, match="depends on the model's parameters"):
        theory.estimate(model, lambda model, x: 3.0, [[x, x]])
    with pytest.raises(ValueError, match="loss of batch 0 is nan"):
        theory.estimate(model, lambda model, x: model(x[:0]).mean(), [[x, x]])
    with pytest.raises(ValueError, match="complex parameters"):
        theory.estimate(nn.Linear(3, 1, dtype=torch.complex64), lambda model, x: model(x).abs().sum(), [[x, x]])
    with pytest.raises(ValueError, match="nothing to estimate"):
        theory.estimate(model.requires_grad_(False), lambda model, x: model(x).sum(), [[x, x]])
