"""Functions compiled as one graph, held against themselves."""

from collections.abc import Callable

import torch
from torch import Tensor


def check_compiled(loss: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Compiled, a loss and its gradients with respect to all inputs are what they are eagerly."""
    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        needed = [x.clone().requires_grad_() for x in inputs]
        results.append([(result := function(*needed)), *torch.autograd.grad(result, needed)])
    torch.testing.assert_close(results[1], results[0])
