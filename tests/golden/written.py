"""Small files in the layout of the original numbers, computed from their description alone, with NumPy.

The readers of files that are not at hand are tested against these. Nothing here uses the package: forward passes are
written out token by token, and torch serves for their gradients only.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, np.ndarray]
ORDERS = ("normalize_then_average", "average_then_normalize")


def normalized(x: np.ndarray) -> np.ndarray:
    norm = np.sqrt((x * x).sum())
    return x / norm if norm > 0 else np.zeros_like(x)


def by_rows(x: np.ndarray) -> np.ndarray:
    return np.stack([normalized(row) for row in x])


class NormalizedSteps:
    """W <- W - lr G / ||G||, or with averaged rows."""

    def __init__(self, order: str | None, rate: float = 0.05) -> None:
        self.order, self.rate, self.average = order, rate, 0.0

    def __call__(self, weight: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        if self.order is None:
            return weight - self.rate * normalized(gradient)
        if self.order == "normalize_then_average":
            self.average = 0.9 * self.average + 0.1 * by_rows(gradient)
            return weight - self.rate * self.average
        self.average = 0.9 * self.average + 0.1 * gradient
        return weight - self.rate * by_rows(self.average)


class MomentSteps:
    """The optimizer of TScale, ascending along delta."""

    def __init__(self, rows: bool) -> None:
        self.axis = 1 if rows else None
        self.momentum = self.second = self.weight = 0.0
        self.step = 0

    def __call__(self, weights: np.ndarray, delta: np.ndarray, rate: float, l2: float) -> np.ndarray:
        beta = 1 - 0.5 / math.sqrt(1 + self.step)
        mean = (delta * delta).mean(axis=self.axis, keepdims=True)
        self.weight = beta * self.weight + 1
        self.second = beta * self.second + mean
        direction = np.where(mean > 0, delta / np.sqrt(np.where(mean > 0, self.second, 1) / self.weight), 0)
        self.momentum = beta * self.momentum + (1 - beta) * direction
        self.step += 1
        return (1 - rate * l2) * weights + rate * (0.8 * self.momentum + 0.2 * direction)


def threelin_optimizer() -> Arrays:
    draw = np.random.default_rng(0)
    arrays = {}
    for kind, shape in (("matrix", (5, 7)), ("combiner", (4, 3, 5)), ("rows", (6, 4))):
        arrays[f"{kind}.W0"] = draw.normal(size=shape)
        for step in range(3):
            arrays[f"{kind}.G{step}"] = draw.normal(size=shape) * 10.0**step
        if kind == "rows":
            arrays["rows.G0"][2] = arrays["rows.G1"][1] = 0
        for order in ORDERS if kind == "rows" else (None,):
            steps, weight = NormalizedSteps(order), arrays[f"{kind}.W0"]
            for step in range(3):
                weight = steps(weight, arrays[f"{kind}.G{step}"])
                arrays[f"{kind}.{order}.W{step + 1}" if order else f"{kind}.W{step + 1}"] = weight
    return arrays


def gradients(loss: Callable[[dict[str, Tensor]], Tensor], weights: Arrays) -> tuple[float, Arrays]:
    tensors = {name: torch.from_numpy(array).requires_grad_() for name, array in weights.items()}
    value = loss(tensors)
    value.backward()
    return value.item(), {name: tensor.grad.numpy() for name, tensor in tensors.items() if tensor.grad is not None}


def unit(x: Tensor) -> Tensor:
    return x / x.square().mean().sqrt()


def threelin_logits(w: dict[str, Tensor], ids: np.ndarray, meta: dict) -> Tensor:
    states = [w["embed"][token] for token in ids]
    for layer, (slope, hyper, wide) in enumerate(meta["layers"]):
        m = {name: w[f"layer{layer}.{name}"] for name in ("QK", "QV", "K", "V", "Combiner")}
        xs, after = [unit(state) for state in states], []
        for t, x in enumerate(xs):
            own, past = unit(m["K"] @ x), range(0 if wide else max(0, t - meta["window"]), t)
            if t == 0:
                after.append(states[0])
                continue
            logits = [unit(m["QK"] @ xs[k]) @ (m["QV"] @ x) - slope * (t - k) + hyper / (t - k) for k in past]
            weights = torch.softmax(torch.stack(logits), dim=0)
            read = unit(m["V"] @ sum(weights[i] * xs[k] for i, k in enumerate(past)))
            pairs = torch.stack([read * own[torch.arange(len(own)) ^ b] for b in range(16)])
            added = torch.einsum("bi,biz->z", pairs, m["Combiner"])
            after.append(states[t] + added)
        states = after
    return torch.stack(states) @ w["final"].T


def threelin_train() -> Arrays:
    meta = {"dim": 16, "qdim": 4, "ttdim": 16, "vocab": 11, "window": 3, "layers": [[0.0, 6.6, False], [0.1, 0, True]]}
    draw = np.random.default_rng(1)
    shapes = {"QK": (4, 16), "QV": (4, 16), "K": (16, 16), "V": (16, 16), "Combiner": (16, 16, 16)}
    first = {name: draw.normal(size=(11, 16)) for name in ("embed", "final")}
    for layer in range(2):
        first |= {f"layer{layer}.{name}": draw.normal(size=shape) * 0.3 for name, shape in shapes.items()}
    ids = draw.integers(0, 11, size=(2, 2, 5))
    arrays = {"meta_json": np.array(json.dumps(meta)), "token_ids": ids}
    arrays |= {f"w0.{name}": array for name, array in first.items()}
    for order in ORDERS:
        weights = first
        steps = {name: NormalizedSteps(order if name in ("embed", "final") else None) for name in first}
        for step, batch in enumerate(ids):

            def loss(w: dict[str, Tensor], batch: np.ndarray = batch) -> Tensor:
                return torch.stack([
                    torch.nn.functional.cross_entropy(threelin_logits(w, row, meta)[:-1], torch.from_numpy(row[1:]))
                    for row in batch
                ]).mean()  # fmt: skip

            arrays[f"{order}.loss{step}"], grads = gradients(loss, weights)
            if step == 0:
                arrays |= {f"grad0.{name}": array for name, array in grads.items()}
            weights = {name: steps[name](weight, grads[name]) for name, weight in weights.items()}
            arrays |= {f"{order}.w{step + 1}.{name}": array for name, array in weights.items()}
    return {name: np.asarray(array) for name, array in arrays.items()}


def turned(x: Tensor, t: int) -> Tensor:
    """Rotary positions of one head of 128."""
    first = [*range(32), *range(64, 96)]
    angle = t * 500000.0 ** (-2 * torch.arange(64, dtype=torch.float64) / 128)
    a, b = x[first], x[[i + 32 for i in first]]
    result = torch.empty_like(x)
    result[first] = a * angle.cos() - b * angle.sin()
    result[[i + 32 for i in first]] = a * angle.sin() + b * angle.cos()
    return result


def tiles(x: Tensor) -> Tensor:
    return torch.cat([unit(tile) for tile in x.split(128)])


def lin(weight: Tensor, x: Tensor) -> Tensor:
    return weight @ x / math.sqrt(len(x))


def tscale_log_prob(w: dict[str, Tensor], bias: Tensor, ids: np.ndarray, meta: dict) -> Tensor:
    states, c = [w["MP_MODEL_EMBED"][33 + token] for token in ids], float(np.float32(0.693147))
    for layer, (width_id, slope) in enumerate(meta["layers"]):
        m = {name: w[f"layer{layer}.MP_{name}"] for name in TSCALE_SHAPES}
        width, xs, after = meta["widths"][width_id], [tiles(state) for state in states], []
        heads = [slice(128 * head, 128 * head + 128) for head in range(meta["heads"])]
        qv = [lin(m["ATT_QV"], x) for x in xs]
        v = [tiles(lin(m["ATT_V"], x)) for x in xs]
        for t, x in enumerate(xs):
            k, qk, products = tiles(lin(m["ATT_K"], x)), tiles(lin(m["ATT_QK"], x)), []
            for head in heads:
                value, total = torch.zeros(128, dtype=torch.float64), 1.0
                for u in range(max(0, t - width), t):
                    dot = turned(qk[head], t) @ turned(qv[u][head], u)
                    weight = torch.exp(math.log(2) * (dot / math.sqrt(128) * 0.5 / c - slope * (t - u)))
                    value, total = value + weight * v[u][head], total + weight
                pairs = [k[head][torch.arange(128) ^ b] * value / total for b in range(4)]
                products.append(torch.cat(pairs))
            state = states[t] + lin(m["ATT_COMBINER"], torch.cat(products))
            after.append(state + lin(m["RELU_CONTRACT"], torch.relu(tiles(lin(m["RELU_EXPAND"], tiles(state))))))
        states = after
    logits2 = torch.stack([lin(w["MP_MODEL_FINAL"], tiles(state)) for state in states]) / c
    return torch.log_softmax((logits2 + bias) * math.log(2), dim=-1)


TSCALE_SHAPES = {
    **dict.fromkeys(("ATT_QK", "ATT_QV", "ATT_K", "ATT_V", "RELU_EXPAND", "RELU_CONTRACT"), (256, 256)),
    "ATT_COMBINER": (256, 1024),
}


def tscale_train() -> Arrays:
    meta = {"dim": 256, "heads": 2, "relu_mult": 1, "vocab": 7, "widths": [0, 3], "doc_start": None}
    meta["layers"] = [[1, 0.5], [1, 0.0]]
    draw = np.random.default_rng(2)
    weights = {"MP_MODEL_EMBED": draw.normal(size=(40, 256)), "MP_MODEL_FINAL": draw.normal(size=(7, 256))}
    for layer in range(2):
        weights |= {f"layer{layer}.MP_{name}": draw.normal(size=shape) for name, shape in TSCALE_SHAPES.items()}
    ids, bias = draw.integers(0, 7, size=(2, 1, 5)), draw.normal(size=7)
    arrays = {
        "meta_json": np.array(json.dumps(meta)),
        "tokens": ids[:, :, :4],
        "targets": ids[:, :, 1:].copy(),
        "Bias": bias,
    }
    arrays["targets"][0, 0, 1] = -1
    arrays |= weights
    steps = {name: MomentSteps(name in ("MP_MODEL_EMBED", "MP_MODEL_FINAL")) for name in weights}
    for step, (row, target) in enumerate(zip(ids[:, 0, :4], arrays["targets"][:, 0], strict=True)):
        scored = np.nonzero(target >= 0)[0]

        def score(w: dict[str, Tensor], row: np.ndarray = row, at: tuple = (scored, target[scored])) -> Tensor:
            return tscale_log_prob(w, torch.from_numpy(bias), row, meta)[at].sum()

        before = {name: torch.from_numpy(array) for name, array in weights.items()}
        arrays[f"train.step{step}.prob"] = (
            tscale_log_prob(before, torch.from_numpy(bias), row, meta).exp().numpy()[None]
        )
        total, ascent = gradients(score, weights)
        arrays[f"train.step{step}.score"] = np.array(total / len(scored))
        rate = 0.01 * (step + 1) / 1000
        weights = {name: steps[name](weight, ascent[name], rate, 0.0) for name, weight in weights.items()}
        arrays |= {f"train.step{step}.W.{name}": array for name, array in weights.items()}
    return arrays


def write(folder: Path, family: str) -> Path:
    """One of the files above."""
    arrays = {"threelin_optimizer": threelin_optimizer, "threelin_train": threelin_train, "tscale_train": tscale_train}
    path = folder / f"{family}.npz"
    np.savez(path, **arrays[family]())
    return path
