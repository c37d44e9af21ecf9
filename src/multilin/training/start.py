"""The model that a run starts from: another run, or a folder or hub name in the layout of transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multilin.errors import InputError, prefixed, shown
from multilin.runs.files import check_weights_hash, find_model, recipe_sections, weights_hash

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

DEFAULT_BLOCK, LONGEST_DEFAULT_BLOCK = 256, 1024


def complete_start(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recipe, with the sections `model` and `tokenizer` filled in from the model to start from.

    Args:
        values: the values of a recipe with `model.start`. If sizes, options or tokenizer are given, they must equal
            the model's, but `n_positions` may be smaller than the model's longest text.

    Raises:
        InputError: the model does not exist or cannot be trained, or a field contradicts it.
    """
    given, tokenizer = dict(values["model"]), dict(values.get("tokenizer") or {})
    start, expected_hash = given.pop("start"), given.pop("start_hash", None)
    folder = find_model(start, "model.start")
    model, own_tokenizer, longest = _describe(folder)
    block = given.pop("n_positions", None)
    if block is not None and longest is not None and block > longest:
        raise InputError(
            f"model.n_positions: {block} given, but the model to start from, {shown(start)}, reads at most {longest} "
            "tokens"
        )
    model["n_positions"] = block or model.get("n_positions") or min(longest or DEFAULT_BLOCK, LONGEST_DEFAULT_BLOCK)
    for section, asked, known in (("model", given, model), ("tokenizer", tokenizer, own_tokenizer | {"path": start})):
        for name, value in asked.items():
            if value not in (None, {}, known.get(name)):
                has = f"has {shown(known[name])}" if known.get(name) is not None else "decides that"
                raise InputError(
                    f"{section}.{name}: {shown(value)} given, but the model to start from, {shown(start)}, {has}; "
                    "leave it out"
                )
    model |= {"start": start, "start_hash": expected_hash or weights_hash(folder)}
    return {**values, "model": model, "tokenizer": {"path": start}}


def open_start(start: str, expected_hash: str | None) -> Path:
    """The folder of the model to start from. Raises if the weights do not have the recipe's hash.

    Raises:
        InputError: the model does not exist, or its weights have changed.
    """
    folder = find_model(start, "model.start")
    check_weights_hash(folder, expected_hash, "model.start")
    return folder


def load_start(start: str, expected_hash: str | None, tokenizer: "PreTrainedTokenizerFast") -> "PreTrainedModel":
    """The model to start from, in float32.

    Raises:
        InputError: see `open_start`; or the model has another tokenizer than the text to train on.
    """
    from multilin.data.tokenizers import tokenizer_hash
    from multilin.runs.load import load_model, load_own_tokenizer

    folder = open_start(start, expected_hash)
    with prefixed("model.start: ", "run: "):
        model = load_model(folder)
        own = load_own_tokenizer(folder, model.config)
    if tokenizer_hash(own) != tokenizer_hash(tokenizer):
        raise InputError(f"model.start: the model in {shown(start)} has another tokenizer than the text to train on")
    return model.float()


def _describe(folder: Path) -> tuple[dict[str, Any], dict[str, Any], int | None]:
    """The sections `model` and `tokenizer` of a recipe for a trained model, and the longest text it can read."""
    from multilin.model.factory import BASELINES
    from multilin.runs.load import longest_text, read_config

    with prefixed("model.start: ", "run: "):
        config = read_config(folder)
        sections = recipe_sections(folder)
    model: dict[str, Any] = {}
    if (getattr(config, "arithmetic", None) or {}).get("stored_as_int8"):
        raise InputError(f"model.start: the weights in {shown(str(folder))} are int8, which cannot be trained")
    if config.model_type == "multilin":
        model["architecture"] = config.layers[0]["architecture"]
        if any(layer["architecture"] != model["architecture"] for layer in config.layers):
            model["layers"] = config.layers
    elif (baseline := config.model_type.removeprefix("multilin_")) in BASELINES:
        model["architecture"] = baseline
    else:
        accepted = ", ".join(["multilin", *BASELINES])
        raise InputError(f"model.start: a model of the type {config.model_type!r} given, but it should be {accepted}")
    own_model, tokenizer = sections.get("model", {}), sections.get("tokenizer", {})
    model |= {name: value for name, value in own_model.items() if name not in ("start", "start_hash")}
    model |= {"hidden_size": config.hidden_size, "num_layers": config.num_hidden_layers}
    return model, {} if tokenizer.get("path") else dict(tokenizer), longest_text(config)
