"""The gated delta rule in chunks of tokens, by matrix products.

With u_t for what token t adds to the memory at its key, M_t = a_t M_(t-1) + k_t u_t^T, the tokens of a chunk that
begins with the memory M solve a unit triangular system. G are the sums of the logs of the decays from the chunk's
start, P_ts = e^(G_t - G_s) for s <= t, and b the rates:

    (1 + tril_(-1)(b K K^T * P)) U = b V - b e^G K M        Y = e^G Q M + tril(Q K^T * P) U

The system is solved for all chunks at once, for b V and for b e^G K; what is left to do chunk after chunk are two
products.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

SHORT = 4  # tokens up to which the definition itself is faster
CHUNK = 64  # tokens: large enough for full-speed products, small enough that pairs cost no more than the memory
FORGOTTEN = -1200.0  # 2^-1200 is 0 in float64, too, and sums of such logs lose none of the others' digits
NUMBERS = 2**20  # of a piece of the text, for each kind of tensor: much of it stays in the cache


def why_not_short(queries: Tensor, *_: object) -> str | None:
    """The reason against the definition."""
    return None if queries.shape[1] <= SHORT else "there are many tokens"


def delta_rule(
    queries_BTHD: Tensor, keys_BTHD: Tensor, values_BTHE: Tensor, log_decays_BTH: Tensor | None,
    rates_BTH: Tensor | None, memory_BHDE: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `multilin.ops.delta_rule`."""
    (num_batch, num_time, num_heads, width), value_width = keys_BTHD.shape, values_BTHE.shape[3]
    chunk = min(CHUNK, num_time)
    tokens = (queries_BTHD, keys_BTHD, values_BTHE, log_decays_BTH, rates_BTH)
    chunks = [None if x is None else _chunks(x, chunk) for x in tokens]
    size = 1  # chunks of a piece; one chunk is asked nothing more, so that graphs can have any number of rows
    if chunk < num_time:
        size = max(1, NUMBERS // (num_batch * num_heads * chunk * max(chunk, width, value_width)))
    num_pieces = -(-num_time // (chunk * size))
    pieces = [[None] * num_pieces if x is None else x.split(size) for x in chunks]
    memory_MDE, parts = memory_BHDE.flatten(0, 1), []
    for piece in zip(*pieces, strict=True):
        part_NMCE, memory_MDE = _Chunks.apply(*piece, memory_MDE)
        parts.append(part_NMCE.unflatten(1, (num_batch, num_heads)).permute(1, 0, 3, 2, 4))
    return torch.cat(parts, dim=1).flatten(1, 2)[:, :num_time], memory_MDE.view_as(memory_BHDE)


def _chunks(x_BTHD: Tensor, chunk: int) -> Tensor:
    """(B, T, H, ...) to (N, B * H, C, ...), filled up with zeros, which change nothing."""
    missing = -x_BTHD.shape[1] % chunk
    if missing:
        x_BTHD = pad(x_BTHD, (0, 0) * (x_BTHD.ndim - 2) + (0, missing))
    return x_BTHD.unflatten(1, (-1, chunk)).movedim((1, 3), (0, 2)).flatten(1, 2).contiguous()


class _Chunks(torch.autograd.Function):
    """Results (N, M, C, E) of N chunks of M heads and texts, and the memory after the last."""

    @staticmethod
    def forward(
        ctx: Any, q_NMCD: Tensor, k_NMCD: Tensor, v_NMCE: Tensor, log_decays_NMC: Tensor | None,
        rates_NMC: Tensor | None, memory_MDE: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        pairs_NMCC, from_start_NMC1 = _decays(log_decays_NMC, k_NMCD)
        scores_NMCC = (q_NMCD @ k_NMCD.mT).mul_(pairs_NMCC)
        added_NMCE, overlaps_NMCC, read_NMCD = v_NMCE, None, None
        if rates_NMC is not None:
            rates_NMC1 = rates_NMC[..., None]
            overlaps_NMCC = (k_NMCD @ k_NMCD.mT).mul_(pairs_NMCC)
            system_NMCC = overlaps_NMCC * rates_NMC1
            added_NMCE = solve(system_NMCC, v_NMCE * rates_NMC1)
            read_NMCD = solve(system_NMCC, k_NMCD * (from_start_NMC1 * rates_NMC1))
            if torch.compiler.is_exporting() and len(added_NMCE) == 1:  # written in place, it would fix a graph's rows
                added_NMCE, read_NMCD = added_NMCE - read_NMCD @ memory_MDE, None
        to_end_NMDC = (k_NMCD * pairs_NMCC[:, :, -1, :, None]).mT
        memories_NMDE, memory_MDE = _write(added_NMCE, read_NMCD, to_end_NMDC, from_start_NMC1[:, :, -1:], memory_MDE)
        result_NMCE = (q_NMCD @ memories_NMDE).mul_(from_start_NMC1)
        result_NMCE.flatten(0, 1).baddbmm_(scores_NMCC.flatten(0, 1), added_NMCE.flatten(0, 1))
        ctx.save_for_backward(
            q_NMCD, k_NMCD, v_NMCE, log_decays_NMC, rates_NMC, pairs_NMCC, from_start_NMC1, scores_NMCC,
            overlaps_NMCC, added_NMCE, read_NMCD, memories_NMDE,
        )  # fmt: skip
        return result_NMCE, memory_MDE

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(gradients[0].device.type, enabled=False):
            return _gradients(ctx.saved_tensors, *gradients)


def _gradients(saved: tuple[Any, ...], dresult: Tensor, dmemory: Tensor) -> tuple[Tensor | None, ...]:
    """Those of all arguments; the transposed system, solved once, gives that of b V - b e^G K M as a whole."""
    q, k, v, log_decays, rates, pairs, from_start, scores, overlaps, added, read, memories = saved
    to_end, over_chunk = pairs[:, :, -1, :, None], from_start[:, :, -1:]
    dadded, through_q = scores.mT @ dresult, (q * from_start).mT @ dresult
    dmemories, dmemory = _write_backward(dadded, read, k * to_end, over_chunk, through_q, dmemory)
    dscores = dresult @ added.mT
    by_pair = dscores * scores
    dscores.mul_(pairs)
    dq = (dresult @ memories.mT).mul_(from_start)
    dk = (added @ dmemories.mT).mul_(to_end)
    from_start_logs, to_end_logs = _dot(dq, q), _dot(dk, k)
    dq, dk, dv, drates = dq + dscores @ k, dk + dscores.mT @ q, dadded, None
    if rates is not None:
        rates_1 = rates[..., None]
        system = overlaps * rates_1
        dknown = torch.linalg.solve_triangular(system, dadded.mT, upper=False, left=False, unitriangular=True).mT
        dsystem = (dknown @ added.mT).tril_(-1).neg_()
        dread = (dknown @ memories.mT).mul_(-from_start)
        dv, by_system, by_read = dknown * rates_1, dsystem * overlaps, _dot(dread, k)
        drates = _dot(dknown, v) + by_read + by_system.sum(dim=3)
        dsystem.mul_(pairs * rates_1)
        dk += dread * rates_1 + (dsystem + dsystem.mT) @ k
        by_pair.addcmul_(by_system, rates_1)
        from_start_logs += by_read * rates
    if log_decays is not None:
        whole_logs = to_end_logs.sum(dim=2) + (dmemories * memories * over_chunk).sum(dim=(2, 3))
        log_decays = _sum_logs(log_decays, by_pair, from_start_logs - to_end_logs, whole_logs)
    return dq, dk, dv, log_decays, drates, dmemory


def _write(
    added_NMCE: Tensor, read_NMCD: Tensor | None, to_end_NMDC: Tensor, over_chunk_NM11: Tensor, memory_MDE: Tensor
) -> tuple[Tensor, Tensor]:
    """The memory before each chunk, and after the last; what the memory holds is taken off `added` in place."""
    memories, reads = [memory_MDE], [None] * len(added_NMCE) if read_NMCD is None else read_NMCD.unbind()
    for read_MCD, added_MCE, to_end_MDC, over_chunk_M11 in zip(
        reads, added_NMCE.unbind(), to_end_NMDC.unbind(), over_chunk_NM11.unbind(), strict=True
    ):
        if read_MCD is not None:
            added_MCE.baddbmm_(read_MCD, memories[-1], alpha=-1)
        memories.append((memories[-1] * over_chunk_M11).baddbmm_(to_end_MDC, added_MCE))
    memory_MDE = memories.pop()
    return torch.stack(memories), memory_MDE


def _write_backward(
    dadded_NMCE: Tensor, read_NMCD: Tensor | None, to_end_NMCD: Tensor, over_chunk_NM11: Tensor,
    through_q_NMDE: Tensor, dmemory_MDE: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of the memory after each chunk, and before the first; `dadded` is completed in place."""
    dmemories, reads = [dmemory_MDE], [None] * len(dadded_NMCE) if read_NMCD is None else read_NMCD.mT.unbind()
    parts = (reads, dadded_NMCE.unbind(), to_end_NMCD.unbind(), over_chunk_NM11.unbind(), through_q_NMDE.unbind())
    for read_MDC, dadded_MCE, to_end_MCD, over_chunk_M11, through_q_MDE in zip(*map(reversed, parts), strict=True):
        dadded_MCE.baddbmm_(to_end_MCD, dmemories[-1])
        dmemory_MDE = torch.addcmul(through_q_MDE, dmemories[-1], over_chunk_M11)
        dmemories.append(dmemory_MDE if read_MDC is None else dmemory_MDE.baddbmm_(read_MDC, dadded_MCE, alpha=-1))
    dmemory_MDE = dmemories.pop()
    return torch.stack(dmemories[::-1]), dmemory_MDE


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(dim=-1)


def _sum_logs(log_decays_NMC: Tensor, by_pair_NMCC: Tensor, by_token_NMC: Tensor, whole_NM: Tensor) -> Tensor:
    """The gradient of the logs: that of each pair belongs to all between the two.

    In float64, where the parts of the pairs on one side of a token cancel.
    """
    dsums_NMC = by_pair_NMCC.sum(dim=3, dtype=torch.float64) - by_pair_NMCC.sum(dim=2, dtype=torch.float64)
    dsums_NMC += by_token_NMC
    dsums_NMC[..., -1] += whole_NM
    dlogs_NMC = dsums_NMC.flip(2).cumsum(dim=2).flip(2)
    return dlogs_NMC.masked_fill(log_decays_NMC < FORGOTTEN * math.log(2), 0.0).to(log_decays_NMC.dtype)


def _decays(log_decays_NMC: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """e^(G_t - G_s) for s <= t, else 0, (N, M, C, C); and e^(G_t), (N, M, C, 1)."""
    size = like.shape[2]
    is_later_CC = torch.ones(size, size, dtype=torch.bool, device=like.device).triu(1)
    if log_decays_NMC is None:
        return (~is_later_CC).to(like.dtype)[None, None], like.new_ones(len(like), 1, size, 1)
    # In float64, as one large log would cost the others their digits; and to the base 2, as PyTorch's exponential of
    # the base e takes many times longer where it vanishes.
    logs_NMC = (log_decays_NMC.double() / math.log(2)).clamp_(min=FORGOTTEN).cumsum(dim=2)
    logs_NMCC = (logs_NMC[..., :, None] - logs_NMC[..., None, :]).to(like.dtype)
    return logs_NMCC.masked_fill_(is_later_CC, -torch.inf).exp2_(), logs_NMC[..., None].to(like.dtype).exp2_()


def solve(lower: Tensor, known: Tensor) -> Tensor:
    """x of (1 + L) x = known, L being what is below the diagonal of `lower`; (..., C, C) and (..., C, D)."""
    if not torch.compiler.is_exporting():
        # Transposed, as its results lie in memory: so no product after it has to copy.
        return torch.linalg.solve_triangular(lower.mT, known.mT, upper=True, left=False, unitriangular=True).mT
    return invert(lower) @ known


def invert(lower: Tensor) -> Tensor:
    """(1 + L)^(-1) by products alone, which every runtime of graphs has: of blocks on the diagonal of 1, 2, 4, ..."""
    index_C = torch.arange(lower.shape[-1], device=lower.device)
    inverse = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    size = 1
    while size < len(index_C):
        block_C = index_C // size
        joins_CC = (block_C[:, None] - block_C == 1) & (block_C[:, None] % 2 == 1)
        inverse = inverse - inverse @ (lower * joins_CC) @ inverse
        size *= 2
    return inverse
