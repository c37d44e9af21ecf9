"""The size and the costs of a model: parameters, floating-point operations, and bytes of state."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import Cache, PreTrainedModel

from multilin.analysis.settings import ModelSizes
from multilin.architectures.base import Architecture, get_architecture
from multilin.architectures.own_file import resolve
from multilin.errors import InputError, nearest
from multilin.files.trust import is_own
from multilin.model import TextState
from multilin.model.factory import BASELINES, create_model, evaluation_mode, layers_of, model_names
from multilin.model.memory import check_memory, parameter_bytes
from multilin.runs.load import load_model, longest_text

BACKWARD_AND_FORWARD = 3
"""For each product of the forward pass, the backward pass computes two: for the inputs and for the weights."""


@dataclass(frozen=True)
class LayerInfo:
    """The size and the costs of one layer.

    options: options of the layer, as in config.json.
    state_bytes: bytes of the state after one token.
    state_growth: bytes that each further token adds to the state; 0 for a state of constant size.
    """

    index: int
    architecture: str
    options: dict[str, Any]
    parameters: int
    state_bytes: int
    state_growth: int


@dataclass(frozen=True)
class ModelInfo:
    """The size and the costs of a model.

    parameters: number of all parameters; a tensor that is used twice (tied output) counts once.
    embedding_parameters: number of parameters in embeddings and the output projection.
    flops_per_token: floating-point operations to read the second token of a text, in matrix products and attention. A
        multiplication and an addition count as two; pointwise operations are not counted.
    flops_growth: operations that are added by each further token before the current token.
    state_bytes, state_growth: as in `LayerInfo`, but for all layers together.
    longest_text: largest number of tokens the model can read; None for no limit.
    match: the search for the longest match, and the bytes of its window; None for a model without it.
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
    match: dict[str, int] | None = None


def find_model(name: str, sizes: ModelSizes) -> tuple[ModelInfo, Architecture | None]:
    """Describe the model in a folder, or a new model of an architecture with the given sizes.

    Returns:
        The description, and the architecture if `name` is an architecture of multilin.

    Raises:
        InputError: `name` is neither a folder nor a known model, or the sizes do not fit.
    """
    if Path(name).is_dir():
        if sizes != ModelSizes():
            raise InputError(f"MODEL: {name} is a folder, and its model has fixed sizes; leave out the flags for sizes")
        return describe_model(load_model(Path(name))), None
    if is_own(name):
        name = resolve(name, is_typed=True)
    elif name not in model_names():
        hint = nearest(name, model_names()) or f"; known are {', '.join(model_names())}"
        raise InputError(f"MODEL: {name!r} is neither a folder nor an architecture{hint}")
    with torch.device("meta"):
        model = create_model(name, **vars(sizes))
    check_memory(
        f"--hidden-size: {sizes.hidden_size}, {sizes.num_layers} layers, n_positions {sizes.n_positions} and a "
        f"vocabulary of {sizes.vocab_size} given, but this model",
        parameter_bytes(model),
    )
    # The weights stay uninitialised: their values do not matter, and drawing them would take most of the time.
    model.to_empty(device="cpu").tie_weights()
    return describe_model(model), get_architecture(name) if name not in BASELINES else None


def describe_model(model: PreTrainedModel) -> ModelInfo:
    """Count a model's parameters, and measure the operations of two decoding steps and the state before each step.

    The growth is the difference between the two steps. It is 0 for models that read at most two tokens.
    """
    longest = longest_text(model.config)
    flops, states = _decoding_costs(model, 1)
    next_flops, next_states = (flops, states) if longest == 2 else _decoding_costs(model, 2)
    layers = _layers(model, states, next_states)
    parameters, embedding_parameters = parameter_counts(model)
    match = getattr(model.config, "match", None)
    return ModelInfo(
        architecture=" + ".join(dict.fromkeys(layer.architecture for layer in layers)),
        parameters=parameters,
        embedding_parameters=embedding_parameters,
        flops_per_token=flops,
        flops_growth=next_flops - flops,
        state_bytes=sum(states),
        state_growth=sum(next_states) - sum(states),
        longest_text=longest,
        layers=layers,
        match=match and {**match, "state_bytes": 4 * match["window"]},
    )


def _layers(model: PreTrainedModel, states: list[int], next_states: list[int]) -> list[LayerInfo]:
    stack = layers_of(model)
    # Models of multilin list their layers; in other models all layers are of one kind, without options.
    entries = getattr(model.config, "layers", None) or [{"architecture": model.config.model_type}] * len(stack)
    return [
        LayerInfo(
            index=index,
            architecture=entry["architecture"],
            options={name: value for name, value in entry.items() if name != "architecture"},
            parameters=_count_parameters(module),
            state_bytes=before,
            state_growth=after - before,
        )
        for index, (module, entry, before, after) in enumerate(zip(stack, entries, states, next_states, strict=True))
    ]


def parameter_counts(model: PreTrainedModel) -> tuple[int, int]:
    """The number of all parameters, and of parameters in embeddings and output; a shared tensor counts once."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding) or module in ends)
    return _count_parameters(model), _count_parameters(nn.ModuleList(embeddings))


def _count_parameters(module: nn.Module) -> int:
    """The number of parameters of a module, including int8 values that replace parameters."""
    integers = (buffer for buffer in module.buffers() if buffer.dtype == torch.int8)
    return sum(tensor.numel() for tensor in (*module.parameters(), *integers))


def training_flops_per_token(model: PreTrainedModel, length: int) -> float:
    """Floating-point operations of training per token, in blocks of `length` tokens.

    This is three times the operations of the matrix products of one forward pass, as PyTorch counts them (a
    multiplication and an addition are two). Each weight counts as 6 per token. Attention of GPT-2 and Llama and causal
    mixing count as if every token read all tokens of the block; windowed attention counts only the tiles that it
    computes. Running means, norms, activations and recomputation are not counted. The model must be on the CPU.
    """
    ids = torch.zeros((1, length), dtype=torch.long)
    return BACKWARD_AND_FORWARD * float(forward_flops(model, ids, use_cache=False)) / length


def state_bytes(cache: Cache) -> list[int]:
    """Bytes of each layer's tensors in a model's cache."""
    layers = (
        cache.parts[1:]
        if isinstance(cache, TextState)
        else [vars(layer) for layer in cache.layers if layer is not getattr(cache, "layer_of_ids", None)]
    )
    return [sum(x.nbytes for x in tree_leaves(layer) if isinstance(x, Tensor)) for layer in layers]


def _decoding_costs(model: PreTrainedModel, num_read: int) -> tuple[int, list[int]]:
    """Measure the operations of reading one token after `num_read` others, and the `state_bytes` before reading it."""
    ids = torch.zeros((1, num_read), dtype=torch.long, device=model.device)
    with evaluation_mode(model), torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        sizes = state_bytes(cache)
        return forward_flops(model, ids[:, :1], past_key_values=cache, use_cache=True), sizes


def forward_flops(model: nn.Module, ids: Tensor, **arguments: Any) -> int:
    """Floating-point operations of matrix products and attention in one forward pass, called with `arguments`."""
    # PyTorch does not count fused attention on every device, so plain attention is used. Integer products, which
    # PyTorch does not count either, are counted here from the shapes of their factors.
    products = {torch.ops.aten._int_mm: lambda left, right, *_, **__: 2 * left[0] * left[1] * right[1]}
    counter = FlopCounterMode(display=False, custom_mapping=products)
    with evaluation_mode(model), counter, sdpa_kernel(SDPBackend.MATH):
        model(input_ids=ids, **arguments)
    return int(counter.get_total_flops())
