"""The alternatives to Rumor as contestants: DDP's hooks, PyTorch's Post-local SGD, torchft and fairscale.

`pip install 'rumor[peers]'` installs the last two. A library that can't be imported is left out, with a message on stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from contestants import Build, Contestant, InDDP

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9  # DiLoCo's own (Douillard et al., 2023)
SLOW_MOMENTUM = 0.5  # fairscale's default, and Rumor's


def send_bf16(ddp: DistributedDataParallel) -> None:
    """Registers torch's hook. DDP recognizes it by its name and rejects it without NCCL, but it works with gloo. So wrap it."""
    ddp.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))


class WithBf16(InDDP):
    """DDP that sends gradients as bfloat16."""

    def __init__(self, build: Build, bucket_cap_mb: float = 4, **options: float):
        super().__init__(build, bucket_cap_mb, **options)
        self.description = f"torch: gradients sent as bfloat16, bucket_cap_mb={bucket_cap_mb:g}; DDP's check for NCCL is bypassed"
        send_bf16(self.ddp)


class WithPowerSGD(InDDP):
    """DDP with PowerSGD in one bucket. Its hook waits in gloo's two threads, so two buckets in flight would deadlock."""

    def __init__(self, build: Build, rank: int, start: int, **options: float):
        super().__init__(build, bucket_cap_mb=100_000, **options)
        self.description = (
            f"torch: rank {rank} from step {start} on, warm start, error feedback, one bucket (with more it deadlocks on gloo)"
        )
        self.ddp.register_comm_hook(PowerSGDState(None, rank, start_powerSGD_iter=start), powerSGD_hook)


class PostLocalSGD(InDDP):
    """DDP with torch's model averager. It averages no gradients, because each host has one process only."""

    def __init__(self, build: Build, H: int, **options: float):
        super().__init__(build, **options)
        self.description = f"torch: PeriodicModelAverager, after steps {H}, {2 * H}, ...; local from the first step on"
        self.ddp.register_comm_hook(PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False), post_localSGD_hook)
        # By default it averages after steps 1, H + 1, ... A warm-up of H - 1 steps moves this to H, 2H, ...
        self.averager = PeriodicModelAverager(H, warmup_steps=H - 1)

    def step(self, x: Tensor, y: Tensor) -> None:
        super().step(x, y)
        self.averager.average_parameters(self.model.parameters())  # averages parameters with a gradient, so call it before zero_grad()


class WithTorchFT(Contestant):
    """torchft, with each host as a replica group of one process. Membership is fixed, with all hosts. Host 0 runs the lighthouse.

    While other contestants take their turn, it only sends heartbeats: one per second and host, a few hundred bytes.
    """

    def __init__(self, build: Build, H: int, diloco: bool = False, **options: float):
        super().__init__(build, **options)
        from torchft.local_sgd import DiLoCo, LocalSGD

        self.description = f"sync_every={H}, its own gloo group, fixed membership, heartbeats 1 s (default 0.1 s)"
        self.lighthouse: Any = None
        self.manager = self._join()
        if diloco:
            outer = torch.optim.SGD(self.model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
            self.description += f", outer SGD: lr {OUTER_LR}, Nesterov momentum {OUTER_MOMENTUM}"
            self.hooks = DiLoCo(self.manager, [self.model], self.opt, outer, sync_every=H)
        else:
            self.hooks = LocalSGD(self.manager, self.model, self.opt, sync_every=H)
        self.hooks.__enter__()  # from now on, the optimizer's step averages

    def _join(self) -> Any:
        from torchft.coordination import LighthouseServer
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        logging.getLogger("torchft").setLevel(logging.ERROR)  # it warns about NCCL, which is not used
        n, rank, here = dist.get_world_size(), dist.get_rank(), _own_address()
        where = [""]
        if rank == 0:
            self.lighthouse = LighthouseServer(bind="[::]:0", min_replicas=n, heartbeat_timeout_ms=60_000)
            where = [f"http://{here}:{self.lighthouse.address().rsplit(':', 1)[1]}"]
        dist.broadcast_object_list(where)
        self.store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
        return Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=n,
            use_async_quorum=False,
            rank=0,
            world_size=1,
            store_addr=here,
            store_port=self.store.port,
            lighthouse_addr=where[0],
            replica_id=f"host{rank}",
            hostname=here,
            heartbeat_interval=timedelta(seconds=1),
            init_sync=False,  # all hosts build the same model
            max_retries=0,  # otherwise a host continues alone and silently if an average fails
        )

    def close(self) -> None:
        """Shuts torchft down. All hosts must call it."""
        self.hooks.__exit__(None, None, None)
        self.manager.shutdown(wait=False)
        dist.barrier()  # the lighthouse must end last
        if self.lighthouse is not None:
            self.lighthouse.shutdown()


