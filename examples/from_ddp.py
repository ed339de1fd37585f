"""From DDP in three changed lines, and two more to evaluate the mean model and end with it. Comments show the lines of DDP.

torchrun --standalone --nproc-per-node 4 examples/from_ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rumor  # from torch.nn.parallel import DistributedDataParallel

EPOCHS, BATCH = 5, 32


def spirals(points: int, seed: int) -> TensorDataset:
    """Return points in the plane on three noisy spirals, and the number of the spiral for each point."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (points,), generator=generator)
    radius = torch.rand(points, generator=generator)
    angle = 4 * radius + arm * 2 * torch.pi / 3 + 0.2 * torch.randn(points, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm)


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)).to(device)
    averager = rumor.Averager(model, rumor.gossip_pga(rumor.one_peer_exponential, H=6))
    # model = DistributedDataParallel(model)

    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train, test = spirals(6000, seed=1), spirals(1000, seed=2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, BATCH, sampler=sampler, drop_last=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
            averager.step(loss)  # (not in DDP, which averages the gradients during backward)

        with averager.averaged(), torch.no_grad():  # (not in DDP, where all ranks have the same model)
            x, y = test.tensors
            accuracy = (model(x.to(device)).argmax(dim=1).cpu() == y).float().mean().item()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy of the mean model {accuracy:.1%}", flush=True)
    averager.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
