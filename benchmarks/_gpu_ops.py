"""Ops on a GPU: right first, then fast, beside the machine's limits and the kernels of others."""

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks._gpu_timing import Clock, attempt
from multilin.ops import block_outer as products
from multilin.ops import int8, prefix_softmax, windowed_attention
from multilin.ops.block_outer import reference as products_reference
from multilin.ops.int8 import reference as int8_reference
from multilin.ops.prefix_softmax import reference as pooling_reference
from multilin.ops.windowed_attention import reference as attention_reference

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
COMBINERS = {"3Lin": (16, 16), "TScale": (4, 4), "ELiTA": (None, 8)}
"""Widths of the blocks of both factors; None is the hidden size."""
Figures = dict[str, Any]


def normal(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, *, learns: bool = True) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_(learns)


def limits(clock: Clock, device: torch.device, arguments: argparse.Namespace) -> Figures:
    """Gigabytes per second of a large copy, read and written, and tera-operations of large matrix products."""
    size = arguments.matrix_size
    numbers = torch.randn(arguments.copy_megabytes * 2**18, device=device)
    target = torch.empty_like(numbers)
    factors = {name: torch.randn(size, size, device=device) for name in ("left", "right")}
    halves = [x.bfloat16() for x in factors.values()]
    wholes = [(x * 30).clamp(-127, 127).to(torch.int8) for x in factors.values()]
    wholes[1] = wholes[1].t()
    tasks: dict[str, tuple[Callable[[], object], float]] = {
        "copy_gigabytes_per_second": (lambda: target.copy_(numbers), 2 * numbers.numel() * 4 / 1e6),
        "bf16_teraflops": (lambda: halves[0] @ halves[1], 2 * size**3 / 1e9),
        "float32_teraflops": (lambda: factors["left"] @ factors["right"], 2 * size**3 / 1e9),
        "int8_teraops": (lambda: torch._int_mm(*wholes), 2 * size**3 / 1e9),
    }
    figures: Figures = {}
    for name, (task, amount) in tasks.items():
        milliseconds = clock.milliseconds(task)
        figures[name] = None if milliseconds is None else amount / milliseconds
    return figures


def checks(clock: Clock, device: torch.device, arguments: argparse.Namespace) -> Figures:
    """Relative root mean square errors of results and gradients against float64."""
    figures: Figures = {}
    for dtype in TOLERANCES:
        for name, (fast, exact, inputs) in _checked(arguments.check_shape, device, dtype).items():
            clock.check()
            figures[f"{name}, {str(dtype).removeprefix('torch.')}"] = attempt(
                lambda fast=fast, exact=exact, inputs=inputs: _errors(fast, exact, inputs)
            )
    return figures


