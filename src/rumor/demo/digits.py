"""scikit-learn's handwritten digits, split by label: each node has only a few of the ten digits, so it depends on the other nodes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

TO_TRAIN = 1400  # of the 1797 images; the rest is the test set


class Digits(NamedTuple):
    """The images [m, 64] and labels of one node, and the test set, which all nodes share. Numpy arrays, because processes get copies."""

    x: Any
    y: Any
    test_x: Any
    test_y: Any


def split_by_label(n: int, seed: int) -> list[Digits]:
    """Sorts the training images by label and cuts them into n parts, one for each node. `seed` chooses the images of the test set."""
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
