"""Low-rank adapters in PEFT's format: inserting new ones into a model, and reading and merging trained ones."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from multilin.errors import InputError, as_input_error, plural
from multilin.layers.linear import Arithmetic
from multilin.runs.files import ADAPTER_WEIGHTS, base_of
from multilin.settings.inputs import check_regular

if TYPE_CHECKING:
    from peft import LoraConfig

PREFIX, NAME = "base_model.model.", "default"  # what PEFT adds to weights' names in files, and in models


def import_peft() -> Any:
    """The module peft.

    Raises:
        InputError: peft is not installed.
    """
    try:
        import peft
    except ImportError:
        raise InputError("adapters: PEFT is not installed; pip install 'multilin[lora]'") from None
    return peft


def insert_adapters(model: PreTrainedModel, config: "LoraConfig", field: str) -> Any:
    """Insert new adapters into a model and freeze all its other weights.

    Args:
        model: changed in place.
        config: PEFT's settings.
        field: the field that chose the settings; messages begin with it.

    Returns:
        PEFT's tuner, which can merge the adapters.

    Raises:
        InputError: the settings name a missing module, a module without a matrix, or an output tied to the embedding.
    """
    if getattr(model.config, "unit_variance", False):
        raise InputError(
            f"{field}: given for a Llama with unit_variance, but adapters do not scale their inputs as this model does"
        )
    peft = import_peft()
    with as_input_error(lambda reason: f"{field}: no adapters for this model ({reason})"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about tied heads, which are refused below
        tuner = peft.LoraModel(model, {NAME: config}, NAME)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if model.config.tie_word_embeddings and any(hasattr(module, "base_layer") for module in ends):
        raise InputError(f"{field}: the output of this model shares its matrix with the embedding; name other modules")
    return tuner


def is_adapter_weight(name: str) -> bool:
    """True if a weight of a model belongs to an adapter."""
    return ".lora_" in name


def file_name(name: str) -> str:
    """The name of an adapter's weight in PEFT's files, from its name in the model."""
    return PREFIX + name.replace(f".{NAME}", "")


def merge_adapters(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with the adapters of a folder merged into its weights.

    Args:
        model: the base model, changed in place. Weights and products become float32, as in training adapters.
        folder: the folder with adapter_config.json and adapter_model.safetensors.

    Raises:
        InputError: files are damaged, or the adapters are not LoRA or belong to another model.
    """
    peft, subject = import_peft(), f"run: the adapters in {folder}"
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise InputError(f"{subject} have no weights ({ADAPTER_WEIGHTS})")
    check_regular(path, "run")
    with as_input_error(lambda reason: f"{subject} cannot be read ({reason})"):
        config, weights = peft.PeftConfig.from_pretrained(str(folder)), load_file(path)
    if config.peft_type != peft.PeftType.LORA:
        raise InputError(f"{subject} are of the kind {config.peft_type}, but only LORA is read")
    if config.modules_to_save or config.trainable_token_indices:
        raise InputError(
            f"{subject} come with other trained weights (modules_to_save or trainable_token_indices), which are not "
            "read; merge them with PEFT's merge_and_unload() and save the whole model"
        )
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise InputError(f"{subject} are damaged: {name} holds values that are not finite")
    model = model.float()
    other = f"{subject} belong to another model than {base_of(folder)}"
    with as_input_error(lambda reason: f"{other} ({reason})"):
        _grow_vocabulary(model, weights)
    if hasattr(model, "set_arithmetic"):
        model.set_arithmetic(Arithmetic())
    config.init_lora_weights, config.inference_mode = True, True  # other initial weights may change the model's weights
    try:
        tuner = insert_adapters(model, config, subject)
    except InputError as error:
        raise InputError(other) from error
    own = {file_name(name): tensor for name, tensor in model.state_dict().items() if is_adapter_weight(name)}
    shapes, expected = ({name: x.shape for name, x in tensors.items()} for tensors in (weights, own))
    if misfits := shapes.items() ^ expected.items():
        raise InputError(f"{other}: {min(name for name, _ in misfits)} does not fit this model")
    for name, tensor in weights.items():
        own[name].copy_(tensor)
    return tuner.merge_and_unload().requires_grad_(True)


def _grow_vocabulary(model: PreTrainedModel, weights: dict[str, Any]) -> None:
    """Load embedding and output from PEFT's weights into the model; PEFT saves both if tokens were added."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {
        f"{name}.{part}" for name, module in model.named_modules() if module in ends for part in module.state_dict()
    }
    given = {name: weights.pop(PREFIX + name) for name in names if PREFIX + name in weights}
    if given:
        model.resize_token_embeddings(len(next(iter(given.values()))))
        model.load_state_dict(given, strict=False)


def reach(model: PreTrainedModel) -> str:
    """A sentence that says which matrices of a model have adapters, and how many numbers are trained."""
    from peft.tuners.lora import LoraLayer

    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding) or module in ends]
    outside = {id(weight) for module in embeddings for weight in module.parameters()}
    adapted = [module for module in model.modules() if isinstance(module, LoraLayer)]
    reached = {id(module.get_base_layer().weight) for module in adapted}
    weights = {id(w): w.numel() for name, w in model.named_parameters() if not is_adapter_weight(name)}
    in_layers = {key: number for key, number in weights.items() if key not in outside}
    share = sum(number for key, number in in_layers.items() if key in reached) / max(sum(in_layers.values()), 1)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return (
        f"LoRA covers {plural(len(adapted), 'matrix') if len(adapted) == 1 else f'{len(adapted):,} matrices'}, "
        f"{share:.1%} of the weights outside embeddings and output: {trained:,} trained numbers "
        f"({trained / sum(weights.values()):.1%} of the model)"
    )
