"""Snapshots: the state of a text in one file, to go on from days later as if the run had never stopped."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from multilin.errors import InputError
from multilin.files import atomic_file, shown
from multilin.model import MultilinForCausalLM, TextState
from multilin.model.modes import evaluation_mode

FORMAT, EARLIER_FORMATS = "multilin-state-2", ("multilin-state-1",)
METADATA = {"format", "model", "unread_ids", "sha256"}
RNG_STATE = "rng_state"
MOST_ROWS = 2**16
MOST_TOKENS = 2**40  # that a model without n_positions can have read
CUDA_RNG_BYTES = 16


@dataclass
class Snapshot:
    """Where a text stands.

    state: what the model keeps of the tokens read. Shared, not copied: take `state.clone()` to read on and come back.
    unread_ids: tokens that belong to the text but were not read yet, normally the last one written; a list for each
        row, or none at all.
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
    return _digest(json.dumps(model.config.layers, sort_keys=True), model.state_dict())


def save_snapshot(snapshot: Snapshot, path: str | Path, model: MultilinForCausalLM) -> None:
    """Write a snapshot to one safetensors file, complete or not at all.

    Raises:
        InputError: nothing was read yet, the snapshot is not one that this model can have made, or the path is that of
            a folder or device.
        OSError: the file cannot be written.
    """
    tensors = {name: tensor.contiguous() for name, tensor in snapshot.state.named_tensors()}
    if not tensors:
        raise InputError("state: nothing was read yet, so there is nothing to save")
    num_rows = int(snapshot.state.batch_size or 0)
    unread_ids = snapshot.unread_ids or [[] for _ in range(num_rows)]
    if snapshot.rng_state is not None:
        tensors[RNG_STATE] = snapshot.rng_state
    try:
        _check_values(tensors, model.config.n_positions or MOST_TOKENS)
        _check_unread_ids(unread_ids, num_rows, model.config.vocab_size)
    except InputError as error:
        raise InputError(f"state: {error}") from None
    metadata = {"format": FORMAT, "model": model_hash(model), "unread_ids": json.dumps(unread_ids)}
    with atomic_file(path) as partial:
        save_file(tensors, partial, metadata | {"sha256": _checksum(metadata, tensors)})


def load_snapshot(path: str | Path, model: MultilinForCausalLM) -> Snapshot:
    """Read a snapshot that belongs to this model.

    Nothing in the file is trusted: names, shapes, dtypes and values must be such as this model could have made them,
    and the checksum must be right.

    Raises:
        InputError: no such file, no state file or a damaged one, or the state of another model.
    """
    path = Path(path)
    where = f"state file: {shown(path)}"
    if not path.is_file():
        raise InputError(f"{where} {'is no file' if path.exists() else 'does not exist'}")
    state = _example_state(model)
    try:
        metadata, tensors = _read(path, dict(state.named_tensors()))
        if metadata["model"] != model_hash(model):
            raise InputError("belongs to another model; states fit only the model that wrote them")
        unread_ids = _parse(metadata["unread_ids"])
        _check_values(tensors, model.config.n_positions or MOST_TOKENS)
        _check_unread_ids(unread_ids, len(tensors["embedding.num_read_B"]), model.config.vocab_size)
    except InputError as error:
        raise InputError(f"{where} {error}") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{where} is damaged or no safetensors file ({error})") from None
    state.replace_tensors({name: tensor.to(model.device) for name, tensor in tensors.items()})
    return Snapshot(state, unread_ids, tensors.get(RNG_STATE))


@torch.no_grad()
def _example_state(model: MultilinForCausalLM) -> TextState:
    """The state after one token, which has the names, shapes and dtypes of any other."""
    state = model.new_state()
    with evaluation_mode(model):
        model(torch.zeros((1, 1), dtype=torch.long, device=model.device), past_key_values=state)
    state.num_columns = 0
    return state


