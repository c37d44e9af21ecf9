"""The configuration of a multilin model."""

import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import MaxLen
from transformers import PretrainedConfig

from multilin.architectures.base import LayerOptions, Sizes, get_architecture
from multilin.architectures.own_file import Source, open_code, resolve, resolve_fields
from multilin.errors import InputError, nearest, prefixed, shorten, shown
from multilin.layers.linear import Arithmetic
from multilin.model.match import Match
from multilin.settings import load_settings, settings
from multilin.settings.bounds import (
    Factor,
    Fraction,
    LayerList,
    Length,
    Section,
    Strength,
    TokenId,
    Vocabulary,
    Width,
)

AUTO_FILE = "modeling_multilin.py"
"""A file in the folder of a saved model, which imports multilin and is run with `trust_remote_code=True`.

transformers knows multilin's model type after multilin is imported. Otherwise it runs the file that `auto_map` in
`config.json` names, or says that multilin must be installed.
"""

AUTO_MAP = {
    "AutoConfig": "modeling_multilin.MultilinConfig",
    "AutoModel": "modeling_multilin.MultilinModel",
    "AutoModelForCausalLM": "modeling_multilin.MultilinForCausalLM",
}
"""multilin's class for each Auto class of transformers, as `config.json` lists them."""

_AUTO_TEXT = '''"""A model that needs the package multilin: `pip install multilin`, and `import multilin` to load it."""

from multilin import MultilinConfig, MultilinForCausalLM, MultilinModel
'''


@settings
class TokenIds:
    """The ids of the special tokens."""

    bos_token_id: TokenId | None = None  # starts a text
    eos_token_id: TokenId | Annotated[list[TokenId], MaxLen(100)] | None = None  # ends a text
    pad_token_id: TokenId | None = None  # the token that pads short rows


@settings
class _LayerEntry:
    """Fields that every entry of `layers` may have in addition to the options of its architecture."""

    architecture: str  # a registered one
    initializer_range: Strength | None = None  # standard deviation of initial weights; null takes the model's value


_OF_EVERY_LAYER = tuple(field.name for field in dataclasses.fields(_LayerEntry))


