"""What a model costs: parameters, floating-point operations, and bytes of state."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import Cache, PreTrainedModel

from multilin.model.modes import evaluation_mode

BACKWARD_AND_FORWARD = 3
"""A backward pass makes two products for each of the forward pass: one for the inputs, one for the weights."""


def parameter_counts(model: PreTrainedModel) -> tuple[int, int]:
    """All parameters, and those in embeddings and the output projection; a tensor that is used twice counts once."""
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    embeddings += [module for module in model.modules() if isinstance(module, nn.Embedding)]
    in_embeddings = (p for module in embeddings if module is not None for p in module.parameters())
    return count_parameters(model), _count(in_embeddings)


def count_parameters(module: nn.Module) -> int:
    """The parameters of a module, and the int8 values that took the place of some."""
    return _count([*module.parameters(), *(buffer for buffer in module.buffers() if buffer.dtype == torch.int8)])


def training_flops_per_token(model: PreTrainedModel, length: int) -> float:
    """Floating-point operations that training spends on a token of a block of `length` tokens.

    Counted are the products of one forward pass over one block, as they are computed (by PyTorch's counter; a
    multiplication and an addition are two), times three. So weights count 6 per token, GPT-2's and Llama's attention
    the whole square of the block, windowed attention the tiles it makes, a mixing over positions its whole triangle's
    square. Sums without products, such as running means, norms and activations, and recomputation are not counted.

    Args:
        model: on the CPU, where every product is PyTorch's own.
        length: tokens of a block.
    """
    ids = torch.zeros((1, length), dtype=torch.long)
    return BACKWARD_AND_FORWARD * float(_forward_flops(model, ids, use_cache=False)) / length


def decoding_costs(model: PreTrainedModel, num_read: int) -> tuple[int, list[int]]:
    """Floating-point operations to read one more token after `num_read` others, and the `state_bytes` before it."""
    ids = torch.zeros((1, num_read), dtype=torch.long, device=model.device)
    with evaluation_mode(model), torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        sizes = state_bytes(cache)
        return _forward_flops(model, ids[:, :1], past_key_values=cache, use_cache=True), sizes


def state_bytes(cache: Cache) -> list[int]:
    """Bytes of the tensors in each entry of a model's cache: one per layer, and one for the embedding before ours."""
    return [sum(tensor.nbytes for tensor in _tensors(vars(layer))) for layer in cache.layers]


def _forward_flops(model: PreTrainedModel, ids: Tensor, **arguments: Any) -> int:
    # Fused attention is not counted on every device; the plain one is made of products that are.
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._int_mm: _product_flops})
    with evaluation_mode(model), counter, sdpa_kernel(SDPBackend.MATH):
        model(input_ids=ids, **arguments)
    return int(counter.get_total_flops())


def _product_flops(left: tuple[int, int], right: tuple[int, int], *_: Any, **__: Any) -> int:
    """Of a product of integers, which is as much work as one of floats, but which PyTorch does not count."""
    return 2 * left[0] * left[1] * right[1]


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() for p in {id(p): p for p in parameters}.values())


def _tensors(value: Any) -> Iterable[Tensor]:
    """Every tensor inside dictionaries and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
