"""The verb that prepares text of any size."""

from multilin.cli.messages import loading, say_next
from multilin.data.settings import ShardSettings
from multilin.errors import plural
from multilin.settings import settings
from multilin.settings.bounds import Count


@settings
class PrepareArguments:
    """How the work is divided."""

    workers: Count | None = None  # processes that pack text, one for each core by default


def prepare(plan: ShardSettings, arguments: PrepareArguments) -> None:
    """Prepare text of any size for training: shards of tokens, a tokenizer, a manifest with checksums.

    What is finished stays when it is interrupted or killed, and the same command goes on from there. Training reads it
    with `--data.source FOLDER`; several are mixed with `--data.mix '{"FOLDER": 2, "OTHER": 1}'`.
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
        f"{plural(manifest.num_tokens, 'token')} in {plural(len(manifest.train), 'shard')}, in {plan.output}"
    )
    say_next(f"multilin train --data.source {plan.output}")
