"""Block outer product: all products of pairs inside aligned blocks, contracted by a matrix."""

from jaxtyping import Float
from torch import Tensor

from multilin.errors import InputError
from multilin.ops.block_outer import cpu, portable
from multilin.ops.dispatch import Backend, Op, cpu_kernels, result_dtype

__all__ = ["BLOCK_OUTER", "block_outer"]

BLOCK_OUTER = Op(
    "block_outer",
    [
        cpu_kernels("compiled, products recomputed in the backward pass", cpu.block_outer),
        Backend("portable (PyTorch, products recomputed in the backward pass)", portable.block_outer),
    ],
    special_cases=[Backend("portable (other block sizes)", portable.block_outer, "cpu", refuses=cpu.refuses_vectors)],
)


def block_outer(
    left: Float[Tensor, "*batch N K"],
    right: Float[Tensor, "*batch N J"],
    weight: Float[Tensor, "D N K J"],
) -> Float[Tensor, "*batch D"]:
    """Multiply a matrix with the outer products of the blocks of two vectors.

        y_d = sum over n, k, j of weight[d, n, k, j] * left[n, k] * right[n, j]

    Three architectures use this op. If K = J is a power of two, the pairs (i, i xor b), b < K, are exactly the pairs in
    aligned blocks of K: K is 16 in 3Lin's combiner and 4 in TScale's. ELiTA's feed-forward is one block of D x 8.

    Args:
        left: (..., N, K) N blocks of K numbers.
        right: (..., N, J) N blocks of J numbers.
        weight: (D, N, K, J) the matrix; each of its D rows has one number for each product.

    Returns:
        (..., D) in the dtype of `left`, or in autocast's dtype.

    Raises:
        InputError: shapes that do not fit.

    Cost: 2 N K J D multiplications and additions per row, three times as many with a backward pass. Only the products
    of one chunk of rows are held at a time (2^21 products on a CPU, else 2^27); backward, they are computed again.
    Source: TScale and 3Lin (combiners), ELiTA (two-factor feed-forward).
    """
    check_blocks(left, right, weight)
    dtype = result_dtype(left)
    return BLOCK_OUTER(left.to(dtype), right.to(dtype), weight.to(dtype), dtype=dtype)


def check_blocks(left: Tensor, right: Tensor, weight: Tensor) -> None:
    """Raise InputError if the shapes do not fit."""
    if weight.shape[1:] != (*left.shape[-2:], right.shape[-1]) or left.shape[:-1] != right.shape[:-1]:
        raise InputError(
            f"weight: shape {tuple(weight.shape)} given for blocks (N, K) {tuple(left.shape[-2:])} and (N, J) "
            f"{tuple(right.shape[-2:])}, but it must be (D, N, K, J)"
        )
