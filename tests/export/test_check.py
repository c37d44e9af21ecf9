"""Exports that differ from their model are refused, and so are models whose state changes its size."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, helper, numpy_helper
from torch import Tensor

from multilin import InputError, MultilinForCausalLM
from multilin.architectures import base, register
from multilin.architectures.base import Architecture, LayerOptions, Preset
from multilin.data.tokenizers import train_tokenizer
from multilin.export.check import check_export
from multilin.export.folder import export_run
from multilin.export.weights import WeightFile
from multilin.files import checksum
from multilin.inference.generate import continue_file
from multilin.inference.generate_run import text_codec
from multilin.inference.manifest import GRAPHS
from multilin.inference.settings import GenerationSettings
from multilin.inference.snapshot import state_tensors
from multilin.inference.torch_engine import TorchEngine
from multilin.layers import Layer, Layout, Linear
from multilin.model.factory import create_model
from multilin.runs.files import MANIFEST
from multilin.runs.load import Run
from multilin.settings import settings
from tests.export.conftest import FAST, Exports

N_POSITIONS = 150


@settings
class OwnOptions(LayerOptions):
    """One layer, or a whole model."""

    state: Literal["sum", "dropped", "all tokens", "a slot per 64 tokens", "another dtype"] = "sum"


class OwnState(NamedTuple):
    """What a layer keeps."""

    total: Tensor


class OwnLayer(Layer):
    """x + W tanh(sum of the tokens so far), with a state that may be wrong."""

    def __init__(self, hidden_size: int, options: OwnOptions) -> None:
        super().__init__()
        self.kind, self.out = options.state, Linear(hidden_size, hidden_size)

    def forward(self, x_BTD: Tensor, state: OwnState | None, layout: Layout) -> tuple[Tensor, Any]:
        """(B, T, D) to (B, T, D), and the state."""
        new_BTD = x_BTD if layout.padding_BT is None else x_BTD.masked_fill(layout.padding_BT[:, :, None], 0.0)
        totals_BTD = new_BTD.cumsum(1)
        if state is not None and self.kind == "sum":
            totals_BTD = totals_BTD + state.total[:, None]
        kept = totals_BTD[:, -1]
        if self.kind == "all tokens":
            kept = new_BTD if state is None else torch.cat([state.total, new_BTD], 1)
        elif self.kind == "a slot per 64 tokens":
            kept = kept[:, None].repeat(1, 1 + int(layout.positions_BT.max()) // 64, 1)
        elif self.kind == "another dtype":
            kept = kept if state is None else kept.double()
        return x_BTD + self.out(torch.tanh(totals_BTD)), OwnState(kept) if layout.needs_state else None


@pytest.fixture(scope="module", autouse=True)
def own_architecture() -> Iterator[None]:
    """The layer above is an architecture in these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "_registry", dict(base._registry))
        register(
            Architecture(
                name="own_for_export", title="Own", source="a test", layer=OwnLayer, options=OwnOptions,
                preset_options=OwnOptions,
                preset=lambda sizes, choices: Preset(layers=[OwnOptions.from_choices(choices)] * sizes.num_layers),
            )
        )  # fmt: skip
        yield


def own_run(folder: Path, state: str) -> Run:
    """A run of a layer with such a state."""
    tokenizer = train_tokenizer([""], "byte", None)
    torch.manual_seed(0)
    model = create_model(
        "own_for_export", hidden_size=8, num_layers=1, vocab_size=len(tokenizer), n_positions=N_POSITIONS,
        options={"state": state},
    )  # fmt: skip
    assert isinstance(model, MultilinForCausalLM)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokenizer.save_pretrained(folder)
    return Run(folder, model.eval(), tokenizer)


def change_graphs(folder: Path, names: tuple[str, ...], change: Callable[[ModelProto], None]) -> None:
    """Change some graphs of an export, and the checksums in its manifest."""
    graphs = {name: onnx.load(folder / name) for name in GRAPHS}
    for name in names:
        change(graphs[name])
    weights = WeightFile(folder)
    for name, graph in graphs.items():
        weights.save(graph, name)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"] = {name: checksum(folder / name) for name in manifest["files"]}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def replace_input(graph: ModelProto, name: str, operator: str, *others: Any) -> None:
    """Let the nodes of a graph read operator(input, others) instead of the input."""
    for index, other in enumerate(others):
        graph.graph.initializer.append(numpy_helper.from_array(np.array(other, np.int64), f"{name}.other{index}"))
    for node in graph.graph.node:
        for place, given in enumerate(node.input):
            if given == name:
                node.input[place] = f"{name}.wrong"
    inputs = [name, *(f"{name}.other{index}" for index in range(len(others)))]
    node = helper.make_node(operator, inputs if others else [name, name], [f"{name}.wrong"])
    graph.graph.node.insert(0, node)


