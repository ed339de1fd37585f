"""scikit-learn's handwritten digits, split by label: each node has a few of the ten digits only, so it needs the others."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

TO_TRAIN = 1400  # of the 1797 images; the others are the test set


class Digits(NamedTuple):
    """One node's images [m, 64] and labels, and the test set, which is the same for all. In numpy: what is sent to a process is copied."""

    x: Any
    y: Any
    test_x: Any
    test_y: Any


def split_by_label(n: int, seed: int) -> list[Digits]:
    """For each of n nodes: the training images, sorted by label, are cut into n parts. `seed` says which images are for the test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError("the demo trains on scikit-learn's digits: pip install 'rumor[demo]'") from None
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    shuffled = np.random.default_rng(seed).permutation(len(images))
    train, test = shuffled[:TO_TRAIN], shuffled[TO_TRAIN:]
    parts = np.array_split(train[np.argsort(labels[train], kind="stable")], n)
    return [Digits(images[part], labels[part], images[test], labels[test]) for part in parts]
