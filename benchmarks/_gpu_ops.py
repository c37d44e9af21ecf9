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
from multilin.ops.block_outer import portable as products_portable
from multilin.ops.block_outer import reference as products_reference
from multilin.ops.int8 import reference as int8_reference
from multilin.ops.int8.portable import PortableSteps
from multilin.ops.int8.products import Int8Linear
from multilin.ops.prefix_softmax import portable as pooling_portable
from multilin.ops.prefix_softmax import reference as pooling_reference
from multilin.ops.windowed_attention import portable as attention_portable
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
            label = f"{name}, {str(dtype).removeprefix('torch.')}"
            figures[label] = attempt(partial(_errors, clock, fast, exact, inputs), label)
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


def _errors(clock: Clock, fast: Any, exact: Any, inputs: tuple[Tensor, ...]) -> Figures:
    clock.check()
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
        float((actual.double() - expected).norm().detach() / expected.norm().detach())
        for expected, actual in zip(*results, strict=True)
    ]
    return {"errors": errors, "tolerance": TOLERANCES[dtype], "passed": all(e <= TOLERANCES[dtype] for e in errors)}


def poolings(clock: Clock, device: torch.device, arguments: argparse.Namespace, limit: Figures) -> Figures:
    """prefix_softmax and windowed_attention beside the portable path, compiled, and the attention of others."""
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

    def pool_portably(window: int | None) -> Tensor:
        return pooling_portable.prefix_softmax(logits.float(), v, window=window, needs_state=False)[0].to(v.dtype)

    def attend() -> Tensor:
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

    def attend_near(module: Any) -> Tensor:
        result: Tensor = module.windowed_attention(q, k, v, needs_state=False, **near)[0]
        return result

    pooled, attended = [logits, v], [q, k, v]
    tasks: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        "prefix_softmax, global": (lambda: pool(None), pooled),
        "prefix_softmax, global, portable": (compiled(clock, lambda: pool_portably(None)), pooled),
        "prefix_softmax, window 64": (lambda: pool(64), pooled),
        "prefix_softmax, window 64, portable": (compiled(clock, lambda: pool_portably(64)), pooled),
        "windowed_attention, window 64": (lambda: attend_near(windowed_attention), attended),
        "windowed_attention, window 64, portable": (
            compiled(clock, lambda: attend_near(attention_portable)), attended
        ),
        "peer: causal attention (SDPA)": (attend, attended),
        **_flex_attention(clock, q, k, v, near),
        **_linear_attention(q, k, v),
    }  # fmt: skip

    def time(name: str) -> Figures:
        return _timed(clock, *tasks[name], dresult, limit)

    return {f"{name}, {shape}": attempt(lambda name=name: time(name), name) for name in tasks}


def compiled(clock: Clock, task: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The task through torch.compile; as it is in a dry run."""
    return task if clock.is_dry else torch.compile(task, dynamic=False)


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


def _flex_attention(
    clock: Clock, q: Tensor, k: Tensor, v: Tensor, near: dict[str, Any]
) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """PyTorch's flex_attention with the same window and slope; it has no null key, nor a row that sees nothing."""
    if not q.is_cuda:
        return {}
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def is_near(_b: Tensor, _h: Tensor, i_query: Tensor, i_key: Tensor) -> Tensor:
        return (i_query >= i_key) & (i_query - i_key <= near["window"])

    def decay(score: Tensor, _b: Tensor, _h: Tensor, i_query: Tensor, i_key: Tensor) -> Tensor:
        return score - near["slope"] * (i_query - i_key)

    length = q.shape[1]
    mask = create_block_mask(is_near, None, None, length, length, device=q.device, _compile=length > 2**14)

    def attend() -> Tensor:
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        return flex_attention(*heads_first, score_mod=decay, block_mask=mask, scale=near["scale"]).transpose(1, 2)

    return {"peer: flex_attention, window 64": (compiled(clock, attend), [q, k, v])}


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
    """block_outer and int8_linear as shares of the matrix peak, beside the portable path, as it is and compiled."""
    figures: Figures = {}

    def measure(name: str, work: Callable[[], Figures]) -> None:
        figures[name] = attempt(work, name)

    for rows in (arguments.rows, arguments.few_rows):
        for name in COMBINERS:
            for way, compute in _ways(clock, products.block_outer, products_portable.block_outer).items():
                measure(
                    f"block_outer {name}{way}, {rows} rows, {arguments.hidden_size}",
                    partial(_outer, clock, device, arguments, limit, name, rows, compute),
                )
        size = f"{rows} x {arguments.hidden_size} x {4 * arguments.hidden_size}"
        for way, compute in _ways(clock, _linear, _linear_portably).items():
            measure(f"int8_linear{way}, {size}", partial(_int8, clock, device, arguments, limit, rows, compute))
    return figures


def _ways(
    clock: Clock, ours: Callable[..., Tensor], portable: Callable[..., Tensor]
) -> dict[str, Callable[..., Tensor]]:
    return {"": ours, ", portable": portable, ", portable, compiled": compiled(clock, portable)}


def _outer(
    clock: Clock, device: torch.device, arguments: argparse.Namespace, limit: Figures, name: str, rows: int,
    compute: Callable[..., Tensor],
) -> Figures:  # fmt: skip
    factors = _factors(name, arguments.hidden_size, rows, device, torch.bfloat16)
    dresult = torch.randn(rows, arguments.hidden_size, device=device, dtype=torch.bfloat16)

    def forward() -> None:
        with torch.no_grad():
            compute(*factors)

    once = clock.milliseconds(forward)
    both = clock.milliseconds(lambda: torch.autograd.grad(compute(*factors), factors, dresult))
    return _rates(2 * rows * factors[2].numel() / 1e9, once, both, limit.get("bf16_teraflops"))


def _linear(x: Tensor, rounded: int8.Rounded, weight: Tensor) -> Tensor:
    return int8.int8_linear(x, rounded, backward="int8", parameter=weight)


def _linear_portably(x: Tensor, rounded: int8.Rounded, weight: Tensor) -> Tensor:
    result: Tensor = Int8Linear.apply(x, weight, *rounded, None, 1.0, "int8", PortableSteps)
    return result


def _int8(
    clock: Clock, device: torch.device, arguments: argparse.Namespace, limit: Figures, rows: int,
    compute: Callable[..., Tensor],
) -> Figures:  # fmt: skip
    hidden_size = arguments.hidden_size
    x = normal((rows, hidden_size), device, torch.bfloat16)
    weight = normal((4 * hidden_size, hidden_size), device, torch.bfloat16)
    rounded = int8.round_weight(weight)
    dresult = torch.randn(rows, 4 * hidden_size, device=device, dtype=torch.bfloat16)

    def forward() -> None:
        with torch.no_grad():
            compute(x, rounded, weight)

    once = clock.milliseconds(forward)
    both = clock.milliseconds(lambda: torch.autograd.grad(compute(x, rounded, weight), (x, weight), dresult))
    return _rates(2 * rows * 4 * hidden_size**2 / 1e9, once, both, limit.get("int8_teraops"))


def _rates(work: float, once: float | None, both: float | None, peak: float | None) -> Figures:
    """Tera-operations per second; backward is two products more."""
    figures: Figures = {"forward_ms": once, "both_ms": both}
    if once and both and peak:
        figures |= {"forward_teraops": work / once, "both_teraops": 3 * work / both}
        figures |= {"forward_share_of_peak": work / once / peak, "both_share_of_peak": 3 * work / both / peak}
    return figures
