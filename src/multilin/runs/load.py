"""Trained models on disk: a run folder, one of its checkpoints, or any folder in Hugging Face's layout."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from multilin.architectures.base import Sizes
from multilin.data.tokenizers import load_tokenizer, save_tokenizer, tokenizer_hash, trained_end
from multilin.errors import InputError, as_input_error, plural, prefixed
from multilin.files import atomic_folder
from multilin.model.factory import BaselineOptions
from multilin.model.memory import check_memory, parameter_bytes
from multilin.runs.adapters import merge_adapters
from multilin.runs.files import (
    RECIPE_FILE,
    base_of,
    below_adapters,
    check_run_files,
    check_weights_hash,
    find_model,
    is_adapter,
    recipe_sections,
)
from multilin.settings import load_settings
from multilin.settings.inputs import check_model_files


@dataclass(frozen=True)
class Run:
    """A model in evaluation mode and the tokenizer it was trained with."""

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast

    @property
    def longest_text(self) -> int | None:
        """The largest number of tokens that the model can read; None if there is no limit."""
        return longest_text(self.model.config)


def longest_text(config: PretrainedConfig) -> int | None:
    """The largest number of tokens that a model of this config can read; None if there is no limit."""
    limit = getattr(config, "max_position_embeddings", None)
    return None if limit is None else int(limit)


def load_run(path: str | Path) -> Run:
    """Load the model of a folder, onto the GPU if there is one, and its tokenizer.

    Raises:
        InputError: there is no model, weights are damaged or missing, or the tokenizer is not the model's.
    """
    folder = Path(path)
    model = load_model(folder)
    tokenizer = load_own_tokenizer(folder, model.config)
    return Run(folder, model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer)


def load_model(folder: Path) -> PreTrainedModel:
    """Load the model of a folder, in evaluation mode.

    Raises:
        InputError: there is no model, weights are damaged or missing, or the model is too large for the memory.
    """
    read_config(folder)
    _check_weights(folder)
    if is_adapter(folder):
        return merge_adapters(load_model(_find_base(folder)), folder)
    with _loading(folder):
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    if found["missing_keys"]:
        missing = sorted(found["missing_keys"])
        others = f" and {plural(len(missing) - 1, 'other')}" if missing[1:] else ""
        raise InputError(f"run: the weights in {folder} lack {missing[0]}{others} that its config.json needs")
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise InputError(f"run: the weights in {folder} are damaged: {name} holds values that are not finite")
    return model.eval()


def read_config(folder: Path) -> PretrainedConfig:
    """The config of the model in a folder.

    Raises:
        InputError: there is no model, the config is damaged, or the model is too large for the memory.
    """
    check_run_files(folder)
    check_model_files(folder, "run")
    if is_adapter(folder):
        return read_config(_find_base(folder))
    with _loading(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _check_sizes(config)
    return config


def _find_base(folder: Path) -> Path:
    """The folder of the adapters' base model. Raises if its weights changed since the adapters were trained."""
    below_adapters(folder)  # refuses adapters that name themselves as their base model
    base = find_model(base_of(folder), f"run: the model of the adapters in {folder}")
    expected = recipe_sections(folder).get("model", {}).get("start_hash")
    if expected is not None:
        check_weights_hash(base, expected, f"run: the model of the adapters in {folder}")
    return base


def save_run(run: Run, target: Path) -> None:
    """Write the model, tokenizer and recipe of a run into a folder. The folder is complete or does not appear.

    Raises:
        OSError: the folder cannot be written.
    """
    with atomic_folder(target) as partial:
        run.model.save_pretrained(partial)
        save_tokenizer(run.tokenizer, partial)
        if (run.folder / RECIPE_FILE).is_file():
            shutil.copy(run.folder / RECIPE_FILE, partial / RECIPE_FILE)


@contextlib.contextmanager
def _loading(folder: Path) -> Iterator[None]:
    # Mistakes in a config or in weights cause errors of many kinds.
    with (
        as_input_error(lambda reason: f"run: the model in {folder} cannot be loaded ({reason})"),
        prefixed(f"run: {folder / 'config.json'}: "),
    ):
        yield


def _check_sizes(config: PretrainedConfig) -> None:
    sizes = {"hidden_size": config.hidden_size, "num_layers": config.num_hidden_layers, "vocab_size": config.vocab_size}
    load_settings(Sizes, {**sizes, "n_positions": None})
    if (num_heads := getattr(config, "num_attention_heads", None)) is not None:
        load_settings(BaselineOptions, {"num_heads": num_heads})
    with torch.device("meta"):
        sketch = AutoModelForCausalLM.from_config(config)
    check_memory("this model", parameter_bytes(sketch))


def _check_weights(folder: Path) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise InputError(f"run: {path} is damaged or incomplete ({error})") from None


def load_own_tokenizer(folder: Path, config: PretrainedConfig) -> PreTrainedTokenizerFast:
    """The tokenizer in the folder of a model, to which tokens may have been added since the model was trained.

    The config gets the hash of this tokenizer. Texts begin with the same token as in training.

    Raises:
        InputError: there is no tokenizer, it is not the model's, or the model lacks embeddings for added tokens.
    """
    tokenizer = load_tokenizer(str(folder))
    subject, trained_hash, end = f"run: the tokenizer in {folder}", getattr(config, "tokenizer_hash", None), None
    if trained_hash is not None:
        end = trained_end(tokenizer, trained_hash)
        if end is None:
            raise InputError(
                f"{subject} is not the tokenizer that its model was trained with; put the original tokenizer.json back"
            )
    if (number := len(tokenizer)) > config.vocab_size:
        advice = f"if tokens were added, save the model again after model.resize_token_embeddings({number})"
        if trained_hash is None:
            advice = f"put the original tokenizer.json back, or {advice}"
        raise InputError(f"{subject} has {number} tokens, but its model was trained with {config.vocab_size}; {advice}")
    if trained_hash is not None:
        config.tokenizer_hash = tokenizer_hash(tokenizer)
    if end not in (None, tokenizer.eos_token):
        tokenizer.bos_token = end
    return tokenizer
