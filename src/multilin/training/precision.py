"""Which number format training computes in."""

import torch


def resolve_precision(precision: str) -> str:
    """`auto` becomes "bf16" where the hardware multiplies bfloat16 matrices natively, "float32" elsewhere."""
    return precision if precision != "auto" else ("bf16" if _has_bf16() else "float32")


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The dtype of autocast for a resolved precision; None computes in float32 throughout."""
    return torch.bfloat16 if precision == "bf16" else None


def _has_bf16() -> bool:
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
