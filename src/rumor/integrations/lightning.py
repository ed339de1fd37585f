"""Lightning: `Trainer(callbacks=[RumorCallback(algorithm)])`. Its samplers, precisions, loggers and checkpoints stay; its DDP goes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

try:
    from lightning.fabric.utilities.apply_func import move_data_to_device
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: rumor.integrations.lightning needs pip install 'rumor[lightning]'", name=error.name) from None

from rumor.algorithm import Algorithm
from rumor.averager import Averager
from rumor.checkpoint import random_state, restore_random

KEY = "rumor"  # of what the nodes have of their own, in a checkpoint


class RumorStrategy(DDPStrategy):
    """Several processes as with "ddp", but each trains the plain module on its own gradients; what is saved is the mean model.

    RumorCallback puts it in place of "ddp" by itself. Hand one to the Trainer to set what it takes, such as `timeout`.
    """

    averager: Averager | None = None  # while a fit is under way: before and after, all nodes have the same model

    def configure_ddp(self) -> None:
        """Leaves the module as it is, so that no gradients are reduced."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The mean model, on every rank. A collective, as saving is with Lightning."""
        if self.averager is None:
            return super().lightning_module_state_dict()
        with self.averager.averaged():
            return {name: _copied(value) for name, value in super().lightning_module_state_dict().items()}


class RumorCallback(Callback):
    """Averages the nodes' models after each optimizer step; validates and saves the mean model; resumes each node where it was.

    Under accumulation the nodes average once per optimizer step, with the mean loss of the batches that went into it. After fit() all
    nodes have the same model.

    Args:
        algorithm: what `rumor.gossip_pga(...)` and its like return, for as many nodes as there are processes.
        save_nodes: checkpoints also hold every node's own model, optimizer, averager and random numbers, which rank 0 gathers: the rest of
            a run that is resumed after a whole epoch is bitwise the one that was not interrupted. Without, they hold the mean model and
            rank 0's optimizer, and are as small as DDP's; a resumed run then starts on every node from these, with a new averager.

    Attributes:
        averager: the `rumor.Averager`, from the start of a fit on.
    """

    def __init__(self, algorithm: Algorithm, save_nodes: bool = True):
        self.algorithm, self.save_nodes = algorithm, save_nodes
        self.averager: Averager | None = None
        self._loaded: dict[str, Any] | None = None  # this node's part of the checkpoint to resume from
        self._random: dict[str, Any] | None = None  # likewise, for when training goes on: much draws before that
        self._losses: list[Tensor] = []  # of the batches since the last optimizer step
        self._lr: float | None = None  # of the optimizer step in this batch, if there was one
        self._showing_mean = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes DDP out before Lightning has wrapped the module."""
        if stage != "fit":
            return
        strategy = trainer.strategy
        if (several := sum(isinstance(callback, RumorCallback) for callback in trainer.callbacks)) > 1:  # type: ignore[attr-defined]
            raise ValueError(f"this Trainer has {several} RumorCallbacks, which would average every step as often: give it one")
        if not isinstance(strategy, DDPStrategy):
            raise ValueError(
                f"RumorCallback trains one whole model on each of several processes, but this Trainer's strategy is "
                f"{type(strategy).__name__}: use devices=N or torchrun with strategy='ddp', or strategy=RumorStrategy()"
            )
        if strategy._layer_sync is not None:
            raise ValueError("sync_batchnorm=True makes all nodes wait for each other in every layer: leave it out, Rumor averages buffers")
        if strategy._ddp_comm_hook is not None or strategy._ddp_comm_state is not None:
            raise ValueError("a ddp_comm_hook has nothing to do where gradients are not reduced: leave it out")
        if not isinstance(strategy, RumorStrategy):
            # the Trainer has chosen and connected its strategy by now; RumorStrategy has no state of its own that would be missing
            strategy.__class__ = RumorStrategy

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The module is on its device, with the checkpoint's mean model in it; the optimizers are loaded after this."""
        self.averager, self._random = Averager(pl_module, self.algorithm), None
        self._strategy(trainer).averager = self.averager
        if self._loaded is not None:
            pl_module.load_state_dict(self._loaded["state_dict"], strict=pl_module.strict_loading)
            self.averager.load_state_dict(self._loaded["averager"])
            self._random, self._loaded = self._loaded.get("random"), None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Of the first epoch of a resumed run, where Lightning has made the loader's iterator already, which has drawn."""
        loop = trainer.fit_loop
        if self._draw_as_saved(pl_module) and (loop.epoch_loop.restarting or getattr(loop, "is_resuming", False)):
            iter(loop._data_fetcher)  # type: ignore[arg-type]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Of a run that is resumed in the middle of an epoch, which does not start."""
        self._draw_as_saved(pl_module)

    def _draw_as_saved(self, pl_module: LightningModule) -> bool:
        """Goes on with the random numbers of the checkpoint, once."""
        if self._random is None:
            return False
        restore_random(self._random, pl_module.device)
        self._random = None
        return True

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        """Also called where GradScaler then skips the step, so all nodes agree that there was one."""
        self._lr = float(optimizer.param_groups[0]["lr"])  # SlowMo's, before the scheduler changes it

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Averages, if this batch ended with an optimizer step."""
        assert self.averager is not None
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach())
        if self._lr is None:
            return
        scale = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1  # Lightning has divided each by this
        mean = torch.stack(self._losses).mean() * scale if self._losses else None
        self.averager.step(mean, lr=self._lr)
        self._losses, self._lr = [], None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validates the mean model. It is over before ModelCheckpoint saves, which Lightning calls last."""
        if trainer.state.fn == TrainerFn.FITTING and self.averager is not None:
            self._showing_mean.enter_context(self.averager.averaged())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._showing_mean.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._showing_mean.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.averager is not None
        self.averager.finish()
        self._strategy(trainer).averager = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Lightning writes rank 0's dictionary: into it goes what the nodes have of their own."""
        if self.averager is None or not self.save_nodes:
            return
        own = {name: checkpoint[name] for name in self._own_keys(trainer) if name in checkpoint}
        own |= {"state_dict": pl_module.state_dict(), "averager": self.averager.state_dict()}
        own["random"] = random_state(pl_module.device)
        everybody: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
        torch.distributed.gather_object(move_data_to_device(own, torch.device("cpu")), everybody)
        if everybody is not None:
            checkpoint[KEY] = everybody

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Comes after the module has taken over the mean model, and before the optimizers are loaded."""
        if trainer.state.fn != TrainerFn.FITTING or not self.save_nodes:
            return
        nodes = checkpoint.get(KEY)
        if nodes is None or len(nodes) != trainer.world_size:
            saved = "holds no states of nodes" if nodes is None else f"is of {len(nodes)} nodes, but here are {trainer.world_size}"
            raise ValueError(f"this checkpoint {saved}: RumorCallback(..., save_nodes=False) starts all nodes from its mean model")
        self._loaded = nodes[trainer.global_rank]
        checkpoint.update({name: self._loaded[name] for name in self._own_keys(trainer) if name in self._loaded})

    def _own_keys(self, trainer: Trainer) -> tuple[str, ...]:
        """Entries of Lightning's checkpoint in which nodes differ: optimizers, schedulers that look at losses, GradScaler."""
        return "optimizer_states", "lr_schedulers", type(trainer.precision_plugin).__qualname__

    def _strategy(self, trainer: Trainer) -> RumorStrategy:
        assert isinstance(trainer.strategy, RumorStrategy)
        return trainer.strategy


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
