"""The additive_ops file: pooling alone, over the whole past and over windows, for ordinary and extreme logits."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from multilin.ops.prefix_softmax import prefix_softmax


def check(file: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(array, ours, expected): `CASE.global` and `CASE.window{k}` for every case with logits."""
    for name in file.files:
        case, _, kind = name.rpartition(".")
        if f"{case}.logits" not in file.files or not (kind == "global" or kind.removeprefix("window").isdigit()):
            continue
        logits = torch.from_numpy(file[f"{case}.logits"]).double()
        values = torch.from_numpy(file["X"]).double()[:, : logits.shape[1]]
        window = None if kind == "global" else int(kind.removeprefix("window"))
        yield name, prefix_softmax(logits, values, window=window)[0].numpy(), file[name]
