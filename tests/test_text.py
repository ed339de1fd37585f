"""The text study: LAMB, reading and tokenising text, riddles, and toy runs of the command."""

import copy
import csv
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

from networks import compare, trials  # noqa: E402
from networks.engines import Simulated  # noqa: E402
from networks.page import rates_table, stores  # noqa: E402
from networks.runs import Run, changed  # noqa: E402
from networks.store import Finished, Point, Settings, Store, rows_of  # noqa: E402
from tests import warm  # noqa: E402
from text.data import GUESSES, LENGTH, Sequences, Special, articles, masked, tokens  # noqa: E402
from text.lamb import Lamb  # noqa: E402
from text.study import EARLIER_LAMB, PARALLEL, PGA, RECIPES, TABLES, settings_of  # noqa: E402
from text.train import algorithm_of, batches, lr_at, optimizer  # noqa: E402

WORDS = ["the", "of", "rain", "cat", "dog", "sat", "on", "a", "mat", "and", "sun", "##s"]


# ---- LAMB -------------------------------------------------------------------------------------------------------------------------


def by_the_book(x: np.ndarray, gradients: list[np.ndarray], lr: float, weight_decay: float, always_adapt: bool) -> np.ndarray:
    """Algorithm 2 of You et al. (2020), with the identity for phi, and gradients clipped to norm 1."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(gradients, 1):
        g = g / max(1.0, np.linalg.norm(g))
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        r = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + weight_decay * x
        ratio = np.linalg.norm(x) / np.linalg.norm(r) if weight_decay or always_adapt else 1.0
        x = x - lr * ratio * r
    return x


@pytest.mark.parametrize("always_adapt", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_goes_by_the_book(weight_decay: float, always_adapt: bool) -> None:
    random = np.random.default_rng(0)
    start = random.normal(size=(3, 4))
    gradients = [size * random.normal(size=(3, 4)) for size in (1, 10, 0.01, 3, 0.1)]  # clipped and not
    x = torch.nn.Parameter(torch.tensor(start))
    opt = Lamb([x], lr=0.1, weight_decay=weight_decay, always_adapt=always_adapt)
    for g in gradients:
        x.grad = torch.tensor(g)
        opt.step()
    assert np.abs(x.detach().numpy() - by_the_book(start, gradients, 0.1, weight_decay, always_adapt)).max() < 1e-12


# timm 1.0.30's Lamb(lr=0.05), six steps as in the test below: as it comes (always_adapt=False, max_grad_norm=1.0), then with
# always_adapt=True, max_grad_norm=None, which is the LAMB of the earlier results
TIMM = """
    0.497891051 0.994940375 0.284940428 -0.827548786 -0.767278028 -0.217156421 0.354269102 0.975246049 0.512785444 -0.527409232 -0.899621729
    -0.474600797 0.874700884 0.416239078 -0.473876645 -0.909170703
"""
TIMM_EARLIER = """
    0.462916527 0.939354247 0.242210457 -0.66798456 -0.836217223 -0.234880977 0.32660711 0.981569353 0.513334781 -0.437703165 -0.876441495
    -0.473631228 0.860264264 0.44335325 -0.406334346 -0.893555999
