"""Models of given sizes, and what a model multiplies with."""

import argparse
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from multilin.architectures import architectures
from multilin.model.factory import create_config, create_model


def build(name: str, arguments: argparse.Namespace, position: int) -> PreTrainedModel:
    """A model of the sizes in the arguments; `position` is the longest text of those that need one."""
    options = {"num_heads": arguments.num_heads}
    if name in architectures() and getattr(architectures()[name].preset_options(), "num_heads", None) is None:
        options = {}
    sizes: dict[str, Any] = {
        "hidden_size": arguments.hidden_size, "num_layers": arguments.num_layers, "vocab_size": arguments.vocab_size,
        "n_positions": arguments.n_positions, "options": options,
    }  # fmt: skip
    if create_config(name, **sizes).max_position_embeddings is not None:
        sizes["n_positions"] = position
    return create_model(name, **sizes)


def multiplied(model: nn.Module) -> list[Tensor]:
    """The weights that multiply every token: not embeddings that are only looked up."""
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    in_products = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    matrices = {id(p): p for p in model.parameters() if p.ndim > 1}
    return [p for key, p in matrices.items() if key not in looked_up or key in in_products]
