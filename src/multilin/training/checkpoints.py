"""Checkpoint folders and the files in them: safetensors and JSON, complete or absent.

A checkpoint is written into a hidden folder and renamed when everything is on the disk, so a folder named
`checkpoint-N` is always complete: a full disk, a crash or a SIGKILL leaves the one before it as the newest.
"""

import contextlib
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from multilin.errors import InputError

_COMPLETE = re.compile(r"checkpoint-(\d+)")
# safetensors reports a failed write, a full disk for one, by an exception of its own.
WRITE_ERRORS = (OSError, SafetensorError)


def checkpoint_step(path: Path) -> int:
    """The step a checkpoint folder was written after."""
    return int(path.name.removeprefix("checkpoint-"))


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if _COMPLETE.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=checkpoint_step)


def part_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is gathered before it is published."""
    return folder / f".checkpoint-{step}.part"


@contextlib.contextmanager
def published(folder: Path, step: int, keep: int) -> Iterator[Path]:
    """A new folder to write a checkpoint into; leaving the block without an error publishes it.

    Then all but the newest `keep` checkpoints go. After an error nothing of the new one remains.
    """
    part = part_folder(folder, step)
    remove_parts(folder)
    part.mkdir(parents=True)
    try:
        yield part
        _flush_to_disk(part)
        final = folder / f"checkpoint-{step}"
        shutil.rmtree(final, ignore_errors=True)
        part.replace(final)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def remove_parts(folder: Path) -> None:
    """Remove what a killed process left unfinished."""
    for part in folder.glob(".checkpoint-*.part"):
        shutil.rmtree(part)


def _flush_to_disk(folder: Path) -> None:
    # A rename may reach the disk before the data it names; a power cut would then leave a complete-looking ruin.
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_optimizer(folder: Path, state: dict[str, Any]) -> None:
    """Write an optimizer state keyed by parameter names: its tensors and its settings.

    Args:
        folder: the checkpoint.
        state: {"state": {parameter: {slot: tensor}}, "param_groups": [{..., "params": [parameter]}]}.
    """
    tensors = {f"{slot}/{name}": value for name, slots in state["state"].items() for slot, value in slots.items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "optimizer.safetensors")
    write_json(folder / "optimizer.json", state["param_groups"])


def read_optimizer(folder: Path) -> dict[str, Any]:
    """What `write_optimizer` wrote."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in read_tensors(folder / "optimizer.safetensors").items():
        slot, name = key.split("/", 1)
        state.setdefault(name, {})[slot] = tensor
    groups = [_with_tuples(group) for group in read_json(folder / "optimizer.json")]
    return {"state": state, "param_groups": groups}


def _with_tuples(group: dict[str, Any]) -> dict[str, Any]:
    # JSON knows lists only.
    return {name: tuple(v) if isinstance(v, list) and name != "params" else v for name, v in group.items()}


def write_random_state(path: Path) -> None:
    """Write the state of every random number generator of this process: Python, NumPy, torch on CPU and GPU."""
    version, words, python_gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, numpy_gauss = numpy_state
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    rest = {"python": [version, python_gauss], "numpy": [name, int(position), int(has_gauss), float(numpy_gauss)]}
    save_file(tensors, path, metadata={"rest": json.dumps(rest)})


def read_random_state(path: Path) -> None:
    """Set every random number generator of this process to what `write_random_state` wrote."""
    tensors = read_tensors(path)
    with safe_open(path, framework="pt") as file:
        rest = json.loads(file.metadata()["rest"])
    version, python_gauss = rest["python"]
    name, position, has_gauss, numpy_gauss = rest["numpy"]
    random.setstate((version, tuple(tensors["python"].tolist()), python_gauss))
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, numpy_gauss))
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file of a checkpoint, on the CPU."""
    try:
        return load_file(path)
    except WRITE_ERRORS as error:
        raise InputError(_unreadable(path, error)) from None


def write_json(path: Path, value: Any) -> None:
    """Write plain data as JSON; floats keep every bit."""
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def read_json(path: Path) -> Any:
    """The plain data in a JSON file of a checkpoint."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(_unreadable(path, error)) from None


def _unreadable(path: Path, error: Exception) -> str:
    return (
        f"checkpoint {path.parent}: {path.name} cannot be read ({error}); delete this folder to resume from the "
        "checkpoint before it"
    )
