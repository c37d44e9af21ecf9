"""How much work a model is: floating-point operations of training, per token."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

BACKWARD_AND_FORWARD = 3
"""A backward pass makes two products for each of the forward pass: one for the inputs, one for the weights."""


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
    was_training = model.training
    model.eval()
    # Fused attention is not counted on every device; the plain one is made of products that are.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(input_ids=ids, use_cache=False)
    model.train(was_training)
    return BACKWARD_AND_FORWARD * float(counter.get_total_flops()) / length