class MultilinConfig(PretrainedConfig):
    """The config of a model: sizes, options of embedding and output, and one entry of options per layer.

    Args:
        vocab_size: V, number of tokens.
        hidden_size: D, width of the states between layers.
        layers: per layer {"architecture": name, **its options}; layers of several architectures make a hybrid. A layer
            may have its own "initializer_range".
        n_positions: longest text that can be read, or None for no limit; needed by learned positions.
        positions: "learned" adds an embedding of the position to the token embedding; "none" adds nothing.
        tie_word_embeddings: the output projection shares the token embedding.
        output_bias: "learned" adds a bias per token to the logits, "unigram" a fixed one that `set_token_counts` sets
            to the log of how often each token occurs, "none" adds nothing.
        final_norm: before the output: "layer_norm", "tile_norm" (root mean square, no parameters), or "none".
        final_norm_tile: width of the tiles of "tile_norm"; None is the whole vector.
        final_scale: factor on the hidden states between the final norm and the head.
        embedding_dropout: dropout probability, in training.
        label_smoothing: share of the target spread evenly over the vocabulary, in training only.
        initializer_range: standard deviation of initial weights.
        embedding_range: standard deviation of the initial token embedding; None is initializer_range.
        use_cache: whether calls return the state by default.
        arithmetic: fields of `multilin.layers.linear.Arithmetic`; None multiplies floats.
        match: fields of `multilin.model.match.Match`: adds the longest match to the embedding; None adds nothing.
    """

    model_type = "multilin"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"max_position_embeddings": "n_positions"}

    def __init__(
        self,
        vocab_size: Vocabulary = 258,
        hidden_size: Width = 128,
        layers: LayerList | None = None,
        n_positions: Length | None = None,
        positions: Literal["learned", "none"] = "none",
        tie_word_embeddings: bool = True,
        output_bias: Literal["learned", "unigram", "none"] = "none",
        final_norm: Literal["layer_norm", "tile_norm", "none"] = "layer_norm",
        final_norm_tile: Width | None = None,
        final_scale: Factor = 1.0,
        embedding_dropout: Fraction = 0.0,
        label_smoothing: Fraction = 0.0,
        initializer_range: Strength = 0.02,
        embedding_range: Strength | None = None,
        arithmetic: Section | None = None,
        match: Section | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        given = locals()
        for other, name in self.attribute_map.items():
            if other in kwargs:
                given[name] = kwargs.pop(other)
        fields = load_settings(_Fields, {name: given[name] for name in FIELDS})
        for name in FIELDS:
            setattr(self, name, getattr(fields, name))
        self.initializer_range: float = fields.initializer_range
        self.layers: list[dict[str, Any]] = [dict(entry) for entry in fields.layers or []]
        self.arithmetic: dict[str, Any] = dict(fields.arithmetic or {})
        if fields.match is not None:
            self.match = dataclasses.asdict(load_settings(Match, fields.match, "match"))
        self._check(kwargs)
        self.num_hidden_layers = len(self.layers)
        num_layers = kwargs.pop("num_hidden_layers", len(self.layers))
        if num_layers != len(self.layers):
            raise InputError(f"num_hidden_layers: {num_layers} given, but {len(self.layers)} layers are listed")
        num_heads = kwargs.pop("num_attention_heads", None)
        if num_heads is not None and num_heads != self.num_attention_heads:
            self.num_attention_heads = num_heads  # the setter refuses this field
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        super().__init__(**{**kwargs, "tie_word_embeddings": self.tie_word_embeddings})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Load a config as transformers does, and the code of its layers from users' files, if it is trusted.

        Raises:
            InputError: the code is missing, or its hash is not trusted, see `multilin.trust_code`.
        """
        kwargs.setdefault("name_or_path", pretrained_model_name_or_path)
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a config as transformers does, but check keyword arguments as strictly as the fields of the file."""
        open_code(config_dict, kwargs.get("name_or_path"))
        own = [*FIELDS, *TOKEN_IDS, *cls.attribute_map, "num_hidden_layers"]
        given = {name: kwargs.pop(name) for name in own if name in kwargs}
        return super().from_dict({**config_dict, **given}, **kwargs)

    def _check(self, others: Mapping[str, Any]) -> None:
        """Refuse unknown names, and fields that contradict each other; types are checked elsewhere."""
        if "logit_scale" in others:  # In other models, logit_scale also scales the output bias; final_scale does not.
            raise InputError("logit_scale: given, but this model has final_scale, a factor on the final hidden states")
        for name in others:  # transformers keeps unknown fields, such as those of other tools; only typos fail
            if not hasattr(PretrainedConfig, name) and (hint := nearest(name, FIELDS, cutoff=0.85)):
                raise InputError(f"{shorten(name)}: unknown field of the model{hint}")
        load_settings(TokenIds, {name: others[name] for name in TOKEN_IDS if name in others})
        load_settings(Arithmetic, self.arithmetic, "arithmetic")
        if self.positions == "learned" and not self.n_positions:
            raise InputError("n_positions: none given, but learned positions need the length of the longest text")
        for index, entry in enumerate(self.layers):
            if "architecture" not in entry:
                raise InputError(f"layers.{index}: no architecture given; every layer names one")
            values = {name: value for name, value in entry.items() if name in _OF_EVERY_LAYER}
            load_settings(_LayerEntry, values, f"layers.{index}")

    @property
    def num_attention_heads(self) -> int:
        """Largest number of heads of a layer, for tools that ask by this name; 1 where layers have no heads."""
        return max([options.count_heads(self.hidden_size) for options in self.layer_options()], default=1)

    @num_attention_heads.setter
    def num_attention_heads(self, value: int) -> None:
        raise InputError(f"num_attention_heads: {value} given, but each layer has its own; set num_heads in `layers`")

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary, with the number of heads, which PEFT reads there."""
        return super().to_dict() | {"num_attention_heads": self.num_attention_heads}

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Architecture, width, options and longest match of each layer; models of equal kinds can exchange states."""
        match = f", match {json.dumps(self.match)}" if self.match else ""
        return tuple(
            f"{entry['architecture']} of width {self.hidden_size}, {json.dumps(entry, sort_keys=True)}{match}"
            for entry in self.layers
        )

    def layer_options(self) -> Iterator[LayerOptions]:
        """The options of each layer, defaults included."""
        for index, entry in enumerate(self.layers):
            with prefixed(f"layers.{index}."):
                architecture = get_architecture(entry["architecture"])
            values = {name: value for name, value in entry.items() if name not in _OF_EVERY_LAYER}
            yield load_settings(architecture.options, values, f"layers.{index}")

    @classmethod
    def from_architecture(
        cls,
        name: str,
        *,
        hidden_size: int,
        num_layers: int | None = None,
        vocab_size: int,
        n_positions: int | None = None,
        options: Mapping[str, Any] | None = None,
        layers: Sequence[Mapping[str, Any]] | None = None,
        **model: Any,
    ) -> "MultilinConfig":
        """The configuration of an architecture's preset at these sizes.

        Args:
            name: a registered architecture, or a file with a layer, FILE.py:Class, which is run.
            hidden_size, num_layers, vocab_size, n_positions: see the class.
            options: choices of the architecture's preset (heads, windows, ...).
            layers: entries as in the class, which replace the preset's layers; its other fields stay. Each entry has
                its own options, so `options` must not be given. If nothing sets n_positions, it is the lowest
                limit of all layers.
            model: fields of this class that replace the preset's, and token ids.

        Raises:
            InputError: an architecture, option or field is unknown, or a value is out of range.
        """
        if layers is not None:
            num_layers = _count_layers(layers, num_layers, options)
            layers = resolve_fields({"layers": list(layers)}, is_typed=True)["layers"]
        name = resolve(name, is_typed=True)
        if num_layers is None:
            raise InputError("num_layers: none given, but it is needed where no layers are listed")
        sizes = load_settings(Sizes, {
            "hidden_size": hidden_size, "num_layers": num_layers, "vocab_size": vocab_size, "n_positions": n_positions,
        })  # fmt: skip
        preset = get_architecture(name).expand(sizes, options or {})
        known = [*FIELDS, *TOKEN_IDS]
        fields = {"n_positions": n_positions, **preset.model, **model}
        for field in fields:
            if field not in known:
                raise InputError(f"{shorten(field)}: unknown field of the model{nearest(field, known)}")
        tile = model.get("final_norm_tile")
        if tile is not None and fields.get("final_norm") != "tile_norm":
            raise InputError(f"final_norm_tile: {tile!r:.40} given, but only tile_norm has tiles; leave it out")
        if layers is None:
            layers = [{"architecture": name, **dataclasses.asdict(options)} for options in preset.layers]
        entries = [dict(entry) for entry in layers]
        config = cls(vocab_size=sizes.vocab_size, hidden_size=sizes.hidden_size, layers=entries, **fields)
        if config.n_positions is None:  # the preset has no limit, but layers may have one
            limits = (options.longest_text for options in config.layer_options())
            config.n_positions = min((limit for limit in limits if limit is not None), default=None)
        return config


# The fields and their bounds are read from the signature.
FIELDS = tuple(name for name in inspect.signature(MultilinConfig.__init__).parameters if name not in ("self", "kwargs"))
TOKEN_IDS = tuple(field.name for field in dataclasses.fields(TokenIds))
_HINTS = get_type_hints(MultilinConfig.__init__, include_extras=True)
_Fields: Any = settings(type("_Fields", (), {"__annotations__": {name: _HINTS[name] for name in FIELDS}}))


def _count_layers(layers: Sequence[Any], num_layers: int | None, options: Mapping[str, Any] | None) -> int:
    if not layers or not all(isinstance(entry, Mapping) for entry in layers):
        raise InputError(f"layers: {shown(layers)} given, but it must be a list of {{architecture: name, its options}}")
    if num_layers not in (None, len(layers)):
        raise InputError(f"num_layers: {num_layers} given, but {len(layers)} layers are listed; leave it out")
    if options:
        raise InputError(f"options.{next(iter(options))}: given, but layers are listed; put it into their entries")
    return len(layers)


def write_auto_file(folder: Path, sources: Mapping[str, Source]) -> None:
    """Write the file that `AUTO_MAP` names, and the code of layers from users' files under the given names.

    Whoever runs the first file, with `trust_remote_code=True`, trusts the other files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trusted = [f"trust_hash({source.hash!r})  # {name}\n" for name, source in sources.items()]
    more = ["from multilin.files.trust import trust_hash\n\n", *trusted] if trusted else []
    (folder / AUTO_FILE).write_text("".join([_AUTO_TEXT, *more]), encoding="utf-8")
    for name, source in sources.items():
        (folder / name).write_bytes(source.code)
