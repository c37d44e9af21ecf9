"""The verb that says what a training run will take."""

import json
from typing import Annotated

from rich.filesize import decimal

from multilin.analysis.settings import PlanSettings
from multilin.cli.arguments import POSITIONAL
from multilin.cli.messages import as_json, loading, say_next
from multilin.cli.tables import make_console, print_table
from multilin.settings import settings
from multilin.settings.bounds import PathText
from multilin.training.recipe import Changes, load_recipe


@settings
class PlanArguments:
    """The recipe to plan."""

    recipe: Annotated[PathText | None, POSITIONAL] = None  # built-in recipe, YAML file or run folder; else the defaults
    json: bool = False  # print JSON


def plan(arguments: PlanArguments, devices: PlanSettings, changes: Changes) -> None:
    """Say what training will take, before anything is rented: memory, bytes sent, hours, checkpoints.

    Counted from the model, without its text; times follow from the peak of the device and --efficiency.
    """
    recipe = load_recipe(arguments.recipe, changes)
    with loading():
        from multilin.analysis.plan import describe_plan, plan_training
    found = plan_training(recipe, devices)
    if arguments.json:
        print(as_json(found))
        return
    console = make_console()
    print_table("lw", describe_plan(found).items())
    console.print()
    head = [
        "", "memory per device", "fits", "sent per step", "sending, s", "hidden", "tokens/s", "hours", "device hours",
        *([] if devices.price is None else ["cost"]),
    ]  # fmt: skip
    rows = [
        (
            way.way, decimal(way.memory), "yes" if way.fits else "NO", decimal(way.sent_bytes),
            f"{way.communication_seconds:.3g}", "yes" if way.is_hidden else "no", f"{way.tokens_per_second:,.0f}",
            f"{way.hours:,.3g}", f"{way.device_hours:,.3g}", *([] if way.cost is None else [f"{way.cost:,.2f}"]),
        )
        for way in found.ways
    ]  # fmt: skip
    print_table("l" + "r" * (len(head) - 1), rows, head=head)
    console.print(
        "\nddp: every device holds all; int8: the same with training.communication int8; fsdp: each holds a part.\n"
        "Memory is a lower bound, as activations are estimated and no reserve is counted; "
        f"times assume {devices.efficiency:.0%} of the device's peak and the full speed of its link.",
        style="dim",
    )
    of_machines = ["--nnodes", devices.devices, "--rdzv-backend", "c10d", "--rdzv-endpoint", "FIRST_MACHINE:29500"]
    is_one = devices.kind != "cpu" or devices.devices == 1
    where = ["--standalone", "--nproc-per-node", devices.devices] if is_one else of_machines
    launcher = ["torchrun", *where, "-m"]
    typed = {f"--{name}": value if isinstance(value, str) else json.dumps(value) for name, value in changes.items()}
    flags = [word for flag in typed.items() for word in flag]
    say_next([*launcher, "multilin", "train", *([arguments.recipe] if arguments.recipe else []), *flags])
