"""Hugging Face: `RumorTrainer(model, args, callbacks=[RumorCallback(rumor.gossip_pga(...))])`, started with torchrun.

A callback alone can't stop the Trainer from wrapping the model in DistributedDataParallel, and it does not get the loss. RumorTrainer does
both, and is otherwise transformers' Trainer. For another Trainer, write `class MyTrainer(WithRumor, Seq2SeqTrainer): pass`. A checkpoint
holds the mean model, and in the same folder one file for each rank with the rank's own state. A resumed run gives the same result as one
that was not interrupted.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: rumor.integrations.huggingface needs pip install 'rumor[huggingface]'", name=error.name) from None

from rumor.averager import Averager
from rumor.checkpoint.checkpoint import by_all
from rumor.checkpoint.files import load_tensors, replacing
from rumor.methods import Algorithm
from rumor.model.optimizer_state import AverageState


def without_ddp(accelerator: Accelerator) -> Accelerator:
    """Makes `accelerator.prepare()` leave out DistributedDataParallel. Device, mixed precision and data are prepared as usual."""
    accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)
    return accelerator


class RumorCallback(TrainerCallback):
    """Averages the models of all processes after each optimizer step. It needs RumorTrainer or WithRumor.

    After train() all ranks hold the mean model. Gossip-AGA gets the loss whose gradient the optimizer has used.

    Args:
        algorithm: a method such as `rumor.gossip_pga(...)`, with one node for each process.
        resume_from_mean: if True, train(resume_from_checkpoint=...) starts all ranks from the mean model with a new averager; use it if
            the number of ranks has changed. If False, each rank continues from its own model, optimizer and averager.
        average_state: "global" or "always" also averages the state of the Trainer's optimizer, as in `rumor.Averager`.
    """

    def __init__(self, algorithm: Algorithm, *, resume_from_mean: bool = False, average_state: AverageState | None = None):
        self.averager: Averager | None = None
        self.loss: Tensor | None = None  # sum over the batches since the last optimizer step; WithRumor adds to it
        self.checkpoint: Path | None = None  # the checkpoint to resume from; WithRumor sets it
        self.has_host = False
        self._algorithm, self._resume_from_mean, self._average_state = algorithm, resume_from_mean, average_state

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self.has_host:
            raise ValueError(
                "this Trainer wraps the model in DistributedDataParallel, which averages gradients at every step, so a RumorCallback can't "
                "work in it: use rumor.integrations.huggingface.RumorTrainer, or `class MyTrainer(WithRumor, ...)` for your own Trainer"
            )
        optimizer = None if self._average_state is None else _without_wrapper(kwargs["optimizer"])
        self.averager = Averager(kwargs["model"], self._algorithm, optimizer=optimizer, average_state=self._average_state)
        if args.world_size != self.averager.engine.n:
            raise ValueError(
                f"there are {self.averager.engine.n} processes, but Accelerate sees {args.world_size}, so each one would train on all of "
                "the data: on CPUs, use TrainingArguments(use_cpu=True)"
            )
        if self.checkpoint is not None and not self._resume_from_mean:
            own = by_all(self.averager, partial(_read, rank_file(self.checkpoint, args.process_index)), "reading a checkpoint")
            self._resume(own, kwargs["model"], kwargs["optimizer"])
        self.checkpoint = None

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.averager is not None
        self.averager.step(self.loss, lr=kwargs["optimizer"].param_groups[0]["lr"])
        self.loss = None

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.averager is not None and kwargs.get("logs") is not None:
            kwargs["logs"].update({f"rumor/{name}": value for name, value in self.averager.metrics.scalars().items()})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Saves this rank's own state, after the Trainer has saved the mean model."""
        if self.averager is None or args.save_only_model:
            return
        optimizer = kwargs["optimizer"]
        scaler = getattr(optimizer, "scaler", None)
        own = {
            "model": kwargs["model"].state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "averager": self.averager.state_dict(),
        }
        path = rank_file(Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", args.process_index)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as aside:
            torch.save(own, aside)

    def _resume(self, own: dict[str, Any], model: nn.Module, optimizer: Any) -> None:
        model.load_state_dict(own["model"])
        optimizer.load_state_dict(own["optimizer"])
        if own["scaler"] is not None and getattr(optimizer, "scaler", None) is not None:
            optimizer.scaler.load_state_dict(own["scaler"])
        assert self.averager is not None
        self.averager.load_state_dict(own["averager"])

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.averager is not None
        best = None
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:  # every rank has loaded the best model by now
            best = {name: value.clone() for name, value in kwargs["model"].state_dict().items()}
        self.averager.finish()
        if best is not None:
            kwargs["model"].load_state_dict(best)


class WithRumor:
    """A mixin for Trainers with a RumorCallback. It leaves out DistributedDataParallel, and evaluates and saves the mean model."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        without_ddp(self.accelerator)  # type: ignore[attr-defined]
        # This option would make all nodes wait for each other at every step, and scale their losses for a mean of gradients that
        # Rumor does not compute.
        self.args.average_tokens_across_devices = False  # type: ignore[attr-defined]

    @property
    def rumor(self) -> RumorCallback:
        callbacks = [c for c in self.callback_handler.callbacks if isinstance(c, RumorCallback)]  # type: ignore[attr-defined]
        if len(callbacks) != 1:
            raise ValueError(
                f"this Trainer has {len(callbacks)} RumorCallbacks, but it needs exactly one: pass callbacks=[RumorCallback(algorithm)]"
            )
        return callbacks[0]

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self.rumor.has_host = True
        return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]  # already divided by the accumulated batches
        self.rumor.loss = loss if self.rumor.loss is None else self.rumor.loss + loss
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self._on_mean_model():
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)  # type: ignore[misc]
            return metrics

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        with self._on_mean_model():
            super().save_model(*args, **kwargs)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        self.rumor.checkpoint = Path(resume_from_checkpoint)

    def _on_mean_model(self) -> AbstractContextManager[None]:
        """Swaps in the mean model during training. Before and after training all models are equal, and one rank may call this alone."""
        averager = self.rumor.averager
        return averager.averaged() if averager is not None and self.is_in_train else nullcontext()  # type: ignore[attr-defined]


class RumorTrainer(WithRumor, Trainer):
    """transformers' Trainer where each process trains its own model; see RumorCallback."""


def _without_wrapper(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns torch's optimizer. step() of Accelerate's wrapper may do nothing, or update GradScaler, when the state is created."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _read(path: Path) -> dict[str, Any]:
    """Reads a rank's own part of a checkpoint."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path.parent} has the mean model, but not {path.name}, which this rank needs to resume: copy that file there, or start all "
            "ranks from the mean model with RumorCallback(..., resume_from_mean=True)"
        )
    own: dict[str, Any] = load_tensors(path)
    return own


def rank_file(checkpoint: Path, rank: int) -> Path:
    """The file of a rank's own part of a checkpoint. It is in the Trainer's folder, so the Trainer deletes it with the checkpoint."""
    return checkpoint / f"rumor_{rank}.pt"
