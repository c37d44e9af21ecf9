"""The number formats that training computes in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from multilin.errors import InputError
from multilin.layers.linear import Arithmetic
from multilin.training.settings import TrainingRecipe


def resolve_precision(precision: str) -> str:
    """`auto` becomes "bf16" if the hardware multiplies bfloat16 matrices, and "float32" if not."""
    return precision if precision != "auto" else ("bf16" if has_bf16() else "float32")


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The dtype of autocast for a resolved precision; None computes in float32 throughout.

    With precision int8, operations other than int8 products use bf16 if the hardware multiplies bfloat16.
    """
    return torch.bfloat16 if precision == "bf16" or (precision == "int8" and has_bf16()) else None


@contextmanager
def tf32_beside_bf16(precision: str) -> Iterator[None]:
    """While autocast uses bf16, let a GPU multiply the remaining float32 matrices in tf32, which has more digits.

    Training in float32 keeps PyTorch's setting. A value set by PyTorch's newer `fp32_precision` is kept too, since
    PyTorch's older function, which is used here, could not restore this value.
    """
    mkldnn: Any = torch.backends.mkldnn
    settings: list[Any] = [torch.backends, torch.backends.cuda.matmul, mkldnn.matmul]
    own = [setting.fp32_precision for setting in settings]
    if not torch.cuda.is_available() or own[0] != "none":
        yield
        return
    before = torch.get_float32_matmul_precision()
    is_narrow = autocast_dtype(precision) is not None and before == "highest"
    torch.set_float32_matmul_precision("high" if is_narrow else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for setting, value in zip(settings, own, strict=True):
            setting.fp32_precision = value


def set_arithmetic(model: PreTrainedModel, plan: TrainingRecipe) -> None:
    """Set the arithmetic of the model's matrix products as the recipe says.

    Raises:
        InputError: the recipe asks for int8 or simulated rounding, but the model does not support this.
    """
    uses_int8 = plan.precision == "int8"
    if not uses_int8 and plan.quantization == "none" and not getattr(model.config, "arithmetic", None):
        return
    if not hasattr(model, "set_arithmetic"):
        field, value = ("precision", plan.precision) if uses_int8 else ("quantization", plan.quantization)
        accepted = "auto, bf16 or float32" if uses_int8 else "none"
        raise InputError(
            f"training.{field}: {value!r} given, but {type(model).__name__} of transformers takes {accepted} only"
        )
    model.set_arithmetic(
        Arithmetic(
            products="int8" if uses_int8 else "float",
            backward="int8" if uses_int8 and plan.int8_backward else "float",
            weights=plan.quantization,
        )
    )


def has_bf16(device: str | None = None) -> bool:
    """Whether a kind of device ("cuda" or "cpu"; None for the device that trains) multiplies bfloat16 natively."""
    if (device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
