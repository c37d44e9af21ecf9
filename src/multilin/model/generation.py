"""transformers' generate() for models whose state reads on: any text can be continued, many times."""

from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin

from multilin.errors import InputError
from multilin.model.config import MultilinConfig
from multilin.model.state import TextState, open_state


class StatefulGenerationMixin(GenerationMixin):
    """What a model with a TextState adds to generate(): a state to begin from, which stays as it was.

    transformers finds out whether a model generates by this name's ending.
    """

    config: MultilinConfig
    layers: nn.ModuleList

    def new_state(self) -> TextState:
        """The state at the start of a text."""
        return TextState(len(self.layers))

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """transformers' generate (greedy, sampling, beams, streamers), at the start of a text or from a state.

        With `past_key_values=state`, `inputs` are the new tokens only; the state itself is left as it was, so one
        state can be continued many times. `return_dict_in_generate=True` returns the state reached.

        Raises:
            InputError: the prompt and the new tokens together are longer than the model can read.
        """
        input_ids = inputs if inputs is not None else kwargs.get("input_ids")
        if input_ids is None or input_ids.shape[-1] == 0:
            raise InputError("input_ids: no tokens given; generation needs at least one, such as the start token")
        settings = generation_config or self.generation_config
        if kwargs.get("use_cache", settings.use_cache) is not False:
            given = kwargs.get("past_key_values")
            num_rows = max(self._setting("num_beams", settings, kwargs), 1)
            state = self.new_state() if given is None else open_state(given, len(self.layers), len(input_ids)).clone()
            state.num_columns = 0
            if num_rows == 1:
                num_rows = self._setting("num_return_sequences", settings, kwargs)
            kwargs["past_key_values"] = state if num_rows == 1 else state.fork(num_rows)
        self._check_length(input_ids, settings, kwargs)
        return super().generate(inputs, generation_config, **kwargs)

    def _setting(self, name: str, settings: GenerationConfig, given: dict[str, Any]) -> int:
        value = given.get(name, getattr(settings, name, None))
        return 1 if value is None else int(value)

    def _check_length(self, input_ids: Tensor, settings: GenerationConfig, kwargs: dict[str, Any]) -> None:
        limit = self.config.n_positions
        if limit is None:
            return
        state = kwargs.get("past_key_values")
        num_read = 0 if state is None or state.num_tokens is None else int(state.num_tokens.max())
        mask = kwargs.get("attention_mask")
        length = input_ids.shape[1] if mask is None else int(mask[:, -input_ids.shape[1] :].sum(dim=1).max())
        max_new = kwargs.get("max_new_tokens", settings.max_new_tokens)
        if max_new is None and (max_length := kwargs.get("max_length", settings.max_length)) is not None:
            max_new = max_length - input_ids.shape[1]
        # The last new token is written but not read.
        if num_read + length > limit or num_read + length + max(max_new or 1, 1) - 1 > limit:
            raise InputError(
                f"max_new_tokens: {max_new} after a text of {num_read + length} tokens given, but this model reads at "
                f"most {limit} tokens (n_positions)"
            )

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As transformers', but positions are counted by the state: generate() counts from the start of its call."""
        kwargs.pop("position_ids", None)
        prepared: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        # Older transformers add these.
        for name in ("position_ids", "cache_position", "inputs_embeds"):
            prepared.pop(name, None)
        return prepared
