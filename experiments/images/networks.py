"""The networks of the image study."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from images.convolution import convolution
from images.resnet50 import resnet50, start_as_identity

WIDTHS = (64, 256, 256)
PATCHES = 5_000  # images for the whitening of 2 x 2 patches in the first layer


class Convolution(nn.Module):
    """A convolution without bias, channels last. It is initialized to the identity on the first channels."""

    def __init__(self, inputs: int, outputs: int, size: int = 3):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, size, size, inputs))

    def reset_parameters(self) -> None:
        outputs, size, _, inputs = self.weight.shape
        nn.init.uniform_(self.weight, -1 / math.sqrt(inputs * size**2), 1 / math.sqrt(inputs * size**2))
        with torch.no_grad():
            if size % 2 and inputs <= outputs:
                self.weight[:inputs] = 0
                self.weight[range(inputs), size // 2, size // 2, range(inputs)] = 1

    def forward(self, x: Tensor) -> Tensor:
        size = self.weight.shape[1]
        return convolution(x, self.weight.to(x.dtype), size // 2 if size % 2 else 0)


class Norm(nn.Module):
    """Batch normalisation over all dimensions except the last, in float32."""

    def __init__(self, channels: int, momentum: float = 0.1):
        super().__init__()
        self.momentum = momentum
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))

    def reset_parameters(self) -> None:
        for tensor, value in ((self.weight, 1.0), (self.bias, 0.0), (self.mean, 0.0), (self.variance, 1.0)):
            nn.init.constant_(tensor, value)

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.mean, self.variance
        if self.training:
            count = x.numel() // x.shape[-1]
            variance, mean = torch.var_mean(x.float().flatten(0, -2), 0, correction=0)
            with torch.no_grad():
                m = self.momentum
                self.mean.mul_(1 - m).add_(m * mean.detach())
                self.variance.mul_(1 - m).add_(m * count / (count - 1) * variance.detach())
        scale = self.weight * torch.rsqrt(variance + 1e-5)
        return (x.float() * scale + (self.bias - mean * scale)).to(x.dtype)


def halved(x: Tensor) -> Tensor:
    """Max-pools 2 x 2 pixels."""
    batch, height, width, channels = x.shape
    h, w = height // 2, width // 2
    return x[:, : 2 * h, : 2 * w].reshape(batch, h, 2, w, 2, channels).amax((2, 4))


class Block(nn.Module):
    """Halves the resolution, then adds a residual layer."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.first, self.first_norm = Convolution(inputs, outputs), Norm(outputs)
        self.second, self.second_norm = Convolution(outputs, outputs), Norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.first_norm(halved(self.first(x))))
        return x + functional.gelu(self.second_norm(self.second(x)))


class SmallResNet(nn.Module):
    """A ResNet with 2.0 M parameters for images of about 32 x 32, channels last.

    The first layer whitens patches of 2 x 2 pixels (each direction with both signs) and is not trained. Three residual blocks follow.
    """

    def __init__(self, classes: int = 10, channels: int = 3, widths: tuple[int, ...] = WIDTHS):
        super().__init__()
        self.patches = Convolution(channels, 8 * channels, 2)
        self.patches.weight.requires_grad_(False)
        self.bias = nn.Parameter(torch.zeros(8 * channels))
        through = (8 * channels, *widths)
        self.blocks = nn.Sequential(*(Block(a, b) for a, b in zip(through, widths, strict=False)))
        self.head = nn.Linear(widths[-1], classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.patches(x) + self.bias.to(x.dtype))
        x = self.blocks(x).amax((1, 2))
        return functional.linear(x, self.head.weight.to(x.dtype)).float() / 9

    @torch.no_grad()
    def start(self, images: Tensor) -> None:
        """Initializes all weights again. The first layer is set to whiten `images` [N, H, W, C]."""
        _draw_anew(self)
        self.bias.zero_()
        self.patches.weight.copy_(whitening(images[:PATCHES]))


class TinyResNet(SmallResNet):
    """A SmallResNet with few channels and half the resolution, for a study that takes minutes on two cores."""

    def __init__(self, classes: int = 10, channels: int = 3):
        super().__init__(classes, channels, widths=(16, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_means_of_four(x))

    def start(self, images: Tensor) -> None:
        super().start(_means_of_four(images[:PATCHES]))


class MLP(nn.Module):
    """Two layers on 14 x 14 pixels, for studies of many runs on a CPU."""

    def __init__(self, classes: int = 10, channels: int = 3, hidden: int = 64, side: int = 14):
        super().__init__()
        self.side = side
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(side * side * channels, hidden), nn.GELU(), nn.Linear(hidden, classes))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(functional.adaptive_avg_pool2d(x.permute(0, 3, 1, 2).float(), self.side))
        return result

    def start(self, images: Tensor) -> None:
        _draw_anew(self)


def _means_of_four(x: Tensor) -> Tensor:
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).mean((2, 4))


def whitening(images: Tensor, least: float = 5e-4) -> Tensor:
    """Returns weights [8 C, 2, 2, C]: the principal directions of 2 x 2 patches, scaled to variance one, and their negatives."""
    channels = images.shape[-1]
    patches = images.float().unfold(1, 2, 1).unfold(2, 2, 1).permute(0, 1, 2, 4, 5, 3).reshape(-1, 4 * channels)
    variances, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
    scaled = (directions / (variances + least).sqrt()).T.flip(0).reshape(-1, 2, 2, channels)
    return torch.cat([scaled, -scaled])


class ResNet50(nn.Module):
    """The standard ResNet-50, for images [B, H, W, C]."""

    def __init__(self, classes: int = 1000, channels: int = 3):
        super().__init__()
        if channels != 3:
            raise ValueError(f"ResNet-50 needs images with 3 channels, got {channels}: use --net small")
        self.network = resnet50(classes)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.dtype == torch.bfloat16):
            result: Tensor = self.network(x.permute(0, 3, 1, 2))
        return result.float()

    def start(self, images: Tensor) -> None:
        _draw_anew(self)
        start_as_identity(self)


def _draw_anew(network: nn.Module) -> None:
    for module in network.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


NETWORKS = {"mlp": MLP, "tiny": TinyResNet, "small": SmallResNet, "resnet50": ResNet50}
