"""Checks a mask; where padding follows tokens, moves each row's tokens together to be read, and the results back.

Padding before the first token of a sequence has no effect. After a token it has: a window would keep it instead of a
token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from multilin.errors import InputError


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
        # Some packers number documents in the mask; taken for ones they would see each other.
        wrong = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
        if len(wrong):
            raise InputError(
                f"attention_mask: {wrong[0].item():g} given, but it must be 0 for padding or 1 for a token"
            )
    return attention_mask[:, -num_time:] != 0


def pads_after_tokens(mask: Tensor, is_start: bool, only_gaps: bool) -> bool:
    """Whether padding follows a token; compiled code, which cannot look at the mask, assumes it at the start of a text.

    Args:
        mask: (B, T) True for a token.
        is_start: the rows are at the start of a text.
        only_gaps: ignore padding after the last token of a row; compiled code does not.
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
    """An order of each row's columns in which the tokens stand together.

    take_BS: (B, S) the columns of the packed row, S the largest number of tokens in a row, at least 1;
        T in compiled code.
    place_BT: (B, T) the packed column of the last token up to each column; -1 where there is none.
    """

    take_BS: Tensor
    place_BT: Tensor

    @classmethod
    def of_mask(cls, mask: Tensor, at_end: bool) -> "ColumnOrder":
        """The order for a (B, T) mask, tokens at the end of the packed row, behind its padding, or at the start."""
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
        """(B, T, ...) to (B, S, ...)."""
        return x[self.rows_B1, self.take_BS]

    def unpack(self, x: Tensor) -> Tensor:
        """(B, S, D) to (B, T, D); padding gets the values of the token before it, or 0 without one."""
        return x[self.rows_B1, self.place_BT.clamp(min=0)].masked_fill((self.place_BT < 0)[..., None], 0)
