"""Snapshots: the state of a text in one file, to go on from days later as if the run had never stopped."""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from multilin.errors import InputError
from multilin.model import MultilinForCausalLM, TextState
from multilin.model.state import map_tensors, with_tensors

FORMAT = "multilin-state-1"
RNG_STATE = "rng_state"


@dataclass
class Snapshot:
    """Where a text stands.

    state: what the model keeps of the tokens read. Shared, not copied: take `state.clone()` to read on and come back.
    unread_ids: tokens that belong to the text but were not read yet, normally the last one written; per row.
    rng_state: of torch's default CPU generator, so that sampling goes on as if never interrupted; None if irrelevant.
    """

    state: TextState
    unread_ids: list[list[int]] = field(default_factory=list)
    rng_state: Tensor | None = None

    def clone(self) -> "Snapshot":
        """An independent copy: reading on from one leaves the other where it was."""
        rng_state = None if self.rng_state is None else self.rng_state.clone()
        return Snapshot(self.state.clone(), [list(row) for row in self.unread_ids], rng_state)

    def fork(self, num_continuations: int) -> "Snapshot":
        """A copy with every row this many times, to continue one text in several ways."""
        rows = [list(row) for row in self.unread_ids for _ in range(num_continuations)]
        return Snapshot(self.state.fork(num_continuations), rows, self.rng_state)


def model_hash(model: MultilinForCausalLM) -> str:
    """SHA-256 over the layers' options and every parameter: states are exchanged between equal models only."""
    digest = hashlib.sha256(json.dumps(model.config.layers, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def save_snapshot(snapshot: Snapshot, path: str | Path, model: MultilinForCausalLM) -> None:
    """Write a snapshot to one safetensors file, beside and renamed.

    Raises:
        InputError: nothing was read yet, or the folder cannot be written.
    """
    path = Path(path)
    tensors = {name: tensor.contiguous() for name, tensor in snapshot.state.named_tensors()}
    if not tensors:
        raise InputError("state: nothing was read yet, so there is nothing to save")
    if snapshot.rng_state is not None:
        tensors[RNG_STATE] = snapshot.rng_state
    metadata = {"format": FORMAT, "model": model_hash(model), "unread_ids": json.dumps(snapshot.unread_ids)}
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, beside, metadata)
        beside.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"state file: {path} cannot be written ({error})") from None
    finally:
        beside.unlink(missing_ok=True)


def load_snapshot(path: str | Path, model: MultilinForCausalLM) -> Snapshot:
    """Read a snapshot that belongs to this model.

    Raises:
        InputError: no such file, no state file or a damaged one, or the state of another model.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"state file: {path} does not exist")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"state file: {path} is damaged or no safetensors file ({error})") from None
    if metadata.get("format") != FORMAT:
        raise InputError(
            f"state file: {path} is no state of a text (format {metadata.get('format')!r}, not {FORMAT!r})"
        )
    if metadata["model"] != model_hash(model):
        raise InputError(f"state file: {path} belongs to another model; states fit only the model that wrote them")
    rng_state = tensors.pop(RNG_STATE, None)
    return Snapshot(_fill(model, tensors), json.loads(metadata["unread_ids"]), rng_state)


@torch.no_grad()
def _fill(model: MultilinForCausalLM, tensors: dict[str, Tensor]) -> TextState:
    """A state of the model's structure, learned by reading one token, with the tensors of the file."""
    state = model.new_state()
    was_training = model.training
    model.eval()(torch.zeros((1, 1), dtype=torch.long, device=model.device), past_key_values=state)
    model.train(was_training)
    expected = {name for name, _ in state.named_tensors()}
    if expected != set(tensors):
        raise InputError(f"state file: holds {len(tensors)} tensors of other names than the model's {len(expected)}")
    names = ["embedding", *(f"layers.{index}" for index in range(len(state.layers)))]
    values = [with_tensors(value, name, tensors) for name, value in zip(names, state.values, strict=True)]
    state.values = [map_tensors(lambda tensor: tensor.to(model.device), value) for value in values]
    state.num_columns = 0
    return state
