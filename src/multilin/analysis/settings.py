"""What the analyses can be asked for. Nothing heavy is imported here: the command line reads these before PyTorch."""

from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from multilin.settings import settings

Positive = Annotated[int, Gt(0)]


@settings
class EvaluationSettings:
    """What a model is scored on."""

    source: str | None = None  # text: a corpus, file, folder, glob or hub dataset; else the run's validation text
    max_tokens: Positive | None = None  # score about so many tokens, spread evenly over the text; none scores all
    batch_size: Positive = 8  # blocks read at a time
    text_field: str = "text"  # the field or column of .jsonl, .csv and .parquet files that holds the text
    encoding_errors: Literal["strict", "replace"] = "strict"  # bytes that are not UTF-8: refuse, or replace by U+FFFD


@settings
class ExplainSettings:
    """What is explained, and how."""

    document: Annotated[int, Ge(0)] = 0  # where no text is given: the document of the validation text, from 0
    max_tokens: Positive = 400  # longest text; each of its tokens is removed once, so twice as long takes four times
    remove: bool = True  # also measure how each prediction changes when a token is removed
    batch_size: Positive = 16  # texts without a token read at a time


@settings
class ModelSizes:
    """The sizes of a model that is not trained yet."""

    hidden_size: int = 256  # width of the vectors between the layers
    num_layers: int = 6  # layers
    vocab_size: int = 4096  # entries of the vocabulary
    n_positions: int = 256  # longest text, in tokens
    options: dict[str, Any] = field(default_factory=dict)  # options of the architecture
