"""The manifest of an exported model: what its graphs take and return, and the checksums of its files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from multilin.errors import InputError, as_input_error
from multilin.files import checksum, short_path
from multilin.inference.state_file import StateTensor
from multilin.runs.files import MANIFEST
from multilin.settings.inputs import read_json

FORMAT = "multilin-onnx-2"
GRAPHS = ("step.onnx", "prompt.onnx")
MATCH_INPUTS = ("match_predicted", "match_length")
"""Inputs of graphs with the longest match, (rows, T) int64 each: the program that runs a graph finds the match."""

MATCH_TOKENS = "embedding.match.tokens_BS"
"""The tensor of the state with the last tokens, in which the longest match is searched."""


@dataclass(frozen=True)
class Manifest:
    """The inputs, outputs and files of an exported model, as its manifest.json lists them.

    model_hash: the model's `multilin.inference.snapshot.model_hash`, which its state files contain.
    architectures: the architectures of the layers.
    precision: the precision of the matrices: float32, 8bit or 4bit.
    vocab_size, n_positions: V, and the number of tokens of the longest text, None for no limit.
    end_id, pad_id: the token that begins and ends a text, and the token of padding.
    eos_id: another token that ends a text, if there is one.
    match: window and longest of the search for the longest match; None for a model without it.
    prompt_columns: number of tokens of each row that prompt.onnx reads at once.
    state: descriptions of the state's tensors.
    source: SHA-256 of the files that the model was exported from.
    files: SHA-256 of the files beside the manifest.
    """

    model_hash: str
    architectures: list[str]
    precision: str
    vocab_size: int
    n_positions: int | None
    end_id: int
    pad_id: int
    prompt_columns: int
    state: list[StateTensor]
    source: dict[str, str]
    files: dict[str, str]
    eos_id: int | None = None
    match: dict[str, int] | None = None
    format: str = FORMAT


def graph_tensors(state: Sequence[StateTensor]) -> list[StateTensor]:
    """The tensors of a state that graphs take and return: all except the numbers and hashes of the tokens read."""
    return [about for about in state if about.kind != "count" and not about.name.startswith("embedding.")]


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder, and check the checksums of its files.

    Raises:
        InputError: the folder has no export, or its export is of another version, changed or incomplete.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(f"export: {short_path(folder)} holds no exported model (no {MANIFEST})")
    values = read_json(path, "export")
    version = values.get("format") if isinstance(values, dict) else None
    if version != FORMAT:
        raise InputError(f"export: {path} has format {version!r:.40}, not {FORMAT!r}; export the model again")
    with as_input_error(lambda reason: f"export: {path} is damaged or files beside it are missing ({reason})"):
        manifest = Manifest(**values | {"state": [StateTensor(**about) for about in values["state"]]})
        wrong = [name for name, digest in manifest.files.items() if checksum(folder / name) != digest]
    if wrong:
        raise InputError(f"export: {folder / wrong[0]} does not match its checksum; export the model again")
    return manifest
