"""The configuration of the one model."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

from multilin.architectures.base import Sizes, get_architecture, layer_entry
from multilin.errors import InputError, nearest
from multilin.layers.linear import Arithmetic
from multilin.model.remote import AUTO_MAP
from multilin.settings import load_settings

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
POSITIONS = ("learned", "none")
FINAL_NORMS = ("layer_norm", "tile_norm", "none")
OUTPUT_BIASES = ("learned", "unigram", "none")


class MultilinConfig(PretrainedConfig):
    """Sizes, embedding and output options, and one entry per layer: so windows, slopes and hybrids are plain data.

    Args:
        vocab_size: V, number of tokens.
        hidden_size: D, width of the states between layers.
        layers: per layer {"architecture": name, **its options}; layers of several architectures make a hybrid. A layer
            may have its own "initializer_range".
        n_positions: longest text that can be read, or None for no limit; needed by learned positions.
        positions: "learned" adds an embedding of the position to the token's; "none" adds nothing.
        tie_word_embeddings: the output projection shares the token embedding.
        output_bias: "learned" adds a bias per token to the logits, "unigram" a fixed one that `set_token_counts` sets
            to the log of how often each token occurs, "none" adds nothing.
        logit_scale: factor on the product with the output embedding (not on the bias).
        final_norm: before the output: "layer_norm", "tile_norm" (root mean square, no parameters), or "none".
        final_norm_tile: width of the tiles of "tile_norm"; None is the whole vector.
        embedding_dropout: probability, in training.
        label_smoothing: share of the target spread evenly over the vocabulary, in training only.
        initializer_range: standard deviation of initial weights.
        embedding_range: that of the token embedding; None is the same.
        use_cache: return the state of the text that was read, where a call does not say.
        arithmetic: fields of `multilin.layers.linear.Arithmetic`; None multiplies floats.
    """

    model_type = "multilin"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"max_position_embeddings": "n_positions"}

    def __init__(
        self,
        vocab_size: int = 258,
        hidden_size: int = 128,
        layers: list[dict[str, Any]] | None = None,
        n_positions: int | None = None,
        positions: str = "none",
        tie_word_embeddings: bool = True,
        output_bias: str = "none",
        logit_scale: float = 1.0,
        final_norm: str = "layer_norm",
        final_norm_tile: int | None = None,
        embedding_dropout: float = 0.0,
        label_smoothing: float = 0.0,
        initializer_range: float = 0.02,
        embedding_range: float | None = None,
        arithmetic: Mapping[str, Any] | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.layers = [dict(entry) for entry in layers or []]
        self.n_positions = n_positions
        self.positions = positions
        self.output_bias = output_bias
        self.logit_scale = logit_scale
        self.final_norm = final_norm
        self.final_norm_tile = final_norm_tile
        self.embedding_dropout = embedding_dropout
        self.label_smoothing = label_smoothing
        self.initializer_range = initializer_range
        self.embedding_range = embedding_range
        self.arithmetic = dict(arithmetic or {})
        self.use_cache = use_cache
        self.num_hidden_layers = len(self.layers)
        num_layers = kwargs.pop("num_hidden_layers", len(self.layers))
        if num_layers != len(self.layers):
            raise InputError(f"num_hidden_layers: {num_layers} given, but {len(self.layers)} layers are listed")
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        self.tie_word_embeddings = tie_word_embeddings
        self._check()

    def _check(self) -> None:
        for name in ("vocab_size", "hidden_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)} given, but it must be at least 1")
        for name, accepted in (("positions", POSITIONS), ("final_norm", FINAL_NORMS), ("output_bias", OUTPUT_BIASES)):
            if getattr(self, name) not in accepted:
                raise InputError(f"{name}: {getattr(self, name)!r} given, but it must be {' or '.join(accepted)}")
        if self.positions == "learned" and not self.n_positions:
            raise InputError("n_positions: none given, but learned positions need the length of the longest text")
        for name in ("label_smoothing", "embedding_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)} given, but it must be at least 0 and below 1")
        load_settings(Arithmetic, self.arithmetic, "arithmetic")
        for index, entry in enumerate(self.layers):
            if "architecture" not in entry:
                raise InputError(f"layers.{index}: no architecture given; every layer names one")

    @property
    def num_attention_heads(self) -> int:
        """Largest number of heads of a layer, for tools that ask by this name; 1 where layers have no heads."""
        heads = [1]
        for entry in self.layers:
            options = {name: entry[name] for name in entry if name not in ("architecture", "initializer_range")}
            heads.append(get_architecture(entry["architecture"]).count_heads(self.hidden_size, options))
        return max(heads)

    @num_attention_heads.setter
    def num_attention_heads(self, value: int) -> None:
        raise InputError(f"num_attention_heads: {value} given, but each layer has its own number; set it in layers")

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
        """The preset of an architecture at these sizes.

        Args:
            name: a registered architecture.
            hidden_size, num_layers, vocab_size, n_positions: see the class.
            options: choices of the architecture's preset (heads, windows, ...).
            layers: entries as in the class that replace the preset's: a hybrid in the frame of this architecture. Each
                has its own options, so `options` has no place beside it.
            model: fields of this class that replace the preset's, and token ids.

        Raises:
            InputError: an unknown architecture, option or field, or a value out of range.
        """
        if layers is not None:
            num_layers = _count_layers(layers, num_layers, options)
        if num_layers is None:
            raise InputError("num_layers: none given, but it is needed where no layers are listed")
        sizes = Sizes(hidden_size, num_layers, vocab_size, n_positions)
        preset = get_architecture(name).expand(sizes, options or {})
        known = [*inspect.signature(cls.__init__).parameters, *TOKEN_IDS]
        for field in model:
            if field not in known:
                raise InputError(f"{field}: unknown field of the model{nearest(field, known)}")
        fields = {"n_positions": n_positions, **preset.model, **model}
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            layers=[layer_entry(name, options) for options in preset.layers]
            if layers is None
            else [dict(entry) for entry in layers],
            **fields,
        )


def _count_layers(layers: Sequence[Any], num_layers: int | None, options: Mapping[str, Any] | None) -> int:
    if not layers or not all(isinstance(entry, Mapping) for entry in layers):
        raise InputError(f"layers: {layers!r:.60} given, but it must be a list of {{architecture: name, its options}}")
    if num_layers not in (None, len(layers)):
        raise InputError(f"num_layers: {num_layers} given, but {len(layers)} layers are listed; leave it out")
    if options:
        raise InputError(f"options.{next(iter(options))}: given, but where layers are listed each has its own options")
    return len(layers)
