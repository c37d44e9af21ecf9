"""The verb that looks at the machine."""

from typing import TYPE_CHECKING

from multilin.cli.messages import as_json, loading
from multilin.cli.tables import make_console, print_table
from multilin.errors import plural
from multilin.settings import settings

if TYPE_CHECKING:
    from multilin.machine import Checkup


@settings
class DoctorArguments:
    """The form of the report."""

    json: bool = False  # print JSON


def doctor(arguments: DoctorArguments) -> None:
    """Show what this machine offers and which implementation every op will use."""
    with loading():
        from multilin.machine import examine

        checkup = examine()
    if arguments.json:
        print(as_json(checkup))
    else:
        _print(checkup)


def _print(checkup: "Checkup") -> None:
    from multilin.machine import OPTIONAL

    rows = {"python": f"{checkup.python} on {checkup.platform}"}
    rows |= {name: version or "not installed" for name, version in checkup.versions.items()}
    rows |= {
        "device": checkup.device,
        "threads": f"{checkup.threads} on {plural(checkup.cores, 'core')}",
        "processor has": " ".join(checkup.cpu_features),
        "precision auto is": checkup.precision,
        "freed memory": checkup.freed_memory,
    }
    rows |= {f"op {name}": backend for name, backend in checkup.backends.items()}
    rows |= {f"op {name} on a GPU": backend for name, backend in checkup.gpu_backends.items()}
    for name, is_installed in checkup.optional.items():
        rows[f"optional {name}"] = "installed" if is_installed else f"not installed ({OPTIONAL[name]})"
    print_table("ll", rows.items())
    console = make_console()
    for warning in checkup.warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    if not checkup.warnings:
        console.print("no warnings", style="green")
