"""Images and labels: CIFAR-10 and Fashion-MNIST in the memory of a device, and folders such as ImageNet's on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from images import idx

Batch = tuple[Tensor, Tensor]  # [nodes, B, H, W, C] and [nodes, B]
CIFAR = (*(f"data_batch_{b}.bin" for b in range(1, 6)), "test_batch.bin")
SIDE, CHANNELS = 32, 3
BORDER = 4  # pixels that a crop may be shifted by
SAMPLE = 5_000  # images for the mean and standard deviation
AT_ONCE = 2_000  # test images per batch
TRAINED = 10_000  # training images on which accuracy is measured: as many as CIFAR-10 has test images
TRIAL = 10  # one of this many training images is held out for trials


class Data(Protocol):
    """A data set for training. Pixels are bytes; `Scale` normalises them."""

    name: str
    labels: Tensor  # of the training images
    classes: int
    device: torch.device

    def take(self, order: Tensor, nodes: Sequence[int], seed: int) -> Iterator[Batch]:
        """Yields training images in the given order [steps, n, B], one batch per step, for the given nodes.

        Images are cropped and flipped at random. The random changes of a node's images depend on the seed only, not on the other nodes.
        """
        ...

    def test(self) -> Iterator[Batch]:
        """Yields all test images [B, H, W, C] and labels [B]."""
        ...

    def trained(self) -> Iterator[Batch]:
        """Yields some training images [B, H, W, C], unchanged, and labels [B]. They are the same at each call."""
        ...

    def for_trials(self) -> Data:
        """Returns the training images alone, with a tenth of them as test images. A rate chosen with them has not seen the test images."""
        ...

    def sample(self) -> Tensor:
        """Returns some unchanged training images, [N, H, W, C]."""
        ...


class Scale:
    """Scales pixels so that each channel of the training images has mean 0 and standard deviation 1."""

    def __init__(self, data: Data):
        x = data.sample().float()
        deviation = x.std((0, 1, 2)).clamp(min=1.0)  # pixels are 0 to 255; a constant channel has deviation 0
        self.mean, self.deviation = x.mean((0, 1, 2)).to(data.device), deviation.to(data.device)
        self.dtype = torch.bfloat16 if data.device.type == "cuda" else torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        return ((x.to(self.mean.device).float() - self.mean) / self.deviation).to(self.dtype)


def load(folder: Path, device: torch.device, side: int = 224) -> Data:
    """Loads CIFAR-10, Fashion-MNIST, or train/ and val/ with a folder for each class, whichever the folder has."""
    cifar = next((path.parent for path in sorted(folder.rglob(CIFAR[0])) if all(path.with_name(name).exists() for name in CIFAR)), None)
    if cifar is not None:
        return InMemory.of_cifar10(cifar, device)
    if any(folder.rglob(idx.FILES[0])):
        return InMemory.of_idx(idx.find(folder), device)
    if (folder / "train").is_dir() and (folder / "val").is_dir():
        from images.folders import OnDisk

        return OnDisk(folder, device, side)
    raise FileNotFoundError(
        f"{folder} has no known data set: it needs {CIFAR[0]} and the other files of CIFAR-10, {idx.FILES[0]} and the other files of "
        "Fashion-MNIST, or train/ and val/ with a folder for each class"
    )


class InMemory:
    """A small data set in the memory of a device. It crops a whole epoch at once."""

    def __init__(self, name: str, device: torch.device, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]):
        self.name, self.device = name, device
        (self._x, self.labels), self._test = train, test
        self._on_device = [t.to(device) for t in (*train, *test)]
        self.classes = int(self.labels.max()) + 1

    @classmethod
    def of_cifar10(cls, folder: Path, device: torch.device) -> InMemory:
        """Reads the official binary files: a label, then the red, green and blue planes of a 32 x 32 image."""
        records = [np.fromfile(folder / name, np.uint8).reshape(-1, 1 + CHANNELS * SIDE**2) for name in CIFAR]
        return cls("cifar10", device, _from_records(np.concatenate(records[:-1])), _from_records(records[-1]))

    @classmethod
    def of_idx(cls, folder: Path, device: torch.device) -> InMemory:
        parts = []
        for part in ("train", "t10k"):
            x, y = (torch.tensor(idx.read_idx(folder / f"{part}-{kind}-ubyte")) for kind in ("images-idx3", "labels-idx1"))
            parts.append((x[..., None], y.long()))
        return cls("fashion-mnist", device, *parts)

    def take(self, order: Tensor, nodes: Sequence[int], seed: int) -> Iterator[Batch]:
        random = torch.Generator(self.device).manual_seed(seed)
        x, y, *_ = self._on_device
        order, which = order.to(self.device), list(nodes)
        moves = torch.randint(2 * BORDER + 1, (*order.shape, 2), device=self.device, generator=random)[:, which]
        flips = torch.rand(order.shape, device=self.device, generator=random)[:, which] < 0.5
        mine = order[:, which]
        images = cropped(x[mine.flatten()], moves.view(-1, 2), flips.flatten()).view(*mine.shape, *x.shape[1:])
        return zip(images, y[mine], strict=True)

    def test(self) -> Iterator[Batch]:
        return zip(*(t.split(AT_ONCE) for t in self._on_device[2:]), strict=True)

    def trained(self) -> Iterator[Batch]:
        every = max(1, len(self.labels) // TRAINED)
        return zip(*(t[::every].split(AT_ONCE) for t in self._on_device[:2]), strict=True)

    def for_trials(self) -> InMemory:
        kept = held_out(len(self.labels))
        train, test = ((self._x[chosen], self.labels[chosen]) for chosen in (~kept, kept))
        return InMemory(f"{self.name}, {len(test[1])} training images held out", self.device, train, test)

    def sample(self) -> Tensor:
        return self._on_device[0][:: max(1, len(self.labels) // SAMPLE)]


def held_out(images: int) -> Tensor:
    """Marks one of TRIAL training images, chosen at random once for all."""
    return torch.randperm(images, generator=torch.Generator().manual_seed(0)) % TRIAL == 0


def _from_records(records: NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
    x = records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1)
    return torch.tensor(np.ascontiguousarray(x)), torch.tensor(records[:, 0]).long()


def cropped(x: Tensor, moves: Tensor, flips: Tensor) -> Tensor:
    """Shifts each image x [N, H, W, C] by `moves` [N, 2], from 0 to 2 BORDER, with mirrored borders. Flips it where `flips` [N] is True."""
    N, height, width, _ = x.shape
    wide = functional.pad(x.permute(0, 3, 1, 2).half(), (BORDER,) * 4, mode="reflect").to(x.dtype).permute(0, 2, 3, 1)
    column = torch.arange(width, device=x.device)
    rows = torch.arange(height, device=x.device) + moves[:, :1]
    columns = torch.where(flips[:, None], width - 1 - column, column) + moves[:, 1:]
    return wide[torch.arange(N, device=x.device)[:, None, None], rows[:, :, None], columns[:, None, :]]
