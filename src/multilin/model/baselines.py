"""GPT-2 and Llama with three options of multilin's models, to find out why models differ in quality.

With `match` the longest match is added to the embedding of each token, see `multilin.model.match`. With
`output_bias: unigram` the log of the token counts is added to the logits. With `unit_variance`, for Llama only,
every product is lin(W, x) = W x / sqrt(width of x), so that weights of unit variance keep the variance of x, and the
token embedding is drawn with a standard deviation of 1. Under AdamW without weight decay this equals Llama with
weights W / sqrt(width of x) and, for each matrix, a learning rate divided by sqrt(width of x); the embedding keeps the
whole rate.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from multilin.layers.base import Layout
from multilin.model.head import FixedBias, FixedBiasLinear
from multilin.model.match import Match, MatchEmbedding
from multilin.ops.longest_match import MatchState
from multilin.settings import load_settings


class BiasedGPT2Config(GPT2Config):
    """GPT-2's fields, `output_bias` and `match`."""

    model_type = "multilin_gpt2"


class ScaledLlamaConfig(LlamaConfig):
    """Llama's fields, `unit_variance`, `output_bias` and `match`."""

    model_type = "multilin_llama"


class _WithOptions(FixedBias, PreTrainedModel):
    """A model of transformers with a fixed bias of the output and the longest match, if the config asks for them."""

    def __init__(self, config: BiasedGPT2Config | ScaledLlamaConfig) -> None:
        super().__init__(config)
        if config.output_bias == "unigram":
            self.lm_head = FixedBiasLinear(config.hidden_size, config.vocab_size)
        if config.match is not None:
            search = load_settings(Match, config.match, "match")
            self.match = MatchEmbedding(config.vocab_size, config.hidden_size, search)
            self.base_model.register_forward_pre_hook(self._embed, with_kwargs=True)
        if config.output_bias == "unigram" or config.match is not None:
            self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, MatchEmbedding):
            module.initialize(self.config.initializer_range)
        else:
            super()._init_weights(module)

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        super().set_input_embeddings(value)
        if self.config.match is not None:
            self.match.resize(value.num_embeddings)

    def _embed(self, body: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before the body is called: replace token ids by their embeddings with the longest match."""
        options = {**dict(zip(("input_ids",), inputs, strict=False)), **options}
        ids_BT, x_BTD = options.pop("input_ids", None), options.get("inputs_embeds")
        if (ids_BT is None) == (x_BTD is None):
            return (), options | {"input_ids": ids_BT}  # which transformers refuses
        if x_BTD is None:
            x_BTD = self.get_input_embeddings()(ids_BT)
        else:
            ids_BT = torch.full(x_BTD.shape[:2], -1, device=x_BTD.device)  # embeddings have no ids
        cache, mask, position_ids = (options.get(n) for n in ("past_key_values", "attention_mask", "position_ids"))
        if cache is None and options.get("use_cache", self.config.use_cache) and not self.training:
            cache = options["past_key_values"] = DynamicCache(config=self.config)
        if mask is not None and mask.ndim == 2:
            ids_BT = ids_BT.where(mask[:, -ids_BT.shape[1] :] != 0, -1)
        starts_BT = None
        if position_ids is not None:
            starts_BT = pad(position_ids[:, 1:] <= position_ids[:, :-1], (1, 0)).expand_as(ids_BT)
        state = None if cache is None else self._last_tokens(cache, ids_BT)
        matches, _ = self.match.look_up(ids_BT, state, Layout(ids_BT, starts_BT, needs_state=False))
        return (), options | {"inputs_embeds": x_BTD + self.match(matches)}

    def _last_tokens(self, cache: Any, new_BT: Tensor) -> MatchState:
        """The last tokens before the new ones. A further layer of the cache keeps all ids, in the place of keys."""
        if not hasattr(cache, "layer_of_ids"):
            while len(cache.layers) < self.config.num_hidden_layers:  # a cache may make its layers when they are used
                cache.layers.append(cache.layer_class_to_replicate())
            cache.layer_of_ids = DynamicLayer()
            cache.layers.append(cache.layer_of_ids)
        layer, window = cache.layer_of_ids, self.match.match.window
        old_BS = layer.keys[:, 0, -window:, 0] if layer.get_seq_length() else new_BT[:, :0]
        layer.update(new_BT[:, None, :, None], new_BT[:, None, :, None])
        return MatchState(pad(old_BS + 1, (window - old_BS.shape[1], 0)).int())


class BiasedGPT2(_WithOptions, GPT2LMHeadModel):
    """GPT-2 with `output_bias` and `match`."""

    config_class = BiasedGPT2Config


class ScaledLlama(_WithOptions, LlamaForCausalLM):
    """Llama with `unit_variance`, `output_bias` and `match`."""

    config_class = ScaledLlamaConfig

    def __init__(self, config: ScaledLlamaConfig) -> None:
        super().__init__(config)
        if config.unit_variance:
            self._scale_inputs()
            nn.init.normal_(self.get_input_embeddings().weight)

    def _scale_inputs(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear) and _scale_input not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_scale_input)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Resize the embeddings as transformers does; the input of a new head is scaled too."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        if self.config.unit_variance:
            self._scale_inputs()
        return embeddings


def _scale_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    assert isinstance(module, nn.Linear)
    return (inputs[0] * module.in_features**-0.5, *inputs[1:])


def attend_without_mask(model: PreTrainedModel) -> None:
    """Let a compiled GPT-2 or Llama use PyTorch's causal attention without a mask; other models stay as they are.

    For a compiled model, transformers makes a T x T mask, because compiled code cannot check whether position_ids mark
    packed texts. With a mask, attention takes three times as long. After this call, the compiled model must not get
    position_ids of packed texts.
    """
    if model.config.model_type in _WITHOUT_WINDOWS and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(_WITHOUT_MASK)


def _mask(*, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **call: Any) -> Tensor | None:
    if torch.compiler.is_compiling() and attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **call)


_WITHOUT_WINDOWS = ("gpt2", "llama", BiasedGPT2Config.model_type, ScaledLlamaConfig.model_type)
_WITHOUT_MASK = "multilin_without_mask"
AttentionInterface.register(_WITHOUT_MASK, sdpa_attention_forward)
AttentionMaskInterface.register(_WITHOUT_MASK, _mask)
AutoConfig.register(BiasedGPT2Config.model_type, BiasedGPT2Config)
AutoConfig.register(ScaledLlamaConfig.model_type, ScaledLlamaConfig)
AutoModelForCausalLM.register(BiasedGPT2Config, BiasedGPT2)
AutoModelForCausalLM.register(ScaledLlamaConfig, ScaledLlama)
# Without these names, Trainer's label smoothing would compare logits with the current token, not with the next one.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[BiasedGPT2Config.model_type] = BiasedGPT2.__name__
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[ScaledLlamaConfig.model_type] = ScaledLlama.__name__
