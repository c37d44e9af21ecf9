"""State files: the state of sequences in one safetensors file, which is checked completely when it is read.

In this module a state consists of numpy arrays with a description of each, whichever engine computed the state. Nothing
heavy is imported: engines without PyTorch read and write the same files. `multilin.inference.snapshot` converts from
and to PyTorch.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import load, save

from multilin.errors import InputError, prefixed
from multilin.files import short_path, write_whole
from multilin.inference.sampling import STATE_BYTES, RandomNumbers

FORMAT = "multilin-state-4"
METADATA = {"format", "model", "unread_ids", "sha256"}
RNG_STATE = "rng_state"
MOST_ROWS = 2**16
GROWS = -1
LEAST_PARALLEL = 2**22  # bytes that are hashed in parallel; for fewer bytes, starting threads takes longer
MOST_TOKENS = 2**40  # tokens that a model without n_positions can have read


@dataclass(frozen=True)
class StateTensor:
    """The description of a tensor of a model's state.

    name: see `TextState.named_tensors`.
    shape: shape of one row; the length of an axis that grows with the text is GROWS.
    dtype: "float32", "float64", "int32" or "int64".
    kind: a "window" has the last tokens in order; "positions" has the token at position n in slot n. Both have slots
        along the first axis; an empty slot is -inf in a tensor of logits, and 0 in other tensors. A "summary" has no
        slots. A "count" is the number of tokens read.
    is_multiplied: whether graphs have the axis of heads before the axis of slots, (rows, heads, slots, ...).
    """

    name: str
    shape: list[int]
    dtype: str
    kind: Literal["window", "positions", "summary", "count"]
    is_multiplied: bool = False

    @property
    def is_ring(self) -> bool:
        """True if the tensor has slots; only filled slots need to be stored."""
        return self.kind in ("window", "positions")

    @property
    def empty(self) -> float:
        """The value of an empty slot."""
        return -np.inf if self.name.rpartition(".")[2].startswith("logits") else 0.0

    def filled(self, tensor: NDArray[Any], num_slots: int) -> NDArray[Any]:
        """The slots of (rows, slots, ...) that are filled after `num_slots` tokens."""
        if self.kind == "window":
            return tensor[:, max(tensor.shape[1] - num_slots, 0) :]
        return tensor[:, :num_slots]

    def whole(self, tensor: NDArray[Any]) -> NDArray[Any]:
        """All slots, given the filled slots."""
        missing = self.shape[0] - tensor.shape[1]
        if not missing:
            return tensor
        edges = (missing, 0) if self.kind == "window" else (0, missing)
        return np.pad(tensor, [(0, 0), edges, *[(0, 0)] * (tensor.ndim - 2)], constant_values=self.empty)


class StateOwner(NamedTuple):
    """The model that states belong to.

    hash: see `model_hash`.
    vocab_size: V.
    n_positions: tokens of the longest sequence, None for no limit.
    tensors: descriptions of the tensors of the model's state.
    """

    hash: str
    vocab_size: int
    n_positions: int | None
    tensors: Sequence[StateTensor]


@dataclass
class StateContents:
    """The content of a state file.

    tensors: tensors by name, (rows, ...).
    unread_ids: for each row, the tokens that were not read yet.
    rng_state: state of PyTorch's default generator on a CPU, (5056,) uint8, or None.
    """

    tensors: dict[str, NDArray[Any]]
    unread_ids: list[list[int]] = field(default_factory=list)
    rng_state: NDArray[np.uint8] | None = None


def write_state(contents: StateContents, path: str | Path, owner: StateOwner) -> None:
    """Write a state file, complete or not at all; see `pack_state`.

    Raises:
        InputError: as `pack_state`, or the path is a folder or device.
        OSError: the file cannot be written.
    """
    write_whole(path, pack_state(contents, owner))


def pack_state(contents: StateContents, owner: StateOwner) -> bytes:
    """The content of a state file; only the filled part of windows is stored.

    Raises:
        InputError: nothing was read yet, or the model cannot have made the state.
    """
    if not contents.tensors:
        raise InputError("state: nothing was read yet, so there is nothing to save")
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in contents.tensors.items()}
    num_read_B = tensors["embedding.num_read_B"]
    unread_ids = contents.unread_ids or [[] for _ in num_read_B]
    if contents.rng_state is not None:
        tensors[RNG_STATE] = contents.rng_state
    with prefixed("state: "):
        _check_values(tensors, owner)
        _check_unread_ids(unread_ids, len(num_read_B), owner.vocab_size)
    longest = max(int(num_read_B.max()), 1)
    for about in owner.tensors:
        if about.is_ring:
            tensors[about.name] = np.ascontiguousarray(about.filled(tensors[about.name], longest))
    metadata = {"format": FORMAT, "model": owner.hash, "unread_ids": json.dumps(unread_ids)}
    return save(tensors, metadata | {"sha256": checksum(metadata, tensors)})


def read_state(path: str | Path, owner: StateOwner) -> StateContents:
    """Read a state file of this model; see `unpack_state`.

    Raises:
        InputError: the file is missing, damaged or no state file, or has the state of another model.
    """
    path = Path(path)
    where = f"state file: {short_path(path)} "
    if not path.is_file():
        raise InputError(f"{where}{'is not a file' if path.exists() else 'does not exist'}")
    with prefixed(where, "state: "):
        try:
            return unpack_state(path.read_bytes(), owner)
        except OSError as error:
            raise InputError(f"cannot be read ({error.strerror})") from None


def unpack_state(data: bytes, owner: StateOwner) -> StateContents:
    """Read the content of a state file of this model.

    Names, shapes, dtypes and values must be possible for the model, and the checksum must be right.

    Raises:
        InputError: the content is damaged or no state file, or has the state of another model.
    """
    with prefixed("state: "):
        metadata, tensors = _unpack(data)
        check_tensors({name: (list(x.shape), str(x.dtype)) for name, x in tensors.items()}, owner.tensors)
        if metadata.pop("sha256") != checksum(metadata, tensors):
            raise InputError("is damaged: its content does not match its checksum")
        if metadata["model"] != owner.hash:
            raise InputError("belongs to another model; states fit only the model that wrote them")
        unread_ids = _parse(metadata["unread_ids"])
        _check_values(tensors, owner)
        _check_unread_ids(unread_ids, len(tensors["embedding.num_read_B"]), owner.vocab_size)
    rng_state = tensors.pop(RNG_STATE, None)
    for about in owner.tensors:
        if about.is_ring:
            tensors[about.name] = about.whole(tensors[about.name])
    return StateContents(tensors, unread_ids, rng_state)


def _unpack(data: bytes) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Metadata and tensors of a state file, which take no more memory than the content."""
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = dict(header.get("__metadata__") or {})
        if (name := metadata.get("format")) != FORMAT:
            raise InputError(f"is not a state of a text (format {name!r:.40}, not {FORMAT!r})")
        tensors = load(data)
    except InputError:
        raise
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"is damaged or not a safetensors file ({error!r:.80})") from None
    if set(metadata) != METADATA:
        raise InputError(f"is damaged: its metadata should be {', '.join(sorted(METADATA))}")
    return metadata, tensors


