"""Export of a folder with a web page that runs the model in the browser, for any server of static files."""

import base64
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import urllib.request
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Regex, Tokenizer, normalizers

from multilin.data.progress import Progress, no_progress
from multilin.errors import InputError, as_input_error, shown
from multilin.export.folder import export_run
from multilin.export.weights import BLOCK, SMALLEST, Precision
from multilin.files import atomic_folder, check_folder, checksum, short_path
from multilin.runs.load import Run
from multilin.settings.inputs import to_json

RUNTIME_VERSION = "1.30.0"
RUNTIME_FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
RUNTIME_INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
REGISTRY = "https://registry.npmjs.org/"
TIMEOUT = 60.0  # seconds
BLOCKED_OPSET = 21  # the first in which DequantizeLinear takes a scale for every block

# The parts that assets/web/tokenizer.js computes exactly as the tokenizers library.
TOKENIZER_PARTS = {
    "normalizer": ("NFC", "Lowercase", "Prepend", "Replace"),
    "pre_tokenizer": ("ByteLevel", "Digits", "Metaspace", "Split", "WhitespaceSplit"),
    "model": ("BPE", "Unigram", "WordLevel"),
    "decoder": ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip"),
}
TOKENIZER_OPTIONS = (
    *("dropout", "continuing_subword_prefix", "end_of_word_suffix", "stop"),
    *("lstrip", "rstrip", "single_word"),
)
# Patterns that Oniguruma and browsers take in the same way.
_ESCAPE = r"\\[sSrnt]|\\[pP]\{[A-Z][a-z]?\}|\\[^\w\s]"
_CLASS = rf"\[\^?(?:(?!&&)(?:[0-9A-Za-z]-[0-9A-Za-z]|{_ESCAPE}|[^\\\[\]^-]))+\]"
_GROUP = r"\(\?[:!]|\(\?i:'s\|'t\|'re\|'ve\|'m\|'ll\|'d\)|\)|\|"
_COUNT = r"[*+?]|\{\d+(?:,\d*)?\}"
SIMPLE_PATTERN = re.compile(rf"(?:(?:{_ESCAPE}|{_CLASS}|{_GROUP}|[^\\()\[\]{{}}.^$*+?|])(?:{_COUNT})?)*")


def export_web(
    run: Run,
    folder: Path,
    runtime: Path | None = None,
    precision: Precision = "8bit",
    progress: Progress = no_progress,
) -> None:
    """Export the model of a run with a web page that runs the model; write the whole folder or nothing.

    `export_run` writes the subfolder `model`, so `OnnxEngine` can run this subfolder too.

    Args:
        run: the model and its tokenizer.
        folder: the folder to write; serve it with `python -m http.server`, for example.
        runtime: a folder with the files of onnxruntime-web; None fetches these files from the npm registry.
        precision: precision of the matrices in files. 8-bit matrices are a quarter as large, and are expanded when the
            page loads: the browser always computes in float32, at the same speed.
        progress: see `export_run`.

    Raises:
        InputError: as `export_run`; a tokenizer that the page cannot follow exactly; files of the runtime that are
            missing, of another version, or cannot be fetched.
        OSError: the folder cannot be written.
    """
    check_folder("--output", folder, must_be_new=True)
    check_tokenizer(run.tokenizer.backend_tokenizer)
    files = fetch_runtime() if runtime is None else read_runtime(runtime)
    with atomic_folder(folder) as partial:
        export_run(run, partial / "model", precision, progress, stored_in_bytes)
        (partial / "runtime").mkdir()
        for name, content in files.items():
            (partial / "runtime" / name).write_bytes(content)
        with resources.as_file(resources.files("multilin.export") / "assets/web") as page:
            shutil.copytree(page, partial, dirs_exist_ok=True)
        _write_list(partial)


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Check that the page can make the same tokens and the same text as the tokenizer.

    Raises:
        InputError: the tokenizer has a part that the page lacks.
    """
    content = json.loads(tokenizer.to_str())
    added = [token | {"type": "AddedToken"} for token in content["added_tokens"] if not token["special"]]
    parts = [(name, part) for name in TOKENIZER_PARTS for part in _flat(content[name])]
    for name, part in [*parts, *(("vocabulary", token) for token in added)]:
        kind, pattern = part["type"], (part.get("pattern") or {}).get("Regex", "x")
        options = [f"{option} of {kind}" for option in TOKENIZER_OPTIONS if part.get(option)]
        if kind not in (*TOKENIZER_PARTS.get(name, ()), "AddedToken"):
            options = [kind]
        elif not SIMPLE_PATTERN.fullmatch(pattern) or _matches_nothing(pattern):
            options = [f"the pattern {shown(pattern)}"]
        elif name == "normalizer" and part.get("content") == "":
            options = ["Replace with nothing"]
        if options:
            raise InputError(
                f"tokenizer: its {name} has {options[0]}, which the page cannot reproduce exactly; use --format onnx, "
                "or train with another tokenizer"
            )


def _flat(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The parts of a sequence of normalizers, pre-tokenizers or decoders."""
    if part is None or part["type"] != "Sequence":
        return [] if part is None else [part]
    return [inner for parts in part.values() if isinstance(parts, list) for each in parts for inner in _flat(each)]


