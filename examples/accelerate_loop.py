"""Accelerate: `without_ddp` keeps prepare() from wrapping the model in DDP, and the Averager does the rest.

torchrun --standalone --nproc-per-node 4 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rumor
from rumor.integrations.huggingface import without_ddp

# without cpu=True, Accelerate counts several processes on CPUs as one
accelerator = without_ddp(Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2))
torch.manual_seed(0)
x = torch.randn(2048, 4)
y = x.sum(dim=1, keepdim=True).tanh()
model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=0.01)  # for a larger model, see docs/choosing.md on Adam
model, opt, loader = accelerator.prepare(model, opt, DataLoader(TensorDataset(x, y), 16, shuffle=True))
averager = rumor.Averager(model, rumor.gossip_pga(rumor.one_peer_exponential, H=6))
for _ in range(5):
    for inputs, wanted in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), wanted)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
        if accelerator.sync_gradients:  # the optimizer has taken a step
            averager.step(loss)
with averager.averaged():
    loss = nn.functional.mse_loss(model(x.to(accelerator.device)), y.to(accelerator.device))
    accelerator.print(f"loss of the mean model: {loss.item():.3f}")
averager.finish()
accelerator.end_training()
