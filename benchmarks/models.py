"""Models of well-known sizes for benchmarks: ResNet-50 (25.6 M in 161 tensors), BERT-base (109 M), and an encoder of BERT-large's size."""

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


def bert_base() -> nn.Module:
    """The parameters of BERT-base, in their real shapes: 109,482,240 in embeddings, 12 layers and the pooler. It is not meant to be run."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    embeddings = (nn.Embedding(30522, 768), nn.Embedding(512, 768), nn.Embedding(2, 768), nn.LayerNorm(768))
    return nn.Sequential(*embeddings, nn.TransformerEncoder(layer, 12, enable_nested_tensor=False), nn.Linear(768, 768))