def _matches_nothing(pattern: str) -> bool:
    """True for a pattern that matches an empty text."""
    return normalizers.Replace(Regex(rf"(?<=-)(?:{pattern})\z"), "+").normalize_str("-") == "-+"


def stored_in_bytes(graph: onnx.ModelProto, precision: Precision) -> onnx.ModelProto:
    """Store large arrays as int8 with a float32 scale for every BLOCK numbers; nodes of the graph expand the arrays.

    Blocks lie along the axis over which products sum. Runtimes may expand the arrays once, at loading, or in every
    product. With float32, the graph does not change.
    """
    if precision == "float32":
        return graph
    body, nodes, arrays = graph.graph, [], []
    factors = {node.input[1] for node in body.node if node.op_type == "MatMul"}
    for tensor in body.initializer:
        values = numpy_helper.to_array(tensor)
        axis = values.ndim - (2 if tensor.name in factors else 1)
        is_large = tensor.data_type == TensorProto.FLOAT and values.ndim > 1 and values.nbytes >= 4 * SMALLEST
        if not is_large or values.shape[axis] % BLOCK:
            arrays.append(tensor)
            continue
        blocks = np.moveaxis(values, axis, -1).reshape(*np.delete(values.shape, axis), -1, BLOCK)
        scales = np.abs(blocks).max(-1) / 127
        rounded = np.rint(blocks / np.where(scales > 0, scales, 1)[..., None]).astype(np.int8)
        names = [f"{tensor.name}.int8", f"{tensor.name}.scales"]
        parts = (rounded.reshape(*rounded.shape[:-2], -1), scales)
        arrays += [
            numpy_helper.from_array(np.ascontiguousarray(np.moveaxis(part, -1, axis)), name)
            for part, name in zip(parts, names, strict=True)
        ]
        nodes.append(helper.make_node("DequantizeLinear", names, [tensor.name], axis=axis, block_size=BLOCK))
    nodes += body.node
    for field, content in ((body.node, nodes), (body.initializer, arrays)):
        del field[:]
        field.extend(content)
    for opset in graph.opset_import:
        if opset.domain == "":
            opset.version = max(opset.version, BLOCKED_OPSET)
    return graph


def read_runtime(folder: Path) -> dict[str, bytes]:
    """Read the runtime's files from a folder: an unpacked npm package, or the `runtime` of an earlier export.

    Raises:
        InputError: a file is missing or of another version.
    """
    places = [folder, folder / "dist"]
    place = next((place for place in places if all((place / name).is_file() for name in RUNTIME_FILES)), None)
    if place is None:
        raise InputError(f"--runtime: {short_path(folder)} holds no {' and '.join(RUNTIME_FILES)} of onnxruntime-web")
    files = {name: (place / name).read_bytes() for name in RUNTIME_FILES}
    if f"v{RUNTIME_VERSION}\n".encode() not in files[RUNTIME_FILES[0]][:200]:
        raise InputError(f"--runtime: {short_path(folder)} does not hold onnxruntime-web {RUNTIME_VERSION}")
    return files


def fetch_runtime() -> dict[str, bytes]:
    """Fetch the runtime's files from the npm registry that npm's settings name.

    Raises:
        InputError: the package cannot be fetched, or its checksum differs from the expected checksum.
    """
    url = f"{_registry().rstrip('/')}/onnxruntime-web/-/onnxruntime-web-{RUNTIME_VERSION}.tgz"
    with (
        as_input_error(lambda reason: f"--runtime: none given, and {short_path(url)} cannot be fetched ({reason})"),
        urllib.request.urlopen(url, timeout=TIMEOUT) as response,
    ):
        package = response.read()
    if base64.b64encode(hashlib.sha512(package).digest()).decode() != RUNTIME_INTEGRITY:
        raise InputError(f"--runtime: none given, and {short_path(url)} has another checksum than expected")
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        members: dict[str, Any] = {name: archive.extractfile(f"package/dist/{name}") for name in RUNTIME_FILES}
        return {name: member.read() for name, member in members.items()}


def _registry() -> str:
    npm = shutil.which("npm")
    if npm is None:
        return REGISTRY
    with as_input_error(lambda reason: f"--runtime: none given, and npm does not name its registry ({reason})"):
        command = [npm, "config", "get", "registry"]
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT).stdout.strip()
    return said if said.startswith(("https://", "http://")) else REGISTRY


def _write_list(folder: Path) -> None:
    """Write files.json: the sizes of all files, for the progress bar, and a version that changes with any file."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    sizes = {name: path.stat().st_size for name, path in zip(names, paths, strict=True)}
    version = hashlib.sha256("".join(map(checksum, paths)).encode()).hexdigest()[:16]
    (folder / "files.json").write_text(to_json({"version": version, "sizes": sizes}, indent=1), encoding="utf-8")
    worker = folder / "sw.js"
    worker.write_text(worker.read_text(encoding="utf-8").replace("{{version}}", version), encoding="utf-8")
