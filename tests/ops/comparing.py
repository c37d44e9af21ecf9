"""What tests of ops share: results with gradients, relative errors, compiled functions, poison, the largest tensor."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
"""Of the root mean square of outputs, states and gradients, relative to that of the definition in float64."""


def with_gradients(
    compute: Callable[..., Any], inputs: Iterable[Tensor | None], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """All tensors that a function returns, and the gradients of all inputs from gradients of results drawn at random.

    Args:
        dtype: of the inputs; None leaves them as they are.
    """
    given = [x if x is None else x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in inputs]
    found = tensors_of(compute(*given))
    generator = torch.Generator().manual_seed(7)
    draws = [torch.randn(x.shape, generator=generator, dtype=torch.float64).bfloat16().to(x) for x in found]
    needed = [x for x in given if x is not None]
    # A state's logit of -inf has no gradient.
    draws = [draw.masked_fill(x == -torch.inf, 0.0) for draw, x in zip(draws, found, strict=True)]
    used = [(x, draw) for x, draw in zip(found, draws, strict=True) if x.requires_grad]
    if not used:
        return found
    results, draws = zip(*used, strict=True)
    gradients = torch.autograd.grad(results, needed, draws, allow_unused=True, materialize_grads=True)
    return [*(x.detach() for x in found), *gradients]


def tensors_of(results: Any) -> list[Tensor]:
    """The tensors in what an op returns: a result, with or without a state."""
    if isinstance(results, Tensor):
        return [results]
    return [x for part in results if part is not None for x in tensors_of(part)]


def check_near(found: Sequence[Tensor], exact: Sequence[Tensor], tolerance: float) -> None:
    """Every tensor is that of the definition: its relative error, and -inf where that is."""
    for result, expected in zip(found, exact, strict=True):
        assert torch.equal(result == -torch.inf, expected == -torch.inf)
        result, expected = (x.detach().double().cpu().nan_to_num(neginf=0.0, nan=torch.nan) for x in (result, expected))
        assert (result - expected).norm() <= tolerance * expected.norm().clamp(min=1e-12)


def check_compiled(compute: Callable[..., Any], *inputs: Tensor) -> None:
    """Compiled as one graph, results and gradients with respect to all inputs are what they are eagerly."""
    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(with_gradients(compiled, inputs), with_gradients(compute, inputs))


def poison_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, what makes empty tensors gives nan, so that reading it, or leaving it as a result, shows."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poison(*arguments: object, **options: object) -> Tensor:
            tensor = make(*arguments, **options)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return poison

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


class LargestTensor(TorchDispatchMode):
    """Inside this context, `numbers` is the most numbers that one new tensor held, whoever made it."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            # A view holds nothing; an expanded one has more numbers than memory.
            self.numbers = max(self.numbers, result.untyped_storage().nbytes() // result.element_size())
        return result
