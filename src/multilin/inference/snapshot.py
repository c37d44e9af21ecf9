"""Snapshots: the state of a text in one file, from which generation can continue later."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from multilin.errors import InputError
from multilin.inference.state_file import GROWS, StateContents, StateOwner, StateTensor, digest, read_state, write_state
from multilin.model import MultilinForCausalLM, TextState
from multilin.model.factory import evaluation_mode
from multilin.model.state import map_windows, named_tensors
from multilin.ops.ring import slots_of


@dataclass
class Snapshot:
    """The state of a text and what is needed to continue it.

    state: the model's state after the tokens read. The state is not copied: to keep it, continue `state.clone()`.
    unread_ids: tokens of the text that the model has not read yet: normally the last generated token, or all tokens of
        the last character. There is one list for each row; no list at all means that every token was read.
    rng_state: state of torch's default CPU generator, so that sampling continues unchanged; None without sampling.
    """

    state: TextState
    unread_ids: list[list[int]] = field(default_factory=list)
    rng_state: Tensor | None = None

    def clone(self) -> "Snapshot":
        """An independent copy: reading tokens into one does not change the other."""
        rng_state = None if self.rng_state is None else self.rng_state.clone()
        return Snapshot(self.state.clone(), [list(row) for row in self.unread_ids], rng_state)

    def fork(self, num_continuations: int) -> "Snapshot":
        """A copy that repeats every row `num_continuations` times, to continue one text in several ways."""
        rows = [list(row) for row in self.unread_ids for _ in range(num_continuations)]
        return Snapshot(self.state.fork(num_continuations), rows, self.rng_state)


def model_hash(model: MultilinForCausalLM) -> str:
    """SHA-256 of the layers' options and all parameters; only models with the same hash exchange states."""
    tensors = {name: (f"{tuple(x.shape)} {x.dtype}", _raw(x)) for name, x in model.state_dict().items()}
    return digest(json.dumps(model.config.layers, sort_keys=True), tensors)


def state_owner(model: PreTrainedModel) -> StateOwner:
    """The description of this model's state files.

    Raises:
        InputError: a model of another package, such as GPT-2, or a state that changes its form (see `state_tensors`).
    """
    if not isinstance(model, MultilinForCausalLM):
        kind = model.config.model_type
        raise InputError(f"run: a {kind} model keeps no state; serve and chat need a model of multilin")
    return StateOwner(model_hash(model), model.config.vocab_size, model.config.n_positions, state_tensors(model))


def state_tensors(model: MultilinForCausalLM) -> list[StateTensor]:
    """Descriptions of the tensors in the model's state, for texts of any length; an axis that grows has length -1.

    Raises:
        InputError: names, dtypes or numbers of axes change as tokens are read, in a layer that breaks the contract.
    """
    tensors = describe_state(example_state(model))
    for num_tokens in {min(number, model.config.n_positions or number) for number in (2, 100)}:
        later = describe_state(example_state(model, num_tokens))
        before, after = _kinds(tensors), _kinds(later)
        if before != after:
            name = next(name for name in [*before, *after] if before.get(name) != after.get(name))
            raise InputError(
                "run: the state of this model changes its form, so it cannot be exported, saved or served: "
                f"{name} is {before.get(name, 'missing')} after 1 token and {after.get(name, 'missing')} after "
                f"{num_tokens}"
            )
        pairs = zip(tensors, later, strict=True)
        tensors = [replace(one, shape=_common(one.shape, other.shape)) for one, other in pairs]
    return tensors


def _kinds(tensors: list[StateTensor]) -> dict[str, str]:
    return {about.name: f"{about.dtype} with {len(about.shape)} axes" for about in tensors}


def _common(sizes: list[int], later: list[int]) -> list[int]:
    return [size if size == other else GROWS for size, other in zip(sizes, later, strict=True)]


def describe_state(state: TextState) -> list[StateTensor]:
    """Descriptions of all tensors of a state that has read at least one token."""
    kinds: dict[int, tuple[Any, bool]] = {}

    def note(window: Any) -> None:
        slots = slots_of(window)
        assert slots is not None
        for tensor in (getattr(window, name) for name in slots.fields):
            kind = "positions" if slots.are_positions else "window"
            kinds[id(tensor)] = kind, kind == "window" and tensor.ndim >= 3

    values, described = state.values, []
    for part, value in zip(state.part_names, values, strict=True):
        map_windows(note, value)
        for name, tensor in named_tensors(value, part):
            kind, is_multiplied = kinds.get(id(tensor), ("count" if "num_read" in name else "summary", False))
            dtype = str(tensor.dtype).removeprefix("torch.")
            described.append(StateTensor(name, list(tensor.shape[1:]), dtype, kind, is_multiplied))
    return described


def save_snapshot(snapshot: Snapshot, path: str | Path, model: MultilinForCausalLM) -> None:
    """Write a snapshot to one safetensors file; write the whole file or nothing.

    Raises:
        InputError: nothing was read yet, this model cannot have made the snapshot, or the path is a folder or device.
        OSError: the file cannot be written.
    """
    write_state(to_contents(snapshot), path, state_owner(model))


def load_snapshot(path: str | Path, model: MultilinForCausalLM) -> Snapshot:
    """Read a snapshot of this model from a file, and check the whole file.

    Raises:
        InputError: the file is missing, damaged or no state file, or has the state of another model.
    """
    return from_contents(read_state(path, state_owner(model)), model)


def to_contents(snapshot: Snapshot) -> StateContents:
    """The snapshot as the content of a state file; tensors on the CPU share memory with the result."""
    tensors = {name: tensor.detach().cpu().numpy() for name, tensor in snapshot.state.named_tensors()}
    rng_state = None if snapshot.rng_state is None else snapshot.rng_state.numpy()
    return StateContents(tensors, snapshot.unread_ids, rng_state)


def from_contents(contents: StateContents, model: MultilinForCausalLM) -> Snapshot:
    """The snapshot from the content of a state file."""
    state = example_state(model)
    state.replace_tensors({name: torch.from_numpy(x.copy()).to(model.device) for name, x in contents.tensors.items()})
    rng_state = None if contents.rng_state is None else torch.from_numpy(contents.rng_state)
    return Snapshot(state, contents.unread_ids, rng_state)


@torch.no_grad()
def example_state(model: MultilinForCausalLM, num_tokens: int = 1) -> TextState:
    """A state after `num_tokens` tokens, the first of which is read in a separate call."""
    state = model.new_state()
    ids = torch.zeros((1, num_tokens), dtype=torch.long, device=model.device)
    with evaluation_mode(model):
        for piece in (ids[:, :1], ids[:, 1:]) if num_tokens > 1 else (ids,):
            model(piece, past_key_values=state)
    state.num_columns = 0
    return state


def _raw(tensor: Tensor) -> Any:
    """The bytes of a tensor."""
    # Viewing as bytes needs a last axis of stride 1, which the new axis has; a single number may have any other.
    return tensor.detach().cpu().contiguous().flatten().unsqueeze(-1).view(torch.uint8).numpy()
