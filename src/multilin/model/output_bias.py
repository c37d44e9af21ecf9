"""An output bias that is fixed: the log of how often each token occurs in the training text."""

from typing import Any

import torch
from torch import Tensor, nn

from multilin.errors import InputError


class FixedBiasLinear(nn.Linear):
    """y = W x + b with a bias that is saved with the model but never trained: a buffer."""

    bias: Any

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        del self.bias
        self.register_buffer("bias", torch.zeros(out_features))


class FixedBias:
    """Mixin before a PreTrainedModel: its `lm_head` is a FixedBiasLinear where config.output_bias is "unigram"."""

    config: Any
    lm_head: nn.Linear

    @torch.no_grad()
    def set_token_counts(self, counts: Tensor) -> None:
        """Fix the head's bias to log((count + 1) / sum(counts + 1)) of each token, where the config asks for it.

        Args:
            counts: (V,) how often each token occurs in the training text.

        Raises:
            InputError: the config's output_bias is another one, or there are not V counts.
        """
        if self.config.output_bias != "unigram":
            raise InputError(f"output_bias: {self.config.output_bias!r} given, but only 'unigram' is set from counts")
        if counts.shape != (self.config.vocab_size,):
            raise InputError(f"counts: shape {tuple(counts.shape)} given, but it must be ({self.config.vocab_size},)")
        assert isinstance(self.lm_head, FixedBiasLinear)
        smoothed_V = counts.double() + 1
        self.lm_head.bias.copy_((smoothed_V / smoothed_V.sum()).log())

    @torch.no_grad()
    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As transformers', but a fixed bias stays fixed; a new token gets the bias of the rarest token."""
        bias_V = self.lm_head.bias.clone() if isinstance(self.lm_head, FixedBiasLinear) else None
        embeddings: nn.Module = super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]
        if bias_V is not None:
            if not isinstance(self.lm_head, FixedBiasLinear):
                weight = self.lm_head.weight
                self.lm_head = FixedBiasLinear(weight.shape[1], weight.shape[0]).to(weight)
                self.lm_head.weight = weight
            num_kept = min(len(bias_V), self.lm_head.out_features)
            self.lm_head.bias = bias_V.min().repeat(self.lm_head.out_features)
            self.lm_head.bias[:num_kept] = bias_V[:num_kept]
        return embeddings
