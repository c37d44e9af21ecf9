"""GPT-2 and Llama with two options of multilin's models, to find out why models differ in quality.

With `output_bias: unigram` the log of the token counts is added to the logits. With `unit_variance`, for Llama only,
every product is lin(W, x) = W x / sqrt(width of x), so that weights of unit variance keep the variance of x, and the
token embedding is drawn with a standard deviation of 1. Under AdamW without weight decay this equals Llama with
weights W / sqrt(width of x) and, for each matrix, a learning rate divided by sqrt(width of x); the embedding keeps the
whole rate.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from multilin.model.head import FixedBias, FixedBiasLinear


class BiasedGPT2Config(GPT2Config):
    """GPT-2's fields, and `output_bias`."""

    model_type = "multilin_gpt2"


class ScaledLlamaConfig(LlamaConfig):
    """Llama's fields, `unit_variance` and `output_bias`."""

    model_type = "multilin_llama"


class _Biased(FixedBias, PreTrainedModel):
    """A model of transformers whose output gets a fixed bias if the config asks for it."""

    def __init__(self, config: BiasedGPT2Config | ScaledLlamaConfig) -> None:
        super().__init__(config)
        if config.output_bias == "unigram":
            self.lm_head = FixedBiasLinear(config.hidden_size, config.vocab_size)
            self.post_init()


class BiasedGPT2(_Biased, GPT2LMHeadModel):
    """GPT-2 with `output_bias`."""

    config_class = BiasedGPT2Config


class ScaledLlama(_Biased, LlamaForCausalLM):
    """Llama with `unit_variance` and `output_bias`."""

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