def check_tensors(found: Mapping[str, tuple[list[int], str]], expected: Sequence[StateTensor]) -> None:
    """Refuse found tensors, (shape, dtype) by name, if names, shapes or dtypes differ from the expected tensors."""
    wanted = {about.name: about for about in expected}
    if wrong := sorted((set(found) - {RNG_STATE}) ^ set(wanted)):
        missing_or_not = "lacks" if wrong[0] in wanted else "holds a tensor of another name,"
        raise InputError(f"is not a state of this model: it {missing_or_not} {wrong[0]}")
    num_rows = next(shape[0] if shape else 0 for name, (shape, _) in found.items() if name != RNG_STATE)
    if not 1 <= num_rows <= MOST_ROWS:
        raise InputError(f"holds {num_rows} rows, but a state has 1 to {MOST_ROWS}")
    for name, (shape, dtype) in found.items():
        like, kind = [STATE_BYTES], "uint8"
        if name != RNG_STATE:
            like, kind = [num_rows, *wanted[name].shape], wanted[name].dtype
            if wanted[name].is_ring and len(shape) == len(like):
                like[1] = min(like[1], shape[1])
        if len(shape) == len(like):
            like = [size if length == GROWS else length for size, length in zip(shape, like, strict=True)]
        if shape != like:
            raise InputError(f"is not a state of this model: {name} has shape {shape}, but it should be {like}")
        if dtype != kind:
            raise InputError(f"is not a state of this model: {name} holds torch.{dtype}, not torch.{kind}")


