"""Compares the consensus distance in runs of the logistic-regression study with the closed form of rumor.theory and the lemma's bound.

Expect the closed form to be within about 10 % of the runs, and the bound of the running consensus lemma (26) to hold with a wide margin.
It takes less than a minute on one core.

    python experiments/consensus_distance.py --out FOLDER          # writes consensus.csv and constants.csv
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from tqdm import tqdm

import rumor
from logistic import tables
from logistic.problem import Problem, synthetic
from logistic.run import Walk
from rumor import theory

LR, H, TRIALS, STEPS, SETTLED = 0.003, 16, 16, 5_000, 2_000
BATCHES = 100  # batches per node for the estimates, of one sample each


class Linear(nn.Module):
    def __init__(self, x: Tensor):
        super().__init__()
        self.x = nn.Parameter(x.clone())


def loss(model: Linear, rows: Tensor) -> Tensor:
    return softplus(-(rows @ model.x)).mean()


def exact(problem: Problem) -> dict[str, float]:
    """Computes sigma^2, b^2, and the largest and mean curvature at x*, from all samples."""
    p = torch.sigmoid(-(problem.rows @ problem.minimizer))[..., None]  # [n, M, 1]
    gradients = -p * problem.rows
    own = gradients.mean(1)  # [n, d]
    hessians = (problem.rows * (p * (1 - p))).mT @ problem.rows / problem.rows.shape[1]  # [n, d, d]
    return {
        "sigma2": float((gradients - own[:, None]).square().sum(-1).mean()),
        "b2": float(own.square().sum(-1).mean()),
        "L": float(torch.linalg.eigvalsh(hessians).max()),
        "mu": float(problem.hessian.trace() / problem.d),
    }


def estimated(problem: Problem) -> theory.Estimate:
    """Estimates the same constants with `rumor.theory.estimate`, from a model and a few batches of each node."""
    batches = [[(rows[m : m + 1],) for m in range(BATCHES)] for rows in problem.rows]
    return theory.estimate(Linear(problem.minimizer), loss, batches)


def measured(problem: Problem, algorithms: list[rumor.GossipPGA], progress: tqdm) -> tuple[Tensor, Tensor]:
    """Measures the means over steps and trials of 1/n sum ||x_i - xbar||^2, once it has settled, and of f(xbar) - f*: [methods]."""
    draw = torch.Generator().manual_seed(0)
    samples = torch.randint(problem.rows.shape[1], (STEPS, TRIALS, problem.n), generator=draw, dtype=torch.int16)
    walk = Walk(problem, algorithms, TRIALS)
    walk.X += problem.minimizer  # the closed form holds near the end of a run
    distances, means = [], []
    for k in range(STEPS):
        walk.step(samples[k], torch.tensor(LR, dtype=torch.float64))
        if k >= SETTLED:
            mean = walk.X.mean(-2, keepdim=True)
            distances.append((walk.X - mean).square().sum((-2, -1)).mean(-1) / problem.n)
            if k % 100 == 0:
                means.append(mean.squeeze(-2))
        progress.update()
    return torch.stack(distances).mean(0), problem.gap(torch.stack(means)).mean((0, -1))


def rows_of(problem: Problem, constants: dict[str, float], progress: tqdm) -> list[tables.Row]:
    n = problem.n
    algorithms = [rumor.local_sgd(n, H)]
    for graph in (rumor.ring, rumor.grid):
        algorithms += [rumor.gossip_pga(graph(n), H), rumor.gossip_sgd(graph(n))]
    found, gaps = measured(problem, algorithms, progress)
    rows: list[tables.Row] = []
    for algorithm, distance, gap in zip(algorithms, found.tolist(), gaps.tolist(), strict=True):
        period = theory.mixing(algorithm).H
        closed = theory.consensus_distance(algorithm.topology, period, LR, constants["sigma2"], constants["b2"], constants["mu"])
        known = {name: constants[name] for name in ("L", "sigma2", "b2")}
        try:
            bound = f"{theory.running_consensus_bound(algorithm, lr=LR, mean_B=gap, **known) / n:.3g}"
        except ValueError:  # the step size is above 1/(4 L beta D_beta)
            bound = "lr too large"
        row: tables.Row = {"topology": algorithm.topology.name, "n": n, "H": period, "measured": f"{distance:.4g}"}
        rows.append(row | {"closed_form": f"{closed:.4g}", "deviation": f"{closed / distance - 1:+.1%}", "lemma_5": bound})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("logistic-regression"))
    out: Path = parser.parse_args().out
    distances: list[tables.Row] = []
    known: list[tables.Row] = []
    settings = [(20, False), (20, True), (100, False)]
    with tqdm(total=STEPS * len(settings), unit=" steps") as progress:
        for n, iid in settings:
            problem = synthetic(n, iid)
            constants, guess = exact(problem), estimated(problem)
            known += [{"n": n, "iid": iid, "from": "all samples"} | {name: f"{value:.3g}" for name, value in constants.items()}]
            known += [
                {"n": n, "iid": iid, "from": f"{BATCHES} a node", "mu": "-"}
                | {c: f"{getattr(guess, c):.3g}" for c in ("sigma2", "b2", "L")}
            ]
            distances += [{"iid": iid} | row for row in rows_of(problem, constants, progress)]
    tables.write(out / "consensus.csv", tables.as_csv(distances))
    tables.write(out / "constants.csv", tables.as_csv(known))
    print(tables.as_text(known), tables.as_text(distances), sep="\n\n")


if __name__ == "__main__":
    main()
