"""The one model: config, language model, state. Importing it registers all models with transformers' Auto classes."""

import multilin.model.baselines  # noqa: F401
from multilin.model.body import MultilinModel
from multilin.model.config import MultilinConfig
from multilin.model.language_model import MultilinForCausalLM
from multilin.model.state import TextState

__all__ = ["MultilinConfig", "MultilinForCausalLM", "MultilinModel", "TextState"]
