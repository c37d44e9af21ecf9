"""Checkpoint folders and their files (safetensors and JSON), each complete or absent.

A checkpoint is written into a hidden folder, which is renamed when all files are on the disk. So after a full disk, a
crash or a SIGKILL, the previous checkpoint is the newest. checksums.json shows whether files are undamaged.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from multilin.errors import as_input_error, shown
from multilin.files import atomic_folder, checksum, partial_path, remove_partials
from multilin.settings.inputs import check_regular, to_json

CHECKSUMS = "checksums.json"
PROGRESS = "progress.json"  # step, running sums and clock
LARGEST_NUMBER = 2**62  # largest integer in the JSON files of a checkpoint
_COMPLETE = re.compile(r"checkpoint-(\d+)")


def checkpoint_step(path: Path) -> int:
    """The step of a checkpoint folder."""
    return int(path.name.removeprefix("checkpoint-"))


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    complete = [path for path in folder.glob("checkpoint-*") if _COMPLETE.fullmatch(path.name) and path.is_dir()]
    return sorted(complete, key=checkpoint_step)


def checkpoint_folder(folder: Path, step: int) -> Path:
    """The folder of a checkpoint."""
    return folder / f"checkpoint-{step}"


def partial_folder(folder: Path, step: int) -> Path:
    """The folder in which all processes of a run write a checkpoint before it is published."""
    return partial_path(checkpoint_folder(folder, step), "run")


@contextlib.contextmanager
def published(folder: Path, step: int, keep: int) -> Iterator[Path]:
    """Context that yields a new folder to write a checkpoint into, and publishes it unless an error occurs.

    After publishing, all but the newest `keep` checkpoints are removed. Checkpoints of later steps are removed too:
    these are damaged checkpoints that the run did not resume from. After an error, the new folder is removed.
    """
    remove_partials(folder)
    with atomic_folder(checkpoint_folder(folder, step), partial_folder(folder, step)) as partial:
        yield partial
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        write_json(partial / CHECKSUMS, {path.relative_to(partial).as_posix(): checksum(path) for path in files})
    up_to_this = [path for path in checkpoints(folder) if checkpoint_step(path) <= step]
    for path in checkpoints(folder):
        if path not in up_to_this[-keep:]:
            shutil.rmtree(path)


def find_damage(checkpoint: Path) -> str | None:
    """A description of the first file of a checkpoint that does not match its checksum; None if all files match."""
    try:
        sums = json.loads((checkpoint / CHECKSUMS).read_bytes())
    except (OSError, ValueError, RecursionError):
        sums = None
    if not isinstance(sums, dict) or PROGRESS not in sums:
        return f"{CHECKSUMS} is {'damaged' if (checkpoint / CHECKSUMS).exists() else 'missing'}"
    for name, expected in sums.items():
        path = checkpoint / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if checksum(path) != expected:
                return f"{name} is damaged"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def write_optimizer(folder: Path, state: dict[str, Any]) -> None:
    """Write an optimizer state, in which names replace the parameters: the tensors and the settings.

    Args:
        folder: the checkpoint.
        state: {"state": {parameter: {slot: tensor}}, "param_groups": [{..., "params": [parameter]}]}.
    """
    tensors = {f"{slot}/{name}": value for name, slots in state["state"].items() for slot, value in slots.items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "optimizer.safetensors")
    write_json(folder / "optimizer.json", state["param_groups"])


def read_optimizer(folder: Path) -> dict[str, Any]:
    """Read the state that `write_optimizer` wrote."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    with loading(folder / "optimizer.safetensors"):
        for key, tensor in read_tensors(folder / "optimizer.safetensors").items():
            slot, name = key.split("/", 1)
            state.setdefault(name, {})[slot] = tensor
    return {"state": state, "param_groups": read_groups(folder)}


def read_groups(folder: Path) -> list[dict[str, Any]]:
    """For each group of an optimizer's parameters: its settings, and the names of its parameters."""
    with loading(folder / "optimizer.json"):
        return [
            # JSON has no tuples, only lists.
            {name: tuple(v) if isinstance(v, list) and name != "params" else v for name, v in group.items()}
            for group in read_json(folder / "optimizer.json")
        ]


def check_groups(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Refuse groups of parameters with other settings than the optimizer's own, see `check_like`."""
    saved, own = ([{k: v for k, v in group.items() if k != "params"} for group in groups] for groups in (saved, own))
    check_like(saved, own, "groups")


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file of a checkpoint, on the CPU; call this inside `loading`."""
    check_regular(path, "checkpoint")
    return load_file(path)


def write_json(path: Path, value: Any) -> None:
    """Write plain data as JSON; finite floats keep every bit."""
    path.write_text(to_json(value, indent=1), encoding="utf-8")


def read_json(path: Path) -> Any:
    """The plain data in a JSON file of a checkpoint; call this inside `loading`."""
    check_regular(path, "checkpoint")
    return json.loads(path.read_text(encoding="utf-8"))


def loading(path: Path) -> contextlib.AbstractContextManager[None]:
    """Context for code that uses the content of the file at `path`; any error inside becomes an InputError."""
    return as_input_error(
        lambda reason: (
            f"checkpoint {path.parent}: {path.name} cannot be read ({reason}); delete this folder to resume "
            "from the checkpoint before it"
        )
    )


def read_progress(checkpoint: Path, own: dict[str, Any] | None = None) -> dict[str, Any]:
    """The content of `progress.json` of a checkpoint; its names and types must be the same as in `own`.

    Raises:
        InputError: the file is damaged, or belongs to another step.
    """
    own = own or {"step": 0}
    with loading(checkpoint / PROGRESS):
        values = read_json(checkpoint / PROGRESS)
        check_like(values, own)
        _check_complete(values, own)
        if values["step"] != checkpoint_step(checkpoint):
            raise ValueError(f"step is {shown(values['step'])}")
        return dict(values)


def _check_complete(values: dict[str, Any], own: dict[str, Any], section: str = "") -> None:
    if missing := own.keys() - values.keys():
        raise ValueError(f"it has no {section}{min(missing)}")
    for name, inner in own.items():
        if isinstance(inner, dict):
            _check_complete(values[name], inner, f"{name}.")


def check_like(value: Any, own: Any, name: str = "") -> None:
    """Refuse plain data with other lengths or types than `own`; in place of an empty list, any list is accepted.

    Names that only the data or only `own` has are not checked, since other versions of PyTorch write other names.

    Raises:
        ValueError: says what differs.
    """
    if isinstance(own, dict) and isinstance(value, dict):
        for key in own.keys() & value.keys():
            check_like(value[key], own[key], f"{name}.{key}".strip("."))
    elif isinstance(own, list | tuple) and isinstance(value, list | tuple):
        if own and len(own) != len(value):
            raise ValueError(f"{name} has {len(value)} entries")
        for index, (entry, like) in enumerate(zip(value, own, strict=False)):
            check_like(entry, like, f"{name}.{index}")
    elif isinstance(own, int | float) and not isinstance(own, bool):
        if type(value) not in (int, float) or abs(value) > LARGEST_NUMBER:
            raise ValueError(f"{name} is {shown(value)}")
    elif type(value) is not type(own) and (own is not None or isinstance(value, list | dict)):
        raise ValueError(f"{name} is {shown(value)}")
