"""What the analyses can be asked for. Nothing heavy is imported here: the command line reads these before PyTorch."""

from dataclasses import field
from typing import Literal

from multilin.settings import bounds, settings


@settings
class EvaluationSettings:
    """What a model is scored on."""

    source: bounds.PathText | None = None  # corpus, file, folder, glob or hub dataset; else the run's validation text
    max_tokens: bounds.Tokens | None = None  # about so many tokens, evenly spread, with --long the first; else all
    batch_size: bounds.Batch = 8  # blocks in one forward pass
    text_field: str = "text"  # the field or column of rows (not of .txt and .md) that holds the text
    encoding_errors: Literal["strict", "replace"] = "strict"  # bytes that are not UTF-8: refuse, or replace by U+FFFD


@settings
class ExplainSettings:
    """What is explained, and how."""

    document: bounds.Index | None = None  # where no text is given: the document of the validation text, from 0
    max_tokens: bounds.ShortLength = 400  # longest text; each token is removed once: twice as long takes four times
    remove: bool = True  # also measure how each prediction changes when a token is removed
    batch_size: bounds.Batch = 16  # sequences, each without one token, in one forward pass


@settings
class PlanSettings:
    """The devices that a run would be trained on."""

    devices: bounds.Count = 1  # devices that train together
    kind: Literal["here", "cpu", "h200", "a100"] = "here"  # of device: this machine, or its processor, or a GPU's name
    efficiency: bounds.Share | None = None  # share of the peak that training reaches; by default measured here, or 0.4
    price: bounds.Positive | None = None  # price of an hour of one device


@settings
class ModelSizes:
    """The sizes of a model that is not trained yet."""

    hidden_size: bounds.Width = 256  # width of the vectors between the layers
    num_layers: bounds.Depth = 6  # layers
    vocab_size: bounds.Vocabulary = 4096  # entries of the vocabulary
    n_positions: bounds.BlockLength = 256  # longest text, in tokens
    options: bounds.Section = field(default_factory=dict)  # options of the architecture
