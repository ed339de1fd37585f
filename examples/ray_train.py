"""Ray Train: four workers, each with its own model. Ray sets up the process group. There is no prepare_model, which would add DDP.

python examples/ray_train.py
"""

import os
import tempfile

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer, get_device
from torch import nn

import rumor

WORKERS = 4


def train() -> None:
    rank, device = dist.get_rank(), get_device()
    torch.manual_seed(rank)  # each worker draws its own data
    model = nn.Linear(20, 1).to(device)
    averager = rumor.Averager(model, rumor.gossip_pga(rumor.one_peer_exponential, H=6))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(200):
        x = torch.randn(32, 20, device=device)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        averager.step(loss)
    averager.finish()  # now all workers have the same model, and rank 0 saves it
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
        checkpoint = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
        ray.train.report({"bytes sent": averager.metrics.bytes_sent}, checkpoint=checkpoint)


if __name__ == "__main__":
    ray.init(num_cpus=WORKERS + 1, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = TorchTrainer(
                train,
                scaling_config=ray.train.ScalingConfig(num_workers=WORKERS, use_gpu=torch.cuda.is_available()),
                run_config=ray.train.RunConfig(storage_path=folder),
            ).fit()
            with result.checkpoint.as_directory() as saved:
                weights = torch.load(os.path.join(saved, "model.pt"), map_location="cpu")["weight"]
        print(f"largest error of a weight: {(weights - 1).abs().max().item():.3f}, bytes sent: {result.metrics['bytes sent']:,}")
    finally:
        ray.shutdown()
