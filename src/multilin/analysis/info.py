"""What a model is made of and what it costs: parameters, work per token, and memory for the text it has read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from multilin.analysis.costs import count_parameters, decoding_costs, parameter_counts
from multilin.analysis.settings import ModelSizes
from multilin.architectures import architectures
from multilin.architectures.base import Architecture
from multilin.errors import InputError, nearest
from multilin.inference.runs import load_model, longest_text
from multilin.model.factory import create_model, model_names
from multilin.model.memory import check_memory, parameter_bytes


@dataclass(frozen=True)
class LayerInfo:
    """One layer.

    options: the layer's own choices, as config.json has them.
    state_bytes: what it keeps of a text of one token.
    state_growth: bytes it keeps more for every further token; 0 for a state of constant size.
    """

    index: int
    architecture: str
    options: dict[str, Any]
    parameters: int
    state_bytes: int
    state_growth: int


@dataclass(frozen=True)
class ModelInfo:
    """A whole model.

    parameters: all of them; a tensor that is used twice (tied output) counts once.
    embedding_parameters: of them in embeddings and the output projection.
    flops_per_token: floating-point operations to read one token and predict the next, after one other token: matrix
        products and attention, a multiplication and an addition counted as two; pointwise work is not counted.
    flops_growth: what every token read adds to that.
    state_bytes, state_growth: as for a layer, all layers and the embedding together.
    longest_text: tokens it can read, None for any number.
    """

    architecture: str
    parameters: int
    embedding_parameters: int
    flops_per_token: int
    flops_growth: int
    state_bytes: int
    state_growth: int
    longest_text: int | None
    layers: list[LayerInfo]

    @property
    def other_parameters(self) -> int:
        """Parameters outside embeddings and the output projection."""
        return self.parameters - self.embedding_parameters


def find_model(name: str, sizes: ModelSizes) -> tuple[ModelInfo, Architecture | None]:
    """Describe the model of a folder, or a new one of an architecture at these sizes.

    Returns:
        The description, and the architecture if `name` is one of ours (not a folder, not a baseline).

    Raises:
        InputError: neither a folder nor a model that is known, or sizes that do not fit.
    """
    if Path(name).is_dir():
        if sizes != ModelSizes():
            raise InputError(f"MODEL: {name} is a folder, whose model has its own sizes; leave out the flags for sizes")
        return describe_model(load_model(Path(name))), None
    if name not in model_names():
        hint = nearest(name, model_names()) or f"; known are {', '.join(model_names())}"
        raise InputError(f"MODEL: {name!r} is neither a folder nor an architecture{hint}")
    with torch.device("meta"):
        model = create_model(name, **vars(sizes))
    check_memory(
        f"--hidden-size: {sizes.hidden_size}, {sizes.num_layers} layers, n_positions {sizes.n_positions} and a "
        f"vocabulary of {sizes.vocab_size} given, but this model",
        parameter_bytes(model),
    )
    # The values of the weights do not matter here, and to draw them would take most of the time and all the memory.
    model.to_empty(device="cpu").tie_weights()
    return describe_model(model), architectures().get(name)


def describe_model(model: PreTrainedModel) -> ModelInfo:
    """Count a model's parameters, and measure two decoding steps for its work and its memory."""
    (flops, states), (next_flops, next_states) = (decoding_costs(model, num_read) for num_read in (1, 2))
    layers = _layers(model, states, next_states)
    parameters, embedding_parameters = parameter_counts(model)
    return ModelInfo(
        architecture=" + ".join(dict.fromkeys(layer.architecture for layer in layers)),
        parameters=parameters,
        embedding_parameters=embedding_parameters,
        flops_per_token=flops,
        flops_growth=next_flops - flops,
        state_bytes=sum(states),
        state_growth=sum(next_states) - sum(states),
        longest_text=longest_text(model.config),
        layers=layers,
    )


def _layers(model: PreTrainedModel, states: list[int], next_states: list[int]) -> list[LayerInfo]:
    stack = next(
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers
    )
    # Models of ours say what each layer is; the others have layers of one kind and no options per layer.
    entries = getattr(model.config, "layers", None) or [{"architecture": model.config.model_type}] * len(stack)
    # The cache of ours begins with the embedding's entry.
    before, after = states[-len(stack) :], next_states[-len(stack) :]
    return [
        LayerInfo(
            index=index,
            architecture=entry["architecture"],
            options={name: value for name, value in entry.items() if name != "architecture"},
            parameters=count_parameters(module),
            state_bytes=before[index],
            state_growth=after[index] - before[index],
        )
        for index, (module, entry) in enumerate(zip(stack, entries, strict=True))
    ]
