"""Settings of generation. Nothing heavy is imported here: the command line reads them before PyTorch."""

import dataclasses
from typing import Annotated, Literal

from annotated_types import MaxLen

from multilin.settings import settings
from multilin.settings.bounds import Beams, Factor, Length, Positive, Seed, Share, Temperature, Tokens, Vocabulary

DEFAULT_NEW_TOKENS = 200
EngineName = Literal["auto", "torch", "onnx"]
Biases = Annotated[dict[str, Factor], MaxLen(1000)]
StopTexts = Annotated[tuple[str, ...], MaxLen(16)]


@settings
class GenerationSettings:
    """Settings of generation: length, sampling, beams, stops."""

    max_new_tokens: Tokens | None = None  # most tokens to generate; 200, as many as fit, or a server's own default
    temperature: Temperature = 0.8  # below 1 prefers likely tokens more than the model does, 0 takes the likeliest
    top_k: Vocabulary | None = None  # draw from the k likeliest tokens only
    top_p: Share | None = None  # draw from the likeliest tokens that together have this share
    min_p: Share | None = None  # draw from the tokens at least this share as likely as the likeliest
    repetition_penalty: Positive = 1.0  # above 1 makes tokens of the prompt and the new text less likely to come again
    presence_penalty: Factor = 0.0  # taken from the logits of tokens that the new text has
    frequency_penalty: Factor = 0.0  # the same for each time that it has them
    logit_bias: Biases = dataclasses.field(default_factory=dict)  # added to the logits of tokens by their ids
    stop: StopTexts = ()  # end before the first of these strings
    num_beams: Beams = 1  # beam search with so many sequences at a time instead of drawing
    seed: Seed | None = None  # the same seed generates the same text again; none takes a new one
    stop_at_end: bool = True  # stop where the model ends its text; otherwise it begins a new one

    @property
    def draws(self) -> bool:
        """True if tokens are drawn at random."""
        return self.temperature > 0 and self.num_beams == 1


@settings
class RolloutSettings:
    """How far, and how exactly."""

    num_steps: Length = 64  # output vectors to compute; all but the last are fed back
    dtype: Literal["float64", "float32"] = "float64"  # of both computations; float32 is faster and less exact
