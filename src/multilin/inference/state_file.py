"""State files: the state of sequences in one safetensors file, all of which is checked when it is read.

Nothing heavy is imported here: engines without PyTorch read and write the same files.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import load, save

from multilin.errors import InputError, prefixed
from multilin.files import short_path, write_whole
from multilin.inference.random_numbers import STATE_BYTES, RandomNumbers
from multilin.inference.state_contents import StateContents, StateOwner, StateTensor

FORMAT = "multilin-state-4"
METADATA = {"format", "model", "unread_ids", "sha256"}
RNG_STATE = "rng_state"
MOST_ROWS = 2**16
LEAST_PARALLEL = 2**22  # bytes that are hashed in parallel; starting threads takes longer than hashing fewer
MOST_TOKENS = 2**40  # that a model without n_positions can have read


def write_state(contents: StateContents, path: str | Path, owner: StateOwner) -> None:
    """Write a state file, complete or not at all; see `pack_state`.

    Raises:
        InputError: as `pack_state`, or the path is that of a folder or device.
        OSError: the file cannot be written.
    """
    write_whole(path, pack_state(contents, owner))


def pack_state(contents: StateContents, owner: StateOwner) -> bytes:
    """The content of a state file; only the filled part of windows is stored.

    Raises:
        InputError: nothing was read yet, or the state is not one that the model can have made.
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
    """Read a state file of this model.

    Names, shapes, dtypes and values must be such as the model could have made them, and the checksum must be right.

    Raises:
        InputError: no such file, no state file or a damaged one, or the state of another model.
    """
    path = Path(path)
    where = f"state file: {short_path(path)}"
    if not path.is_file():
        raise InputError(f"{where} {'is no file' if path.exists() else 'does not exist'}")
    return _check(where, lambda expected: _read(path, expected), owner)


def unpack_state(data: bytes, owner: StateOwner) -> StateContents:
    """Read the content of a state file of this model; see `read_state`.

    Raises:
        InputError: no state file or a damaged one, or the state of another model.
    """
    return _check("state:", lambda expected: _unpack(data, expected), owner)


_Read = Callable[[Mapping[str, StateTensor]], tuple[dict[str, str], dict[str, NDArray[Any]]]]


def _check(where: str, read: _Read, owner: StateOwner) -> StateContents:
    try:
        metadata, tensors = read({about.name: about for about in owner.tensors})
        if metadata.pop("sha256") != checksum(metadata, tensors):
            raise InputError("is damaged: its content does not have the checksum that it was written with")
        if metadata["model"] != owner.hash:
            raise InputError("belongs to another model; states fit only the model that wrote them")
        unread_ids = _parse(metadata["unread_ids"])
        _check_values(tensors, owner)
        _check_unread_ids(unread_ids, len(tensors["embedding.num_read_B"]), owner.vocab_size)
    except InputError as error:
        raise InputError(f"{where} {error}") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{where} is damaged or no safetensors file ({error})") from None
    rng_state = tensors.pop(RNG_STATE, None)
    for about in owner.tensors:
        if about.is_ring:
            tensors[about.name] = about.whole(tensors[about.name])
    return StateContents(tensors, unread_ids, rng_state)


