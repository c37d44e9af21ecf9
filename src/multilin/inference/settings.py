"""Settings of generation. Nothing heavy is imported here: the command line reads settings before it loads PyTorch."""

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

    max_new_tokens: Tokens | None = None  # most new tokens; default: 200 or the server's, or fewer if they do not fit
    temperature: Temperature = 0.8  # values below 1 make likely tokens even more likely; 0 takes the likeliest token
    top_k: Vocabulary | None = None  # draw from the k likeliest tokens only
    top_p: Share | None = None  # draw from the likeliest tokens that together have this probability
    min_p: Share | None = None  # drop tokens below this share of the likeliest token's probability
    repetition_penalty: Positive = 1.0  # values above 1 make tokens of the prompt and the new text less likely
    presence_penalty: Factor = 0.0  # subtracted from the logits of tokens that the new text contains
    frequency_penalty: Factor = 0.0  # subtracted from logits for each occurrence of the token in the new text
    logit_bias: Biases = dataclasses.field(default_factory=dict)  # numbers to add to logits, by token id
    stop: StopTexts = ()  # end before the first of these strings
    num_beams: Beams = 1  # number of beams; above 1, beam search replaces random drawing
    seed: Seed | None = None  # the same seed gives the same text again; by default a new seed each time
    stop_at_end: bool = True  # stop where the model ends its text; otherwise the model begins a new text

    @property
    def draws(self) -> bool:
        """True if tokens are drawn at random."""
        return self.temperature > 0 and self.num_beams == 1


@settings
class RolloutSettings:
    """The length and the precision of a rollout."""

    num_steps: Length = 64  # output vectors to compute; all but the last are fed back
    dtype: Literal["float64", "float32"] = "float64"  # dtype of both computations; float32 is faster and less exact
