"""What test_integrations_lightning.py looks at: fits of Lightning's and the loops that they stand for, on real processes.

    torchrun --standalone --nproc-per-node 4 tests/integrations_lightning.py FOLDER

Each rank leaves what it saw in FOLDER/RANK.pt.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rumor
from rumor.integrations.lightning import RumorCallback, RumorStrategy
from tests.integrations import AVERAGED_STATES, BATCH, BATCHES, N, by_hand, counts, dataset, flat, network, optimizer

RING = rumor.ring(N)
PGA, AGA = rumor.gossip_pga(RING, H=3), rumor.gossip_aga(RING, warmup=2, H_init=2)
SLOWMO, DELAYED = rumor.slowmo(RING, H=3), rumor.gossip_pga(RING, H=3, delay=1)


class Module(pl.LightningModule):
    """Notes its parameters after each optimizer step, when the callback has been at work, and those that validation sees."""

    def __init__(self, seed: int):
        super().__init__()
        self.net = network(seed)
        self.seen: list[Tensor] = []
        self.validated: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.trainer.model is self, "the module is wrapped"
        every = self.trainer.accumulate_grad_batches
        if (batch_idx + 1) % every == 0 or batch_idx + 1 == BATCHES:
            self.seen.append(flat(self.net))

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.validated.append(flat(self.net))

    def configure_optimizers(self) -> Any:
        opt, scheduler = optimizer(self.net)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def trainer(folder: Path, callback: RumorCallback, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    usual = {"accelerator": "cpu", "devices": N, "max_epochs": 1, "default_root_dir": folder, "callbacks": [callback]}
    return pl.Trainer(**{**quiet, **usual, **options})


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*dataset()), BATCH)  # Lightning puts a DistributedSampler into it


def batches(epoch: int) -> list[tuple[Tensor, Tensor]]:
    """What this rank sees in an epoch."""
    sampler = DistributedSampler(TensorDataset(*dataset()))
    sampler.set_epoch(epoch)
    mine = torch.tensor(list(sampler)).split(BATCH)
    x, y = dataset()
    return [(x[some], y[some]) for some in mine]


def fitted(algorithm: Any, folder: Path, average_state: Any = None, **options: Any) -> dict[str, Any]:
    module = Module(seed=dist.get_rank() if dist.is_initialized() else 0)
    callback = RumorCallback(algorithm, average_state=average_state)
    trainer(folder, callback, **options).fit(module, loader())
    return {"seen": torch.stack(module.seen), "end": flat(module), "counts": counts(callback.averager)}


class Noted(Logger):
    """A logger that keeps what it gets."""

    name, version = "noted", 0

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append({name: value for name, value in metrics.items() if name != "epoch"})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


def logged(folder: Path) -> list[dict[str, float]]:
    noted, callback = Noted(), RumorCallback(PGA)
    trainer(folder, callback, logger=noted, log_every_n_steps=1).fit(Module(seed=0), loader())
    return [*noted.metrics, {f"rumor/{name}": value for name, value in callback.averager.metrics.scalars().items()}]


def resumed(folder: Path, algorithm: Any = DELAYED, name: str = "stop", average_state: Any = None) -> dict[str, Any]:
    """Two epochs at once, and the same in two fits with a checkpoint between them: in the middle of a period, a message under way."""
    whole = fitted(algorithm, folder, average_state, max_epochs=2)
    first, callback = Module(seed=0), RumorCallback(algorithm, average_state=average_state)
    saver = ModelCheckpoint(folder, filename=name)
    trainer(folder, callback, callbacks=[callback, saver], enable_checkpointing=True).fit(first, loader(), loader())
    rest, callback = Module(seed=5), RumorCallback(algorithm, average_state=average_state)
    trainer(folder, callback, max_epochs=2).fit(rest, loader(), ckpt_path=folder / f"{name}.ckpt")
    return {
        "whole": whole,
        "stopped": first.seen[-1],
        "validated": first.validated[-1],
        "rest": {"seen": torch.stack(rest.seen), "end": flat(rest), "counts": counts(callback.averager)},
    }


class Dropping(Module):
    """Draws random numbers at every step."""

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.net(torch.dropout(batch[0], 0.2, train=True)) - batch[1]).square().mean()


def resumed_with_dropout(folder: Path) -> dict[str, Tensor]:
    """As above, with a loader that draws, too, and validation before each checkpoint and before the first epoch."""
    ends = {}
    for name, epochs, start in (("whole", 2, None), ("first", 1, None), ("rest", 2, "dropout.ckpt")):
        torch.manual_seed(11 + dist.get_rank() if start is None else 99)
        callback, saver = RumorCallback(PGA), ModelCheckpoint(folder, filename="dropout", enable_version_counter=False)
        module, shuffled = Dropping(seed=0), DataLoader(TensorDataset(*dataset()), BATCH, shuffle=True)
        fit = trainer(
            folder,
            callback,
            callbacks=[callback, saver] if name == "first" else [callback],
            max_epochs=epochs,
            enable_checkpointing=name == "first",
        )
        fit.fit(module, shuffled, loader(), ckpt_path=start and folder / start)
        ends[name] = torch.stack(module.seen)
    return ends


def resumed_from_the_mean(folder: Path) -> Tensor:
    """The first step of a run that takes only the mean model from the checkpoint, with another method."""
    module = Module(seed=5)
    trainer(folder, RumorCallback(rumor.local_sgd(N, H=50), save_nodes=False), max_epochs=2).fit(
        module, loader(), ckpt_path=folder / "stop.ckpt"
    )
    return module.seen[0]


def weights(folder: Path) -> None:
    """Only the model is saved, after one epoch."""
    callback, saver = RumorCallback(DELAYED), ModelCheckpoint(folder, filename="weights", save_weights_only=True)
    trainer(folder, callback, callbacks=[callback, saver], enable_checkpointing=True).fit(Module(seed=0), loader())


class TwoOptimizers(Module):
    def __init__(self, seed: int):
        super().__init__(seed)
        self.automatic_optimization = False  # Lightning asks for this if there are several

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in (self.net[0], self.net[2])]


def refused(
    folder: Path,
    ckpt_path: Path | None = None,
    algorithm: Any = PGA,
    module: type[Module] = Module,
    average_state: Any = None,
    **options: Any,
) -> str:
    callback = RumorCallback(algorithm, average_state=average_state)
    try:
        trainer(folder, callback, **options).fit(module(seed=0), loader(), ckpt_path=ckpt_path)
    except ValueError as error:
        return str(error)
    return "it was not refused"


def refusals(folder: Path) -> dict[str, str]:
    if dist.get_rank() == 0:
        saved = torch.load(folder / "stop.ckpt", weights_only=True)
        torch.save({**saved, "rumor": saved["rumor"][:3]}, folder / "three.ckpt")
        of_old = [{name: value for name, value in node.items() if name != "random"} for node in saved["rumor"]]
        torch.save({**saved, "rumor": of_old}, folder / "old.ckpt")
        torch.save({name: value for name, value in saved.items() if name != "rumor"}, folder / "foreign.ckpt")
    dist.barrier()
    return {
        "sync_batchnorm": refused(folder, sync_batchnorm=True),
        "three nodes": refused(folder, folder / "three.ckpt"),
        "old": refused(folder, folder / "old.ckpt", DELAYED, max_epochs=2),
        "no nodes": refused(folder, folder / "foreign.ckpt"),
        "no averaged state": refused(folder, folder / "stop.ckpt", DELAYED, average_state="global", max_epochs=2),
        "two optimizers": refused(folder, module=TwoOptimizers, average_state="global"),
        "two callbacks": refused(folder, callbacks=[RumorCallback(PGA), RumorCallback(PGA)]),
        "one device": refused(folder, strategy="single_device", devices=1),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Lightning's advice on workers and loggers
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seen: dict[str, Any] = {"plain": fitted(PGA, folder)}
    rank = dist.get_rank()
    epochs = [batches(epoch) for epoch in range(4)]
    seen |= {
        "strategy": fitted(PGA, folder, strategy=RumorStrategy(find_unused_parameters=True)),
        "accumulated": fitted(AGA, folder, accumulate_grad_batches=3, max_epochs=4),
        "bf16": fitted(PGA, folder, precision="bf16-mixed"),
        "slowmo": fitted(SLOWMO, folder),
        "by hand": {
            "plain": by_hand(PGA, epochs[:1]),
            "accumulated": by_hand(AGA, epochs, accumulate=3),
            "bf16": by_hand(PGA, epochs[:1], autocast=lambda: torch.autocast("cpu", torch.bfloat16)),
            "slowmo": by_hand(SLOWMO, epochs[:1]),
            "resumed": by_hand(DELAYED, epochs[:2]),
        }
        | {f"state {mode}": by_hand(method, epochs[:2], average_state=mode) for mode, method in AVERAGED_STATES.items()},
        "resumed": resumed(folder),
        **{f"state {mode}": resumed(folder, method, f"state-{mode}", mode) for mode, method in AVERAGED_STATES.items()},
        "with dropout": resumed_with_dropout(folder),
        "from the mean": resumed_from_the_mean(folder),
        "logged": logged(folder),
        "batch": epochs[1][0],
    }
    weights(folder)
    seen["refused"] = refusals(folder)
    torch.save(seen, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
