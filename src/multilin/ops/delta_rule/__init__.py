"""Delta rule: each head has a memory matrix, in which each token corrects the value stored under the token's key."""

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from multilin.ops.delta_rule import gpu, portable, reference
from multilin.ops.dispatch import Backend, Op, cpu_kernels, few_tokens, gpu_kernels
from multilin.ops.shapes import check_heads, check_shapes

__all__ = ["DELTA_RULE", "DeltaRuleState", "delta_rule", "delta_rule_weights"]

DELTA_RULE = Op(
    "delta_rule",
    [
        cpu_kernels("compiled, products by PyTorch in chunks", partial(portable.delta_rule, kernels="cpu")),
        gpu_kernels(
            "compiled, memory updated chunk by chunk", partial(portable.delta_rule, kernels="gpu"), gpu.refuses
        ),
        Backend("portable (PyTorch, chunks)", portable.delta_rule),
        Backend("reference (PyTorch, token by token)", reference.delta_rule),
    ],
    special_cases=[few_tokens(reference.delta_rule, portable.SHORT)],
)


class DeltaRuleState(NamedTuple):
    """Each head's memory M, a row per element of a key and a column per element of a value; float32 or better."""

    memory_BHDE: Tensor


def delta_rule(
    queries: Float[Tensor, "B T H D"],
    keys: Float[Tensor, "B T H D"],
    values: Float[Tensor, "B T H E"],
    *,
    log_decays: Float[Tensor, "B T H"] | None = None,
    rates: Float[Tensor, "B T H"] | None = None,
    padding: Bool[Tensor, "B T"] | None = None,
    state: DeltaRuleState | None = None,
    starts: Bool[Tensor, "B T"] | None = None,
    needs_state: bool = True,
) -> tuple[Float[Tensor, "B T H E"], DeltaRuleState | None]:
    """Read a memory matrix with queries. Each token first decays the matrix and corrects the value of the token's key.

        M_t = a_t (1 - b_t k_t k_t^T) M_(t-1) + b_t k_t v_t^T        y_t = M_t^T q_t        a_t = e^(log_decay_t)

    M is the transpose of S in the papers, and 0 at the start of a text. The memory is stable if keys have length 1 and
    rates b are between 0 and 2. Rate 1 replaces the value stored under the key; larger rates also reflect the value.
    Without rates, no value is corrected: M_t = a_t M_(t-1) + k_t v_t^T. This is gated linear attention with one gate
        per head, or linear attention if there are no decays either.

    Args:
        queries, keys: (B, T, H, D); normalise and scale them before the call.
        values: (B, T, H, E); E may differ from D.
        log_decays: (B, T, H) natural logs of a, at most 0; -inf forgets everything. None keeps everything.
        rates: (B, T, H) b; None adds without correcting.
        padding: (B, T) True at padding, where the memory stays as it is.
        state: the state that an earlier call returned.
        starts: (B, T) True where a new text begins; its positions read nothing from before the start.
        needs_state: False if the text ends here: None is returned in place of the state.

    Returns:
        The values read (B, T, H, E) in the dtype of `values`, and the memory after the last token, (B, H, D, E), in
        float32 (float64 if an argument is float64).

    Raises:
        InputError: shapes that do not fit.

    Cost: 2 B T H (C (3 D + 2 E) + 3 D E) multiplications and additions for chunks of C = 64 tokens, three times as many
    with a backward pass, in float32 or better even for bf16 inputs. Memory for a backward pass: about 10 (C + D)
    numbers for each token and head.
    Source: "Gated Delta Networks" (arXiv 2412.06464), equation 10; chunks as in "Parallelizing Linear Transformers with
    the Delta Rule over Sequence Length" (arXiv 2406.06484).
    """
    check_heads(queries, keys, values)
    (B, T, H, D), E = keys.shape, values.shape[3]
    given = None if state is None else state.memory_BHDE
    check_shapes(("log_decays", log_decays, (B, T, H)), ("rates", rates, (B, T, H)), ("state", given, (B, H, D, E)))
    dtype = torch.float32
    for tensor in (queries, keys, values, log_decays, rates):
        dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    q, k, v = (x.to(dtype) for x in (queries, keys, values))
    a, b = (None if x is None else x.to(dtype) for x in (log_decays, rates))
    if padding is not None:
        k, v = (x.masked_fill(padding[..., None, None], 0.0) for x in (k, v))
        a, b = (None if x is None else x.masked_fill(padding[..., None], 0.0) for x in (a, b))
    if starts is not None:
        a = (torch.zeros_like(q[..., 0]) if a is None else a).masked_fill(starts[..., None], -torch.inf)
    memory = v.new_zeros(B, H, D, E) if given is None else given.to(dtype)
    with torch.autocast(v.device.type, enabled=False):
        read, memory = DELTA_RULE(q, k, v, a, b, memory, dtype=dtype)
    return read.to(values.dtype), DeltaRuleState(memory) if needs_state else None


def delta_rule_weights(
    queries: Float[Tensor, "B T H D"],
    keys: Float[Tensor, "B T H D"],
    *,
    log_decays: Float[Tensor, "B T H"] | None = None,
    rates: Float[Tensor, "B T H"] | None = None,
    padding: Bool[Tensor, "B T"] | None = None,
    starts: Bool[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B H T T"]:
    """Compute the weights w in y_t = sum_{s <= t} w_ts v_s of `delta_rule`, for a text from its start.

    Arguments as for `delta_rule`. A value written by an earlier token weighs less if later keys overwrite the value.

    Cost: the same as for `delta_rule` with values of width T.
    """
    num_time = keys.shape[1]
    one_for_each = torch.eye(num_time, dtype=keys.dtype, device=keys.device)[None, :, None, :]
    one_for_each = one_for_each.expand(*keys.shape[:3], -1)
    weights_BTHS, _ = delta_rule(
        queries, keys, one_for_each, log_decays=log_decays, rates=rates, padding=padding, starts=starts,
        needs_state=False,
    )  # fmt: skip
    return weights_BTHS.transpose(1, 2)
