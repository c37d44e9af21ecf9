"""Make small golden files from large ones: `python -m tests.golden.small SOURCE_FOLDER TARGET_FOLDER`.

A small file holds all that its check reads and, of each array that it expects, 64 values spread over the array and the
largest one, with nan in place of the others. Weights and inputs are kept exactly. Of the models with large layers only
the last ones are kept, with the state that enters them as `layer{i}.input`.
"""

import re
import sys
from pathlib import Path

import numpy as np

from tests.golden.families import TOLERANCE, compare, find_check

KEPT = 64  # values of an expected array; of a shorter one than four times that, all
FIRST_LAYERS = {"tscale_small": (3, "state_ffn"), "threelin_base": (2, "state")}  # and the name of a layer's output
EMBEDDINGS = ("MP_MODEL_EMBED", "delta.MP_MODEL_EMBED", "w.embed", "grad.embed", "state_embed")
ATTENTION = re.compile(r"layer\d+\.(qk|qv|v|valLookup)")
LENGTH, WIDTH = 12, 16  # tokens of the first row that are kept of a layer's attention, and features of its values


class Recording:
    """A file whose arrays are in memory, and the names that were read."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays, self.files, self.read = arrays, list(arrays), set()

    def __getitem__(self, name: str) -> np.ndarray:
        self.read.add(name)
        return self.arrays[name].copy()  # optimizers write into it


def make_small(path: Path, target: Path) -> None:
    """Write the small file of a large one into the folder, and check it."""
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    if path.stem in FIRST_LAYERS:
        arrays = last_layers(arrays, *FIRST_LAYERS[path.stem])
    recording = Recording(arrays)
    expected = {name for name, *_ in find_check(path)(recording)}
    kept = {name: thinned(arrays[name]) if name in expected else narrowed(arrays[name]) for name in recording.read}
    np.savez_compressed(target / path.name, **dict(sorted(kept.items())))
    errors = {comparison.array: comparison.error for comparison in compare(target / path.name)}
    assert errors.keys() == expected
    assert max(errors.values()) <= TOLERANCE, errors
    print(f"{path.name}: {len(errors)} arrays checked, {(target / path.name).stat().st_size:,} bytes")


def last_layers(arrays: dict[str, np.ndarray], first: int, output: str) -> dict[str, np.ndarray]:
    """The file without earlier layers and what needs them: a stretch of their attention is left."""
    small = {f"layer{first}.input": arrays[f"layer{first - 1}.{output}"]}
    for name, array in arrays.items():
        layer = re.search(r"layer(\d+)\.", name)
        if layer and f"{layer[0]}valLookup" in arrays and (part := ATTENTION.fullmatch(name)):
            small[name] = array[:1, :LENGTH, : None if part[1] in ("qk", "qv") else WIDTH]
        elif (layer is None or int(layer[1]) >= first) and not name.startswith("noise.") and name not in EMBEDDINGS:
            small[name] = array
    return small


def thinned(expected: np.ndarray) -> np.ndarray:
    """The array with one value of each of 64 equal stretches, and its largest one; nan elsewhere."""
    if expected.size < 4 * KEPT or expected.dtype.kind != "f":
        return expected
    bounds = np.linspace(0, expected.size, KEPT + 1).astype(int)
    chosen = np.random.default_rng(expected.size).integers(bounds[:-1], bounds[1:])
    result = np.full_like(expected, np.nan)
    for index in (*chosen, np.nanargmax(np.abs(expected))):
        result.flat[index] = expected.flat[index]
    return result


def narrowed(given: np.ndarray) -> np.ndarray:
    """The array in the narrowest type of float that holds all its values exactly."""
    with np.errstate(over="ignore"):
        narrow = [given.astype(kind) for kind in (np.float16, np.float32)] if given.dtype.kind == "f" else []
    return next((array for array in narrow if np.array_equal(array, given)), given)


if __name__ == "__main__":
    for large in sorted(Path(sys.argv[1]).glob("*.npz")):
        make_small(large, Path(sys.argv[2]))