def _own_address() -> str:
    """The address by which the other hosts know this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((os.environ["MASTER_ADDR"], 1))  # nothing is sent
        return str(s.getsockname()[0])


class WithFairscale(Contestant):
    """fairscale's stochastic gradient push, with SlowMo every H steps if slow_momentum > 0. Its gossip thread sleeps between turns."""

    def __init__(self, build: Build, H: int, slow_momentum: float = 0.0, base: str = "sgp", **options: Any):
        of_optimizer = {name: options.pop(name) for name in ("lr", "momentum") if name in options}
        super().__init__(build, **of_optimizer)
        replace_cuda_calls_of_fairscale()
        warnings.filterwarnings("ignore", "Using a non-full backward hook")  # fairscale uses one
        net = imported("fairscale.experimental.nn.data_parallel")
        self.description = f"nprocs_per_node=1; {REPLACED}"
        if slow_momentum:
            self.description = (
                f"slowmo_momentum={slow_momentum}, slowmo_frequency={H}, all averaged there; "
                f"{self.description}; slow buffers made before the first step instead of after it"
            )
        self.ddp = net.SlowMoDistributedDataParallel(
            self.model,
            nprocs_per_node=1,
            slowmo_base_algorithm=net.SlowMoBaseAlgorithm(base),
            slowmo_momentum=slow_momentum,
            slowmo_frequency=H,
            localsgd_frequency=H,
            **{"slowmo_memory_efficient": False, "slowmo_sgp_average_params": True, **options},
        )
        self.start_slowmo()

    def start_slowmo(self) -> None:
        """Creates the slow buffers now. By default fairscale takes the models after the first step, which differ between hosts."""
        self.ddp._init_global_momentum_buffers(self.opt)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.backward(self.ddp, x, y)
        self.opt.step()
        self.ddp.perform_slowmo(self.opt)


REPLACED = "replaced by no-ops: torch.cuda.synchronize, current_stream, stream, Tensor.cuda, pin_memory"


def replace_cuda_calls_of_fairscale() -> None:
    """Replaces CUDA calls by no-ops. fairscale makes them on any device, and without CUDA they fail. No other foreign code is changed."""
    if torch.cuda.is_available():
        return

    class NoStream:
        def wait_stream(self, stream: object) -> None: ...
        def synchronize(self) -> None: ...

    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = lambda device=None: NoStream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    Tensor.cuda = lambda self, *args, **kwargs: self
    Tensor.pin_memory = lambda self, *args, **kwargs: self


def peers(n: int, H: int, powersgd_rank: int = 2, powersgd_start: int = 10) -> dict[str, Callable[..., Contestant]]:
    """Functions that build the contestants: `peers(n, H)[name](build, lr=..., momentum=...)`. Each has a `description` of its settings."""
    found: dict[str, Callable[..., Contestant]] = {
        "DDP, bf16 hook": WithBf16,
        "DDP, PowerSGD hook": lambda build, **options: WithPowerSGD(build, powersgd_rank, powersgd_start, **options),
        "PostLocalSGD (torch)": lambda build, **options: PostLocalSGD(build, H, **options),
    }
    os.environ.setdefault("RUST_LOG", "error")  # otherwise torchft prints some lines at every average
    if _can_import("torchft.local_sgd", "torchft's LocalSGD and DiLoCo"):
        found["LocalSGD (torchft)"] = lambda build, **options: WithTorchFT(build, H, **options)
        found["DiLoCo (torchft)"] = lambda build, **options: WithTorchFT(build, H, diloco=True, **options)
    if _can_import("fairscale.experimental.nn.data_parallel", "fairscale's SGP and SGP+SlowMo"):
        found["SGP (fairscale)"] = lambda build, **options: WithFairscale(build, H, **options)
        found["SGP+SlowMo (fairscale)"] = lambda build, **options: WithFairscale(build, H, SLOW_MOMENTUM, **options)
    return found


def _can_import(module: str, what: str) -> bool:
    try:
        imported(module)
    except ImportError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"left out: {what} ({error}); to include it, pip install 'rumor[peers]'", file=sys.stderr)
        return False
    return True


def imported(module: str) -> Any:
    """Imports a module without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the module uses deprecated parts of torch
        return importlib.import_module(module)
