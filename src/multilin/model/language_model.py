"""The one language model: embedding, layers, norm, output, loss, and the state that lets any text go on."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from multilin.architectures.base import get_architecture
from multilin.errors import InputError
from multilin.layers.base import Layer, ParameterHolder
from multilin.layers.gradients import normalize_gradient
from multilin.layers.linear import Arithmetic, MatrixModule, scaled_linear, set_arithmetic
from multilin.layers.norms import TileNorm
from multilin.model.config import MultilinConfig
from multilin.model.embedding import TokenEmbedding, documents_from_lengths
from multilin.model.generation import StatefulGenerationMixin
from multilin.model.state import TextState, open_state
from multilin.ops.linear_cross_entropy import linear_cross_entropy, token_cross_entropy
from multilin.settings import load_settings


class MultilinForCausalLM(PreTrainedModel, StatefulGenerationMixin):
    """A causal language model whose layers are those of the config.

    One call reads any number of tokens, at the start of a text or from a state; training, prefill and decoding are
    this same call. In training the logits are not returned: the loss is computed a chunk of tokens at a time.
    """

    config_class = MultilinConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _no_split_modules = ["Layer"]
    _tied_weights_keys = {"output.weight": "embedding.tokens.weight"}

    def __init__(self, config: MultilinConfig) -> None:
        super().__init__(config)
        self.embedding = TokenEmbedding(config)
        self.layers = nn.ModuleList(_build_layer(config, index) for index in range(len(config.layers)))
        _check_lengths(config, self.layers)
        names = sorted({entry["architecture"] for entry in config.layers})
        self.unpackable = ", ".join(name for name in names if not get_architecture(name).packs)
        self.norm = _build_norm(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=config.output_bias != "none")
        if config.output_bias == "unigram":
            self.output.bias.requires_grad_(False)
        self.normalizes_gradients = False  # whether each layer's backward begins with a gradient of unit size
        self.post_init()
        # After the weights are drawn: int8 weights are made from them.
        set_arithmetic(self.layers, self.arithmetic)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: TextState | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        document_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple:
        """Read tokens and predict the next one at each.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, T) 1 for tokens, 0 for padding, which weighs nothing and advances no position. A longer
                mask, as generate() keeps, counts with its last T columns.
            past_key_values: the state to read on from; changed in place. None is the start of a text.
            labels: (B, T) the ids again (-100 is not scored); token t is predicted from those before it.
            use_cache: return the state; as the default, outside training and where no labels are given.
            logits_to_keep: compute logits for the last so many positions (0 for all), or for these positions.
            document_ids: (B, T) number of each token's document; documents packed into a row do not see each other.
            cu_seqlens: the same as cumulative lengths over the rows laid end to end.
            position_ids: positions to use instead of counting, for models that were trained so.
            num_items_in_batch: divisor of the loss instead of the number of scored tokens (gradient accumulation).
            output_hidden_states: also return the input of every layer and the final state, (B, T, D) each.
            return_dict: False returns a tuple.

        Returns:
            loss in nats per scored token (with labels), logits (B, T kept, V) (not in training with labels), and the
            state after the last token.

        Raises:
            InputError: a text longer than n_positions, or arguments that do not fit together.
        """
        if use_cache is None:
            use_cache = past_key_values is not None or (labels is None and not self.training)
        if cu_seqlens is not None:
            document_ids = documents_from_lengths(cu_seqlens, *input_ids.shape)
        state = open_state(past_key_values, len(self.layers), len(input_ids)) if use_cache else None
        hidden_BTD, inputs = self._read(
            input_ids, state, attention_mask, document_ids, position_ids, bool(output_hidden_states)
        )
        loss = None if labels is None else self._loss(hidden_BTD, labels, num_items_in_batch)
        logits = None
        if labels is None or not self.training:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self._logits(hidden_BTD[:, kept])
        result = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=state, hidden_states=inputs)
        return result if return_dict is not False else result.to_tuple()

    @torch.no_grad()
    def token_losses(self, input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Nats of each token given those before it in its row: (B, T - 1), float32, for tokens 1 to T - 1."""
        hidden_BTD, _ = self._read(input_ids, None, None, document_ids, None, False)
        losses = token_cross_entropy(
            hidden_BTD[:, :-1].flatten(0, 1), self.output.weight, self.output.bias, input_ids[:, 1:].flatten(),
            logit_scale=self.config.logit_scale,
        )  # fmt: skip
        return losses.view(len(input_ids), -1)

    def row_parameters(self) -> list[Tensor]:
        """Parameters whose rows belong to single tokens; optimizers that normalise treat each row by itself."""
        return [self.embedding.tokens.weight, self.output.weight]

    def _read(
        self,
        input_ids: Tensor,
        state: TextState | None,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
        position_ids: Tensor | None,
        keeps_inputs: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Final hidden states (B, T, D) and, on request, what each layer read; the state moves on."""
        if document_ids is not None and not self.packs:
            raise InputError(f"document_ids: given, but {self.unpackable} layers cannot read several texts in a row")
        states: list[Any] = [None] * (len(self.layers) + 1) if state is None else [s.value for s in state.layers]
        layout, states[0] = self.embedding.lay_out(
            input_ids, states[0], attention_mask, document_ids, position_ids, needs_state=state is not None
        )
        x_BTD = self.embedding(input_ids, layout)
        inputs = [x_BTD]
        for index, layer in enumerate(self.layers, start=1):
            x_BTD, states[index] = layer(x_BTD, states[index], layout)
            if self.normalizes_gradients:
                x_BTD = normalize_gradient(x_BTD)
            inputs.append(x_BTD)
        # Only now, so that a call that fails leaves the state as it was.
        if state is not None:
            for slot, value in zip(state.layers, states, strict=True):
                slot.value = value
            state.num_columns += input_ids.shape[1]
        return self.norm(x_BTD), tuple(inputs) if keeps_inputs else None

    def _logits(self, hidden_BTD: Tensor) -> Tensor:
        if self.config.logit_scale == 1.0:
            logits: Tensor = self.output(hidden_BTD)
            return logits
        return scaled_linear(hidden_BTD, self.output.weight, self.output.bias, self.config.logit_scale)

    def _loss(self, hidden_BTD: Tensor, labels: Tensor, num_items: int | Tensor | None) -> Tensor:
        targets = labels[:, 1:].flatten()
        total = linear_cross_entropy(
            hidden_BTD[:, :-1].flatten(0, 1), self.output.weight, self.output.bias, targets,
            logit_scale=self.config.logit_scale,
            label_smoothing=self.config.label_smoothing if self.training else 0.0,
        )  # fmt: skip
        if num_items is None:
            num_items = (targets != -100).sum().clamp(min=1)
        return total / num_items

    @torch.no_grad()
    def set_token_counts(self, counts: Tensor) -> None:
        """Fix the output's bias to log((count + 1) / sum(counts + 1)) of each token, where the config asks for it.

        Args:
            counts: (V,) how often each token occurs in the training text.

        Raises:
            InputError: the config's output_bias is another one, or there are not V counts.
        """
        if self.config.output_bias != "unigram":
            raise InputError(f"output_bias: {self.config.output_bias!r} given, but only 'unigram' is set from counts")
        if counts.shape != (self.config.vocab_size,):
            raise InputError(f"counts: shape {tuple(counts.shape)} given, but it must be ({self.config.vocab_size},)")
        smoothed_V = counts.double() + 1
        self.output.bias.copy_((smoothed_V / smoothed_V.sum()).log())

    @property
    def arithmetic(self) -> Arithmetic:
        """How the layers multiply."""
        return load_settings(Arithmetic, self.config.arithmetic, "arithmetic")

    def set_arithmetic(self, arithmetic: Arithmetic) -> None:
        """How all layers multiply from now on, and after the model is saved and loaded; see `Arithmetic`.

        Embedding and output use floats in any case.

        Raises:
            InputError: floats asked for where only int8 weights are left.
        """
        set_arithmetic(self.layers, arithmetic)
        self.config.arithmetic = dataclasses.asdict(arithmetic)

    @property
    def packs(self) -> bool:
        """Whether several documents can share a row (document_ids)."""
        return not self.unpackable

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, MatrixModule) and module.arithmetic.stored_as_int8:
            return  # its weights come from a file
        std = getattr(module, "initializer_range", self.config.initializer_range)
        if isinstance(module, nn.Linear | nn.Embedding):
            if module is self.embedding.tokens and self.config.embedding_range is not None:
                std = self.config.embedding_range
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm) and module.elementwise_affine:
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, ParameterHolder):
            module.initialize(std)

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.embedding.tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        self.embedding.tokens = value

    def get_output_embeddings(self) -> nn.Module:
        """The output projection."""
        return self.output

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the output projection."""
        self.output = new_embeddings


def _build_norm(config: MultilinConfig) -> nn.Module:
    if config.final_norm == "layer_norm":
        return nn.LayerNorm(config.hidden_size)
    if config.final_norm == "tile_norm":
        return TileNorm(config.final_norm_tile, keeps_dtype=True)
    return nn.Identity()


def _build_layer(config: MultilinConfig, index: int) -> Layer:
    values, where = dict(config.layers[index]), f"layers.{index}"
    name, std = values.pop("architecture"), values.pop("initializer_range", None)
    try:
        layer = get_architecture(name).build_layer(config.hidden_size, values, where)
    except InputError as error:
        # In a model of one kind the field is the preset's; in a hybrid one has to know whose it is.
        if where in str(error) or all(entry["architecture"] == name for entry in config.layers):
            raise
        raise InputError(f"{where}.{error}") from None
    for module in layer.modules():
        module.initializer_range = config.initializer_range if std is None else std
    return layer


def _check_lengths(config: MultilinConfig, layers: Iterable[Any]) -> None:
    """A model cannot read longer texts than each of its layers."""
    for index, layer in enumerate(layers):
        longest = layer.longest_text
        if longest is not None and (config.n_positions is None or config.n_positions > longest):
            raise InputError(
                f"n_positions: {config.n_positions or 'no limit'} given, but layers.{index} "
                f"({config.layers[index]['architecture']}) reads at most {longest} tokens"
            )


AutoConfig.register(MultilinConfig.model_type, MultilinConfig)
AutoModelForCausalLM.register(MultilinConfig, MultilinForCausalLM)
