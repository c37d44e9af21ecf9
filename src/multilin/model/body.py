"""The body of the model: embedding, layers and final norm. A state lets any text be continued."""

import contextlib
import itertools
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from multilin.architectures.base import LayerOptions, get_architecture
from multilin.architectures.own_file import sources_of
from multilin.errors import InputError, listed, prefixed, shown
from multilin.layers.base import Layer, ParameterHolder
from multilin.layers.blocks import TileNorm
from multilin.layers.linear import Arithmetic, Linear, set_arithmetic
from multilin.layers.plain import PlainMixer
from multilin.model.config import MultilinConfig, write_auto_file
from multilin.model.embedding import TokenEmbedding, check_tokens
from multilin.model.row_layout import ColumnOrder, Packing, check_mask, pads_after_tokens, read_packing
from multilin.model.state import TextState, map_tensors, open_state, put_rows
from multilin.settings import load_settings

DRAWN = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, ParameterHolder)
"""The modules whose parameters `_init_weights` initialises."""


class MultilinPreTrainedModel(PreTrainedModel):
    """Base class of the body and the language model: config, initial weights and transformers' attributes."""

    config: MultilinConfig
    config_class = MultilinConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True

    def save_pretrained(self, save_directory: str | Path, is_main_process: bool = True, **kwargs: Any) -> None:
        """Save as transformers does, with the code of layers from users' files, and a file that imports multilin."""
        if is_main_process and not Path(save_directory).is_file():
            sources = sources_of(entry["architecture"] for entry in self.config.layers)
            write_auto_file(Path(save_directory), sources)
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        """Load a model as transformers does; layers from users' files compute again the tensors that are not saved."""
        loaded = super().from_pretrained(*arguments, **options)
        for module in (loaded[0] if isinstance(loaded, tuple) else loaded).modules():
            if isinstance(module, PlainMixer):
                module.restore_unsaved()
        return loaded

    def _init_weights(self, module: nn.Module) -> None:
        if getattr(module, "keeps_own_weights", False):
            return  # a module from a user's file
        if isinstance(module, Linear) and module.arithmetic.stored_as_int8:
            return  # its weights come from a file
        std = getattr(module, "initializer_range", self.config.initializer_range)
        if isinstance(module, nn.Linear | nn.Embedding):
            if module is self.get_input_embeddings() and self.config.embedding_range is not None:
                std = self.config.embedding_range
            if getattr(module, "starts_at_zero", False):
                nn.init.zeros_(module.weight)
            else:
                nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.elementwise_affine:
            nn.init.ones_(module.weight)
        elif isinstance(module, ParameterHolder):
            module.initialize(std)
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            nn.init.zeros_(module.bias)


