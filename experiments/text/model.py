"""BERT for masked language modelling, in several sizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIZES = {  # hidden, layers, heads, dropout
    "tiny": (64, 2, 2, 0.0),
    "small": (256, 4, 4, 0.0),
    "base": (768, 12, 12, 0.1),
    "large": (1024, 24, 16, 0.1),  # the paper's, 330 M parameters
}


def bert(size: str, vocabulary: int, length: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    hidden, layers, heads, dropout = SIZES[size]
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=length,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="eager",  # works with torch.func.vmap
    )
    model: nn.Module = BertForMaskedLM(config)
    return model


class MaskedBert(nn.Module):
    """A BERT that predicts the tokens at some positions only."""

    def __init__(self, size: str, vocabulary: int, length: int):
        super().__init__()
        self.bert = bert(size, vocabulary, length)

    def forward(self, seen: Tensor, places: Tensor) -> Tensor:
        """Returns logits [B, guesses, vocabulary]."""
        with torch.autocast(seen.device.type, torch.bfloat16, enabled=seen.is_cuda):
            hidden = self.bert.bert(seen).last_hidden_state  # [B, length, hidden]
            asked = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
            logits: Tensor = self.bert.cls(asked)
        return logits.float()

    def start(self) -> None:
        """Initializes all weights again."""
        with torch.no_grad():
            for module in self.bert.modules():
                self.bert._init_weights(module)


def loss_of(model: nn.Module, seen: Tensor, places: Tensor, there: Tensor) -> Tensor:
    """The cross-entropy of the predictions on one node's batch."""
    return nn.functional.cross_entropy(model(seen, places).flatten(0, 1), there.flatten())