"""


@pytest.mark.parametrize("is_earlier", [False, True])
def test_lamb_agrees_with_another_implementation(is_earlier: bool) -> None:
    i = torch.arange(12, dtype=torch.float64).view(3, 4)
    weight, bias = torch.nn.Parameter(torch.sin(i + 1)), torch.nn.Parameter(torch.cos(i[0]))
    groups = [{"params": [weight], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.01 if is_earlier else 0.0}]
    opt = Lamb(groups, lr=0.05, max_norm=None, always_adapt=True) if is_earlier else Lamb(groups, lr=0.05)
    for t in range(6):
        size = 1.0 if is_earlier else 3.0 if t % 2 else 0.1  # every other gradient is clipped
        weight.grad, bias.grad = size * torch.cos(i * (t + 1)), size * torch.sin(i[0] + t)
        opt.step()
    found, theirs = torch.cat([weight.detach().flatten(), bias.detach()]), TIMM_EARLIER if is_earlier else TIMM
    assert torch.allclose(found, torch.tensor([float(x) for x in theirs.split()], dtype=torch.float64), atol=2e-9, rtol=0)


def test_stacked_lamb_is_each_nodes_own() -> None:
    """Also the norm by which its gradients are clipped, which is that of all its tensors together."""
    torch.manual_seed(0)
    shapes, sizes = [(4, 3, 2), (4, 3)], torch.tensor([0.1, 0.3, 1.0, 3.0])  # two nodes are clipped, or three
    stacked = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    alone = [[torch.nn.Parameter(x.detach()[node].clone()) for x in stacked] for node in range(4)]
    together, apart = Lamb(stacked, stacked=True), [Lamb(own) for own in alone]
    for _ in range(5):
        gradients = [torch.randn(shape) * sizes.view(-1, *[1] * (len(shape) - 1)) for shape in shapes]
        for x, g in zip(stacked, gradients, strict=True):
            x.grad = g.clone()
        together.step()
        for node, (own, opt) in enumerate(zip(alone, apart, strict=True)):
            for x, g in zip(own, gradients, strict=True):
                x.grad = g[node].clone()
            opt.step()
    for place, x in enumerate(stacked):
        assert torch.allclose(x.detach(), torch.stack([own[place].detach() for own in alone]), atol=1e-6)


def test_compiled_lamb_takes_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is compiled once, however lr changes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # traced as a whole; no compiler needed
    torch.manual_seed(0)
    lr, start, found = torch.tensor(0.1), [torch.randn(4, 3, 2), torch.randn(4, 3)], []
    for compiled in (False, True):
        params = [torch.nn.Parameter(x.clone()) for x in start]
        opt, random = Lamb(params, lr=lr, stacked=True, compiled=compiled), torch.Generator().manual_seed(1)
        for step in range(4):
            lr.fill_(0.1 / (step + 1))
            for p in params:
                p.grad = torch.randn(p.shape, generator=random)
            with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
                opt.step()
        found.append([p.detach() for p in params])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))


def test_lamb_moves_what_is_zero() -> None:
    x = torch.nn.Parameter(torch.zeros(3))
    x.grad = torch.ones(3)
    Lamb([x], lr=0.1).step()
    assert torch.allclose(x.detach(), torch.full((3,), -0.1), atol=1e-4)


def test_lamb_moves_a_small_bias_as_far_as_a_large_one() -> None:
    """In proportion to its norm, a bias that begins at zero would stay there for a thousand steps."""
    for size in (1e-6, 1.0):
        x = torch.nn.Parameter(torch.full((3,), size))
        x.grad = torch.ones(3)
        Lamb([x], lr=0.1, weight_decay=0.0).step()
        assert torch.allclose(x.detach(), torch.full((3,), size - 0.1), atol=1e-4)


@pytest.mark.parametrize("stacked", [False, True])
def test_lamb_leaves_a_gradient_of_zero_as_it_is(stacked: bool) -> None:
    x = torch.nn.Parameter(torch.ones(2, 3))
    x.grad = torch.zeros(2, 3)
    Lamb([x], lr=0.1, weight_decay=0.0, stacked=stacked).step()
    assert torch.equal(x.detach(), torch.ones(2, 3))


def test_lamb_refuses_a_norm_that_clips_everything() -> None:
    with pytest.raises(ValueError, match=r"max_norm > 0, or None for no clipping, got max_norm=0"):
        Lamb([torch.nn.Parameter(torch.ones(1))], max_norm=0.0)


# ---- text -------------------------------------------------------------------------------------------------------------------------


def test_mark_up_is_left_out() -> None:
    page = (
        "<page><title>Rain</title><text xml:space='preserve'>'''Rain''' is [[water|wet]] {{stub|{{x}}}}&amp;amp; [[cold]]"
        "[[Image:a.png|thumb|a [[cloud]]]]&lt;ref&gt;no&lt;/ref&gt;\n{| table |}==End==</text></page>"
        "<page><title>R</title><text>#REDIRECT [[Rain]]</text></page>"
    )
    assert list(articles(page)) == ["Rain\nRain is wet & cold\nEnd"]


def vocabulary(folder: Path) -> Path:
    path = folder / "words.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    return path


def write_text(folder: Path, lines: int) -> None:
    folder.mkdir()
    random = np.random.default_rng(0)
    whole = [word for word in WORDS if not word.startswith("#")]
    for name in ("one", "two"):
        text = "\n".join(" ".join(random.choice(whole, size=12)) for _ in range(lines))
        (folder / f"{name}.txt").write_text("\ufeff" + text.replace("\n", "\r\n"), encoding="utf-8")


def test_text_is_tokenised_once(tmp_path: Path) -> None:
    write_text(tmp_path / "books", 3)
    words = vocabulary(tmp_path)
    found = tokens(tmp_path / "books", words, tmp_path / "cache")
    special = Special.of(words)
    assert (found == special.sep).sum() == 2  # one at the end of each document
    listed = words.read_text().split()
    assert [listed[number] for number in found[:12]] == (tmp_path / "books" / "one.txt").read_text("utf-8-sig").split()[:12]
    assert len(found) == 2 * (3 * 12 + 1)
    (cached,) = (tmp_path / "cache").iterdir()
    np.save(cached, found[:5])
    assert len(tokens(tmp_path / "books", words, tmp_path / "cache")) == 5


def test_riddles_are_as_berts() -> None:
    special = Special(2, 3, 4, 1000)
    x = torch.randint(5, 1000, (400, LENGTH), dtype=torch.int32)
    x[:, 0], x[:, -1] = special.cls, special.sep
    seen, places, there = masked(x, special, torch.Generator().manual_seed(0))
    assert places.shape == there.shape == (400, GUESSES)
    assert torch.equal(x.gather(1, places).long(), there)
    assert 1 <= places.min() <= places.max() <= LENGTH - 2
    assert all(len(set(row.tolist())) == GUESSES for row in places)
    shown = seen.gather(1, places)
    assert (shown == special.mask).float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (shown == there).float().mean().item() == pytest.approx(0.1, abs=0.02)
    assert torch.equal(seen.scatter(1, places, there), x.long())


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 128 are needed"):
        Sequences.of(np.zeros(1000, np.uint16), Special(2, 3, 4, 30))


def test_the_learning_rate_warms_up_and_falls() -> None:
    assert [round(lr_at(k, 100, 1.0), 3) for k in (0, 4, 9, 10, 55, 99)] == [0.1, 0.5, 1.0, 1.0, 0.707, 0.105]


def test_a_node_gets_the_same_riddles_alone_and_among_all() -> None:
    text = Sequences.of(np.arange(200 * (LENGTH - 2), dtype=np.uint16) % 25 + 5, Special(2, 3, 4, 30))
    together = list(batches(text, [0, 1, 2], 3, 4, steps=20, seed=1))
    for node in range(3):
        for all_of_them, own in zip(together, batches(text, [node], 3, 4, steps=20, seed=1), strict=True):
            assert all(torch.equal(a[node], b[0]) for a, b in zip(all_of_them, own, strict=True))


def test_parallel_sgd_with_lamb_is_one_model_on_the_big_batch() -> None:
    n, random = 4, torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    together = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    alone = copy.deepcopy(together)
    x, y = torch.randn(8, n, 7, 5, generator=random, dtype=torch.float64), torch.randint(3, (8, n, 7), generator=random)

    def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x), y)

    trainer = Simulated(together, n, (x[0], y[0]), loss_of, optimizer, average_gradients=True)
    trainer.start(algorithm_of(replace(PARALLEL, nodes=n), steps=8))
    lr = torch.tensor(0.1)
    opt = optimizer(alone.named_parameters(), alone, lr)
    for k in range(8):
        trainer.step((x[k], y[k]), lr=0.1 / (k + 1))
        lr.fill_(0.1 / (k + 1))
        opt.zero_grad()
        loss_of(alone, x[k].flatten(0, 1), y[k].flatten()).backward()
        opt.step()
    for node in trainer.node_models():
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(node.parameters(), alone.parameters(), strict=True))


def test_learning_rates_are_compared_where_there_are_most_seeds(tmp_path: Path) -> None:
    """A lucky seed at a high rate is shown, and is not its method's best."""
    losses = {0.1: {PARALLEL: (3.0, 3.1, 3.2), PGA: (3.5, 3.7, 3.6)}, 0.2: {PARALLEL: (2.0,), PGA: (3.2, 3.2, 3.2)}, 0.3: {PGA: (4.0,)}}
    by_rate = {}
    for lr, of_runs in losses.items():
        settings = Settings("text", "BERT small", 1, 100, 32, lr, 0.01, None)
        by_rate[lr] = Store(tmp_path / f"{lr}.csv", TABLES, lambda run, settings=settings: settings)
        for run, values in of_runs.items():
            for seed, loss in enumerate(values):
                by_rate[lr].add(
                    replace(run, nodes=8, recipe="earlier", seed=seed),
                    Finished(None, loss, loss, 0.0, 1.0, 1.0, "cpu", [Point(loss, loss)]),
                )
    _, _, parallel, pga = ([cell.strip() for cell in line.split("|")[1:-1]] for line in rates_table(by_rate).splitlines())
    assert parallel == ["Parallel SGD", "3.100 ± 0.100 (3)", "2.000 (1)", "-", "-", "-"]
    assert pga == ["Gossip-PGA", "3.600 ± 0.100 (3)", "3.200 ± 0.000 (3)", "4.000 (1)", "+0.100", "0.225"]  # t = sqrt(3), 2 degrees


