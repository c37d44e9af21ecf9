"""Where documents begin in a row of tokens, in each of the ways that the field's collators say it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multilin.errors import InputError
from multilin.ops.shapes import kind_of

SIZE_HINTS = ("max_length_q", "max_length_k", "cu_seq_lens_k")
"""Arguments that collators add to `cu_seq_lens_q` for attention kernels, and that self-attention does not need."""


class Packing(NamedTuple):
    """How several documents lie in the rows.

    A token starts a document if any of the fields marks it; fields that are None are ignored.

    document_ids: (B, T) number of each token's document; a change begins one.
    cu_seqlens: (N + 1,) cumulative lengths of the documents in the rows laid end to end, from 0 to B * T.
    position_ids: (B, T) or (1, T) position of each token in its document; one that does not rise begins one.
    """

    document_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    position_ids: Tensor | None = None

    @property
    def names(self) -> str:
        """The names of the arguments that are given."""
        return ", ".join(name for name, value in self._asdict().items() if value is not None)

    def part(self, rows: Tensor, columns: slice | Tensor) -> "Packing":
        """The packing of some rows and columns, which index a tensor; not for a packing given as cu_seqlens."""
        document_ids, _, position_ids = self
        if position_ids is not None and len(position_ids) == 1:
            position_ids = position_ids.expand(int(rows.max()) + 1, -1)
        return Packing(
            None if document_ids is None else document_ids[rows, columns],
            None,
            None if position_ids is None else position_ids[rows, columns],
        )


def read_packing(
    document_ids: Tensor | None, cu_seqlens: Tensor | None, position_ids: Tensor | None, others: Mapping[str, Any]
) -> tuple[Packing, dict[str, Any]]:
    """The packing from the model's own arguments and from arguments of transformers' collators.

    Returns:
        The packing, with `cu_seq_lens_q` as `cu_seqlens` and `seq_idx` as `document_ids`, and all other arguments.

    Raises:
        InputError: the same thing is given under two names.
    """
    rest = {name: value for name, value in others.items() if name not in SIZE_HINTS and value is not None}
    for name, given, alias in (("document_ids", document_ids, "seq_idx"), ("cu_seqlens", cu_seqlens, "cu_seq_lens_q")):
        if given is not None and alias in rest:
            raise InputError(f"{alias}: given together with {name}, which says the same; give one of them")
    document_ids = rest.pop("seq_idx", document_ids)
    return Packing(document_ids, rest.pop("cu_seq_lens_q", cu_seqlens), position_ids), rest


def document_starts(
    packing: Packing, padding_BT: Tensor | None, num_before_BT: Tensor, document_B: Tensor
) -> Tensor | None:
    """True where a document begins inside a row; None if no document begins and each row continues its document.

    Args:
        packing: the caller's arguments.
        padding_BT: True for padding, which neither begins a document nor ends one.
        num_before_BT: number of tokens before each token in its row, including the tokens of the state.
        document_B: number of the last document of each row.

    Raises:
        InputError: a tensor of another shape, or cumulative lengths that do not cover the rows.
    """
    document_ids, cu_seqlens, position_ids = packing
    num_batch, num_time = num_before_BT.shape
    starts = []
    if document_ids is not None:
        _check_shape("document_ids", document_ids, [(num_batch, num_time)])
        starts.append(document_ids != _before(document_ids, document_B, padding_BT))
    if cu_seqlens is not None:
        starts.append(_starts_from_lengths(cu_seqlens, num_batch, num_time))
    if position_ids is not None:
        _check_shape("position_ids", position_ids, [(num_batch, num_time), (1, num_time)])
        position_ids = position_ids.expand(num_batch, num_time)
        starts.append(position_ids <= _before(position_ids, num_before_BT[:, 0] - 1, padding_BT))
    if not starts:
        return None
    starts_BT = torch.stack(starts).any(dim=0) & (num_before_BT > 0)
    if padding_BT is not None:
        starts_BT = starts_BT & ~padding_BT
    # Looking costs a wait on a GPU, less than kernels that look for starts at every token.
    if not torch.compiler.is_compiling() and not starts_BT.any():
        return None
    return starts_BT


def _before(values_BT: Tensor, first_B: Tensor, padding_BT: Tensor | None) -> Tensor:
    """The value at the token before each, padding skipped; `first_B` before a row's first token."""
    shifted_BT = torch.cat([first_B[:, None].to(values_BT.dtype), values_BT[:, :-1]], dim=1)
    if padding_BT is None:
        return shifted_BT
    # The index of the last token among those before, as an index into `first_B ++ values_BT`: 0 where there is none.
    index_T = torch.arange(1, values_BT.shape[1] + 1, device=values_BT.device)
    last_BT = torch.where(padding_BT, 0, index_T).cummax(dim=1).values
    last_BT = torch.cat([torch.zeros_like(last_BT[:, :1]), last_BT[:, :-1]], dim=1)
    return torch.cat([shifted_BT[:, :1], values_BT], dim=1).gather(1, last_BT)


def _starts_from_lengths(cu_seqlens: Tensor, num_batch: int, num_time: int) -> Tensor:
    num_tokens = num_batch * num_time
    is_checked = not torch.compiler.is_compiling()
    if is_checked and not (
        not cu_seqlens.is_floating_point()
        and cu_seqlens.ndim == 1
        and len(cu_seqlens) >= 2
        and cu_seqlens[0] == 0
        and cu_seqlens[-1] == num_tokens
        and bool((cu_seqlens.diff() >= 0).all())
    ):
        raise InputError(
            f"cu_seqlens: {cu_seqlens.tolist()!s:.60} given, but its integers must rise from 0 to {num_tokens}"
        )
    starts = torch.zeros(num_tokens + 1, dtype=torch.bool, device=cu_seqlens.device)
    starts[cu_seqlens.long()] = True
    starts_BT = starts[:-1].view(num_batch, num_time)
    if is_checked and not starts_BT[:, 0].all():
        raise InputError("cu_seqlens: a document goes on from one row into the next, but every row must begin with one")
    return starts_BT


def _check_shape(name: str, given: Tensor, accepted: list[tuple[int, int]]) -> None:
    if given.is_floating_point() or tuple(given.shape) not in accepted:
        shapes = " or ".join(map(str, dict.fromkeys(accepted)))
        raise InputError(f"{name}: {kind_of(given)} given, but it must be integers of shape {shapes}")
