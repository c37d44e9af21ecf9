"""The verb that checks a layer."""

from dataclasses import field

from multilin.cli.messages import as_flags, as_json, loading, say_next
from multilin.cli.tables import print_table
from multilin.settings import bounds, settings


@settings
class CheckArguments:
    """The layer to check."""

    layer: str  # FILE.py:Class, package.module:Class, or the name of an architecture
    hidden_size: bounds.Width = 32  # width of the vectors that the layer reads
    options: bounds.Section = field(default_factory=dict)  # options of the layer
    json: bool = False  # print JSON


def check(arguments: CheckArguments) -> None:
    """Check a layer: whether it is right, what it costs, and what it can do.

    The exit status is 1 if a check fails.
    """
    with loading():
        from multilin.cli.progress import show_progress
        from multilin.testing import check_layer
    with show_progress() as progress:
        report = check_layer(
            arguments.layer, hidden_size=arguments.hidden_size, options=arguments.options, raises=False,
            progress=progress,
        )  # fmt: skip
    if arguments.json:
        print(as_json(report))
    else:
        rows = [[finding.name, finding.result, finding.sentence] for finding in report.findings]
        failed = [index for index, (_, result, _) in enumerate(rows) if result == "failure"]
        print_table("llw", rows, head=("check", "result", report.layer), bold=failed)
    if report.failures:
        raise SystemExit(1)
    options = as_flags({f"model.options.{name}": value for name, value in arguments.options.items()})
    train = ["multilin", "train", "--model.architecture", arguments.layer, *options, "--data.source", "my-books/"]
    say_next(train, ["multilin", "compare", arguments.layer, "llama"])
