"""An extension of transformers' generate(), which can start from a state, and so continue a text many times."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from multilin.errors import InputError
from multilin.model.config import MultilinConfig
from multilin.model.embedding import check_tokens, hash_tokens
from multilin.model.state import TextState, open_state

OTHER_MODES = {
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa",
    "force_words_ids": "constrained beam search",
    "constraints": "constrained beam search",
    "num_beam_groups": "group beam search",
}
"""Settings of modes for which transformers runs code from the hub, written for its caches; multilin refuses them."""

Settings = Sequence[GenerationConfig | None]


class StatefulGenerationMixin(GenerationMixin):
    """Let generate() start from a given state, without changing this state.

    transformers recognises models that can generate by the end of this class's name, GenerationMixin.
    """

    config: MultilinConfig

    def new_state(self) -> TextState:
        """The state at the start of a text."""
        return TextState(self.config.layer_kinds)

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        new_tokens_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        """transformers' generate (greedy, sampling, beams, assistants), at the start of a text or from a state.

        With `past_key_values=state`, `inputs` are the whole text, including the part that the state has read, as in
        transformers. The given state is not changed, so you can continue this state many times.
        `return_dict_in_generate=True` also returns the state at the end.

        Args:
            inputs: (B, T) token ids; None begins with the start token.
            generation_config: transformers' settings; single settings may be given by name.
            new_tokens_only: `inputs` are the tokens after those that the state has read.
            kwargs: further arguments of transformers' generate.

        Raises:
            InputError: a text that does not begin with the tokens that the state has read, more tokens (prompt and new)
                than the model can read, no token at all, a cache of another kind, or a mode of generation that
                transformers no longer has.
        """
        settings = (generation_config, self.generation_config)
        _refuse_other_modes(settings, kwargs)
        name, tokens = self._given_tokens(inputs, kwargs)
        if tokens is None and _setting("bos_token_id", settings, kwargs) is None:
            raise InputError("input_ids: no tokens given; generation needs at least one, such as the start token")
        if (kind := _setting("cache_implementation", settings, kwargs)) is not None:
            if kind != "dynamic":
                raise InputError(
                    f"cache_implementation: {kind!r} given, but a multilin model always uses its own state of "
                    "constant size; leave it out"
                )
            kwargs["cache_implementation"] = None
        _check_order(tokens, settings, kwargs)
        num_before = torch.zeros(1, dtype=torch.long)
        # Embeddings need a state: without it, transformers would read new tokens without the embeddings before them.
        is_cached = name == "inputs_embeds" or _setting("use_cache", settings, kwargs) is not False
        if is_cached or kwargs.get("past_key_values") is not None:
            state = self._open_state(name, tokens, kwargs, new_tokens_only)
            if state.num_tokens is not None and state.num_columns == 0:
                num_before = state.num_tokens
            if _setting("is_assistant", settings, kwargs):
                state.activate_past_recording()
            num_rows = max(_setting(name, settings, kwargs) or 1 for name in ("num_beams", "num_return_sequences"))
            if tokens is not None:
                size = _setting("prefill_chunk_size", settings, kwargs)
                _check_pieces(kwargs.get("attention_mask"), tokens.shape[1] - state.num_columns, size)
            kwargs["past_key_values"] = state if num_rows == 1 else state.fork(num_rows)
        self._check_length(tokens, num_before, settings, kwargs)
        return super().generate(inputs, generation_config, **kwargs)

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Refuse `generate_batch`, which pages keys and values: a state has no keys and values."""
        raise InputError(
            "generate_batch: a multilin model has no keys and values to page; use generate(), or `multilin serve` for "
            "requests that come and go"
        )

    def _given_tokens(self, inputs: Tensor | None, kwargs: dict[str, Any]) -> tuple[str, Tensor | None]:
        """The tokens to begin with and the name of their argument; None if there are no tokens."""
        given = {"inputs_embeds": kwargs.get("inputs_embeds"), "input_ids": inputs}
        if inputs is None:
            given["input_ids"] = kwargs.get("input_ids")
        for name, tokens in given.items():
            if tokens is not None:
                check_tokens(name, tokens, self.config)
            if tokens is not None and tokens.shape[1] > 0:
                return name, tokens
        return "input_ids", None

    def _open_state(self, name: str, tokens: Tensor | None, kwargs: dict[str, Any], new_tokens_only: bool) -> TextState:
        """A copy of the given state, or a new state; its `num_columns` counts the columns of `tokens` already read."""
        given, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        num_batch = 1 if tokens is None else len(tokens)
        state = open_state(given, self.config.layer_kinds, num_batch)
        if given is None or state.num_tokens is None:
            return state
        state = state.clone()
        state.num_columns = 0
        # As in transformers, a mask longer than the tokens says that only new tokens are given.
        if tokens is None or new_tokens_only or (mask is not None and mask.shape[1] > tokens.shape[1]):
            return state
        state.num_columns = _num_columns_read(name, tokens, mask, state)
        return state

    def _check_length(
        self, tokens: Tensor | None, num_before: Tensor, settings: Settings, kwargs: dict[str, Any]
    ) -> None:
        """Refuse more tokens than the model can read; without a given number, generation ends at the model's limit."""
        limit, mask = self.config.n_positions, kwargs.get("attention_mask")
        max_new = _setting("max_new_tokens", settings, kwargs)
        if max_new is not None and kwargs.get("max_length") is None:
            kwargs["max_length"] = None  # else transformers warns that it ignores the config's value
        if limit is None:
            return
        num_columns = 1 if tokens is None else tokens.shape[1]
        num_given = torch.tensor(num_columns) if mask is None else mask[:, -num_columns:].sum(dim=1)
        length = int((num_given + num_before.to(num_given.device)).max())
        # The last new token is generated but not read.
        room = limit - length + 1
        max_length = _setting("max_length", settings[:1], kwargs)
        if max_length is None and self.generation_config.max_length != limit:  # the model itself has set this length
            max_length = self.generation_config.max_length
        if max_new is None and max_length is not None:
            max_new = max_length - num_columns
        if room < 1 or (max_new or 1) > room:
            raise InputError(
                f"max_new_tokens: {max_new} given after a text of {length} tokens, but this model reads at most "
                f"{limit} tokens (n_positions)"
            )
        if max_new is None:
            kwargs["max_length"] = num_columns + room

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = 0,
        past_key_values: TextState | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare the next call of the model, which reads the columns that the state has not read.

        After `TextState.crop`, more columns may be unread than transformers counts. Assisted decoding begins with a
        count of None. With a count of 0, all columns are read: a piece of a prompt. Positions come from the state.
        """
        if next_sequence_length != 0 and isinstance(past_key_values, TextState) and inputs_embeds is None:
            next_sequence_length = input_ids.shape[1] - past_key_values.num_columns
        for name in ("position_ids", "tokenizer", "assistant_tokenizer"):  # the latter only generate() itself reads
            kwargs.pop(name, None)
        return super().prepare_inputs_for_generation(
            input_ids, next_sequence_length, past_key_values, attention_mask, inputs_embeds, **kwargs
        )


def _refuse_other_modes(settings: Settings, given: dict[str, Any]) -> None:
    if given.get("custom_generate") is not None:
        return
    for name, mode in OTHER_MODES.items():
        value = _setting(name, settings, given)
        if value and (name, value) != ("num_beam_groups", 1):
            raise InputError(
                f"{name}: {value!r:.40} given, but a multilin model does not generate by {mode}; leave it out"
            )


def _setting(name: str, settings: Settings, given: dict[str, Any]) -> Any:
    """The value of a setting: the keyword argument, else the given config's value, else the model config's."""
    values = (given.get(name), *(getattr(config, name, None) for config in settings))
    return next((value for value in values if value is not None), None)


def _num_columns_read(name: str, tokens: Tensor, mask: Tensor | None, state: TextState) -> int:
    """The number of columns of a whole text that the state has read.

    Raises:
        InputError: the text has no new tokens, or does not begin with the tokens that were read.
    """
    num_read_B, _, hash_B = state.parts[0][:3]
    counts_BT = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if mask is None else mask != 0
    num_new_B = counts_BT.sum(dim=1).to(num_read_B.device) - num_read_B
    how = "give the whole text with new tokens at its end, or the new tokens alone with new_tokens_only=True"
    if num_new_B.min() < 1 or num_new_B.min() != num_new_B.max():
        row = int(num_new_B.argmin())
        raise InputError(
            f"{name}: row {row} holds {int(num_new_B[row] + num_read_B[row])} tokens, but the state has read "
            f"{int(num_read_B[row])} tokens of it; {how}"
        )
    num_columns = tokens.shape[1] - int(num_new_B[0])
    if name == "input_ids":
        start_B = torch.zeros_like(hash_B)
        begins_alike_B = hash_tokens(tokens[:, :num_columns], start_B, counts_BT[:, :num_columns]) == hash_B
        if not begins_alike_B.all():
            row = int((~begins_alike_B).nonzero()[0, 0])
            raise InputError(
                f"{name}: row {row} does not begin with the {int(num_read_B[row])} tokens that the state has read; "
                f"{how}"
            )
    return num_columns


def _check_order(tokens: Tensor | None, settings: Settings, kwargs: dict[str, Any]) -> None:
    """Refuse packed documents, and positions that do not count from 0, because each row is continued as one text."""
    for name in ("document_ids", "cu_seqlens", "seq_idx", "cu_seq_lens_q"):
        if kwargs.get(name) is not None:
            raise InputError(f"{name}: given, but generate() continues one text per row; give only one, without {name}")
    positions, mask = kwargs.pop("position_ids", None), kwargs.get("attention_mask")
    if positions is None or tokens is None or _setting("is_assistant", settings, kwargs):
        return  # transformers itself sends positions to assistants
    counts_BT = torch.ones_like(tokens if tokens.ndim == 2 else tokens[..., 0]).long() if mask is None else mask.long()
    expected_BT = (counts_BT.cumsum(dim=1) - 1)[:, -positions.shape[-1] :]
    if ((positions != expected_BT) & (counts_BT[:, -positions.shape[-1] :] != 0)).any():
        raise InputError("position_ids: given, but generate() counts the tokens of each row from 0; leave it out")


def _check_pieces(mask: Tensor | None, num_columns: int, size: int | None) -> None:
    """Refuse a prompt read in pieces if a row has no token in the last piece, which predicts the first new token."""
    if mask is not None and size is not None:
        rest = mask[:, -num_columns:]
        empty_B = (rest[:, (num_columns - 1) // size * size :] == 0).all(dim=1)
        if empty_B.any():
            raise InputError(
                f"prefill_chunk_size: {size} given, but the last piece holds only padding in row "
                f"{int(empty_B.nonzero()[0, 0])}; pad prompts on the left"
            )
