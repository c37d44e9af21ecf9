"""The model: config, language model and state. Importing this registers all models with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

import multilin.model.baselines  # noqa: F401
from multilin.model.body import MultilinModel
from multilin.model.config import MultilinConfig
from multilin.model.language_model import MultilinForCausalLM
from multilin.model.state import TextState

__all__ = ["MultilinConfig", "MultilinForCausalLM", "MultilinModel", "TextState"]

AutoConfig.register(MultilinConfig.model_type, MultilinConfig)
AutoModel.register(MultilinConfig, MultilinModel)
AutoModelForCausalLM.register(MultilinConfig, MultilinForCausalLM)
# By these names, pipelines and the Trainer (which shifts labels) tell bodies from language models.
MODEL_MAPPING_NAMES[MultilinConfig.model_type] = MultilinModel.__name__
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MultilinConfig.model_type] = MultilinForCausalLM.__name__
