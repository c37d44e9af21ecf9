"""A folder with an exported model: graphs, weights, manifest, tokenizer, and a README on running the model."""

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path

import onnx

from multilin.data.progress import Progress, no_progress
from multilin.data.tokenizers import save_tokenizer
from multilin.errors import InputError
from multilin.export.check import check_export
from multilin.export.graph import make_graph
from multilin.export.weights import WEIGHTS, Precision, WeightFile, rounded
from multilin.files import atomic_folder, checksum
from multilin.inference.generate_run import text_codec
from multilin.inference.manifest import GRAPHS, Manifest
from multilin.inference.snapshot import model_hash, state_tensors
from multilin.inference.state_file import GROWS
from multilin.layers.plain import has_plain_modules
from multilin.model import MultilinForCausalLM
from multilin.runs.files import MANIFEST, source_hashes
from multilin.runs.load import Run
from multilin.settings.inputs import to_json

PROMPT_COLUMNS = 64
OWN_PROMPT_COLUMNS = 8  # graphs of users' modules repeat the module for each column
README = "README.md"


def export_run(
    run: Run,
    folder: Path,
    precision: Precision = "float32",
    progress: Progress = no_progress,
    round_graph: Callable[[onnx.ModelProto, Precision], onnx.ModelProto] = rounded,
    source: Mapping[str, str] | None = None,
) -> None:
    """Export the model of a run as ONNX graphs into a folder, which is written completely or not at all.

    The graphs are compared with the model before and after rounding their matrices, see `check_export`.

    Args:
        run: the model and its tokenizer; int8 weights become floats.
        folder: the folder to write; an existing one is replaced as a whole.
        precision: precision of the products with matrices.
        progress: called for each graph.
        round_graph: the function that rounds the matrices of a graph to the precision.
        source: the result of `source_hashes` before the run was loaded; None computes it now.

    Raises:
        InputError: the model is of another kind or cannot be exported, or `check_export` fails.
        OSError: the folder cannot be written.
    """
    model = run.model
    if not isinstance(model, MultilinForCausalLM):
        raise InputError(f"run: a {model.config.model_type} model given, but only models of multilin can be exported")
    model = copy.deepcopy(model).to("cpu").float().eval()
    model.set_arithmetic(dataclasses.replace(model.arithmetic, products="float"))
    codec, state = text_codec(run.tokenizer), state_tensors(model)
    if growing := next((about.name for about in state if GROWS in about.shape), None):
        raise InputError(
            f"run: the state of this model grows with the text ({growing}), so it cannot be exported; `multilin "
            "generate` and `multilin serve` run it"
        )
    columns = OWN_PROMPT_COLUMNS if has_plain_modules(model) else PROMPT_COLUMNS
    with atomic_folder(folder) as partial:
        graphs = {}
        for index, name in enumerate(GRAPHS):
            progress("graphs", index, len(GRAPHS))
            graphs[name] = make_graph(model, columns if name == "prompt.onnx" else 1).model_proto
        progress("graphs", len(GRAPHS), len(GRAPHS))
        save_tokenizer(run.tokenizer, partial)
        manifest = Manifest(
            model_hash=model_hash(run.model),
            architectures=sorted({entry["architecture"] for entry in model.config.layers}), precision="float32",
            vocab_size=model.config.vocab_size, n_positions=model.config.n_positions, end_id=codec.end_id,
            pad_id=codec.pad_id, eos_id=codec.eos_id, match=model.config.match, prompt_columns=columns, state=state,
            source=dict(source_hashes(run.folder) if source is None else source), files={},
        )  # fmt: skip
        _write(graphs, manifest, partial)
        check_export(model, partial)
        if precision != "float32":
            graphs = {name: round_graph(onnx.load(partial / name), precision) for name in GRAPHS}
            _write(graphs, dataclasses.replace(manifest, precision=precision), partial)
            check_export(model, partial)


def _write(graphs: Mapping[str, onnx.ModelProto], manifest: Manifest, folder: Path) -> None:
    """Write the graphs, their weights, and the manifest with the checksums of both."""
    weights = WeightFile(folder)
    for name, graph in graphs.items():
        weights.save(graph, name)
    names = [*graphs, WEIGHTS, "tokenizer.json"]
    manifest = dataclasses.replace(manifest, files={name: checksum(folder / name) for name in names})
    (folder / README).write_text(_readme(manifest), encoding="utf-8")
    (folder / MANIFEST).write_text(to_json(dataclasses.asdict(manifest), indent=1) + "\n", encoding="utf-8")


def _readme(manifest: Manifest) -> str:
    text = resources.files("multilin.export").joinpath("assets/README.md").read_text(encoding="utf-8")
    only_with_match = r"<!-- match -->\n(.*?)<!-- end -->\n"
    text = re.sub(only_with_match, "" if manifest.match is None else r"\1", text, flags=re.DOTALL)
    values = dataclasses.asdict(manifest)
    values["architectures"] = ", ".join(manifest.architectures)
    values["limit"] = f"at most {manifest.n_positions} tokens" if manifest.n_positions else "any number of tokens"
    for name, value in values.items():
        text = text.replace(f"{{{{{name}}}}}", str(value))
    return text
