"""Modules in which positions read each other; they call ops with the layout and can record the weights of reading."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multilin.errors import plural
from multilin.layers.base import Layout
from multilin.ops.prefix_softmax import PrefixSoftmaxState, prefix_softmax, prefix_softmax_weights
from multilin.ops.windowed_attention import WindowedAttentionState, windowed_attention, windowed_attention_weights


class Reading(NamedTuple):
    """The weights with which each position of a text reads its own token and earlier tokens.

    meaning: one or two sentences that say what a weight is.
    weights_BHTS: (B, H, T, T) weight of token s for position t, 0 if t does not read s; H is 1 without heads.
    nearest, farthest: smallest and largest distance t - s that is read; farthest None: back to the text's start.
    own_BHT: (B, H, T) weight of an extra term for the position's own token; None without such a term.
    null_BHT: (B, H, T) weight that belongs to no token; None without such a term.
    is_share: whether the weights of a position, including own and null, are nonnegative and sum to 1.
    """

    meaning: str
    weights_BHTS: Tensor
    nearest: int
    farthest: int | None
    own_BHT: Tensor | None = None
    null_BHT: Tensor | None = None
    is_share: bool = True


class Reader(nn.Module):
    """The base class of modules in which positions read each other; it records the weights for `explain`.

    The methods below call ops: they take padding and the starts of texts from the layout, build no state if none is
        needed, and record the weights. A module that calls another op must do all this itself, and call `record`.
    """

    _recorder: Callable[[Reading], None] | None = None

    def record(self, make_reading: Callable[[], Reading]) -> None:
        """Inside `record_readings`, compute and keep the weights of this forward pass; elsewhere do nothing."""
        if self._recorder is not None:
            self._recorder(make_reading())

    def prefix_softmax(
        self, logits_BTH: Tensor, values_BTHD: Tensor, state: PrefixSoftmaxState | None, layout: Layout, **options: Any
    ) -> tuple[Tensor, PrefixSoftmaxState | None]:
        """Call the op `prefix_softmax`, options window, own_logits, null_logit; return means (B, T, H, D) and state.

        The logits of padding become -inf, so padding has no weight.
        """
        if layout.padding_BT is not None:
            logits_BTH = logits_BTH.masked_fill(layout.padding_BT[..., None], -torch.inf)
        options["starts"] = layout.starts_BT
        self.record(lambda: _read_softmax(logits_BTH, options))
        return prefix_softmax(logits_BTH, values_BTHD, **options, state=state, needs_state=layout.needs_state)

    def windowed_attention(
        self,
        queries_BTHD: Tensor,
        keys_BTHD: Tensor,
        values_BTHE: Tensor,
        state: WindowedAttentionState | None,
        layout: Layout,
        **options: Any,
    ) -> tuple[Tensor, WindowedAttentionState | None]:
        """Call the op `windowed_attention`, options window, scale, ...; return means (B, T, H, E) and the state."""
        options |= {"padding": layout.padding_BT, "starts": layout.starts_BT}
        self.record(lambda: _read_window(queries_BTHD, keys_BTHD, options))
        return windowed_attention(
            queries_BTHD, keys_BTHD, values_BTHE, **options, state=state, needs_state=layout.needs_state
        )


def _read_softmax(logits_BTH: Tensor, options: dict[str, Any]) -> Reading:
    (weights_BHTS, own_BHT), window = prefix_softmax_weights(logits_BTH, **options), options.get("window")
    among = "all tokens so far" if window is None else f"the last {plural(window, 'token')}"
    meaning = (
        f"A weight is the token's share in the mean over {among}: the score of the token, which is the same at every "
        "position, divided by the sum of the scores of all tokens read"
    )
    if own_BHT is not None:
        meaning += ". The own term is the share of the position's own token, which is counted a second time in this sum"
    farthest = None if window is None else window - 1
    null_BHT = None if options.get("null_logit") is None else _missing(weights_BHTS)
    return Reading(f"{meaning}.", weights_BHTS, 0, farthest, own_BHT, null_BHT)


def _read_window(queries_BTHD: Tensor, keys_BTHD: Tensor, options: dict[str, Any]) -> Reading:
    weights_BHTS, window = windowed_attention_weights(queries_BTHD, keys_BTHD, **options), options["window"]
    null_BHT = _missing(weights_BHTS) if options.get("null_key") else None
    meaning = (
        f"A weight is the token's share in the head's attention to the {plural(window, 'token')} before the position. "
        "It includes the decay over distance"
    )
    if null_BHT is not None:
        meaning += ". The weight of the null key belongs to no token"
    return Reading(f"{meaning}.", weights_BHTS, min(window, 1), window, null_BHT=null_BHT)


def _missing(weights_BHTS: Tensor) -> Tensor:
    """1 minus the sum of the weights of each position."""
    return (1 - weights_BHTS.sum(dim=-1)).clamp(min=0)


@contextlib.contextmanager
def record_readings(layers: nn.Module) -> Iterator[list[tuple[str, Reading]]]:
    """Collect the name and reading of every Reader in the layers, in the order in which they run.

    The layers must be called at the start of a text. Their outputs do not change, because the weights are computed
    again from the arguments of the ops.
    """
    readings: list[tuple[str, Reading]] = []
    readers = [(name, module) for name, module in layers.named_modules() if isinstance(module, Reader)]
    for name, module in readers:
        module._recorder = lambda reading, name=name: readings.append((name, reading))
    try:
        yield readings
    finally:
        for _, module in readers:
            module._recorder = None
