"""Lightning: one callback replaces DDP. Lightning still handles samplers, precision, logging and checkpoints.

torchrun --standalone --nproc-per-node 4 examples/lightning_callback.py
"""

import os

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rumor
from rumor.integrations.lightning import RumorCallback


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch  # here the net holds the mean of all nodes
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)  # for a larger model, see docs/choosing.md on Adam


def samples(count: int) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return TensorDataset(x, x.sum(dim=1, keepdim=True).tanh())


trainer = pl.Trainer(
    accelerator="auto",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
    max_epochs=5,
    accumulate_grad_batches=2,  # the nodes average once per optimizer step
    callbacks=[RumorCallback(rumor.gossip_aga(rumor.one_peer_exponential, warmup=10))],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Regression(), DataLoader(samples(2048), 16), DataLoader(samples(512), 64))
if trainer.is_global_zero:
    print(f"loss of the mean model: {trainer.callback_metrics['val_loss']:.3f}")
torch.distributed.destroy_process_group()
