"""Low-rank adapters (LoRA): small trained matrices are added to the model's weights, which stay fixed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from multilin.errors import InputError
from multilin.runs.adapters import PREFIX, file_name, import_peft, insert_adapters, is_adapter_weight
from multilin.runs.files import ADAPTER_WEIGHTS
from multilin.training.recipe import Recipe


def add_adapters(model: PreTrainedModel, recipe: Recipe) -> None:
    """Insert the adapters that a recipe asks for into a model; training then changes only the adapters.

    The matrices B start at zero, so adapters change nothing at first. Torch's global generator draws the matrices A.

    Raises:
        InputError: PEFT is missing, no module matches the targets, or adapters cannot be merged with rounded weights.
    """
    plan, lora = recipe.training, recipe.training.lora
    assert lora is not None
    if plan.precision == "int8" or plan.quantization != "none":
        name = "precision" if plan.precision == "int8" else "quantization"
        raise InputError(
            f"training.{name}: {getattr(plan, name)!r} given with training.lora, but an adapter cannot be merged with "
            "rounded weights"
        )
    config = import_peft().LoraConfig(
        task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout,
        target_modules=lora.targets or "all-linear", base_model_name_or_path=recipe.model.start,
    )  # fmt: skip
    insert_adapters(model, config, "training.lora.targets")
    model.enable_input_require_grads()  # recomputed layers need an input with a gradient, and the embedding is frozen


def save_adapters(model: PreTrainedModel, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
    """Write a model's adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

    `weights` are the model's weights, gathered from all devices; None takes the weights in this process.

    Raises:
        OSError: the folder cannot be written.
    """
    state = model.state_dict() if weights is None else weights
    tensors = {file_name(name): tensor.contiguous() for name, tensor in state.items() if is_adapter_weight(name)}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    model.peft_config["default"].save_pretrained(str(folder))


def in_model(tensors: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights in an adapter file, by their names in the model."""
    own = {file_name(name): name for name in model.state_dict() if is_adapter_weight(name)}
    return {own.get(name, name.removeprefix(PREFIX)): tensor for name, tensor in tensors.items()}