def _read(path: Path, expected: Mapping[str, StateTensor]) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Metadata and tensors of a state file, with the right names, shapes and dtypes."""
    with safetensors.safe_open(path, framework="np") as file:
        # Checked before any tensor is loaded, so that a file cannot ask for more memory than a state of the model.
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        header = {name: {"shape": part.get_shape(), "dtype": part.get_dtype()} for name, part in slices.items()}
        metadata = _check_header(file.metadata(), header, expected)
        return metadata, {name: file.get_tensor(name) for name in slices}


def _unpack(data: bytes, expected: Mapping[str, StateTensor]) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """The same from the content of a file; its tensors cannot be larger than these bytes."""
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (KeyError, ValueError, AttributeError) as error:  # types that numpy lacks, for one
        raise InputError(f"is damaged or no safetensors file ({error!r:.80})") from None
    return _check_header(header.pop("__metadata__", None), header, expected), tensors


def _check_header(
    given: dict[str, str] | None, header: Mapping[str, Mapping[str, Any]], expected: Mapping[str, StateTensor]
) -> dict[str, str]:
    """The metadata, if they and the shapes and dtypes of the tensors are those of a state."""
    metadata = given or {}
    if (name := metadata.get("format")) != FORMAT:
        raise InputError(f"is no state of a text (format {name!r}, not {FORMAT!r})")
    if set(metadata) != METADATA:
        raise InputError(f"is damaged: its metadata should be {', '.join(sorted(METADATA))}")
    check_shapes({name: part["shape"] for name, part in header.items()}, expected)
    for name, part in header.items():
        wanted, dtype = expected[name].dtype if name in expected else "uint8", _DTYPES.get(part["dtype"], part["dtype"])
        if dtype != wanted:
            raise InputError(f"is no state of this model: {name} holds torch.{dtype}, but it should be torch.{wanted}")
    return metadata


def check_shapes(shapes: Mapping[str, list[int]], expected: Mapping[str, StateTensor]) -> None:
    """Refuse tensors of other names or shapes than a state of the model has."""
    if wrong := sorted((set(shapes) - {RNG_STATE}) ^ set(expected)):
        missing_or_not = "lacks" if wrong[0] in expected else "holds a tensor of another name,"
        raise InputError(f"is no state of this model: it {missing_or_not} {wrong[0]}")
    num_rows = next(shape[0] if shape else 0 for name, shape in shapes.items() if name != RNG_STATE)
    if not 1 <= num_rows <= MOST_ROWS:
        raise InputError(f"holds {num_rows} rows, but a state has 1 to {MOST_ROWS}")
    for name, shape in shapes.items():
        if name == RNG_STATE:
            if shape != [STATE_BYTES]:
                raise InputError(f"is damaged: {name} has shape {shape}, which no generator of random numbers has")
            continue
        wanted = [num_rows, *expected[name].shape]
        if expected[name].is_ring and len(shape) == len(wanted):
            wanted[1] = min(wanted[1], shape[1])
        if shape != wanted:
            raise InputError(f"is no state of this model: {name} has shape {shape}, but it should be {wanted}")


_DTYPES = {
    "F32": "float32", "F64": "float64", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


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
            raise InputError(f"{name} holds the number {int(tensor.min())}, but none of a state is negative")
        elif last.startswith("num_read") and (tensor > most_tokens).any():
            raise InputError(f"{name} is {int(tensor.max())}, but this model reads at most {most_tokens} tokens")
        elif last.startswith("num_read") and not np.array_equal(tensor, counts_B):
            raise InputError(f"{name} and embedding.num_read_B count different numbers of tokens")


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


def checksum(metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 of the content of a state file."""
    described = {name: (f"{x.shape} torch.{x.dtype}", x) for name, x in tensors.items()}
    return digest(json.dumps(metadata, sort_keys=True), described)


def digest(text: str, tensors: Mapping[str, tuple[str, NDArray[Any]]]) -> str:
    """SHA-256 of a text and of named tensors with a description each; large tensors are hashed in parallel."""
    total = hashlib.sha256(text.encode())
    names = sorted(tensors)
    contents = [tensors[name][1] for name in names]
    if sum(tensor.nbytes for tensor in contents) < LEAST_PARALLEL:
        hashes = list(map(_content_hash, contents))
    else:
        with ThreadPoolExecutor() as pool:
            hashes = list(pool.map(_content_hash, contents))
    for name, content in zip(names, hashes, strict=True):
        total.update(f"{name} {tensors[name][0]} {content}".encode())
    return total.hexdigest()


def _content_hash(tensor: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data).hexdigest()
