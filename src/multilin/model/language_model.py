"""The language model: the body, an output head and its loss."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from multilin.layers.linear import Arithmetic, set_arithmetic
from multilin.model.body import MultilinModel, MultilinPreTrainedModel
from multilin.model.config import MultilinConfig
from multilin.model.generation import StatefulGenerationMixin
from multilin.model.head import FixedBias, FixedBiasLinear, check_targets, sequence_loss, token_losses
from multilin.model.state import TextState
from multilin.settings import load_settings


class MultilinForCausalLM(FixedBias, MultilinPreTrainedModel, StatefulGenerationMixin):
    """The causal language model: `MultilinModel` with an output projection and a loss.

    In training, logits are not returned, because the loss is computed for a chunk of tokens at a time.
    """

    model: MultilinModel
    lm_head: nn.Linear
    accepts_loss_kwargs = True
    _tied_weights_keys = {"lm_head.weight": "model.embedding.embed_tokens.weight"}

    def __init__(self, config: MultilinConfig) -> None:
        super().__init__(config)
        self.model = MultilinModel(config)
        if config.output_bias == "unigram":
            self.lm_head = FixedBiasLinear(config.hidden_size, config.vocab_size)
        else:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.output_bias == "learned")
        self.post_init()
        if config.n_positions is not None:
            # Without this attribute, transformers' pipelines ask for more tokens than fit.
            self.generation_config.max_length = config.n_positions

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TextState | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        document_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Read tokens and predict the next token at each. With `return_dict=False` the result is a tuple.

        Args:
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, output_hidden_states, document_ids,
                cu_seqlens, others: see `MultilinModel.forward`.
            labels: (B, T) the same ids as `input_ids`, not shifted (-100 is not scored).
            use_cache: return the state; the default is the config's value, but False in training and with labels.
            logits_to_keep: number of last positions to compute logits for (0 for all), or a tensor of positions.
            num_items_in_batch: divisor of the loss instead of the number of scored tokens (gradient accumulation).
            others: also `shift_labels`, in place of `labels`: (B, T) the token that follows each position (-100 is not
                scored).

        Returns:
            loss in nats per scored token (with labels), logits (B, kept positions, V) (not in training with labels),
            past_key_values with use_cache, hidden_states on request.

        Raises:
            InputError: a text longer than n_positions, an unknown argument, or arguments that do not fit together.
        """
        # Not a named parameter: Trainer would expect it as a label in every batch, and evaluate without a loss.
        shift_labels = others.pop("shift_labels", None)
        is_scored = labels is not None or shift_labels is not None
        for name, targets in (("labels", labels), ("shift_labels", shift_labels)):
            if targets is not None:
                check_targets(name, targets, input_ids if inputs_embeds is None else inputs_embeds)
        if use_cache is None and is_scored:
            use_cache = past_key_values is not None
        body = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, output_hidden_states,
            return_dict=True, document_ids=document_ids, cu_seqlens=cu_seqlens, **others,
        )  # fmt: skip
        hidden_BTD = body.last_hidden_state
        loss = self._loss(hidden_BTD, labels, shift_labels, num_items_in_batch) if is_scored else None
        logits = None
        if not (is_scored and self.training):
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden_BTD[:, kept])
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=body.past_key_values, hidden_states=body.hidden_states
        )

    @torch.no_grad()
    def token_losses(self, input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Return -ln p of tokens 1 to T - 1, given the earlier tokens of their row: (B, T - 1), float32."""
        hidden_BTD = self.model(input_ids, document_ids=document_ids, use_cache=False, return_dict=True)[0]
        losses = token_losses(self.lm_head, hidden_BTD[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        return losses.view_as(input_ids[:, 1:])

    def _loss(
        self, hidden_BTD: Tensor, labels: Tensor | None, shift_labels: Tensor | None, num_items: int | Tensor | None
    ) -> Tensor:
        if shift_labels is None:
            assert labels is not None
            shift_labels, hidden_BTD = labels[:, 1:], hidden_BTD[:, :-1]
        targets = shift_labels.flatten()
        total = sequence_loss(
            self.lm_head, hidden_BTD.flatten(0, 1), targets,
            label_smoothing=self.config.label_smoothing if self.training else 0.0,
        )  # fmt: skip
        if num_items is None:
            num_items = (targets != -100).sum().clamp(min=1)
        return total / num_items

    @property
    def arithmetic(self) -> Arithmetic:
        """How the layers multiply."""
        return load_settings(Arithmetic, self.config.arithmetic, "arithmetic")

    def set_arithmetic(self, arithmetic: Arithmetic) -> None:
        """Set how all layers multiply; the setting is saved with the model. See `Arithmetic`.

        Embedding and output always use floats.

        Raises:
            InputError: the arithmetic needs float weights, but the model has only int8 weights.
        """
        set_arithmetic(self.model.layers, arithmetic)
        self.config.arithmetic = dataclasses.asdict(arithmetic)

    @property
    def packs(self) -> bool:
        """Whether several documents can share a row (document_ids)."""
        return not self.model.unpackable
