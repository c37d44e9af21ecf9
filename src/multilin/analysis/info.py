"""What a model is made of and what it costs: parameters, work per token, and memory for the text it has read."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import Cache, PreTrainedModel

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
    flops_per_token: floating-point operations to read one token and predict the next, after a text of one token: matrix
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
    first, second = _Step(model, num_read=1), _Step(model, num_read=2)
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    embeddings += [module for module in model.modules() if isinstance(module, nn.Embedding)]
    layers = _layers(model, first, second)
    return ModelInfo(
        architecture=" + ".join(dict.fromkeys(layer.architecture for layer in layers)),
        parameters=_count(_weights(model)),
        embedding_parameters=_count(p for module in embeddings if module is not None for p in module.parameters()),
        flops_per_token=first.flops,
        flops_growth=second.flops - first.flops,
        state_bytes=sum(first.state_bytes),
        state_growth=sum(second.state_bytes) - sum(first.state_bytes),
        longest_text=longest_text(model.config),
        layers=layers,
    )


def state_bytes(cache: Cache) -> list[int]:
    """Bytes of the tensors in each entry of a model's cache: one per layer, and one for the embedding before ours."""
    return [sum(tensor.nbytes for tensor in _tensors(vars(layer))) for layer in cache.layers]


def _product_flops(left: tuple[int, int], right: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


# A product of integers is as much work as one of floats, but PyTorch does not count it.
_INT8_FLOPS = {torch.ops.aten._int_mm: _product_flops}


class _Step:
    """Reading one more token after `num_read` others.

    flops: of this token.
    state_bytes: per entry of the cache, after the tokens before it.
    """

    def __init__(self, model: PreTrainedModel, num_read: int) -> None:
        was_training = model.training
        model.eval()
        ids = torch.zeros((1, num_read), dtype=torch.long, device=model.device)
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
            self.state_bytes = state_bytes(cache)
            # Fused attention is not counted on every device; the plain one is made of products that are.
            with FlopCounterMode(display=False, custom_mapping=_INT8_FLOPS) as counter, sdpa_kernel(SDPBackend.MATH):
                model(ids[:, :1], past_key_values=cache, use_cache=True)
        self.flops = int(counter.get_total_flops())
        model.train(was_training)


def _tensors(value: Any) -> Iterable[Tensor]:
    """Every tensor inside dictionaries and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _weights(module: nn.Module) -> Iterable[Tensor]:
    """The parameters, and the int8 values that took the place of some."""
    yield from module.parameters()
    yield from (buffer for buffer in module.buffers() if buffer.dtype == torch.int8)


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() for p in {id(p): p for p in parameters}.values())


def _layers(model: PreTrainedModel, first: _Step, second: _Step) -> list[LayerInfo]:
    stack = next(
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers
    )
    # Models of ours say what each layer is; the others have layers of one kind and no options per layer.
    entries = getattr(model.config, "layers", None) or [{"architecture": model.config.model_type}] * len(stack)
    # The cache of ours begins with the embedding's entry.
    before, after = first.state_bytes[-len(stack) :], second.state_bytes[-len(stack) :]
    return [
        LayerInfo(
            index=index,
            architecture=entry["architecture"],
            options={name: value for name, value in entry.items() if name != "architecture"},
            parameters=_count(_weights(module)),
            state_bytes=before[index],
            state_growth=after[index] - before[index],
        )
        for index, (module, entry) in enumerate(zip(stack, entries, strict=True))
    ]