def test_text_for_trials_is_neither_trained_on_nor_tested_on() -> None:
    text = Sequences.of(np.arange(600 * (LENGTH - 2)).astype(np.uint16), Special(2, 3, 4, 30))
    trial = text.for_trials()
    train, held_out, kept = ({tuple(row) for row in rows.tolist()} for rows in (trial.train, trial.held_out, text.held_out))
    assert not train & held_out
    assert not (train | held_out) & kept
    assert len(train) + len(held_out) == len(text.train)
    assert len(held_out) == 5


def test_each_method_takes_its_best_rate_and_the_earlier_table_its_own(tmp_path: Path) -> None:
    results, runs = tmp_path / "found.csv", changed((PARALLEL, PGA), nodes=8)
    for lr, losses in {0.004: (3.0, 3.5), 0.008: (3.1, 3.4), 0.016: (float("nan"), 3.3)}.items():
        for run, loss in zip(runs, losses, strict=True):
            settings = Settings("900 + 9 sequences", "BERT tiny", 1, 100, 128, lr, 0.01, None, "LAMB")
            store = Store(trials.file_of(results), TABLES, lambda run, settings=settings: settings)
            store.add(run, Finished(None, loss, loss, 0.0, 1.0, 1.0, "cpu", [Point(loss, loss)]))

    def rate(run: Run) -> float:
        return settings_of(run, RECIPES[run.recipe], "1000 + 10 sequences", "tiny", results).lr

    assert [rate(run) for run in (*runs, replace(runs[1], stretch=3))] == [0.004, 0.016, 0.016]
    assert rate(replace(runs[0], nodes=32)) == RECIPES[""].lr  # not tried
    assert rate(replace(runs[1], recipe="earlier")) == 8e-3


