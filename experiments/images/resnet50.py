"""ResNet-50 in plain PyTorch: 25.6 M parameters in 161 tensors."""

from __future__ import annotations

from torch import Tensor, nn

BLOCKS, WIDTHS = (3, 4, 6, 3), (64, 128, 256, 512)
EXPANSION = 4


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = EXPANSION * width
        self.path = nn.Sequential(
            convolution(inputs, width, 1), nn.ReLU(), convolution(width, width, 3, stride), nn.ReLU(), convolution(width, outputs, 1)
        )
        self.short = nn.Identity() if inputs == outputs else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.path(x) + self.short(x))


def start_as_identity(network: nn.Module) -> None:
    """Sets the scale of each block's last BatchNorm to zero, so that each block begins as its shortcut (Goyal et al., 2017)."""
    for block in network.modules():
        if isinstance(block, Bottleneck):
            nn.init.zeros_(block.path[-1][1].weight)  # type: ignore[index,union-attr]


def resnet50(classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, (blocks, width) in enumerate(zip(BLOCKS, WIDTHS, strict=True)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = EXPANSION * width
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    start_as_identity(network)
    return network