class MultilinModel(MultilinPreTrainedModel):
    """The model without its output projection: embedding, layers, final norm and scale.

    One call reads any number of tokens, at the start of a text or from a state; training, prefill and decoding are
    this same call.
    """

    def __init__(self, config: MultilinConfig) -> None:
        super().__init__(config)
        self.embedding = TokenEmbedding(config)
        layers = enumerate(config.layer_options())
        self.layers = nn.ModuleList(_build_layer(config, index, options) for index, options in layers)
        _check_lengths(config)
        self.layer_kinds = config.layer_kinds
        self._no_split_modules = sorted({type(layer).__name__ for layer in self.layers})
        names = sorted({entry["architecture"] for entry in config.layers})
        self.unpackable = ", ".join(name for name in names if not get_architecture(name).packs)
        self.norm = _build_norm(config)
        self.post_init()
        # Only after the weights are drawn, because int8 weights are made from them.
        set_arithmetic(self.layers, load_settings(Arithmetic, config.arithmetic, "arithmetic"))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TextState | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        document_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        """Read tokens. With `return_dict=False`, or if the config says so, the result is a tuple.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, T) 1 for tokens, 0 for padding, which has no weight and advances no position. If
                the mask is longer, as in generate(), its last T columns are used.
            position_ids: (B, T) or (1, T) positions to use instead of counting. A position that is not above the
                position before it begins a document, as in rows packed by transformers' collators. Without a state,
                windows then count padding between tokens.
            past_key_values: the state to continue from; changed in place. None is the start of a text.
            inputs_embeds: (B, T, D) embeddings to read instead of ids, in any dtype; converted to the model's dtype.
            use_cache: return the state; the default is the config's, but not in training.
            output_hidden_states: also return the input of every layer and the final hidden states, (B, T, D) each; the
                default is the config's.
            document_ids: (B, T) number of each token's document; documents packed into a row do not see each other.
            cu_seqlens: (N + 1,) the documents as cumulative lengths over the rows laid end to end.
            others: `seq_idx` and `cu_seq_lens_q` are document_ids and cu_seqlens under the names that transformers'
                collators use; `max_length_q`, `max_length_k`, `cu_seq_lens_k` and `cache_position` are ignored.
                Any other argument is refused, unless it is None or False.

        Returns:
            last_hidden_state (B, T, D), past_key_values with use_cache, and hidden_states on request.

        Raises:
            InputError: a text longer than n_positions, an unknown argument, or arguments that do not fit together.
        """
        if (input_ids is None) == (inputs_embeds is None):
            given = "none" if input_ids is None else "both"
            raise InputError(f"input_ids: {given} of input_ids and inputs_embeds given, but one of them is needed")
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        assert tokens is not None
        check_tokens("input_ids" if inputs_embeds is None else "inputs_embeds", tokens, self.config)
        packing, others = read_packing(document_ids, cu_seqlens, position_ids, others)
        _check_tensors(attention_mask=attention_mask, **packing._asdict())
        _refuse_unknown({"output_attentions": self.config.output_attentions, **others})
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training)
        if past_key_values is not None and not use_cache:
            raise InputError("use_cache: False given, but past_key_values is a state to continue from; leave one out")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        state = open_state(past_key_values, self.layer_kinds, len(tokens)) if use_cache else None

        if attention_mask is not None:
            attention_mask = _padding_mask(attention_mask, *tokens.shape[:2])
        values = [None] * (len(self.layers) + 1)
        if state is not None:
            is_plain = attention_mask is None and all(part is None for part in packing[:3])
            values = state.begin_reading(tokens.shape[1], is_plain=is_plain)
        hidden_states, values = self._read_around_padding(
            tokens, values, attention_mask, packing, needs_state=state is not None
        )
        # Only now, so that a call that fails leaves the state as it was.
        if state is not None:
            state.advance(values, num_columns=tokens.shape[1])
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states[-1],
            past_key_values=state,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
        )

    def _read(
        self, tokens: Tensor, values: list[Any], mask: Tensor | None, packing: Packing, needs_state: bool,
        order: ColumnOrder | None = None,
    ) -> tuple[list[Tensor], list[Any]]:  # fmt: skip
        """The input of every layer and the final hidden states, (B, T, D) each, and the states of all parts.

        If `order` is given, `tokens` are packed in this order, and the returned hidden states are unpacked.
        """
        layout, matches, embedding = self.embedding.lay_out(tokens, values[0], mask, packing, needs_state)
        if layout.starts_BT is not None and self.unpackable:
            raise InputError(
                f"{packing.names}: several documents in a row, but {self.unpackable} layers cannot keep them apart"
            )
        x_BTD, after = self.embedding(tokens, layout, matches), [embedding]
        hidden_states = [x_BTD if order is None else order.unpack(x_BTD)]
        for layer, value in zip(self.layers, values[1:], strict=True):
            x_BTD = hidden_states[-1] if order is None else order.pack(hidden_states[-1])
            x_BTD, state = layer(x_BTD, value, layout)
            hidden_states.append(x_BTD if order is None else order.unpack(x_BTD))
            after.append(state)
        hidden_states[-1] = self.finish(hidden_states[-1])
        return hidden_states, after

    def _read_around_padding(
        self, tokens: Tensor, values: list[Any], mask: Tensor | None, packing: Packing, needs_state: bool
    ) -> tuple[list[Tensor], list[Any]]:
        """Like `_read`, but padding may also follow tokens. Padding does not change the results.

        Otherwise a window would hold padding instead of tokens. So the tokens of each row are moved together and read
        without the padding between them. Padding gets the hidden states of the token before it in this call: the last
        column of a prompt padded on the right then predicts the token after the prompt. Padding before the first token
        gets 0.
        """
        is_start = values[0] is None
        # Without a state, given positions decide the place of tokens: as in the published code, which counts padding.
        keeps_columns = not needs_state and packing.position_ids is not None
        if mask is None or keeps_columns or not pads_after_tokens(mask, is_start, self.training and not needs_state):
            return self._read(tokens, values, mask, packing, needs_state)
        if packing.cu_seqlens is not None:
            raise InputError("cu_seqlens: given with padding after a token, but lengths cannot mark padding")
        order = ColumnOrder.of_mask(mask, at_end=is_start)
        packed, packing = order.pack(tokens), packing.part(order.rows_B1, order.take_BS)
        if is_start:
            return self._read(packed, values, order.pack(mask), packing, needs_state, order)
        hidden_states, values = self._read_row_lengths(packed, values, mask.sum(dim=1), packing)
        return [order.unpack(x_BTD) for x_BTD in hidden_states], values

    def _read_row_lengths(
        self, tokens: Tensor, values: list[Any], counts_B: Tensor, packing: Packing
    ) -> tuple[list[Tensor], list[Any]]:
        """Read the first `counts_B` tokens of each row, in pieces that end where a row ends; other tokens get 0."""
        num_batch, num_time = tokens.shape[:2]
        hidden_states = [
            torch.zeros(num_batch, num_time, self.config.hidden_size, dtype=self.dtype, device=tokens.device)
            for _ in range(len(self.layers) + 1)
        ]
        for first, end in itertools.pairwise(sorted({0, *counts_B.tolist()})):
            rows, piece = (counts_B >= end).nonzero()[:, 0], slice(first, end)
            own = [map_tensors(itemgetter(rows), value) for value in values]
            read, after = self._read(tokens[rows, piece], own, None, packing.part(rows, piece), needs_state=True)
            for target, source in zip(hidden_states, read, strict=True):
                target[rows, piece] = source.to(target.dtype)
            values = put_rows(values, after, rows)
        return hidden_states, values

    def finish(self, x_BTD: Tensor) -> Tensor:
        """Final hidden states from the output of the last layer: the norm, times `final_scale`; (B, T, D)."""
        normed, scale = self.norm(x_BTD), self.config.final_scale
        return normed if scale == 1.0 else normed * scale

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.embedding.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        self.embedding.embed_tokens = value
        if self.embedding.match is not None:
            self.embedding.match.resize(value.num_embeddings)


