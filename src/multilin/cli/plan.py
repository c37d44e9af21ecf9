"""The verb that estimates the memory and time of a training run."""

import time
from typing import Annotated

from rich.filesize import decimal

from multilin.analysis.settings import PlanSettings
from multilin.cli.arguments import POSITIONAL
from multilin.cli.messages import as_flags, as_json, loading, read_recipe, say_next
from multilin.cli.tables import make_console, print_table
from multilin.cli.train import check_minutes, print_pick
from multilin.errors import InputError, duration
from multilin.settings import settings
from multilin.settings.bounds import Minutes, PathText
from multilin.training.recipe import Changes


@settings
class PlanArguments:
    """The recipe to plan."""

    recipe: Annotated[PathText | None, POSITIONAL] = None  # built-in recipe, YAML file or run folder; else the defaults
    minutes: Minutes | None = None  # estimate the run that `train --minutes` picks for this machine and the text
    json: bool = False  # print JSON


def plan(arguments: PlanArguments, devices: PlanSettings, changes: Changes) -> None:
    """Estimate the memory, time, network traffic and checkpoints of a training run.

    Sizes are computed from the recipe; its text is not read. On this machine, training steps are measured for about a
    second. For other devices, times follow from their peak speed and --efficiency.
    """
    began = time.monotonic()
    check_minutes(arguments.minutes, changes)
    if arguments.minutes is not None and (devices.devices, devices.kind) != (1, "here"):
        raise InputError(
            f"--minutes: {arguments.minutes:g} given, but --minutes picks a model for this machine alone; leave out "
            "--devices and --kind"
        )
    recipe = read_recipe(arguments.recipe, changes)
    with loading():
        from multilin.analysis.minutes import pick
        from multilin.analysis.plan import DEVICES, describe_plan, plan_training
        from multilin.cli.progress import TrainingDisplay
        from multilin.training.progress import TrainingProgress
    if arguments.minutes is not None:
        with TrainingDisplay() as display:
            progress = TrainingProgress() if arguments.json else display
            picked = pick(arguments.recipe, changes, arguments.minutes, began, progress)
        if not arguments.json:
            print_pick(picked)
        recipe = picked.with_steps
    found = plan_training(recipe, devices)
    if arguments.json:
        print(as_json(found))
        return
    console = make_console()
    print_table("lw", describe_plan(found).items())
    console.print()
    head = [
        "", "memory per device", "fits", "sent per step", "sending", "hidden", "tokens/s", "time", "device time",
        *([] if devices.price is None else ["cost"]),
    ]  # fmt: skip
    rows = [
        (
            way.way, decimal(way.memory), "yes" if way.fits else "NO", decimal(way.sent_bytes),
            duration(way.communication_seconds), "yes" if way.is_hidden else "no", f"{way.tokens_per_second:,.0f}",
            duration(3600 * way.hours), duration(3600 * way.device_hours),
            *([] if way.cost is None else [f"{way.cost:,.2f}"]),
        )
        for way in found.ways
    ]  # fmt: skip
    print_table("l" + "r" * (len(head) - 1), rows, head=head)
    console.print(
        "\nddp: each device holds the whole model; int8: the same with training.communication int8; fsdp: each device "
        "holds a part. Memory is a lower bound: activations are estimated, and no reserve is counted.\nDevices are "
        "assumed to send at the full speed of the link. Sending costs no time if it takes less time than computing.",
        style="dim",
    )
    minutes = {} if arguments.minutes is None else {"minutes": arguments.minutes}
    train = ["multilin", "train", *([arguments.recipe] if arguments.recipe else []), *as_flags(minutes | changes)]
    of_machines = ["--nnodes", devices.devices, "--rdzv-backend", "c10d", "--rdzv-endpoint", "FIRST_MACHINE:29500"]
    where = ["--standalone", "--nproc-per-node", devices.devices] if devices.kind in DEVICES else of_machines
    is_alone = devices.devices == 1 and devices.kind not in DEVICES
    say_next(train if is_alone else ["torchrun", *where, "-m", *train])
