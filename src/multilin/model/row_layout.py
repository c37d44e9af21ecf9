"""Documents and padding in rows: where documents begin, in every form that collators use, and where padding is.

Padding before the first token of a row has no effect. Later padding would take the place of a token in windows. So the
tokens of each row are moved together before they are read, and the results are moved back.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multilin.errors import InputError
from multilin.ops.shapes import kind_of

SIZE_HINTS = ("max_length_q", "max_length_k", "cu_seq_lens_k")
"""Arguments that collators add to `cu_seq_lens_q` for attention kernels, and that self-attention does not need."""


class Packing(NamedTuple):
    """Where documents begin in the rows.

    A token starts a document if any of the fields marks it; fields that are None are ignored.

    document_ids: (B, T) number of each token's document; a change of the number begins a document.
    cu_seqlens: (N + 1,) cumulative lengths of the documents in the rows laid end to end, from 0 to B * T.
    position_ids: (B, T) or (1, T) positions in documents; a position not above the previous position begins a document.
    """

    document_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    position_ids: Tensor | None = None

    @property
    def names(self) -> str:
        """The names of the arguments that are given."""
        return ", ".join(name for name, value in self._asdict().items() if value is not None)

    def part(self, rows: Tensor, columns: slice | Tensor) -> "Packing":
        """The packing of the selected rows and columns; cu_seqlens must be None."""
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
    """Read the packing from the model's own arguments and from the arguments of transformers' collators.

    Returns:
        The packing, with `cu_seq_lens_q` as `cu_seqlens` and `seq_idx` as `document_ids`; and the other arguments.

    Raises:
        InputError: an argument is given under both of its names.
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
    """True where a document begins after earlier tokens of its row; None if no document does.

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
    # This check waits for a GPU, but costs less than kernels that look for starts at every token.
    if not torch.compiler.is_compiling() and not starts_BT.any():
        return None
    return starts_BT


def _before(values_BT: Tensor, first_B: Tensor, padding_BT: Tensor | None) -> Tensor:
    """For each column the value at the last token before it, or `first_B` if there is no such token."""
    shifted_BT = torch.cat([first_B[:, None].to(values_BT.dtype), values_BT[:, :-1]], dim=1)
    if padding_BT is None:
        return shifted_BT
    # The index of the last token before each column, into `first_B ++ values_BT`: 0 where there is none.
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
        raise InputError("cu_seqlens: a document continues in the next row, but every row must begin a document")
    return starts_BT


def _check_shape(name: str, given: Tensor, accepted: list[tuple[int, int]]) -> None:
    if given.is_floating_point() or tuple(given.shape) not in accepted:
        shapes = " or ".join(map(str, dict.fromkeys(accepted)))
        raise InputError(f"{name}: {kind_of(given)} given, but it must be integers of shape {shapes}")


def check_mask(attention_mask: Tensor, num_batch: int, num_time: int) -> Tensor:
    """The last T columns of a mask as (B, T) bool, True for a token.

    Raises:
        InputError: another shape, or numbers other than 0 and 1.
    """
    if attention_mask.ndim != 2 or attention_mask.shape[0] != num_batch or attention_mask.shape[1] < num_time:
        raise InputError(
            f"attention_mask: shape {tuple(attention_mask.shape)} given, but it must be ({num_batch}, {num_time})"
        )
    if attention_mask.dtype != torch.bool and not torch.compiler.is_compiling():
        # Some packers write document numbers into the mask; read as ones, they would let documents see each other.
        wrong = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
        if len(wrong):
            raise InputError(
                f"attention_mask: {wrong[0].item():g} given, but it must be 0 for padding or 1 for a token"
            )
    return attention_mask[:, -num_time:] != 0


def pads_after_tokens(mask: Tensor, is_start: bool, only_gaps: bool) -> bool:
    """Whether padding follows a token. Compiled code cannot look at the mask, and returns True at a text's start.

    Args:
        mask: (B, T) True for a token.
        is_start: whether the rows begin a text.
        only_gaps: ignore padding after the last token of a row; compiled code does not ignore this padding.
    """
    if torch.compiler.is_compiling():
        return is_start
    late_BT = ~mask
    if is_start:
        late_BT &= mask.cumsum(dim=1) > 0
        if only_gaps:
            late_BT &= mask.flip(1).cumsum(dim=1).flip(1) > 0
    return bool(late_BT.any())


class ColumnOrder(NamedTuple):
    """An order of the columns of each row in which all tokens lie together.

    take_BS: (B, S) the columns that make the packed row. S is the largest number of tokens in a row, at least 1; in
        compiled code S is T.
    place_BT: (B, T) for each column, the packed column of the last token up to this column; -1 without such a token.
    """

    take_BS: Tensor
    place_BT: Tensor

    @classmethod
    def of_mask(cls, mask: Tensor, at_end: bool) -> "ColumnOrder":
        """The order for a (B, T) mask: in the packed row, padding comes before the tokens if `at_end`, else after."""
        counts_B1 = mask.sum(dim=1, keepdim=True)
        width = mask.shape[1] if torch.compiler.is_compiling() else max(1, int(counts_B1.max()))
        take_BT = mask.int().argsort(dim=1, descending=not at_end, stable=True)
        place_BT = mask.cumsum(dim=1) - 1
        if at_end:
            return cls(take_BT[:, -width:], torch.where(place_BT < 0, -1, place_BT + width - counts_B1))
        return cls(take_BT[:, :width], place_BT)

    @property
    def rows_B1(self) -> Tensor:
        """(B, 1) the index of each row."""
        return torch.arange(len(self.take_BS), device=self.take_BS.device)[:, None]

    def pack(self, x: Tensor) -> Tensor:
        """Pack (B, T, ...) to (B, S, ...)."""
        return x[self.rows_B1, self.take_BS]

    def unpack(self, x: Tensor) -> Tensor:
        """Undo `pack`: (B, S, D) to (B, T, D); padding gets the values of the last token before it, else 0."""
        return x[self.rows_B1, self.place_BT.clamp(min=0)].masked_fill((self.place_BT < 0)[..., None], 0)
