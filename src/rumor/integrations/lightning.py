"""Lightning: `Trainer(callbacks=[RumorCallback(algorithm)])`. It replaces DDP; samplers, precisions, loggers and checkpoints still work."""

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

from rumor.averager import Averager
from rumor.checkpoint.random_numbers import random_state, restore_random
from rumor.methods import Algorithm
from rumor.model.optimizer_state import AverageState

KEY = "rumor"  # the entry of a checkpoint with the nodes' own states


class RumorStrategy(DDPStrategy):
    """Starts processes as "ddp" does, but each one trains the plain module on its own gradients. It saves the mean model.

    RumorCallback replaces "ddp" by this strategy. Pass one to the Trainer yourself to set its arguments, such as `timeout`.
    """

    averager: Averager | None = None  # set during a fit; before and after it, all nodes have the same model

    def configure_ddp(self) -> None:
        """Does not wrap the module, so that gradients are not reduced."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the mean model on every rank. All ranks must call it, as in Lightning's own saving."""
        if self.averager is None:
            return super().lightning_module_state_dict()
        with self.averager.averaged():
            return {name: _copied(value) for name, value in super().lightning_module_state_dict().items()}


class RumorCallback(Callback):
    """Averages the models of all nodes after each optimizer step, and validates and saves the mean model.

    With gradient accumulation the nodes average once per optimizer step, with the mean loss of its batches. After fit() all nodes have
    the same model.

    Args:
        algorithm: a method such as `rumor.gossip_pga(...)`, with one node for each process.
        save_nodes: if True, checkpoints also hold the model, optimizer, averager and random state of every node, which rank 0 gathers. A
            run that is resumed after a whole epoch is then bitwise equal to one that was not interrupted. If False, checkpoints hold the
            mean model and rank 0's optimizer, and are as small as DDP's. A resumed run then starts all nodes from these, with a new
            averager.
        average_state: "global" or "always" also averages the state of the module's optimizer, as in `rumor.Averager`. The module must have
            only one optimizer then.

    Attributes:
        averager: the `rumor.Averager`; None before the first fit.
    """

    def __init__(self, algorithm: Algorithm, save_nodes: bool = True, *, average_state: AverageState | None = None):
        self.algorithm, self.save_nodes, self.average_state = algorithm, save_nodes, average_state
        self.averager: Averager | None = None
        self._loaded: dict[str, Any] | None = None  # this node's part of the checkpoint to resume from
        self._random: dict[str, Any] | None = None  # its random state, to be restored just before training: setup draws random numbers
        self._losses: list[Tensor] = []  # losses of the batches since the last optimizer step
        self._lr: float | None = None  # learning rate of this batch's optimizer step; None if there was no step
        self._showing_mean = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replaces DDP before Lightning wraps the module."""
        if stage != "fit":
            return
        strategy = trainer.strategy
        if (several := sum(isinstance(callback, RumorCallback) for callback in trainer.callbacks)) > 1:  # type: ignore[attr-defined]
            raise ValueError(
                f"this Trainer has {several} RumorCallbacks, which would average {several} times after each step: pass only one"
            )
        if not isinstance(strategy, DDPStrategy):
            raise ValueError(
                f"RumorCallback needs several processes with one whole model each, but this Trainer's strategy is "
                f"{type(strategy).__name__}: use devices=N or torchrun with strategy='ddp', or strategy=RumorStrategy()"
            )
        if strategy._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True makes all nodes wait for each other in every layer: leave it out, because Rumor averages the buffers"
            )
        if strategy._ddp_comm_hook is not None or strategy._ddp_comm_state is not None:
            raise ValueError("a ddp_comm_hook has no effect, because Rumor does not reduce gradients: leave it out")
        if not isinstance(strategy, RumorStrategy):
            # The Trainer has already set up its strategy, so change its class. RumorStrategy has no state of its own that would be missing.
            strategy.__class__ = RumorStrategy

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Builds the averager. The module holds the checkpoint's mean model, on its device. The optimizers are there, but loaded later."""
        optimizer = None if self.average_state is None else self._only_optimizer(trainer)
        self.averager = Averager(pl_module, self.algorithm, optimizer=optimizer, average_state=self.average_state)
        self._random = None
        self._strategy(trainer).averager = self.averager
        if self._loaded is not None:
            pl_module.load_state_dict(self._loaded["state_dict"], strict=pl_module.strict_loading)
            self.averager.load_state_dict(self._loaded["averager"])
            self._random, self._loaded = self._loaded.get("random"), None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the random state in the first epoch of a resumed run. Lightning's loader has already drawn, so it is started again."""
        loop = trainer.fit_loop
        if self._restore_random_once(pl_module) and (loop.epoch_loop.restarting or getattr(loop, "is_resuming", False)):
            iter(loop._data_fetcher)  # type: ignore[arg-type]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Restores the random state of a run that is resumed in the middle of an epoch, where no epoch starts."""
        self._restore_random_once(pl_module)

    def _restore_random_once(self, pl_module: LightningModule) -> bool:
        """Restores the checkpoint's random state the first time it is called. Returns whether it did."""
        if self._random is None:
            return False
        restore_random(self._random, pl_module.device)
        self._random = None
        return True

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        """Notes that there is an optimizer step. Lightning also calls this if GradScaler skips the step, so all nodes agree."""
        self._lr = float(optimizer.param_groups[0]["lr"])  # for methods that need it, before the scheduler changes it

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Averages the models if this batch ended with an optimizer step."""
        assert self.averager is not None
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach())
        if self._lr is None:
            return
        scale = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1  # Lightning has divided each loss by this
        mean = torch.stack(self._losses).mean() * scale if self._losses else None
        self.averager.step(mean, lr=self._lr)
        self._losses, self._lr = [], None
        # rank 0's own, without a collective; Lightning drops them between its log_every_n_steps
        pl_module.log_dict({f"rumor/{name}": float(value) for name, value in self.averager.metrics.scalars().items()}, rank_zero_only=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Swaps in the mean model for the validation. That ends before ModelCheckpoint saves, because Lightning calls it last."""
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
        """Adds the nodes' own states to rank 0's checkpoint, which Lightning writes."""
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
        """Takes this node's own states out of the checkpoint. The module has loaded the mean model; the optimizers are loaded later."""
        if trainer.state.fn != TrainerFn.FITTING or not self.save_nodes:
            return
        nodes = checkpoint.get(KEY)
        if nodes is None or len(nodes) != trainer.world_size:
            saved = "has no states of nodes" if nodes is None else f"has {len(nodes)} nodes, but this run has {trainer.world_size}"
            raise ValueError(f"this checkpoint {saved}: to start all nodes from its mean model, use RumorCallback(..., save_nodes=False)")
        self._loaded = nodes[trainer.global_rank]
        checkpoint.update({name: self._loaded[name] for name in self._own_keys(trainer) if name in self._loaded})

    def _own_keys(self, trainer: Trainer) -> tuple[str, ...]:
        """The entries of Lightning's checkpoint that differ between nodes: optimizers, schedulers that use the loss, GradScaler."""
        return "optimizer_states", "lr_schedulers", type(trainer.precision_plugin).__qualname__

    def _only_optimizer(self, trainer: Trainer) -> torch.optim.Optimizer:
        if (several := len(trainer.optimizers)) > 1:
            raise ValueError(
                f"average_state={self.average_state!r} averages the state of one optimizer, but configure_optimizers() returned {several}: "
                "return one, which may have several parameter groups, or leave out average_state"
            )
        return trainer.optimizers[0]

    def _strategy(self, trainer: Trainer) -> RumorStrategy:
        assert isinstance(trainer.strategy, RumorStrategy)
        return trainer.strategy


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