def _padding_mask(attention_mask: Tensor, num_batch: int, num_time: int) -> Tensor | None:
    """The bool mask (B, T) of these tokens; None without padding. GPUs and compiled code do not look for padding."""
    mask = check_mask(attention_mask, num_batch, num_time)
    is_seen = mask.device.type == "cpu" and not torch.compiler.is_compiling()
    return None if is_seen and bool(mask.all()) else mask


def _check_tensors(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            raise InputError(f"{name}: {shown(value)} given, but it must be a tensor")


def _refuse_unknown(others: dict[str, Any]) -> None:
    others.pop("cache_position", None)  # the state itself counts
    for name, value in others.items():
        if value is False or (name == "token_type_ids" and not value.any()):
            continue
        hint = "; `multilin explain` shows what a layer read" if name == "output_attentions" else ""
        raise InputError(f"{name}: given, but a multilin model does not take it{hint}")


def _build_norm(config: MultilinConfig) -> nn.Module:
    if config.final_norm == "layer_norm":
        return nn.LayerNorm(config.hidden_size)
    if config.final_norm == "tile_norm":
        tile, width = config.final_norm_tile, config.hidden_size
        if tile and width % tile:
            raise InputError(f"final_norm_tile: {tile} given, but it must divide the hidden size {width}")
        return TileNorm(config.final_norm_tile, keeps_dtype=True)
    return nn.Identity()


def _build_layer(config: MultilinConfig, index: int, options: LayerOptions) -> Layer:
    name, std = config.layers[index]["architecture"], config.layers[index].get("initializer_range")
    # In a hybrid, an error must name the layer; in a model of one architecture, the options are those of its preset.
    is_hybrid = any(entry["architecture"] != name for entry in config.layers)
    with prefixed(f"layers.{index}.") if is_hybrid else contextlib.nullcontext():
        layer = get_architecture(name).layer(config.hidden_size, options)
    for module in layer.modules():
        is_own = getattr(module, "keeps_own_weights", False)
        if any(True for _ in module.parameters(recurse=False)) and not (is_own or isinstance(module, DRAWN)):
            raise InputError(
                f"architecture: {type(module).__name__} of {name!r} has parameters, "
                f"but the model initialises only those of {listed([kind.__name__ for kind in DRAWN])}"
            )
        module.initializer_range = config.initializer_range if std is None else std
    return layer


def _check_lengths(config: MultilinConfig) -> None:
    """Refuse an n_positions above the longest text that a layer can read."""
    for index, options in enumerate(config.layer_options()):
        longest = options.longest_text
        if longest is not None and (config.n_positions is None or config.n_positions > longest):
            raise InputError(
                f"n_positions: {config.n_positions or 'no limit'} given, but layers.{index} "
                f"({config.layers[index]['architecture']}) reads at most {longest} tokens"
            )
