"""The sections of a recipe that say which text is read, and how it becomes tokens."""

from typing import Literal

from multilin.settings import settings
from multilin.settings.bounds import Part, PathText, Vocabulary


@settings
class DataRecipe:
    """The text."""

    source: PathText = "python-docs"  # a built-in corpus, file, folder, glob, hub dataset, or a task such as task:mqar
    validation: PathText | None = None  # a second source to validate on; without one, documents of the source are taken
    validation_fraction: Part = 0.05  # share of the documents split off for validation
    text_field: str = "text"  # the field or column of .jsonl, .csv and .parquet files that holds the text
    encoding_errors: Literal["strict", "replace"] = "strict"  # bytes that are not UTF-8: refuse, or replace by U+FFFD


@settings
class TokenizerRecipe:
    """The tokenizer, trained on the text or loaded."""

    kind: Literal["bpe", "unigram", "byte"] = "bpe"  # how text becomes tokens
    vocab_size: Vocabulary | None = None  # entries of a trained vocabulary, 4096 by default; byte has 258 and no choice
    path: PathText | None = None  # load this tokenizer (a folder or tokenizer.json) instead of training one
