"""Settings of evaluate, explain and plan. The module does not import PyTorch, so that `--help` is fast."""

from dataclasses import field
from typing import Literal

from multilin.settings import bounds, settings


@settings
class EvaluationSettings:
    """The text that a model is scored on."""

    source: bounds.PathText | None = None  # corpus, file, folder, glob or hub dataset; else the run's validation text
    max_tokens: bounds.Tokens | None = None  # number of tokens to score, evenly spread (--long: the first); else all
    batch_size: bounds.Batch = 8  # blocks in one forward pass
    text_field: str = "text"  # field or column that holds the text of a row (not for .txt and .md)
    encoding_errors: Literal["strict", "replace"] = "strict"  # invalid UTF-8: an error, or replaced by U+FFFD


@settings
class ExplainSettings:
    """The text to explain, and how to explain it."""

    document: bounds.Index | None = None  # number of the validation document to explain, from 0, if no text is given
    max_tokens: bounds.ShortLength = 400  # longest text, in tokens; time grows with the square of the length
    remove: bool = True  # also measure how each prediction changes when a token is removed
    batch_size: bounds.Batch = 16  # sequences, each without one token, in one forward pass


@settings
class PlanSettings:
    """The devices that a run would be trained on."""

    devices: bounds.Count = 1  # devices that train together
    kind: Literal["here", "cpu", "h200", "a100"] = "here"  # kind of device: this machine, its CPU, or a GPU
    efficiency: bounds.Share | None = None  # share of peak speed in training; default: measured here, else 0.4
    price: bounds.Positive | None = None  # price of one device for one hour


@settings
class ModelSizes:
    """The sizes of a model that is not trained yet."""

    hidden_size: bounds.Width = 256  # width of the vectors between the layers
    num_layers: bounds.Depth = 6  # number of layers
    vocab_size: bounds.Vocabulary = 4096  # tokens in the vocabulary
    n_positions: bounds.BlockLength = 256  # longest text, in tokens
    options: bounds.Section = field(default_factory=dict)  # options of the architecture
