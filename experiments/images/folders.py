"""Images on disk, in the folders train/CLASS/*.jpeg and val/CLASS/*.jpeg as for ImageNet. Worker processes decode them."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from images.data import TRAINED, Batch, held_out

SUFFIXES = {".jpeg", ".jpg", ".png", ".bmp", ".webp"}
AREA, SHAPE = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random crop: its share of the image, and its width over height
BORDER = 256 / 224  # size of a test image relative to its centre crop
SAMPLE, AT_ONCE = 256, 256


class OnDisk:
    """A data set of image files."""

    def __init__(self, folder: Path, device: torch.device, side: int):
        self.name, self.device, self._side = f"{folder.resolve().name}, {side} pixels", device, side
        names = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
        self._train, self._test = (_listed(folder / part, names) for part in ("train", "val"))
        self.classes = len(names)
        self.labels = torch.tensor([label for _, label in self._train])

    def take(self, order: Tensor, nodes: Sequence[int], seed: int) -> Iterator[Batch]:
        order = order[:, list(nodes)]
        steps, n, batch = order.shape
        images = _Images(self._train, self._side, seed)
        for x, y in self._loaded(images, order.reshape(steps, -1).tolist()):
            yield x.view(n, batch, *x.shape[1:]), y.view(n, batch)

    def test(self) -> Iterator[Batch]:
        numbers = list(range(len(self._test)))
        return self._loaded(_Images(self._test, self._side, None), [numbers[at : at + AT_ONCE] for at in range(0, len(numbers), AT_ONCE)])

    def trained(self) -> Iterator[Batch]:
        numbers = list(range(0, len(self._train), max(1, len(self._train) // TRAINED)))
        images = _Images(self._train, self._side, None)
        return self._loaded(images, [numbers[at : at + AT_ONCE] for at in range(0, len(numbers), AT_ONCE)])

    def for_trials(self) -> OnDisk:
        kept, other = held_out(len(self._train)).tolist(), copy.copy(self)
        other._train = [image for image, is_kept in zip(self._train, kept, strict=True) if not is_kept]
        other._test = [image for image, is_kept in zip(self._train, kept, strict=True) if is_kept]
        other.name, other.labels = f"{self.name}, {sum(kept)} training images held out", torch.tensor([label for _, label in other._train])
        return other

    def sample(self) -> Tensor:
        images = _Images(self._train, self._side, None)
        return torch.stack([images[i][0] for i in range(0, len(images), max(1, len(images) // SAMPLE))])

    def _loaded(self, images: _Images, batches: list[list[int]]) -> Iterator[Batch]:
        workers = min(16, (os.cpu_count() or 1) - 1)
        for x, y in DataLoader(images, batch_sampler=batches, num_workers=workers, pin_memory=self.device.type == "cuda"):
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)


def _listed(folder: Path, names: list[str]) -> list[tuple[Path, int]]:
    """Lists every image with the number of its class."""
    found = []
    for label, name in enumerate(names):
        paths = sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in SUFFIXES)
        if not paths:
            raise FileNotFoundError(
                f"{folder / name} has no images ({', '.join(sorted(SUFFIXES))}): every class needs images in train/ and in val/"
            )
        found += [(path, label) for path in paths]
    return found


class _Images(Dataset[tuple[Tensor, int]]):
    """Images [side, side, 3] as bytes: a random crop, or the centre crop if there is no seed."""

    def __init__(self, paths: list[tuple[Path, int]], side: int, seed: int | None):
        self._paths, self._side, self._seed = paths, side, seed

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        path, label = self._paths[number]
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        image = self._centre_crop(image) if self._seed is None else self._random_crop(image, np.random.default_rng((self._seed, number)))
        return torch.from_numpy(np.array(image)), label

    def _random_crop(self, image: Image.Image, random: np.random.Generator) -> Image.Image:
        area, shape = image.width * image.height * random.uniform(*AREA), np.exp(random.uniform(*np.log(SHAPE)))
        width, height = (
            min(most, max(1, round(size))) for most, size in zip(image.size, ((area * shape) ** 0.5, (area / shape) ** 0.5), strict=True)
        )
        left, top = (int(random.integers(most - size + 1)) for most, size in zip(image.size, (width, height), strict=True))
        box = (left, top, left + width, top + height)
        cut = image.resize((self._side, self._side), Image.Resampling.BILINEAR, box=box)
        return cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else cut

    def _centre_crop(self, image: Image.Image) -> Image.Image:
        size = min(image.size) / BORDER
        left, top = ((most - size) / 2 for most in image.size)
        return image.resize((self._side, self._side), Image.Resampling.BILINEAR, box=(left, top, left + size, top + size))
