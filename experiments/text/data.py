"""Reads text as sequences of WordPieces: Wikipedia (enwik8), novels, or any folder of .txt files. Tokens are cached on disk."""

from __future__ import annotations

import html
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from rumor.checkpoint.files import replacing

LENGTH = 128  # tokens of a sequence including [CLS] and [SEP], as in BERT's first phase
GUESSES = round(0.15 * (LENGTH - 2))  # tokens of a sequence to predict: 80 % are masked, 10 % replaced, 10 % unchanged
HELD_OUT = 128  # one of this many sequences is held out for evaluation
FEWEST = 128  # minimum number of sequences
MOST_LETTERS = 20_000  # characters that are tokenised at a time
VERSION = 1  # of the cleaning: increase it when the cleaning changes


# ---- reading --------------------------------------------------------------------------------------------------------------------------


def texts(folder: Path) -> Iterator[str]:
    """Yields all documents of a folder: the articles of enwik8, and each .txt file as one document."""
    found = False
    for path in sorted(folder.rglob("*")):
        if path.name == "enwik8":
            found = True
            yield from articles(path.read_text("utf-8", errors="replace"))
        elif path.suffix == ".txt":
            found = True
            yield path.read_text("utf-8-sig", errors="replace").replace("\r\n", "\n")
    if not found:
        raise FileNotFoundError(f"{folder} and its subfolders have no text: neither enwik8 nor a .txt file")


def articles(dump: str) -> Iterator[str]:
    """Yields the title and text of each page, without mark-up.

    >>> page = "<page><title>Rain</title><text xml:space='preserve'>'''Rain''' is [[water|wet]] {{stub}} &amp;amp; cold.</text></page>"
    >>> list(articles(page))
    ['Rain\\nRain is wet  & cold.']
    """
    for page in re.finditer(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", dump, re.DOTALL):
        text = html.unescape(html.unescape(page[2]))
        if not text.lstrip().lower().startswith("#redirect"):
            yield f"{html.unescape(page[1])}\n{plain(text)}"


def plain(text: str) -> str:
    """Removes the mark-up of Wikipedia."""
    for nested in (r"\{\{[^{}]*\}\}", r"\{\|[^{}]*?\|\}"):  # templates and tables, the innermost first
        while (shorter := re.sub(nested, "", text)) != text:
            text = shorter
    text = re.sub(r"<ref[^>]*/>|<ref[^>]*>.*?</ref>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\[\[(?:Image|File|Category|[a-z-]{2,12}):[^\[\]]*(?:\[\[[^\[\]]*\]\][^\[\]]*)*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)  # links keep their words
    text = re.sub(r"\[https?://\S+ ?([^\]]*)\]", r"\1", text)
    return re.sub(r"'{2,}|<[^>]+>|={2,}", "", text)


def tokens(folder: Path, vocabulary: Path, cache: Path) -> NDArray[np.uint16]:
    """Returns the tokens of all documents in a row, with a [SEP] after each. They are tokenised once, and then read from `cache`."""
    from tokenizers import BertWordPieceTokenizer  # transformers' own tokenizer renamed its vocabulary argument, and ignores the old name

    listing = sorted((str(p.relative_to(folder)), p.stat().st_size) for p in folder.rglob("*") if p.is_file())
    key = zlib.crc32(repr((VERSION, listing, vocabulary.read_bytes())).encode())
    path = cache / f"tokens-{key:08x}.npy"
    if not path.exists():
        tokenizer = BertWordPieceTokenizer(str(vocabulary), lowercase=True)
        parts = []
        for text in tqdm(texts(folder), desc="tokenising", unit=" documents"):
            pieces = [text[at : at + MOST_LETTERS] for at in range(0, len(text), MOST_LETTERS)]
            for piece in tokenizer.encode_batch(pieces, add_special_tokens=False):
                parts.append(np.array(piece.ids, np.uint16))
            parts.append(np.array([tokenizer.token_to_id("[SEP]")], np.uint16))
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as aside:
            np.save(aside, np.concatenate(parts))
    return np.load(path)


# ---- sequences ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Special:
    """The ids of BERT's special tokens, and the size of the vocabulary."""

    cls: int
    sep: int
    mask: int
    size: int

    @classmethod
    def of(cls, vocabulary: Path) -> Special:
        words = vocabulary.read_text("utf-8").splitlines()
        missing = [name for name in ("[CLS]", "[SEP]", "[MASK]") if name not in words]
        if missing:
            raise ValueError(f"{vocabulary} has no {', '.join(missing)}: give a WordPiece vocabulary of BERT")
        return cls(*(words.index(name) for name in ("[CLS]", "[SEP]", "[MASK]")), len(words))


@dataclass(frozen=True)
class Sequences:
    """The sequences to train on and the held-out ones, [N, LENGTH] each."""

    train: Tensor
    held_out: Tensor
    special: Special

    def to(self, device: torch.device) -> Sequences:
        return Sequences(self.train.to(device), self.held_out.to(device), self.special)

    def evaluated_on(self, most: int) -> Sequences:
        """Keeps at most that many held-out sequences, from the whole text."""
        return Sequences(self.train, self.held_out[:: max(1, len(self.held_out) // most)][:most], self.special)

    def for_trials(self) -> Sequences:
        """Holds out other sequences, which are no longer trained on. A learning rate chosen with them has not seen the test text."""
        kept = torch.arange(len(self.train)) % HELD_OUT == HELD_OUT // 2
        return Sequences(self.train[~kept], self.train[kept], self.special)

    @classmethod
    def of(cls, stream: NDArray[np.uint16], special: Special) -> Sequences:
        inside = LENGTH - 2
        count = len(stream) // inside
        if count < FEWEST:
            raise ValueError(f"{len(stream)} tokens make {count} sequences of {LENGTH}, but at least {FEWEST} are needed: give more text")
        rows = torch.from_numpy(stream[: count * inside].astype(np.int32)).view(count, inside)
        ends = [torch.full((count, 1), number, dtype=torch.int32) for number in (special.cls, special.sep)]
        whole = torch.cat([ends[0], rows, ends[1]], dim=1)
        kept = torch.arange(count) % HELD_OUT == 0
        return cls(whole[~kept], whole[kept], special)


def masked(x: Tensor, special: Special, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Masks tokens, the same number in every sequence.

    Returns the input of the model [..., LENGTH], the masked positions [..., GUESSES], and the tokens that were there.
    """
    chance = torch.rand(x.shape, device=x.device, generator=random)
    chance[..., 0] = chance[..., -1] = -1.0  # never mask [CLS] and the last [SEP]
    places = chance.topk(GUESSES, dim=-1).indices.sort(dim=-1).values
    there = x.gather(-1, places).long()
    what = torch.rand(there.shape, device=x.device, generator=random)
    other = torch.randint(special.size, there.shape, device=x.device, generator=random)
    seen = torch.where(what < 0.8, special.mask, torch.where(what < 0.9, other, there))
    return x.long().scatter(-1, places, seen), places, there
