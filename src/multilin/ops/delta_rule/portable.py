"""The gated delta rule in chunks of tokens, by matrix products.

Let u_t be the vector that token t adds to the memory under the token's key: M_t = a_t M_(t-1) + k_t u_t^T. In a chunk
that begins with the memory M, these vectors solve a unit triangular system. G are the sums of the logs of the decays
from the chunk's start, P_ts = e^(G_t - G_s) for s <= t, and b the rates:

    (1 + tril_(-1)(b K K^T * P)) U = b V - b e^G K M        Y = e^G Q M + tril(Q K^T * P) U

The system is solved for all chunks at once, with the right sides b V and b e^G K. Only two products have to be computed
chunk after chunk.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from multilin.ops.delta_rule import cpu, elementwise, gpu
from multilin.ops.kernels import MANY_NUMBERS, is_exported, refuse_second_derivative

SHORT = 4  # up to this number of tokens the reference is faster
CHUNK = 64  # tokens: large enough for full-speed products, small enough that pairs cost no more than products with M
FORGOTTEN = -1200.0  # in place of -inf: 2^-1200 is 0 even in float64, and logs added to it stay precise
NUMBERS = {"cpu": 2**20}  # of each tensor in a piece of the text, much of which stays in the cache


def delta_rule(
    queries_BTHD: Tensor, keys_BTHD: Tensor, values_BTHE: Tensor, log_decays_BTH: Tensor | None,
    rates_BTH: Tensor | None, memory_BHDE: Tensor, kernels: str = "none",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `multilin.ops.delta_rule`; kernels "cpu" or "gpu" compute some steps in float32; "none" uses PyTorch."""
    (num_batch, num_time, num_heads, width), value_width = keys_BTHD.shape, values_BTHE.shape[3]
    chunk = min(CHUNK, num_time)
    tokens = (queries_BTHD, keys_BTHD, values_BTHE, log_decays_BTH, rates_BTH)
    chunks = [None if x is None else _chunks(x, chunk) for x in tokens]
    size = 1  # chunks of a piece; with a single chunk no sizes are compared, so that a graph takes any number of rows
    if chunk < num_time:
        numbers = NUMBERS.get(keys_BTHD.device.type, MANY_NUMBERS)
        size = max(1, numbers // max(1, num_batch * num_heads * chunk * max(chunk, width, value_width)))
    num_pieces = -(-num_time // (chunk * size))
    if num_pieces == 1:  # a split into one piece would cost a copy of the gradients
        pieces: list[Any] = [[x] for x in chunks]
    else:
        pieces = [[None] * num_pieces if x is None else x.split(size) for x in chunks]
    memory_MDE, parts = memory_BHDE.flatten(0, 1), []
    for piece in zip(*pieces, strict=True):
        part_NMCE, memory_MDE = _Chunks.apply(kernels, *piece, memory_MDE)
        parts.append(part_NMCE.unflatten(1, (num_batch, num_heads)).permute(1, 0, 3, 2, 4))
    return torch.cat(parts, dim=1).flatten(1, 2)[:, :num_time], memory_MDE.view_as(memory_BHDE)


def _chunks(x_BTHD: Tensor, chunk: int) -> Tensor:
    """Reshape (B, T, H, ...) to (N, B * H, C, ...); zeros, which do not change the results, fill the last chunk."""
    missing = -x_BTHD.shape[1] % chunk
    if missing:
        x_BTHD = pad(x_BTHD, (0, 0) * (x_BTHD.ndim - 2) + (0, missing))
    return x_BTHD.unflatten(1, (-1, chunk)).movedim((1, 3), (0, 2)).flatten(1, 2).contiguous()


class _Chunks(torch.autograd.Function):
    """Results (N, M, C, E) of N chunks, and the last memory; M is the number of heads of all texts, n = N * M."""

    @staticmethod
    def forward(
        ctx: Any, kernels: str, q_NMCD: Tensor, k_NMCD: Tensor, v_NMCE: Tensor, log_decays_NMC: Tensor | None,
        rates_NMC: Tensor | None, memory_MDE: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.kernels, steps, shape = kernels, _STEPS[kernels], v_NMCE.shape
        q, k, v = (x.flatten(0, 1) for x in (q_NMCD, k_NMCD, v_NMCE))
        log_decays, rates = (None if x is None else x.flatten(0, 1) for x in (log_decays_NMC, rates_NMC))
        logs = _sums_of_logs(log_decays, k)
        from_start, to_end = (torch.exp2(x.to(k.dtype)) for x in (logs, logs[:, -1:] - logs))
        scores, overlaps = q @ k.mT, None if rates is None else k @ k.mT
        decays, system = steps.weigh(scores, overlaps, logs, rates)
        added, read = v, None
        if rates is not None:
            system, added, read = steps.solve(system, v * rates[..., None], k * (from_start * rates)[..., None])
            if is_exported() and len(v_NMCE) == 1:  # writing in place would fix the number of rows of a graph
                added, read = added - read @ memory_MDE, None
        k_to_end = k * to_end[..., None]
        num_chunks, over_chunk = len(v_NMCE), from_start[:, -1:, None]
        added, memories, memory_MDE = steps.write(num_chunks, added, read, k_to_end, over_chunk, memory_MDE)
        q_from_start = q * from_start[..., None]
        result = (q_from_start @ memories).baddbmm_(scores, added)
        ctx.save_for_backward(
            q, k, v, log_decays, rates, q_from_start, k_to_end, logs, from_start, to_end, decays, scores, overlaps,
            system, added, read, memories,
        )  # fmt: skip
        return result.view(shape), memory_MDE

    @staticmethod
    def backward(ctx: Any, dresult_NMCE: Tensor, dmemory_MDE: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("delta_rule")
        num_chunks = len(dresult_NMCE)
        with torch.autocast(dresult_NMCE.device.type, enabled=False):
            dresult = dresult_NMCE.flatten(0, 1).contiguous()
            *gradients, dmemory = _gradients(ctx.saved_tensors, num_chunks, dresult, dmemory_MDE, _STEPS[ctx.kernels])
        return None, *(None if x is None else x.unflatten(0, (num_chunks, -1)) for x in gradients), dmemory


def _gradients(
    saved: tuple[Any, ...], num_chunks: int, dresult: Tensor, dmemory: Tensor, steps: "_Steps"
) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments. One solve of the transposed system gives the gradient of b V - b e^G K M."""
    (
        q, k, v, log_decays, rates, q_from_start, k_to_end, logs, from_start, to_end, decays, scores, overlaps, system,
        added, read, memories,
    ) = saved  # fmt: skip
    over_chunk = from_start[:, -1:, None]
    dadded, through_q = scores.mT @ dresult, q_from_start.mT @ dresult
    dadded, dmemories, dmemory = steps.write_backward(
        num_chunks, dadded, read, k_to_end, over_chunk, through_q, dmemory
    )
    dsystem = dread = dknown = None
    if rates is not None:
        dknown = steps.solve_transposed(system, dadded)
        dsystem, dread = torch.baddbmm(system, dknown, added.mT, beta=0, alpha=-1), dknown @ memories.mT
    dscores, dq, dk = dresult @ added.mT, dresult @ memories.mT, added @ dmemories.mT
    drates, dlogs = steps.unweigh(dscores, dsystem, scores, overlaps, decays, logs, rates)
    dots = steps.rescale(dq, dk, dknown, dread, q, k, v, from_start, to_end, rates)
    by_start, by_end = dots[0] * from_start, dots[1] * to_end
    dq.baddbmm_(dscores, k)
    dk.baddbmm_(dscores.mT, q)
    if rates is not None:
        by_read = dots[2] * -from_start
        by_start += by_read * rates
        drates += dots[3] + by_read
        dk.baddbmm_(dsystem, k)
    if log_decays is not None:
        by_chunk = (dmemories * memories).sum(dim=-1).sum(dim=1, keepdim=True) * over_chunk[..., 0]
        from_last = by_start.flip(1).cumsum(dim=1).flip(1)  # for each token the sum over it and all later ones
        dlogs = dlogs + from_last + _before(by_end) + by_chunk
        dlogs = dlogs.masked_fill(log_decays < FORGOTTEN * math.log(2), 0.0).to(log_decays.dtype)
    return dq, dk, dadded if dknown is None else dknown, None if log_decays is None else dlogs, drates, dmemory


def write(
    num_chunks: int, added: Tensor, read: Tensor | None, k_to_end: Tensor, over_chunk: Tensor, memory_MDE: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Chunk by chunk, subtract from `added` the values that the memory holds, and write the differences into the
    memory.

        added -= read M        M <- e^(G_C) M + (e^(G_C - G) K)^T added

    Args:
        num_chunks: N. An axis of length n = N * M holds the chunks in order, each with the M heads of all texts.
        added, read, k_to_end: (n, C, E), (n, C, D) or None, (n, C, D); `added` may be overwritten.
        over_chunk: (n, 1, 1) e^(G_C).
        memory_MDE: the memory before the first chunk.

    Returns:
        `added` after the subtraction, the memory before each chunk (n, D, E), and the memory after the last.
    """
    memories_NMDE = memory_MDE[None]
    if num_chunks > 1:
        memories_NMDE = memory_MDE.new_empty(num_chunks, *memory_MDE.shape)
        memories_NMDE[0] = memory_MDE
    places = [*memories_NMDE[1:].unbind(), None]  # for the memory after each chunk; after the last, a new tensor
    chunks = _by_chunk(num_chunks, added, read, k_to_end.mT, over_chunk)
    for place_MDE, (added_MCE, read_MCD, to_end_MDC, over_chunk_M11) in zip(places, chunks, strict=True):
        if read_MCD is not None:
            added_MCE.baddbmm_(read_MCD, memory_MDE, alpha=-1)
        memory_MDE = torch.mul(memory_MDE, over_chunk_M11, out=place_MDE).baddbmm_(to_end_MDC, added_MCE)
    return added, memories_NMDE.flatten(0, 1), memory_MDE


def write_backward(
    num_chunks: int, dadded: Tensor, read: Tensor | None, k_to_end: Tensor, over_chunk: Tensor, through_q: Tensor,
    dmemory_MDE: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `write`, from the last chunk to the first.

        dadded += e^(G_C - G) K dM        dM <- e^(G_C) dM + through_q - read^T dadded

    Args:
        num_chunks, read, k_to_end, over_chunk: as for `write`.
        dadded: (n, C, E) gradients of `added` through the results; may be overwritten.
        through_q: (n, D, E) gradients of the memory before each chunk, through the values that queries read.
        dmemory_MDE: gradient of the memory after the last chunk.

    Returns:
        The complete gradients of `added`, of the memory after each chunk (n, D, E), and of the memory before the first.
    """
    dmemories_NMDE = torch.cat([through_q, dmemory_MDE]).unflatten(0, (num_chunks + 1, -1))
    through_read = None if read is None else read.mT
    before, chunks = dmemories_NMDE.unbind(), _by_chunk(num_chunks, dadded, through_read, k_to_end, over_chunk)
    for n, (dadded_MCE, read_MDC, to_end_MCD, over_chunk_M11) in reversed(list(enumerate(chunks))):
        dadded_MCE.baddbmm_(to_end_MCD, before[n + 1])
        before[n].addcmul_(before[n + 1], over_chunk_M11)
        if read_MDC is not None:
            before[n].baddbmm_(read_MDC, dadded_MCE, alpha=-1)
    return dadded, dmemories_NMDE[1:].flatten(0, 1), before[0]


def solve(lower: Tensor, *known: Tensor) -> tuple[Tensor, ...]:
    """Solve (1 + L) x = known for each `known` (n, C, D or E); L is the part of `lower` (n, C, C) below its diagonal.

    `known` may be overwritten.

    Returns:
        A matrix for `solve_transposed`, and the solutions.
    """
    if is_exported():
        return lower, *_solve_by_inverse(invert, lower, *known)[1:]
    return lower, *(_solve_rows(lower.mT, x, upper=True) for x in known)


def solve_transposed(lower: Tensor, known: Tensor) -> Tensor:
    """Solve (1 + L)^T x = known; `lower` is the first result of `solve`."""
    return _solve_rows(lower, known, upper=False)


class _Steps(NamedTuple):
    """The steps for which a device may have kernels."""

    weigh: Callable[..., Any] = elementwise.weigh
    unweigh: Callable[..., Any] = elementwise.unweigh
    rescale: Callable[..., Any] = elementwise.rescale
    solve: Callable[..., tuple[Tensor, ...]] = solve
    solve_transposed: Callable[[Tensor, Tensor], Tensor] = solve_transposed
    write: Callable[..., tuple[Tensor, Tensor, Tensor]] = write
    write_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = write_backward


def _solve_by_inverse(invert: Callable[[Tensor], Tensor], lower: Tensor, *known: Tensor) -> tuple[Tensor, ...]:
    inverse = invert(lower)
    return inverse, *(inverse @ x for x in known)


_STEPS = {
    "none": _Steps(),
    "cpu": _Steps(weigh=cpu.weigh, unweigh=cpu.unweigh, rescale=cpu.rescale),
    "gpu": _Steps(
        # For many small systems, cuBLAS's substitution takes several times as long as products with inverses.
        solve=partial(_solve_by_inverse, gpu.invert),
        solve_transposed=lambda inverse, known: inverse.mT @ known,
        write=gpu.write,
        write_backward=gpu.write_backward,
    ),
}


def _by_chunk(num_chunks: int, *tensors: Tensor | None) -> list[tuple[Any, ...]]:
    """The parts (M, ...) of tensors (n, ...), chunk by chunk."""
    parts = ([None] * num_chunks if x is None else x.unflatten(0, (num_chunks, -1)).unbind() for x in tensors)
    return list(zip(*parts, strict=True))


def _before(x_nC: Tensor) -> Tensor:
    """For each token the sum over all earlier tokens of the chunk."""
    return pad(x_nC[:, :-1], (1, 0)).cumsum(dim=1)


def _sums_of_logs(log_decays_nC: Tensor | None, like: Tensor) -> Tensor:
    """G, the sums of logs from the chunk's start; to base 2, because PyTorch's e^x is very slow where e^x underflows.

    The sums are in float64, because in float32 one large log would cost the other logs precision.
    """
    if log_decays_nC is None:
        return like.new_zeros(like.shape[:2], dtype=torch.float64)
    return (log_decays_nC.double() / math.log(2)).clamp_(min=FORGOTTEN).cumsum(dim=1)


def _solve_rows(matrix: Tensor, known: Tensor, *, upper: bool) -> Tensor:
    """Solve x^T (1 + U) = known^T, where U is the part of `matrix` above or below its diagonal; overwrite `known`.

    When rows are solved for, x lies in memory such that later products need no copy.
    """
    rows = known.mT
    in_place = None if torch.compiler.is_compiling() else rows
    return torch.linalg.solve_triangular(matrix, rows, upper=upper, left=False, unitriangular=True, out=in_place).mT


def invert(lower: Tensor) -> Tensor:
    """Compute (1 + L)^(-1) by products alone, which every graph runtime supports.

    The inverse is built from the inverses of diagonal blocks of 1, 2, 4, ... rows. For two neighbouring blocks A and C,
    and the block B below A and left of C, the missing block of the inverse is -C^(-1) B A^(-1).
    """
    index_C = torch.arange(lower.shape[-1], device=lower.device)
    inverse = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    size = 1
    while size < len(index_C):
        block_C = index_C // size
        joins_CC = (block_C[:, None] - block_C == 1) & (block_C[:, None] % 2 == 1)
        inverse = inverse - inverse @ (lower * joins_CC) @ inverse
        size *= 2
    return inverse
