"""Models of well-known sizes for benchmarks: ResNet-50 (25.6 M in 161 tensors) and an encoder of BERT-large's size."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

from images.resnet50 import resnet50  # noqa: F401


def bert_large() -> nn.Module:
    """The embeddings and the encoder of BERT-large: 333 M parameters."""
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Embedding(30522, 1024), nn.TransformerEncoder(layer, 24, enable_nested_tensor=False))