def test_results_of_the_earlier_lamb_are_apart() -> None:
    """They stay in the file, marked, and no run with the LAMB of today finds them."""
    _, words, _ = stores()
    assert compare.of_table(TABLES["11 earlier"], words)
    assert {row["optimizer"] for row in words.rows() if row["batch"] == "32"} == {EARLIER_LAMB}
    assert RECIPES[""].optimizer != EARLIER_LAMB


@pytest.mark.processes
def test_a_toy_of_table_11_with_the_rates_of_its_trials(tmp_path: Path) -> None:
    write_text(tmp_path / "books", 900)
    out, words = tmp_path / "found.csv", vocabulary(tmp_path)
    command = [ROOT / "experiments" / "language_modeling.py", "--out", out, "--data", tmp_path / "books", "--vocabulary", words]
    command += ["--cache", tmp_path / "cache", "--quick", "--table", "11", "11 on a ring", "--nodes", "2"]
    command += ["--steps", "6", "--batch", "4", "--device", "cpu", "--method", "Parallel SGD", "Gossip-PGA"]
    heavy = ["tokenizers", "transformers.models.bert.modeling_bert"]
    for extra in (["--tune", "0.001", "0.01"], []):
        done = warm.run([*command, *extra], preload=heavy)
        assert done.returncode == 0, done.stderr
    found, tried = rows_of(out), rows_of(tmp_path / "found-trials.csv")
    assert {(row["method"], row["topology"]) for row in found} == {
        ("Parallel SGD", "complete"),
        ("Gossip-PGA", "one_peer_exponential"),
        ("Gossip-PGA", "ring"),
    }
    assert {row["optimizer"] for row in (*found, *tried)} == {"LAMB"}
    assert {row["data"] for row in found}.isdisjoint(row["data"] for row in tried)
    for row in found:
        of_run = [each for each in tried if (each["method"], each["topology"]) == (row["method"], row["topology"])]
        assert len(of_run) == 2
        assert row["lr"] == min(of_run, key=lambda each: float(each["loss"]))["lr"]


@pytest.mark.processes
def test_a_toy_study_on_both_engines(tmp_path: Path) -> None:
    write_text(tmp_path / "books", 900)
    words = vocabulary(tmp_path)
    losses = []
    for engine in ("simulated", "processes"):
        out = tmp_path / f"{engine}.csv"
        command = [ROOT / "experiments" / "language_modeling.py", "--engine", engine, "--out", out]
        command += ["--data", tmp_path / "books", "--vocabulary", words, "--cache", tmp_path / "cache"]
        command += ["--quick", "--nodes", "2", "--steps", "6", "--batch", "4", "--device", "cpu"]
        heavy = ["tokenizers", "transformers.models.bert.modeling_bert"]
        done = warm.run(command, preload=heavy) if engine == "simulated" else warm.torchrun(2, command, preload=heavy)
        assert done.returncode == 0, done.stderr
        with out.open(newline="") as file:
            losses.append({row["method"]: float(row["loss"]) for row in csv.DictReader(file)})
        with out.with_name(f"{engine}-curves.csv").open(newline="") as file:
            points = [row for row in csv.DictReader(file) if row["method"] == "Local SGD"]
        assert all(float(point["moved"]) > 0 for point in points)
        assert float(points[-2]["spread"]) > 1e-6 > float(points[-1]["spread"])  # the last of six steps is a global one
    assert losses[0].keys() == losses[1].keys() == {"Parallel SGD", "Local SGD", "Gossip SGD", "Gossip-PGA"}
    for method, loss in losses[0].items():
        assert 0 < loss < 4
        assert loss == pytest.approx(losses[1][method], rel=2e-3), method
