"""Create models by name and size: multilin's architectures, and GPT-2 and Llama for comparisons."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, PreTrainedModel

from multilin.architectures.base import Sizes, TrainingDefaults, architectures, get_architecture
from multilin.architectures.own_file import resolve, resolve_fields
from multilin.errors import InputError, nearest, shown
from multilin.files.trust import is_own
from multilin.model.baselines import BiasedGPT2Config, ScaledLlamaConfig
from multilin.model.config import MultilinConfig, TokenIds
from multilin.settings import load_settings, settings
from multilin.settings.bounds import Fraction, Multiple, Section, Strength


def _gpt2(hidden_size: int, num_layers: int, num_heads: int, dropout: float, **sizes: Any) -> PretrainedConfig:
    kind = BiasedGPT2Config if sizes.keys() & _OURS else GPT2Config
    return kind(
        n_embd=hidden_size, n_layer=num_layers, n_head=num_heads, n_positions=sizes.pop("n_positions"),
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **sizes,
    )  # fmt: skip


def _llama(hidden_size: int, num_layers: int, num_heads: int, dropout: float, **sizes: Any) -> PretrainedConfig:
    kind = ScaledLlamaConfig if sizes.keys() & _OURS else LlamaConfig
    # The gated feed-forward has three matrices: at 8/3 of the width they are as large as two at 4 widths.
    return kind(
        hidden_size=hidden_size, num_hidden_layers=num_layers, num_attention_heads=num_heads,
        num_key_value_heads=num_heads, intermediate_size=8 * hidden_size // 3, attention_dropout=dropout,
        max_position_embeddings=sizes.pop("n_positions"), **sizes,
    )  # fmt: skip


BASELINES = {"gpt2": _gpt2, "llama": _llama}
"""Models of transformers, built at the sizes of multilin's: same width, depth, heads, vocabulary and tied output."""

DEFAULT_NUM_LAYERS = 6
_OURS = {
    "unit_variance": False,
    "output_bias": "none",
    "match": None,
}  # fields that transformers' configs lack, and their defaults


@settings
class BaselineOptions:
    """What a recipe may choose for a baseline, as `model.options`."""

    num_heads: Multiple = 4  # number of heads; it must divide the hidden size
    dropout: Fraction = 0.0  # in training


@settings
class BaselineConfig(TokenIds):
    """Fields of a baseline's config that a recipe may set, as `model.config`."""

    initializer_range: Strength = 0.02  # standard deviation of initial weights
    tie_word_embeddings: bool = True  # the output projection shares the token embedding
    unit_variance: bool = False  # llama only: divide products by sqrt(width of the input), for weights of unit variance
    output_bias: Literal["unigram", "none"] = "none"  # unigram adds the log of the token counts to the logits
    match: Section | None = None  # adds the longest match to the embedding: {window: 4096, longest: 8}


def model_names() -> list[str]:
    """The architectures that `create_model` can build."""
    return [*architectures(), *BASELINES]


def create_config(
    architecture: str,
    *,
    hidden_size: int,
    num_layers: int | None = None,
    vocab_size: int,
    n_positions: int,
    options: Mapping[str, Any] | None = None,
    layers: Sequence[Mapping[str, Any]] | None = None,
    **model: Any,
) -> PretrainedConfig:
    """The config of a model with these sizes.

    Args:
        architecture: a registered architecture, a trusted file with a layer (FILE.py:Class), or "gpt2" or "llama",
            transformers' own models.
        hidden_size, num_layers, vocab_size: D, number of layers (6 if not given), V.
        n_positions: longest text the model must read.
        options: choices of the architecture's preset; num_heads and dropout for the baselines.
        layers: entries that replace the preset's, see `MultilinConfig.from_architecture`.
        model: further fields of the config, see MultilinConfig; for the baselines BaselineConfig.

    Raises:
        InputError: an unknown name or option, or sizes that do not fit.
    """
    if num_layers is None and layers is None:
        num_layers = DEFAULT_NUM_LAYERS
    architecture = _check_name(architecture)
    if layers is not None:
        layers = resolve_fields({"layers": list(layers)}, is_typed=False)["layers"]
    given: dict[str, Any] = {
        "hidden_size": hidden_size, "num_layers": num_layers, "vocab_size": vocab_size, "n_positions": n_positions
    }  # fmt: skip
    if architecture not in BASELINES:
        return MultilinConfig.from_architecture(architecture, **given, options=options, layers=layers, **model)
    if num_layers is None:
        raise InputError(f"layers: given, but {architecture} has no list of layers")
    sizes = load_settings(Sizes, given)
    choices = load_settings(BaselineOptions, options or {}, "model.options")
    if sizes.hidden_size % choices.num_heads:
        raise InputError(f"num_heads: {choices.num_heads} given, but it must divide the hidden size {hidden_size}")
    if architecture == "llama" and sizes.hidden_size // choices.num_heads % 2:
        raise InputError(
            f"num_heads: {choices.num_heads} given, but it must divide half the hidden size, {hidden_size // 2}, "
            "because rotary positions turn pairs of numbers"
        )
    fields = dataclasses.asdict(load_settings(BaselineConfig, model, "model.config"))
    if architecture != "llama" and fields.pop("unit_variance"):
        raise InputError("model.config.unit_variance: True given, but only llama has it; leave it out")
    if all(fields.get(name, usual) == usual for name, usual in _OURS.items()):
        fields = {name: value for name, value in fields.items() if name not in _OURS}
    return BASELINES[architecture](
        sizes.hidden_size, sizes.num_layers, choices.num_heads, choices.dropout,
        vocab_size=sizes.vocab_size, n_positions=sizes.n_positions, **fields,
    )  # fmt: skip


def create_model(architecture: str, **sizes: Any) -> PreTrainedModel:
    """Create a model with random weights; the arguments are the same as for `create_config`."""
    return AutoModelForCausalLM.from_config(create_config(architecture, **sizes))


def _check_name(architecture: str) -> str:
    """The name; for a layer in a file, its permanent name."""
    if is_own(architecture):
        return resolve(architecture, is_typed=False)
    if architecture not in model_names():
        hint = nearest(architecture, model_names()) or f"; known are {', '.join(model_names())}"
        raise InputError(f"model.architecture: {shown(architecture)} is not known{hint}")
    return architecture


def training_defaults(architecture: str) -> TrainingDefaults:
    """The training settings that an architecture's source recommends; for GPT-2 and Llama, multilin's defaults.

    Raises:
        InputError: an unknown name.
    """
    architecture = _check_name(architecture)
    if architecture in BASELINES:
        return TrainingDefaults()
    return get_architecture(architecture).expand(Sizes(1, 1, 1, 1), {}).training


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The module with the layers of a model of multilin or transformers."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next(layers for layers in lists if len(layers) == model.config.num_hidden_layers)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; restore the mode of each module when the block ends, also after an error."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