def _check_values(tensors: Mapping[str, NDArray[Any]], owner: StateOwner) -> None:
    """Refuse values that no model writes: only logits may be -inf, no other number is infinite, no count negative."""
    counts_B, most_tokens = tensors["embedding.num_read_B"], owner.n_positions or MOST_TOKENS
    for name, tensor in tensors.items():
        last = name.rpartition(".")[2]
        if name == RNG_STATE:
            RandomNumbers.from_state(tensor)
        elif tensor.dtype.kind == "f":
            may_be_empty = last.startswith("logits")
            if not (np.isfinite(tensor) | (tensor == -np.inf) & may_be_empty).all():
                raise InputError(f"{name} holds values that are not finite")
        elif (tensor < 0).any():
            raise InputError(f"{name} holds the number {int(tensor.min())}, but a state has no negative numbers")
        elif last.startswith("tokens") and (tensor > owner.vocab_size).any():
            raise InputError(f"{name} holds the number {int(tensor.max())}, but ids + 1 are at most {owner.vocab_size}")
        elif last.startswith("num_read") and (tensor > most_tokens).any():
            raise InputError(f"{name} is {int(tensor.max())}, but this model reads at most {most_tokens} tokens")
        elif last.startswith("num_read") and not np.array_equal(tensor, counts_B):
            raise InputError(f"{name} and embedding.num_read_B count different numbers of tokens")


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InputError("is damaged: its unread_ids are not JSON") from None


def _check_unread_ids(unread_ids: Any, num_rows: int, vocab_size: int) -> None:
    rows = unread_ids if isinstance(unread_ids, list) else []
    if len(rows) != num_rows or not all(isinstance(row, list) for row in rows):
        raise InputError(f"unread_ids: should be a list of token ids for each of its {num_rows} rows")
    wrong = [token for row in rows for token in row if type(token) is not int or not 0 <= token < vocab_size]
    if wrong:
        raise InputError(f"unread_ids: {wrong[0]!r:.40} given, but a token is a number from 0 to {vocab_size - 1}")


def checksum(metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 of the content of a state file."""
    described = {name: (f"{x.shape} torch.{x.dtype}", x) for name, x in tensors.items()}
    return digest(json.dumps(metadata, sort_keys=True), described)


def digest(text: str, tensors: Mapping[str, tuple[str, NDArray[Any]]]) -> str:
    """SHA-256 of a text and of tensors with names and descriptions; large tensors are hashed in parallel."""
    names = sorted(tensors)
    contents = [tensors[name][1] for name in names]
    if sum(tensor.nbytes for tensor in contents) < LEAST_PARALLEL:
        hashes = list(map(_content_hash, contents))
    else:
        with ThreadPoolExecutor() as pool:
            hashes = list(pool.map(_content_hash, contents))
    total = hashlib.sha256(text.encode())
    for name, content in zip(names, hashes, strict=True):
        total.update(f"{name} {tensors[name][0]} {content}".encode())
    return total.hexdigest()


def _content_hash(tensor: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data).hexdigest()
