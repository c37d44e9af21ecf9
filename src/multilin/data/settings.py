"""The sections of a recipe that decide which text is read, and how the text becomes tokens."""

from pathlib import Path
from typing import Final, Literal

from multilin.settings import settings
from multilin.settings.bounds import Mixture, Part, PathText, Prose, Vocabulary

BYTE_VOCAB_SIZE = 258
"""Number of entries of a byte tokenizer: 256 bytes, end of text and padding."""
DEFAULT_KIND: Final = "bpe"
DEFAULT_VOCAB_SIZE = 4096
"""Default kind and vocabulary size of a trained tokenizer."""
MANIFEST = "manifest.json"
"""The file that describes the prepared text in a folder or at an address."""


@settings
class DataRecipe:
    """The text."""

    source: PathText = "python-docs"  # corpus, file, folder, glob, hub dataset, prepared text, task (task:mqar)
    mix: Mixture | None = None  # prepared texts to read instead of the source, as {folder or address: weight}
    validation: PathText | None = None  # a second source to validate on; without one, a part of the source is set aside
    validation_fraction: Part = 0.05  # share of the text's bytes set aside for validation
    validation_part: Literal["all", "final", "tuning"] = "all"  # validate on all validation text, or on one half of it
    text_field: str = "text"  # field or column that holds the text of a row (not for .txt and .md)
    encoding_errors: Literal["strict", "replace"] = "strict"  # bytes that are not UTF-8: refuse, or replace by U+FFFD

    @property
    def name(self) -> str:
        """The source, or all sources of the mixture."""
        return self.source if self.mix is None else " + ".join(self.mix)

    @property
    def is_prepared(self) -> bool:
        """True for a mixture, for a folder with a manifest, and for any address of fsspec, such as s3://bucket/text."""
        return self.mix is not None or "://" in self.source or Path(self.source, MANIFEST).is_file()


@settings
class TokenizerRecipe:
    """The tokenizer, trained on the text or loaded."""

    kind: Literal["bpe", "unigram", "byte"] | None = DEFAULT_KIND  # kind of tokenizer; null if the text has a tokenizer
    vocab_size: Vocabulary | None = None  # entries of a trained vocabulary; 4096 by default, fewer for little text
    path: PathText | None = None  # load this tokenizer (folder, tokenizer.json, hub name) instead of training one


@settings
class ShardSettings:
    """Settings of `multilin prepare`: the text, the tokenizer and the shards."""

    source: PathText  # text: a built-in corpus, a file, folder or glob, or a dataset of the Hugging Face hub
    output: PathText = "prepared"  # folder, or address for fsspec such as s3://bucket/folder, to write the shards to
    tokenizer: PathText | None = None  # load this tokenizer (folder, tokenizer.json, hub name) instead of training one
    kind: Literal["bpe", "unigram", "byte"] | None = None  # kind of tokenizer, bpe by default
    vocab_size: Vocabulary | None = None  # entries of a trained vocabulary; 4096 by default, fewer for little text
    validation_fraction: Part = 0.01  # share of the text's bytes set aside for validation
    text_field: str = "text"  # field or column that holds the text of a row (not for .txt and .md)
    encoding_errors: Literal["strict", "replace"] = "strict"  # bytes that are not UTF-8: refuse, or replace by U+FFFD


@settings
class TokenizerTrainArguments:
    """A tokenizer to train."""

    source: PathText  # text: a built-in corpus, a file, folder or glob, or a dataset of the Hugging Face hub
    output: PathText  # folder to write the tokenizer to
    kind: Literal["bpe", "unigram", "byte"] = DEFAULT_KIND  # kind of tokenizer
    vocab_size: Vocabulary | None = None  # entries of the vocabulary; 4096 by default, fewer for little text
    text_field: str = "text"  # field or column that holds the text of a row (not for .txt and .md)
    encoding_errors: Literal["strict", "replace"] = "strict"  # bytes that are not UTF-8: refuse, or replace by U+FFFD
    overwrite: bool = False  # replace the tokenizer in the output folder


@settings
class TokenizerShowArguments:
    """A tokenizer to show."""

    tokenizer: PathText  # folder with a tokenizer.json, run folder, or name on the hub
    source: PathText | None = None  # count tokens and bytes of this text
    text: Prose | None = None  # show how the tokenizer cuts this text
    text_field: str = "text"  # field or column that holds the text of a row (not for .txt and .md)
    encoding_errors: Literal["strict", "replace"] = "strict"  # bytes that are not UTF-8: refuse, or replace by U+FFFD
    json: bool = False  # print JSON
