"""The one model: config, language model, state. Importing it registers the model with transformers' Auto classes."""

from multilin.model.body import MultilinModel
from multilin.model.config import MultilinConfig
from multilin.model.language_model import MultilinForCausalLM
from multilin.model.state import TextState

__all__ = ["MultilinConfig", "MultilinForCausalLM", "MultilinModel", "TextState"]
