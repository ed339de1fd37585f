"""Hugging Face: `RumorTrainer(model, args, callbacks=[RumorCallback(rumor.gossip_pga(...))])`, started with torchrun.

A callback alone can't keep the Trainer from wrapping the model in DistributedDataParallel, nor does it see the loss: RumorTrainer does, and
is otherwise transformers' Trainer. For another Trainer: `class MyTrainer(WithRumor, Seq2SeqTrainer): pass`. Checkpoints hold the mean
model; what differs between ranks lies in the same folder, one file a rank, so that a resumed run is the one that was not interrupted.
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
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: rumor.integrations.huggingface needs pip install 'rumor[huggingface]'", name=error.name) from None

from rumor.algorithm import Algorithm
from rumor.averager import Averager
from rumor.checkpoint import by_all
from rumor.files import loaded, replacing


def without_ddp(accelerator: Accelerator) -> Accelerator:
    """From now on, prepare() leaves a model without DistributedDataParallel; device, mixed precision and data are as ever."""
    accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)
    return accelerator


class RumorCallback(TrainerCallback):
    """Averages the model with those of the other processes, once per optimizer step. It needs RumorTrainer, or WithRumor.

    After train() all ranks hold the mean. The loss that Gossip-AGA goes by is the one whose gradient the optimizer has used.

    Args:
        algorithm: what `rumor.gossip_pga(...)` and its like return, for as many nodes as there are processes.
        resume_from_mean: train(resume_from_checkpoint=...) starts all ranks from the mean model and the averager afresh, as after a change
            of their number. Otherwise each rank goes on from its own model, optimizer and averager.
    """

    def __init__(self, algorithm: Algorithm, *, resume_from_mean: bool = False):
        self.averager: Averager | None = None
        self.loss: Tensor | None = None  # of the batches since the last optimizer step; WithRumor adds to it
        self.checkpoint: Path | None = None  # that this run resumes from; set by WithRumor
        self.has_host = False
        self._algorithm, self._resume_from_mean = algorithm, resume_from_mean

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self.has_host:
            raise ValueError(
                "RumorCallback in a Trainer that puts the model into DistributedDataParallel, which averages gradients at every step: use "
                "rumor.integrations.huggingface.RumorTrainer, or `class MyTrainer(WithRumor, ...)` for a Trainer of your own"
            )
        self.averager = Averager(kwargs["model"], self._algorithm)
        if args.world_size != self.averager.engine.n:
            raise ValueError(
                f"there are {self.averager.engine.n} processes, but Accelerate sees {args.world_size}, so each would train on all of the "
                "data: on CPUs, say TrainingArguments(use_cpu=True)"
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
        """After the Trainer has saved the mean model: each rank saves what is its own."""
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
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:  # which the model holds by now, on every rank
            best = {name: value.clone() for name, value in kwargs["model"].state_dict().items()}
        self.averager.finish()
        if best is not None:
            kwargs["model"].load_state_dict(best)


class WithRumor:
    """What a Trainer needs besides the callback: no DistributedDataParallel, the loss, and the mean model to evaluate and save."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        without_ddp(self.accelerator)  # type: ignore[attr-defined]
        # it would make all nodes wait for each other at every step, and weigh their losses for a mean of gradients that is not taken
        self.args.average_tokens_across_devices = False  # type: ignore[attr-defined]

    @property
    def rumor(self) -> RumorCallback:
        callbacks = [c for c in self.callback_handler.callbacks if isinstance(c, RumorCallback)]  # type: ignore[attr-defined]
        if len(callbacks) != 1:
            raise ValueError(f"this Trainer has {len(callbacks)} RumorCallbacks: give it callbacks=[RumorCallback(algorithm)], one of them")
        return callbacks[0]

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self.rumor.has_host = True
        return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]  # divided by the number of batches to accumulate
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
        """While training; before and after it the models are alike, and a rank may be here alone."""
        averager = self.rumor.averager
        return averager.averaged() if averager is not None and self.is_in_train else nullcontext()  # type: ignore[attr-defined]


class RumorTrainer(WithRumor, Trainer):
    """transformers' Trainer, whose processes each train a model of their own: see RumorCallback."""


def _read(path: Path) -> dict[str, Any]:
    """A rank's own part of a checkpoint."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path.parent} holds the mean model, but {path.name}, which this rank needs to resume, is not there: bring that file "
            "along, or let all ranks start from the mean with RumorCallback(..., resume_from_mean=True)"
        )
    own: dict[str, Any] = loaded(path)
    return own


def rank_file(checkpoint: Path, rank: int) -> Path:
    """Where a rank keeps its own part of a checkpoint: beside the files of the Trainer, which removes them together."""
    return checkpoint / f"rumor_{rank}.pt"
