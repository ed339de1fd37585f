"""Modules that the fork server imports once for all processes of tests (see warm.py)."""

import gc

import matplotlib.pyplot  # noqa: F401
import networkx  # noqa: F401
import numpy  # noqa: F401
import pytest  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch._dynamo
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.multiprocessing
import torch.nn.parallel  # noqa: F401

import rumor.cli  # noqa: F401
import tests.nodes  # noqa: F401

gc.collect()
gc.freeze()  # from now on a collection skips these objects, which would take long and copy their memory