def drop_state(graph: ModelProto) -> None:
    for given in graph.graph.input:
        if given.name.startswith("layers."):
            replace_input(graph, given.name, "Sub")


def look_one_position_before(graph: ModelProto) -> None:
    replace_input(graph, "num_read", "Sub", 1)


def look_at_the_first_token(graph: ModelProto) -> None:
    replace_input(graph, "num_new", "Min", 1)


def scale_a_matrix(graph: ModelProto) -> None:
    for tensor in graph.graph.initializer:
        if tensor.dims[-2:] and min(tensor.dims) > 4:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.02), tensor.name))
            return


WRONG = {
    "a state that is dropped": (drop_state, GRAPHS),
    "a state that single tokens drop": (drop_state, GRAPHS[:1]),
    "a state that longer pieces drop": (drop_state, GRAPHS[1:]),
    "another position": (look_one_position_before, GRAPHS),
    "another position of single tokens": (look_one_position_before, GRAPHS[:1]),
    "the logits of another token": (look_at_the_first_token, GRAPHS[1:]),
    "a matrix that is 2 % too large": (scale_a_matrix, GRAPHS),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_graphs_are_refused(exports: Exports, tmp_path: Path, kind: str) -> None:
    run, right = exports(FAST)
    assert isinstance(run.model, MultilinForCausalLM)
    check_export(run.model, right)
    folder = tmp_path / "export"
    shutil.copytree(right, folder)
    change, names = WRONG[kind]
    change_graphs(folder, names, change)
    with pytest.raises(InputError, match=r"the exported graphs and of the model differ by .* float32 allows 0.1%"):
        check_export(run.model, folder)


def test_graphs_that_cannot_be_run_are_refused(exports: Exports, tmp_path: Path) -> None:
    run, right = exports(FAST)
    assert isinstance(run.model, MultilinForCausalLM)
    folder = tmp_path / "export"
    shutil.copytree(right, folder)
    change_graphs(folder, GRAPHS, lambda graph: replace_input(graph, "num_read", "Add", [1, 2, 3, 4, 5, 6, 7]))
    with pytest.raises(InputError, match="the exported graphs cannot be run") as refusal:
        check_export(run.model, folder)
    assert "\n" not in str(refusal.value)


def double_the_matrices(graph: ModelProto, precision: str) -> ModelProto:
    """Rounding with scales that are twice as large as they should be."""
    for tensor in graph.graph.initializer:
        if len(tensor.dims) == 2:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(2), tensor.name))
    return graph


def test_a_rounded_export_is_checked_too(exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, right = exports(FAST)
    made = {64: onnx.load(right / "prompt.onnx"), 1: onnx.load(right / "step.onnx")}
    monkeypatch.setattr(
        "multilin.export.folder.make_graph", lambda _, num_columns: SimpleNamespace(model_proto=made[num_columns])
    )
    with pytest.raises(InputError, match=r"differ by .* 8bit allows 10.0%"):
        export_run(run, tmp_path / "wrong", "8bit", round_graph=double_the_matrices)
    assert list(tmp_path.iterdir()) == []


def test_a_layer_that_drops_its_state_is_not_exported(tmp_path: Path) -> None:
    """Its graphs and its PyTorch model agree in pieces, but not with the whole text."""
    run = own_run(tmp_path / "run", "dropped")
    with pytest.raises(InputError, match="a layer does not continue from its state"):
        export_run(run, tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("state", ["all tokens", "a slot per 64 tokens"])
def test_a_model_whose_state_grows_is_not_exported(tmp_path: Path, state: str) -> None:
    run = own_run(tmp_path / "run", state)
    with pytest.raises(InputError, match=r"grows with the text \(layers.0.total\), so it cannot be exported") as error:
        export_run(run, tmp_path / "export")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_state_that_changes_its_form_is_refused(tmp_path: Path) -> None:
    run, written = own_run(tmp_path / "run", "another dtype"), list[str]()
    for use in (lambda: export_run(run, tmp_path / "export"), lambda: continue_into(run, tmp_path, written.append)):
        with pytest.raises(InputError, match=r"changes its form, so it cannot be .*layers.0.total is float32") as error:
            use()
        assert "\n" not in str(error.value)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert written == []  # before any text


def continue_into(run: Run, folder: Path, write: Callable[[str], object]) -> None:
    """Continue a text and save the state after it."""
    continue_file(
        TorchEngine(run.model), text_codec(run.tokenizer), "a", GenerationSettings(3), state=None,
        save_state=str(folder / "x.state"), echo=False, write=write,
    )  # fmt: skip


@pytest.mark.parametrize("num_positions", [1, 2])
def test_a_state_of_a_short_text_is_checked(tmp_path: Path, num_positions: int) -> None:
    run = own_run(tmp_path / "run", "sum")
    run.model.config.n_positions = num_positions
    assert [about.name for about in state_tensors(run.model)][-1] == "layers.0.total"
