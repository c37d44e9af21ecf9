"""The Triton kernels of the delta rule: the inverse of a chunk's triangular system, and the memory.

A program of `write` handles one head of one text and a slice of its values. It goes through the chunks forward (left),
or backward from the last chunk to the first (right):

    added -= read M                              dadded += k_to_end dM
    M <- e^(G_C) M + k_to_end^T added            dM <- e^(G_C) dM + through_q - read^T dadded

See `portable.write` and `portable.write_backward`. The program keeps its columns of M from chunk to chunk.
"""

import triton
import triton.language as tl

from multilin.ops.kernels.gpu_launch import autotuned
from multilin.ops.kernels.gpu_tiles import dot, load_tile, store_tile

# Not 8 warps with BE = 16: on an H200, that kernel reads outside of its memory (see results/gpu.md).
WAYS: list[tuple[dict[str, int], int, int]] = [
    ({"BE": 32}, 4, 1), ({"BE": 64}, 4, 1), ({"BE": 16}, 4, 3), ({"BE": 16}, 2, 3),
]  # fmt: skip


@triton.jit
def invert(p_lower, p_inverse, length, BC: tl.constexpr):
    """Compute (1 + L)^(-1) of one chunk as `portable.invert` does, but begin with the inverses of blocks of 2 rows."""
    o_c = tl.arange(0, BC)
    m_c, o_chunk = o_c < length, tl.program_id(0).to(tl.int64) * length * length
    b_lower = load_tile(p_lower + o_chunk, o_c, m_c, length, o_c, m_c)
    row, column = o_c[:, None], o_c[None, :]
    b_inverse = tl.where(row == column, 1.0, tl.where((row == column + 1) & (row % 2 == 1), -b_lower, 0.0))
    size = 2
    while size < BC:
        joins = (row // size == column // size + 1) & (row // size % 2 == 1)
        b_inverse -= dot(dot(b_inverse, tl.where(joins, b_lower, 0.0)), b_inverse)
        size *= 2
    store_tile(p_inverse + o_chunk, o_c, m_c, length, o_c, m_c, b_inverse)


@autotuned(WAYS, ("D", "E", "PRODUCTS"))
@triton.jit
def write(
    p_added, p_read, p_to_end, p_over_chunk, p_through_q, p_memory, p_added_after, p_memories, p_memory_after,
    num_chunks, length, D: tl.constexpr, E: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, PRODUCTS: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Store `added`, M before each chunk and M after the last; with p_through_q, compute the right equations above."""
    i_m, num_memories = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    o_c, o_d, o_e = tl.arange(0, BC), tl.arange(0, BD), tl.program_id(1) * BE + tl.arange(0, BE)
    m_c, m_d, m_e = o_c < length, o_d < D, o_e < E
    b_memory = load_tile(p_memory + i_m * D * E, o_d, m_d, E, o_e, m_e)
    for i in range(num_chunks):
        i_chunk = i if p_through_q is None else num_chunks - 1 - i
        row = i_chunk * num_memories + i_m
        o_keys = row * length * D
        o_added, o_memory = row * length * E, row * D * E
        store_tile(p_memories + o_memory, o_d, m_d, E, o_e, m_e, b_memory)
        b_added = load_tile(p_added + o_added, o_c, m_c, E, o_e, m_e)
        b_to_end = load_tile(p_to_end + o_keys, o_c, m_c, D, o_d, m_d)
        if p_through_q is not None:
            b_added += dot(b_to_end, b_memory, PRODUCTS)
            b_memory = b_memory * tl.load(p_over_chunk + row) + load_tile(p_through_q + o_memory, o_d, m_d, E, o_e, m_e)
            if p_read is not None:
                b_read = load_tile(p_read + o_keys, o_c, m_c, D, o_d, m_d)
                b_memory -= dot(tl.trans(b_read), b_added, PRODUCTS)
        else:
            if p_read is not None:
                b_read = load_tile(p_read + o_keys, o_c, m_c, D, o_d, m_d)
                b_added -= dot(b_read, b_memory, PRODUCTS)
            b_memory = b_memory * tl.load(p_over_chunk + row) + dot(tl.trans(b_to_end), b_added, PRODUCTS)
        store_tile(p_added_after + o_added, o_c, m_c, E, o_e, m_e, b_added)
    store_tile(p_memory_after + i_m * D * E, o_d, m_d, E, o_e, m_e, b_memory)
