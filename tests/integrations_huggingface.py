"""What test_integrations_huggingface.py looks at: runs of the Trainer and the loops that they stand for, on real processes.

    torchrun --standalone --nproc-per-node 4 tests/integrations_huggingface.py FOLDER

Each rank leaves what it saw in FOLDER/RANK.pt.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import rumor
from rumor.integrations.huggingface import RumorCallback, RumorTrainer, without_ddp
from tests.integrations import AVERAGED_STATES, BATCH, N, by_hand, counts, dataset, flat, network, optimizer

RING = rumor.ring(N)
PGA, AGA = rumor.gossip_pga(RING, H=3), rumor.gossip_aga(RING, warmup=2, H_init=2)
SLOWMO, DELAYED = rumor.slowmo(RING, H=3), rumor.gossip_pga(RING, H=3, delay=1)


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, batches: int):
        self.x, self.y = (t[: batches * BATCH * N] for t in dataset())

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "labels": self.y[i]}


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's batches: Accelerate deals them out in turn."""
    x, y = (t.split(BATCH)[dist.get_rank() : count * N : N] for t in dataset())
    return [(a.clone(), b.clone()) for a, b in zip(x, y, strict=True)]  # where a tensor begins in memory may change how sums are rounded


class Model(nn.Module):
    """Returns the loss, as transformers' models do, and notes the parameters that an evaluation sees."""

    def __init__(self, seed: int = 0):
        super().__init__()
        self.net = network(seed)
        self.evaluated: list[Tensor] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if not self.training:
            self.evaluated.append(flat(self.net))
        return {"loss": (self.net(x) - labels).square().mean()}


class Notes(TrainerCallback):
    """The parameters after each optimizer step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(flat(kwargs["model"]))


def trained(
    algorithm: Any, folder: Path, seed: int = 0, of: int = 7, resume: Path | None = None, average_state: Any = None, **options: Any
) -> dict[str, Any]:
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    plain = {"per_device_train_batch_size": BATCH, "max_grad_norm": 0.0, "train_sampling_strategy": "sequential", "num_train_epochs": 1}
    arguments = TrainingArguments(output_dir=str(folder), **{**quiet, **plain, **options})
    model, notes, callback = Model(seed), Notes(), RumorCallback(algorithm, average_state=average_state)
    opt_and_scheduler = optimizer(model.net)
    samples = Samples(of)
    trainer = RumorTrainer(
        model, arguments, train_dataset=samples, eval_dataset=samples, optimizers=opt_and_scheduler, callbacks=[callback, notes]
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    assert trainer.model_wrapped is model, "the model is wrapped"
    return {"seen": torch.stack(notes.seen), "end": flat(model), "counts": counts(callback.averager), "evaluated": model.evaluated}


def resumed(folder: Path, algorithm: Any = DELAYED, step: int = 10, **options: Any) -> dict[str, Any]:
    """Two epochs at once, with a checkpoint after step 10; then from there on, in a new Trainer with another model to begin with."""
    options |= {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": step, "eval_strategy": "steps", "eval_steps": step}
    whole = trained(algorithm, folder, **options)
    return {"whole": whole, "rest": trained(algorithm, folder, seed=5, resume=folder / f"checkpoint-{step}", **options)}


def refused(folder: Path) -> dict[str, str]:
    lost = folder / "lost" / "checkpoint-10"
    if dist.get_rank() == 0:
        shutil.copytree(folder / "checkpoint-10", lost, ignore=shutil.ignore_patterns("rumor_*.pt"))
        shutil.copytree(folder / "checkpoint-10", cut := folder / "cut" / "checkpoint-10")
        (cut / "rumor_2.pt").write_bytes((cut / "rumor_2.pt").read_bytes()[:1000])
    dist.barrier()
    said = {}
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True)
    for name, attempt in {
        "Trainer": lambda: Trainer(Model(), arguments, train_dataset=Samples(7), callbacks=[RumorCallback(PGA)]).train(),
        "no callback": lambda: RumorTrainer(Model(), arguments, train_dataset=Samples(7)).train(),
        "lost": lambda: trained(DELAYED, folder, resume=lost, num_train_epochs=2),
        "cut": lambda: trained(DELAYED, folder, resume=folder / "cut" / "checkpoint-10", num_train_epochs=2),
        "NAdam": lambda: refused_optimizer(arguments),
        "prepare": lambda: rumor.Averager(Accelerator(cpu=True).prepare(network()), PGA),
    }.items():
        try:
            attempt()
        except (ValueError, FileNotFoundError) as error:
            said[name] = str(error)
    return said


def refused_optimizer(arguments: TrainingArguments) -> None:
    model = Model()
    optimizers = torch.optim.NAdam(model.parameters()), None
    callback = RumorCallback(PGA, average_state="global")
    RumorTrainer(model, arguments, train_dataset=Samples(7), optimizers=optimizers, callbacks=[callback]).train()


def accelerated(algorithm: Any, average_state: Any = None) -> dict[str, Any]:
    """A loop of Accelerate's, with accumulation."""
    accelerator = without_ddp(Accelerator(cpu=True, gradient_accumulation_steps=3))
    model = network()
    opt, _ = optimizer(model)
    model, opt, loader = accelerator.prepare(model, opt, DataLoader(Samples(6), BATCH))
    averager = rumor.Averager(model, algorithm, optimizer=opt.optimizer, average_state=average_state)
    seen, losses = [], []
    for _ in range(4):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = (model(batch["x"]) - batch["labels"]).square().mean()
                accelerator.backward(loss)
                opt.step()
                opt.zero_grad()
            losses.append(loss.detach())
            if accelerator.sync_gradients:
                averager.step(torch.stack(losses).mean())
                losses = []
                seen.append(flat(model))
    averager.finish()
    return {"seen": torch.stack(seen), "end": flat(model), "counts": counts(averager)}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    seen: dict[str, Any] = {"plain": trained(PGA, folder)}
    seen |= {
        "accumulated": trained(AGA, folder, of=6, gradient_accumulation_steps=3, num_train_epochs=4),
        "bf16": trained(PGA, folder, bf16=True),
        "slowmo": trained(SLOWMO, folder),
        "resumed": resumed(folder),
        "by hand": {
            "plain": by_hand(PGA, [batches(7)]),
            "accumulated": by_hand(AGA, [batches(6)] * 4, accumulate=3),
            "bf16": by_hand(PGA, [batches(7)], autocast=lambda: torch.autocast("cpu", torch.bfloat16)),
            "slowmo": by_hand(SLOWMO, [batches(7)]),
            "resumed": by_hand(DELAYED, [batches(7)] * 2),
            "accelerated": by_hand(AGA, [batches(6)] * 4, accumulate=3, decay=1.0),
            "accelerated state": by_hand(AVERAGED_STATES["global"], [batches(6)] * 4, accumulate=3, decay=1.0, average_state="global"),
        }
        | {f"state {mode}": by_hand(method, [batches(7)] * 2, average_state=mode) for mode, method in AVERAGED_STATES.items()},
        **{
            f"state {mode}": resumed(folder / mode, method, step=8, average_state=mode)  # in the middle of a period
            for mode, method in AVERAGED_STATES.items()
        },
        "accelerated": accelerated(AGA),
        "accelerated state": accelerated(AVERAGED_STATES["global"], "global"),
        "refused": refused(folder),
    }
    torch.save(seen, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
