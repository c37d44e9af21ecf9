"""Ops on a GPU: errors against float64, then speed beside the limits of the machine and other kernels."""

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, scaled_dot_product_attention

from benchmarks._gpu_timing import Clock, attempt, captured
from multilin.ops import block_outer as products
from multilin.ops import delta_rule, int8, linear_recurrence, prefix_softmax, windowed_attention
from multilin.ops.block_outer import reference as products_reference
from multilin.ops.delta_rule import portable as delta_portable
from multilin.ops.delta_rule import reference as delta_reference
from multilin.ops.int8 import reference as int8_reference
from multilin.ops.int8.portable import PortableSteps
from multilin.ops.int8.products import Int8BlockOuter, Int8Linear
from multilin.ops.linear_recurrence import portable as recurrence_portable
from multilin.ops.linear_recurrence import reference as recurrence_reference
from multilin.ops.prefix_softmax import portable as pooling_portable
from multilin.ops.prefix_softmax import reference as pooling_reference
from multilin.ops.windowed_attention import portable as attention_portable
from multilin.ops.windowed_attention import reference as attention_reference

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
COMBINERS = {"3Lin": (16, 16), "TScale": (4, 4), "ELiTA": (None, 8)}
"""Block widths of both factors; None means the hidden size."""
NEAR: dict[str, Any] = {"window": 64, "slope": 0.3}
"""Options of windowed attention in the timings."""
Figures = dict[str, Any]
Tasks = dict[str, tuple[Callable[[], Tensor], list[Tensor]]]
"""By name: a function, and the inputs for which gradients are computed."""


def normal(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, *, learns: bool = True) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_(learns)


