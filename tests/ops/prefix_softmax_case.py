"""A call of prefix_softmax with all that it can be given, by the kernels and by the definition in float64."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from multilin.ops.prefix_softmax import PrefixSoftmaxState, reference
from tests.ops.cases.prefix_softmax import LOGITS, make_logits, make_starts, make_values
from tests.ops.comparing import TOLERANCE

Kernels = Callable[..., tuple[Tensor, PrefixSoftmaxState]]
CPU = torch.device("cpu")


class Case(NamedTuple):
    """Inputs of one call."""

    name: str
    shape: tuple[int, int, int, int]
    dtype: torch.dtype = torch.float32
    window: int | None = None
    packed: bool = False
    share: float = 0.05  # of the positions of packed texts that begin one
    null: float | None = None
    own: bool = False
    continued: bool = False


def any_case(
    shape: st.SearchStrategy[tuple[int, int, int, int]], dtypes: list[torch.dtype], largest_window: int
) -> st.SearchStrategy[Case]:
    """Cases of all kinds, without an own term where that is refused."""
    return st.builds(
        Case,
        name=st.sampled_from(sorted(set(LOGITS) - {"thousandfold"})),
        shape=shape,
        dtype=st.sampled_from(dtypes),
        window=st.one_of(st.none(), st.integers(1, largest_window)),
        packed=st.booleans(),
        null=st.sampled_from([None, -2.0, 0.3]),
        own=st.booleans(),
        continued=st.booleans(),
    ).map(lambda case: case._replace(own=case.own and case.window is None and case.null is None))


def everything(window: int | None) -> list[dict[str, object]]:
    """All that calls can be given: a null token, or over the whole past an own term."""
    more = [{"null": 0.3}] if window is not None else [{"null": 0.3}, {"own": True}]
    return [{"packed": True, "continued": True, **options} for options in more]


def results(case: Case, kernels: Kernels | None, device: torch.device) -> dict[str, Tensor]:
    """Means, state and the gradients of everything, by the kernels; without them by the definition in float64."""
    shape = case.shape
    inputs = {
        "logits": make_logits(case.name, shape[:3]).float(),
        "values": make_values(shape).to(case.dtype),
        "own": make_logits("masked", shape[:3], seed=6).float() if case.own else None,
    }
    if case.continued:
        early = (shape[0], 9, *shape[2:])
        # Once through the dtype of the values: that is where a window's state comes from.
        past = make_logits("random", early[:3], seed=9).float(), make_values(early, seed=8).to(case.dtype).float()
        past = reference.prefix_softmax(*past, window=case.window)[1]
        inputs |= {"state logits": past.logits_BSH, "state values": past.values_BSHD}
    inputs = {
        name: (x.to(device, copy=True) if kernels else x.double()).requires_grad_()
        for name, x in inputs.items()
        if x is not None
    }
    means, after = (kernels or reference.prefix_softmax)(
        inputs["logits"],
        inputs["values"],
        window=case.window,
        own_logits=inputs.get("own"),
        null_logit=case.null,
        starts=make_starts(shape[:2], share=case.share).to(device) if case.packed else None,
        state=PrefixSoftmaxState(inputs["state logits"], inputs["state values"]) if case.continued else None,
    )
    weight = make_values(shape, seed=3).to(case.dtype).to(means)
    after_logits = after.logits_BSH.masked_fill(after.logits_BSH == -torch.inf, 0.0)
    # Linear in the logits of the state: near 80 their rounding alone would change the gradient of anything else.
    after_weight = make_values(after_logits.shape, seed=5).to(after_logits)
    loss = (means * weight).sum() + after.values_BSHD.sin().sum() + (after_logits * after_weight).sum()
    gradients = torch.autograd.grad(loss, inputs.values(), allow_unused=True, materialize_grads=True)
    found = {"means": means, "after logits": after_logits, "after values": after.values_BSHD}
    found |= {f"d {name}": gradient for name, gradient in zip(inputs, gradients, strict=True)}
    return {name: x.detach().cpu() for name, x in found.items()}


def check(case: Case, kernels: Kernels, device: torch.device = CPU) -> None:
    """Every result of the kernels is that of the definition."""
    expected, found = results(case, None, CPU), results(case, kernels, device)
    # A gradient of logits is a difference of products with values: rounding is seen against the size of those.
    products = (make_values(case.shape) * make_values(case.shape, seed=3)).sum(dim=-1).norm()
    for name, exact in expected.items():
        smallest = 0.03 * products if name in ("d logits", "d own", "d state logits") else 1e-12
        error = (found[name].double() - exact).norm() / exact.norm().clamp(min=smallest)
        assert error <= TOLERANCE[case.dtype], f"{name}: {error:.1e} in {case}"