def _checked(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Calls by name: an op, its definition, and the inputs of both."""
    batch, length, heads, width = shape
    q, k, v = (normal(shape, device, dtype) for _ in range(3))
    logits = normal((batch, length, heads), device, dtype)
    figures: dict[str, Any] = {}
    for window in (None, 7):
        figures[f"prefix_softmax, window {window}"] = (
            partial(_pool, prefix_softmax, window=window),
            partial(_pool, pooling_reference, window=window),
            (logits, v),
        )
    for decay in ({"hyper": 20.0}, {"slope": 0.3, "null_key": True}):
        options = {"window": 9, "scale": width**-0.5, **decay}
        figures[f"windowed_attention, {', '.join(decay)}"] = (
            partial(_attend, windowed_attention, **options),
            partial(_attend, attention_reference, **options),
            (q, k, v),
        )
    for name in COMBINERS:
        factors = _factors(name, 8 * width, batch * length, device, dtype)
        figures[f"block_outer, {name}"] = products.block_outer, products_reference.block_outer, factors
    x, weight = (normal((n, 8 * width), device, dtype, learns=False) for n in (batch * length, 4 * width))
    figures["int8_linear"] = int8.int8_linear, int8_reference.int8_linear, (x, weight)
    return figures


def _pool(module: Any, *inputs: Tensor, **options: Any) -> Tensor:
    return module.prefix_softmax(*inputs, **options)[0]


def _attend(module: Any, *inputs: Tensor, **options: Any) -> Tensor:
    return module.windowed_attention(*inputs, **options)[0]


def _errors(fast: Any, exact: Any, inputs: tuple[Tensor, ...]) -> Figures:
    dtype = inputs[0].dtype
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    results = []
    for compute, given in ((exact, wide), (fast, inputs)):
        result = compute(*given)
        direction = torch.linspace(-1, 1, result.numel(), device=result.device).to(dtype).view_as(result)
        learned = [x for x in given if x.requires_grad]
        gradients = torch.autograd.grad(result, learned, direction.to(result.dtype)) if learned else ()
        results.append([result, *gradients])
    errors = [
        float((actual.double() - expected).norm() / expected.norm()) for expected, actual in zip(*results, strict=True)
    ]
    return {"errors": errors, "tolerance": TOLERANCES[dtype], "passed": all(e <= TOLERANCES[dtype] for e in errors)}


def poolings(clock: Clock, device: torch.device, arguments: argparse.Namespace, limit: Figures) -> Figures:
    """prefix_softmax and windowed_attention beside attention and linear attention of others, at every shape."""
    figures: Figures = {}
    for shape in arguments.shapes:
        figures |= _poolings_at(tuple(shape), clock, device, limit)
    return figures


def _poolings_at(shape: tuple[int, ...], clock: Clock, device: torch.device, limit: Figures) -> Figures:
    q, k, v = (normal(shape, device, torch.bfloat16) for _ in range(3))
    logits = normal(shape[:3], device, torch.bfloat16)
    dresult = torch.randn_like(v)
    near: dict[str, Any] = {"window": 64, "scale": shape[3] ** -0.5, "slope": 0.3, "null_key": True}

    def pool(window: int | None) -> Tensor:
        return prefix_softmax.prefix_softmax(logits, v, window=window, needs_state=False)[0]

    def attend() -> Tensor:
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

    tasks: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        "prefix_softmax, global": (lambda: pool(None), [logits, v]),
        "prefix_softmax, window 64": (lambda: pool(64), [logits, v]),
        "windowed_attention, window 64": (
            lambda: windowed_attention.windowed_attention(q, k, v, needs_state=False, **near)[0],
            [q, k, v],
        ),
        "peer: causal attention (SDPA)": (attend, [q, k, v]),
        **_linear_attention(q, k, v),
    }

    def time(name: str) -> Figures:
        return _timed(clock, *tasks[name], dresult, limit)

    return {f"{name}, {shape}": attempt(lambda name=name: time(name)) for name in tasks}


def _timed(clock: Clock, task: Callable[[], Tensor], inputs: list[Tensor], dresult: Tensor, limit: Figures) -> Figures:
    """Milliseconds, and the share of what copying 2 tensors (6 with backward) of the values' size would take."""

    def forward() -> None:
        with torch.no_grad():
            task()

    figures: Figures = {"forward_ms": clock.milliseconds(forward)}
    figures["both_ms"] = clock.milliseconds(lambda: torch.autograd.grad(task(), inputs, dresult))
    rate = limit.get("copy_gigabytes_per_second")
    if rate:
        size = dresult.numel() * dresult.element_size()
        figures["forward_share_of_copy"] = 2 * size / 1e6 / rate / figures["forward_ms"]
        figures["both_share_of_copy"] = 6 * size / 1e6 / rate / figures["both_ms"]
    return figures


def _linear_attention(q: Tensor, k: Tensor, v: Tensor) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """flash-linear-attention's kernels, where that package is installed and there is a GPU to run them."""
    if importlib.util.find_spec("fla") is None or not q.is_cuda:
        return {}
    from fla.ops.gla import chunk_gla
    from fla.ops.retention import chunk_retention

    gates = torch.nn.functional.logsigmoid(torch.randn_like(k)).detach()
    return {
        "peer: GLA (fla)": (lambda: chunk_gla(q, k, v, gates)[0], [q, k, v]),
        "peer: retention (fla)": (lambda: chunk_retention(q, k, v)[0], [q, k, v]),
    }


def _factors(
    name: str, hidden_size: int, rows: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    left, right = COMBINERS[name]
    left = left or hidden_size
    blocks = max(hidden_size // left, 1)
    shapes = (rows, blocks, left), (rows, blocks, right), (hidden_size, blocks, left, right)
    first, second, third = (normal(shape, device, dtype) for shape in shapes)
    return first, second, third


def matrices(clock: Clock, device: torch.device, arguments: argparse.Namespace, limit: Figures) -> Figures:
    """block_outer and int8_linear as shares of the matrix peak."""
    rows, hidden_size = arguments.rows, arguments.hidden_size
    figures: Figures = {}
    for name in COMBINERS:

        def outer(name: str = name) -> Figures:
            factors = _factors(name, hidden_size, rows, device, torch.bfloat16)
            dresult = torch.randn(rows, hidden_size, device=device, dtype=torch.bfloat16)
            work = 2 * rows * factors[2].numel() / 1e9

            def forward() -> None:
                with torch.no_grad():
                    products.block_outer(*factors)

            once = clock.milliseconds(forward)
            both = clock.milliseconds(lambda: torch.autograd.grad(products.block_outer(*factors), factors, dresult))
            return _rates(work, once, both, limit.get("bf16_teraflops"))

        figures[f"block_outer {name}, {rows} rows, {hidden_size}"] = attempt(outer)

    def linear() -> Figures:
        x = normal((rows, hidden_size), device, torch.bfloat16)
        weight = normal((4 * hidden_size, hidden_size), device, torch.bfloat16)
        rounded = int8.round_weight(weight)
        dresult = torch.randn(rows, 4 * hidden_size, device=device, dtype=torch.bfloat16)

        def both() -> object:
            result = int8.int8_linear(x, rounded, backward="int8", parameter=weight)
            return torch.autograd.grad(result, (x, weight), dresult)

        def forward() -> None:
            with torch.no_grad():
                int8.int8_linear(x, rounded)

        work = 2 * rows * 4 * hidden_size**2 / 1e9
        return _rates(work, clock.milliseconds(forward), clock.milliseconds(both), limit.get("int8_teraops"))

    figures[f"int8_linear, {rows} x {hidden_size} x {4 * hidden_size}"] = attempt(linear)
    return figures


def _rates(work: float, once: float | None, both: float | None, peak: float | None) -> Figures:
    """Tera-operations per second; backward is two products more."""
    figures: Figures = {"forward_ms": once, "both_ms": both}
    if once and both and peak:
        figures |= {"forward_teraops": work / once, "both_teraops": 3 * work / both}
        figures |= {"forward_share_of_peak": work / once / peak, "both_share_of_peak": 3 * work / both / peak}
    return figures