def _read(path: Path, examples: Mapping[str, Tensor]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a state file, of the right names, shapes and dtypes and with the right checksum."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        _check_format(metadata)
        # Before any tensor is loaded, so that a file cannot ask for more memory than a state of the model's.
        _check_shapes({name: file.get_slice(name).get_shape() for name in file.keys()}, examples)  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        dtype = examples[name].dtype if name in examples else torch.uint8
        if tensor.dtype != dtype:
            raise InputError(f"is no state of this model: {name} holds {tensor.dtype}, but it should be {dtype}")
    checksum = metadata.pop("sha256")
    if checksum != _checksum(metadata, tensors):
        raise InputError("is damaged: its content does not have the checksum that it was written with")
    return metadata, tensors


def _check_format(metadata: Mapping[str, str]) -> None:
    name = metadata.get("format")
    if name in EARLIER_FORMATS:
        raise InputError(f"was written by an earlier version of multilin ({name!r}, not {FORMAT!r}); make a new one")
    if name != FORMAT:
        raise InputError(f"is no state of a text (format {name!r}, not {FORMAT!r})")
    if set(metadata) != METADATA:
        raise InputError(f"is damaged: its metadata should be {', '.join(sorted(METADATA))}")


def _check_shapes(shapes: Mapping[str, list[int]], examples: Mapping[str, Tensor]) -> None:
    """Refuse other tensors than a state has, or tensors of different numbers of rows."""
    if wrong := sorted((set(shapes) - {RNG_STATE}) ^ set(examples)):
        missing_or_not = "lacks" if wrong[0] in examples else "holds a tensor of another name,"
        raise InputError(f"is no state of this model: it {missing_or_not} {wrong[0]}")
    num_rows = next(shape[0] if shape else 0 for name, shape in shapes.items() if name != RNG_STATE)
    if not 1 <= num_rows <= MOST_ROWS:
        raise InputError(f"holds {num_rows} rows, but a state has 1 to {MOST_ROWS}")
    for name, shape in shapes.items():
        if name == RNG_STATE:
            if shape not in ([torch.get_rng_state().numel()], [CUDA_RNG_BYTES]):
                raise InputError(f"is damaged: {name} has shape {shape}, which no generator of random numbers has")
        elif shape != [num_rows, *examples[name].shape[1:]]:
            expected = [num_rows, *examples[name].shape[1:]]
            raise InputError(f"is no state of this model: {name} has shape {shape}, but it should be {expected}")


def _check_values(tensors: Mapping[str, Tensor], most_tokens: int) -> None:
    """Refuse values that no model writes: a logit may be -inf, all else is finite, and no count is negative."""
    counts_B = tensors["embedding.num_read_B"]
    for name, tensor in tensors.items():
        field = name.rpartition(".")[2]
        if name == RNG_STATE:
            _check_rng_state(tensor)
        elif tensor.is_floating_point():
            may_be_empty = field.startswith("logits")
            if not (tensor.isfinite() | (tensor == -torch.inf) & may_be_empty).all():
                raise InputError(f"{name} holds values that are not finite")
        elif (tensor < 0).any():
            raise InputError(f"{name} holds the number {int(tensor.min())}, but none of a state is negative")
        elif field.startswith("num_read") and (tensor > most_tokens).any():
            raise InputError(f"{name} is {int(tensor.max())}, but this model reads at most {most_tokens} tokens")
        elif field.startswith("num_read") and not torch.equal(tensor, counts_B):
            raise InputError(f"{name} and embedding.num_read_B count different numbers of tokens")


def _check_rng_state(rng_state: Tensor) -> None:
    if rng_state.numel() != CUDA_RNG_BYTES:
        try:
            torch.Generator().set_state(rng_state.cpu())
        except (RuntimeError, TypeError):
            raise InputError(f"{RNG_STATE} is no state of a generator of random numbers") from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InputError("is damaged: its unread_ids are no JSON") from None


def _check_unread_ids(unread_ids: Any, num_rows: int, vocab_size: int) -> None:
    rows = unread_ids if isinstance(unread_ids, list) else []
    if len(rows) != num_rows or not all(isinstance(row, list) for row in rows):
        raise InputError(f"unread_ids: should be a list of token ids for each of its {num_rows} rows")
    wrong = [token for row in rows for token in row if type(token) is not int or not 0 <= token < vocab_size]
    if wrong:
        raise InputError(f"unread_ids: {wrong[0]!r:.40} given, but a token is a number from 0 to {vocab_size - 1}")


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    return _digest(json.dumps(metadata, sort_keys=True), tensors)


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over a text and tensors with their names, shapes and dtypes; the tensors are hashed in parallel."""
    digest = hashlib.sha256(text.encode())
    names = sorted(tensors)
    with ThreadPoolExecutor() as pool:
        for name, content in zip(names, pool.map(_content_hash, (tensors[name] for name in names)), strict=True):
            digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype} {content}".encode())
    return digest.hexdigest()


def _content_hash(tensor: Tensor) -> str:
    # The last axis, of size 1, has stride 1, without which bytes cannot be seen; a single number may have any other.
    content = tensor.detach().cpu().contiguous().flatten().unsqueeze(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().data).hexdigest()
