"""Runs of every architecture, small, and their exports: made once for all tests, as each takes seconds."""

from pathlib import Path

import pytest
import torch

from multilin import MultilinForCausalLM
from multilin.architectures import architectures
from multilin.data.tokenizers import train_tokenizer
from multilin.export.folder import export_run
from multilin.model import MultilinConfig
from multilin.model.factory import create_model
from multilin.runs.load import Run, load_run
from tests.contract.conftest import HYBRIDS

N_POSITIONS = 300
OPTIONS = {"tscale": {"head_size": 16, "full_width": 90}, "additive": {"num_heads": 2, "windows": 80}}
FAST = "linear_mixer"  # whose graphs are made in a third of the time of others
NAMES = [*architectures(), "hybrid"]


def make_run(name: str, folder: Path, n_positions: int = N_POSITIONS) -> Run:
    """A run folder with random weights, drawn wide, and a byte tokenizer."""
    tokenizer = train_tokenizer([""], "byte", None)
    sizes = {"hidden_size": 32, "num_layers": 2, "vocab_size": len(tokenizer), "n_positions": n_positions}
    torch.manual_seed(0)
    if name == "hybrid":
        layers = HYBRIDS["window below, running sums above"]
        config = MultilinConfig.from_architecture("additive", **sizes | {"num_layers": None}, layers=layers)
        config.match = {"window": 100, "longest": 4}
        model = MultilinForCausalLM(config)
    else:
        model = create_model(name, **sizes, options=OPTIONS.get(name), tie_word_embeddings=False)
    for parameter_name, parameter in model.named_parameters():
        # Positions that say much keep greedy tokens from repeating.
        torch.nn.init.normal_(parameter, std=2.0 if "positions" in parameter_name else 0.25)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_run(folder)


class Exports:
    """Runs and exports by name, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._made = folder, dict[str, tuple[Run, Path]]()

    def __call__(self, name: str) -> tuple[Run, Path]:
        """The run of that name, and the folder of its export."""
        if name not in self._made:
            run = make_run(name, self.folder / name)
            export_run(run, self.folder / f"{name}-onnx")
            self._made[name] = run, self.folder / f"{name}-onnx"
        return self._made[name]


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    return Exports(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="session", params=[pytest.param(n, marks=[] if n == FAST else [pytest.mark.slow]) for n in NAMES])
def pair(request: pytest.FixtureRequest, exports: Exports) -> tuple[Run, Path]:
    """A run and its export; all but one architecture are slow."""
    return exports(request.param)
