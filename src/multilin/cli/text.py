"""The verbs that prepare text for training: they write text of any size as shards, and train or show tokenizers."""

from typing import TYPE_CHECKING

from multilin.cli.messages import as_json, loading, say_next
from multilin.cli.tables import print_table
from multilin.data.settings import ShardSettings, TokenizerShowArguments, TokenizerTrainArguments
from multilin.errors import plural
from multilin.settings import settings
from multilin.settings.bounds import Count

if TYPE_CHECKING:
    from multilin.data.tokenizer_tools import TokenizerInfo


@settings
class PrepareArguments:
    """How the work is divided."""

    workers: Count | None = None  # processes that pack text, one for each core by default


def prepare(plan: ShardSettings, arguments: PrepareArguments) -> None:
    """Prepare text of any size for training: write shards of tokens, a tokenizer, and a manifest with checksums.

    An interrupted or killed command keeps its finished parts; run it again to continue. Training reads the folder with
    `--data.source FOLDER`, or several folders with `--data.mix '{"FOLDER": 2, "OTHER": 1}'`.
    """
    with loading():
        from multilin.cli.progress import show_progress
        from multilin.data.sharding import prepare_shards
        from multilin.ops.threads import available_cores
    workers = arguments.workers or available_cores()
    with show_progress() as progress:
        manifest = prepare_shards(plan, workers=workers, progress=progress)
    print(
        f"{plural(manifest.num_documents, 'document')}, {plural(manifest.num_bytes, 'byte')}, "
        f"{plural(manifest.num_tokens, 'token')} in {plural(len(manifest.train), 'shard')}, saved in {plan.output}"
    )
    print(f"validation: {manifest.validation.describe().summary}")
    say_next(["multilin", "train", "--data.source", plan.output])


def tokenizer_train(arguments: TokenizerTrainArguments) -> None:
    """Train a tokenizer on a text and save it to a folder."""
    with loading("transformers"):
        from multilin.cli.progress import show_progress
        from multilin.data.tokenizer_tools import train_into_folder
    with show_progress() as progress:
        tokenizer = train_into_folder(arguments, progress)
    print(f"vocabulary of {len(tokenizer):,} tokens, saved in {arguments.output}")
    say_next(
        ["multilin", "tokenizer", "show", arguments.output, "--source", arguments.source],
        ["multilin", "train", "--data.source", arguments.source, "--tokenizer.path", arguments.output],
    )


def tokenizer_show(arguments: TokenizerShowArguments) -> None:
    """Show a tokenizer: its vocabulary, its special tokens, and how it cuts a text."""
    with loading("transformers"):
        from multilin.cli.progress import show_progress
        from multilin.data.tokenizer_tools import describe_tokenizer
    with show_progress() as progress:
        info = describe_tokenizer(arguments, progress)
    if arguments.json:
        print(as_json(info))
    else:
        _print(info)


def _print(info: "TokenizerInfo") -> None:
    rows = {"vocabulary": f"{info.vocabulary:,} tokens"} | info.special_tokens
    if info.bytes is not None and info.tokens is not None:
        rows["text"] = f"{plural(info.bytes, 'byte')} in {plural(info.tokens, 'token')}"
        rows["bytes per token"] = f"{info.bytes_per_token:.3f}"
    if info.pieces is not None:
        rows["pieces"] = " ".join(map(repr, info.pieces))
    print_table("lw", rows.items())
