"""The verbs that describe a model, an architecture, or this machine."""

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

from multilin.analysis.settings import ModelSizes
from multilin.cli.arguments import POSITIONAL
from multilin.cli.messages import as_json, loading, say_next
from multilin.cli.tables import make_console, print_table
from multilin.errors import InputError, plural
from multilin.settings import field_help, settings
from multilin.settings.bounds import PathText

if TYPE_CHECKING:
    from multilin.analysis.costs import ModelInfo
    from multilin.analysis.machine import Checkup
    from multilin.architectures.base import Architecture


@settings
class InfoArguments:
    """The model to describe."""

    model: Annotated[PathText | None, POSITIONAL] = None  # folder of a trained model, or the name of an architecture
    json: bool = False  # print JSON


def info(arguments: InfoArguments, sizes: ModelSizes) -> None:
    """Describe a model: parameters, operations per token, state, layers; and the options of an architecture.

    Without a name, list the architectures.
    """
    if arguments.model is None:
        _print_architectures(arguments, sizes)
        return
    with loading():
        from multilin.analysis.costs import find_model

        description, architecture = find_model(arguments.model, sizes)
    if arguments.json:
        print(as_json(description))
        return
    _print_model(description)
    if architecture is not None:
        _print_options(architecture)


def _print_architectures(arguments: InfoArguments, sizes: ModelSizes) -> None:
    if sizes != ModelSizes():
        raise InputError("MODEL: missing, but sizes are given; give the name of an architecture")
    with loading():
        from multilin.architectures.base import architectures

        known = architectures()
    if arguments.json:
        print(as_json({name: {"title": one.title, "source": one.source} for name, one in known.items()}))
        return
    rows = [(name, one.title, one.source) for name, one in known.items()]
    print_table("llw", rows, head=("architecture", "title", "source"))
    say_next(["multilin", "info", rows[0][0]])


def _print_model(info: "ModelInfo") -> None:
    """Print the model in a table of two columns, then a line for each layer."""
    options = [layer.options for layer in info.layers]
    shared = {k: v for k, v in info.layers[0].options.items() if all(k in o and o[k] == v for o in options)}
    summary = {
        "architecture": info.architecture,
        "options": _listed(shared),
        "parameters": f"{info.parameters:,}",
        "  in embeddings and output": f"{info.embedding_parameters:,}",
        "  elsewhere": f"{info.parameters - info.embedding_parameters:,}",
        "FLOPs per token": f"{info.flops_per_token:,}{_growth(info.flops_growth, '')}",
        "state": f"{info.state_bytes:,} bytes{_growth(info.state_growth, ' bytes')}",
        "longest text": "any length" if info.longest_text is None else f"{info.longest_text:,} tokens",
    }
    if info.match is not None:
        window, longest, size = (f"{info.match[name]:,}" for name in ("window", "longest", "state_bytes"))
        summary["longest match"] = f"up to {longest} tokens among the last {window}; {size} bytes of state"
    console = make_console()
    print_table("lw", summary.items())
    console.print()
    rows = (
        (
            str(layer.index),
            layer.architecture,
            _listed({name: value for name, value in layer.options.items() if name not in shared}),
            f"{layer.parameters:,}",
            f"{layer.state_bytes:,}{_growth(layer.state_growth, '')}",
        )
        for layer in info.layers
    )
    print_table("rlwrr", rows, head=("layer", "architecture", "options", "parameters", "state bytes"))
    console.print(
        "\nFLOPs count matrix products and attention when tokens are read one by one; a multiplication and an addition "
        "count as two operations. Pointwise operations are not counted.",
        style="dim",
    )


def _print_options(architecture: "Architecture") -> None:
    """Print the options of an architecture, which recipes set under `model.options`."""
    help_of, console = field_help(architecture.preset_options), make_console()
    defaults = {option.name: option.default for option in fields(architecture.preset_options)}
    rows = ((name, "none" if value is None else str(value), help_of[name]) for name, value in defaults.items())
    console.print()
    title = f"Options of {architecture.name} (model.options)"
    print_table("llw", rows, head=("option", "default", "meaning"), title=title)
    console.print(f"\nSource: {architecture.source}", style="dim")


def _growth(growth: int, unit: str) -> str:
    return f", plus {growth:,}{unit} for each further token" if growth else ""


def _listed(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {'none' if value is None else value}" for name, value in options.items())


@settings
class DoctorArguments:
    """The form of the report."""

    json: bool = False  # print JSON


def doctor(arguments: DoctorArguments) -> None:
    """Show this machine's hardware and packages, and which implementation each op will use."""
    with loading():
        from multilin.analysis.machine import examine

        checkup = examine()
    if arguments.json:
        print(as_json(checkup))
    else:
        _print_checkup(checkup)


def _print_checkup(checkup: "Checkup") -> None:
    rows = {"python": f"{checkup.python} on {checkup.platform}"}
    rows |= {name: version or "not installed" for name, version in checkup.versions.items()}
    rows |= {
        "device": checkup.device,
        "threads": f"{checkup.threads} on {plural(checkup.cores, 'core')}",
        "processor features": " ".join(checkup.cpu_features),
        "precision auto means": checkup.precision,
        "freed memory": checkup.freed_memory,
    }
    rows |= {f"op {name}": backend for name, backend in checkup.backends.items()}
    rows |= {f"op {name} on a GPU": backend for name, backend in checkup.gpu_backends.items()}
    print_table("ll", rows.items())
    console = make_console()
    for warning in checkup.warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, markup=False)
    if not checkup.warnings:
        console.print("no warnings", style="green")