def limits(clock: Clock, device: torch.device, arguments: argparse.Namespace) -> Figures:
    """Gigabytes per second of a large copy (read plus written), and tera-operations of large matrix products."""
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
    """By name: an op, its reference, and the inputs of both."""
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
    pairs, memory = normal((batch, length, 2, width), device, dtype), torch.zeros(batch, heads, width, width).to(device)
    figures["linear_recurrence"] = (
        lambda x: linear_recurrence.linear_recurrence(x)[0],
        lambda x: recurrence_reference.linear_recurrence(x, x.new_zeros(batch, width), None)[0],
        (pairs,),
    )
    keys, gates = _keys_and_gates(k)
    figures["delta_rule"] = (
        lambda q, k, v, a, b: delta_rule.delta_rule(q, k, v, log_decays=a, rates=b)[0],
        lambda q, k, v, a, b: delta_reference.delta_rule(q, k, v, a, b, memory.to(v))[0],
        (q, keys, v, *gates),
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
    """Ops that mix positions, beside the compiled portable path and the attention and recurrences of other packages."""
    figures: Figures = {}
    # fla compiles its kernels in many variants, which takes long; its ops are therefore the last.
    for tasks in (_poolings, _recurrences, _flex_attention, _linear_attention):
        for shape in map(tuple, arguments.shapes):
            found = attempt(partial(_poolings_at, tasks, shape, clock, device, limit))
            figures |= {f"{tasks.__name__}, {shape}": found} if "failed" in found else found
    return figures


def _poolings_at(
    tasks: Callable[..., Tasks], shape: tuple[int, ...], clock: Clock, device: torch.device, limit: Figures
) -> Figures:
    q, k, v = (normal(shape, device, torch.bfloat16) for _ in range(3))
    dresult, figures = torch.randn_like(v), {}
    for name, (task, inputs) in tasks(clock, q, k, v).items():
        label = f"{name}, {shape}"
        figures[label] = attempt(partial(_timed, clock, task, inputs, dresult, limit), label)
    return figures


def _poolings(clock: Clock, q: Tensor, k: Tensor, v: Tensor) -> Tasks:
    shape = q.shape
    logits = normal(tuple(shape[:3]), q.device, torch.bfloat16)
    near = {"scale": shape[3] ** -0.5, "null_key": True, **NEAR}

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
    return {
        "prefix_softmax, global": (lambda: pool(None), pooled),
        "prefix_softmax, global, portable": (compiled(clock, lambda: pool_portably(None)), pooled),
        "prefix_softmax, window 64": (lambda: pool(64), pooled),
        "prefix_softmax, window 64, portable": (compiled(clock, lambda: pool_portably(64)), pooled),
        "windowed_attention, window 64": (lambda: attend_near(windowed_attention), attended),
        "windowed_attention, window 64, portable": (
            compiled(clock, lambda: attend_near(attention_portable)), attended
        ),
        "peer: causal attention (SDPA)": (attend, attended),
    }  # fmt: skip


def _recurrences(_: Clock, q: Tensor, k: Tensor, v: Tensor) -> Tasks:
    """Recurrences of single channels and of heads with a matrix each. Portable paths take minutes to compile: eager."""
    pairs = normal((*v.shape[:2], 2, v.shape[2] * v.shape[3]), v.device, v.dtype)
    before = torch.zeros(len(v), pairs.shape[3], device=v.device)
    keys, gates = _keys_and_gates(k)
    corrected = [q, keys, v, *gates]
    memory = torch.zeros(len(v), v.shape[2], v.shape[3], v.shape[3], device=v.device)

    def correct_portably() -> Tensor:
        return delta_portable.delta_rule(*(x.float() for x in corrected), memory)[0].to(v.dtype)

    return {
        "linear_recurrence": (lambda: linear_recurrence.linear_recurrence(pairs)[0].view_as(v), [pairs]),
        "linear_recurrence, portable, not compiled": (
            lambda: recurrence_portable.linear_recurrence(pairs, before, None)[0].view_as(v), [pairs]
        ),
        "delta_rule": (
            lambda: delta_rule.delta_rule(q, keys, v, log_decays=gates[0], rates=gates[1])[0], corrected
        ),
        "delta_rule, portable, not compiled": (correct_portably, corrected),
    }  # fmt: skip


def _keys_and_gates(k: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Keys of length 1; log decays and rates. All require gradients."""
    first, second = (torch.randn_like(k[..., 0]) for _ in range(2))
    return (
        normalize(k.detach(), dim=-1).requires_grad_(),
        (logsigmoid(first + 3).detach().requires_grad_(), second.sigmoid().detach().requires_grad_()),
    )


def compiled(clock: Clock, task: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The task through torch.compile; in a dry run unchanged."""
    return task if clock.is_dry else torch.compile(task, dynamic=False)


def _timed(clock: Clock, task: Callable[[], Tensor], inputs: list[Tensor], dresult: Tensor, limit: Figures) -> Figures:
    """Milliseconds, and the time of copying 2 tensors (6 with backward) of the values' size as a share of them."""
    figures = _both_times(clock, task, inputs, dresult)
    rate, size = limit.get("copy_gigabytes_per_second"), dresult.numel() * dresult.element_size()
    for name, count in (("forward", 2), ("both", 6)):
        milliseconds = figures.get(f"{name}_card_ms", figures[f"{name}_ms"])
        if milliseconds and rate:
            figures[f"{name}_share_of_copy"] = count * size / 1e6 / rate / milliseconds
    return figures


def _both_times(clock: Clock, task: Callable[[], Tensor], inputs: list[Tensor], dresult: Tensor) -> Figures:
    """Milliseconds of the task, without and with gradients: as called, and on the GPU alone (see `captured`)."""

    def forward() -> None:
        with torch.no_grad():
            task()

    def both() -> None:
        torch.autograd.grad(task(), inputs, dresult)

    figures: Figures = {}
    for name, work in (("forward", forward), ("both", both)):
        figures[f"{name}_ms"] = clock.milliseconds(work)
        replay = None if clock.is_dry else captured(work)
        if replay is not None:
            figures[f"{name}_card_ms"] = clock.milliseconds(replay)
    return figures


def _flex_attention(clock: Clock, q: Tensor, k: Tensor, v: Tensor) -> Tasks:
    """PyTorch's flex_attention with the same window and slope, but without a null key."""
    if not q.is_cuda:
        return {}
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def is_near(_b: Tensor, _h: Tensor, i_query: Tensor, i_key: Tensor) -> Tensor:
        return (i_query >= i_key) & (i_query - i_key <= NEAR["window"])

    def decay(score: Tensor, _b: Tensor, _h: Tensor, i_query: Tensor, i_key: Tensor) -> Tensor:
        return score - NEAR["slope"] * (i_query - i_key)

    length = q.shape[1]
    mask = create_block_mask(is_near, None, None, length, length, device=q.device, _compile=length > 2**14)

    def attend() -> Tensor:
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        return flex_attention(*heads_first, score_mod=decay, block_mask=mask, scale=q.shape[3] ** -0.5).transpose(1, 2)

    return {"peer: flex_attention, window 64": (compiled(clock, attend), [q, k, v])}


def _linear_attention(_: Clock, q: Tensor, k: Tensor, v: Tensor) -> Tasks:
    """Kernels of flash-linear-attention, if this package is installed and there is a GPU."""
    if importlib.util.find_spec("fla") is None or not q.is_cuda:
        return {}
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla
    from fla.ops.retention import chunk_retention

    gates = logsigmoid(torch.randn_like(k)).detach()
    keys, (decays, rates) = _keys_and_gates(k)
    return {
        "peer: gated delta rule (fla)": (
            lambda: chunk_gated_delta_rule(q, keys, v, decays, rates, scale=1.0)[0],
            [q, keys, v, decays, rates],
        ),
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
    """Products of pairs and of int8 as shares of the matrix peak, beside compiled and portable ways."""
    figures: Figures = {}
    for rows in (arguments.rows, arguments.few_rows):
        for name, (peak, work, ways) in _products(clock, device, arguments, rows).items():
            for way, (task, inputs) in ways.items():
                label = f"{name}{way}, {rows} rows, {arguments.hidden_size}"
                measure = partial(_rates, clock, task, inputs, work, limit.get(peak))
                figures[label] = attempt(measure, label)
    return figures


def _products(
    clock: Clock, device: torch.device, arguments: argparse.Namespace, rows: int
) -> dict[str, tuple[str, float, Tasks]]:
    """By name: its limit, the operations of one product in 10^9, and the ways to compute it."""
    hidden_size = arguments.hidden_size
    found: dict[str, tuple[str, float, Tasks]] = {}
    for name in COMBINERS:
        factors = _factors(name, hidden_size, rows, device, torch.bfloat16)
        outer = partial(products.block_outer, *factors)
        work = 2 * rows * factors[2].numel() / 1e9
        ways: Tasks = {"": (outer, [*factors]), ", compiled": (compiled(clock, outer), [*factors])}
        found[f"block_outer {name}"] = "bf16_teraflops", work, ways
        if name == "TScale":
            found[f"int8_block_outer {name}"] = "int8_teraops", work, _int8_ways(clock, Int8BlockOuter, *factors)
    x, weight = (normal((n, hidden_size), device, torch.bfloat16) for n in (rows, 4 * hidden_size))
    work = 2 * rows * weight.numel() / 1e9
    found[f"int8_linear to {4 * hidden_size}"] = "int8_teraops", work, _int8_ways(clock, Int8Linear, x, weight)
    return found


def _int8_ways(clock: Clock, product: Any, *inputs: Tensor) -> Tasks:
    rounded = int8.round_weight(inputs[-1])
    more = (None,) * (product is Int8Linear)  # no bias

    def compute(steps: Any) -> Tensor:
        result: Tensor = product.apply(*inputs, *rounded, *more, 1.0, "int8", steps)
        return result

    ours = int8.INT8.backend_for(inputs[0].device, inputs[0].dtype).compute
    return {
        "": (partial(compute, ours), [*inputs]),
        ", portable": (partial(compute, PortableSteps), [*inputs]),
        ", portable, compiled": (compiled(clock, partial(compute, PortableSteps)), [*inputs]),
    }


def _rates(clock: Clock, task: Callable[[], Tensor], inputs: list[Tensor], work: float, peak: float | None) -> Figures:
    """Milliseconds and tera-operations per second; backward adds two products."""
    clock.check()
    with torch.no_grad():
        dresult = torch.randn_like(task())
    figures = _both_times(clock, task, inputs, dresult)
    for name, count in (("forward", 1), ("both", 3)):
        milliseconds = figures.get(f"{name}_card_ms", figures[f"{name}_ms"])
        if milliseconds and peak:
            figures[f"{name}_teraops"] = count * work / milliseconds
            figures[f"{name}_share_of_peak"] = count * work / milliseconds / peak
    return figures
