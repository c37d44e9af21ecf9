"""Float weights in host memory: what crosses to the device, and that training is the same."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from multilin.errors import InputError
from multilin.layers.linear import Arithmetic, matrix_modules
from multilin.model.factory import create_model
from multilin.ops.int8 import Rounded
from multilin.training import host_master
from multilin.training.host_master import HostMaster, check_host_master
from multilin.training.loop import train
from tests.training.conftest import AtStep, Stopped, Tiny, assert_same_run, metrics

INT8 = {"training.precision": "int8"}
HOST = {**INT8, "training.master": "host"}

pytestmark = pytest.mark.filterwarnings(
    "ignore:training.master. 'host' saves memory of a GPU:UserWarning",
    "ignore:.*reads across document borders:UserWarning",
)


class CountingMaster(HostMaster):
    """Keeps a list of what crosses to a device on the CPU, which shares no memory with the host."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.sent: list[Tensor] = []
        self.brought: list[Tensor] = []
        super().__init__(model, "cpu")

    def to_device(self, tensor: Tensor) -> Tensor:
        self.sent.append(super().to_device(tensor).clone())
        return self.sent[-1]

    def to_host(self, tensor: Tensor) -> Tensor:
        self.brought.append(super().to_host(tensor).clone())
        return self.brought[-1]


@pytest.fixture
def host() -> CountingMaster:
    """A tscale model with matrices of int8, and its copy."""
    torch.manual_seed(0)
    model = create_model("tscale", hidden_size=64, num_layers=2, vocab_size=50, n_positions=32)
    model.set_arithmetic(Arithmetic(products="int8", backward="int8"))
    return CountingMaster(model)


def matrices(model: torch.nn.Module) -> list[Tensor]:
    return [module.weight for module in matrix_modules(model)]


def take_step(host: HostMaster) -> None:
    optimizer = torch.optim.SGD(host.model.parameters(), lr=0.1)
    host.follow(optimizer)
    ids = torch.randint(50, (2, 20), generator=torch.Generator().manual_seed(0))
    host.copy(ids, labels=ids).loss.backward()
    optimizer.step()


def floats(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())


def test_only_int8_of_the_matrices_crosses(host: CountingMaster) -> None:
    inside = {id(matrix) for matrix in matrices(host.model)}
    numbers = sum(matrix.numel() for matrix in matrices(host.model))
    others = [parameter for parameter in host.model.parameters() if id(parameter) not in inside]
    other_matrices = sum(parameter.numel() for parameter in others if parameter.ndim > 1)
    vectors = sum(parameter.numel() for parameter in others if parameter.ndim == 1 and parameter.requires_grad)
    host.sent.clear()
    take_step(host)
    assert floats(host.sent) == len(inside) + sum(parameter.numel() for parameter in others)
    assert (
        sum(tensor.nbytes for tensor in host.sent) - 4 * sum(parameter.numel() for parameter in others) <= 1.1 * numbers
    )
    blocks = sum(math.ceil(parameter.numel() / 128) for parameter in host.model.parameters() if parameter.ndim > 1)
    assert floats(host.brought) == blocks + vectors
    assert sum(tensor.nbytes for tensor in host.brought) - 4 * vectors <= 1.1 * (numbers + other_matrices)


def test_the_device_holds_no_floats_of_the_matrices_and_no_gradients(host: HostMaster) -> None:
    take_step(host)
    held = [*host.copy.parameters(), *host.copy.buffers()]
    inside = matrices(host.copy)
    assert {matrix.untyped_storage().nbytes() for matrix in inside} == {4}
    assert all(parameter.grad is None for parameter in [*host.model.parameters(), *host.copy.parameters()])
    kept_by_host = {parameter.data_ptr() for parameter in host.model.parameters()}
    assert not kept_by_host & {tensor.data_ptr() for tensor in held}
    assert host.copy.state_dict().keys() > host.model.state_dict().keys()


def test_nothing_crosses_in_another_way() -> None:
    """PyTorch's meta device computes with nothing that lies elsewhere."""

    class MetaMaster(HostMaster):
        def to_device(self, tensor: Tensor) -> Tensor:
            assert tensor.device.type == "cpu"
            return super().to_device(tensor)

        def to_host(self, tensor: Tensor) -> Tensor:
            assert tensor.device.type == "meta"
            return torch.ones(tensor.shape, dtype=tensor.dtype)

    model = create_model("threelin", hidden_size=64, num_layers=1, vocab_size=50, n_positions=32)
    model.set_arithmetic(Arithmetic(products="int8"))
    host = MetaMaster(model, "meta")
    assert {tensor.device.type for tensor in [*host.copy.parameters(), *host.copy.buffers()]} == {"meta"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    host.follow(optimizer)
    before = model.lm_head.weight.detach().clone()
    torch.stack([parameter.sum() for parameter in host.copy.parameters()]).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.lm_head.weight, before - 0.1)


def test_gradients_arrive_within_half_a_step_of_their_block(host: HostMaster) -> None:
    ids = torch.randint(50, (2, 20), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    host.model(ids, labels=ids).loss.backward()
    exact = [parameter.grad for parameter in host.model.parameters() if parameter.requires_grad]
    host.model.zero_grad()
    torch.manual_seed(1)
    host.copy(ids, labels=ids).loss.backward()
    brought = [parameter.grad for parameter in host.model.parameters() if parameter.requires_grad]
    for expected, found in zip(exact, brought, strict=True):
        assert expected is not None
        assert found is not None
        assert (found - expected).abs().max() <= 0.501 / 127 * expected.abs().max()
        assert expected.ndim > 1 or torch.equal(found, expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a step of the optimizer on a GPU is rounded otherwise")
@pytest.mark.parametrize(
    "changes",
    [
        {"model.architecture": "additive", "optimizer.name": "normalized_sgd", "training.gradient_checkpointing": True},
        {"model.architecture": "elita", "optimizer.name": "matrix_moment", "optimizer.clip_norm": 0.0,
         "model.config": {"tie_word_embeddings": False}},
        {"model.architecture": "linear_mixer", "optimizer.clip_norm": 0.1, "training.int8_backward": False},
        {"model.architecture": "threelin", "training.quantization": "sim_2bit"},
        {"model.architecture": "tscale", "optimizer.name": "adamw"},
    ],
)  # fmt: skip
def test_without_rounded_gradients_training_is_the_same_bit_for_bit(
    tiny: Tiny, tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {**INT8, "training.max_steps": 3, "training.save_every_steps": 0, **changes}
    train(tiny(tmp_path / "device", **plan))
    monkeypatch.setattr(host_master, "quantize_blocks", lambda gradient: Rounded(gradient, gradient.new_ones(())))
    monkeypatch.setattr(host_master, "dequantize_blocks", lambda parts, shape: parts.values)
    train(tiny(tmp_path / "host", **{**plan, "training.master": "host"}))
    assert_same_run(tmp_path / "host", tmp_path / "device")
    one, other = (tmp_path / name / "config.json" for name in ("host", "device"))
    assert one.read_text() == other.read_text()


def test_a_run_learns_as_well_and_leaves_a_model_of_floats(tiny: Tiny, tmp_path: Path) -> None:
    device, host = train(tiny(tmp_path / "device", **INT8)), train(tiny(tmp_path / "host", **HOST))
    assert host.loss == pytest.approx(device.loss, rel=0.02)
    assert metrics(host.output) != metrics(device.output)
    loaded, ids = AutoModelForCausalLM.from_pretrained(host.output), torch.arange(10)[None]
    assert loaded.state_dict().keys() == device.model.state_dict().keys()
    assert torch.equal(loaded(ids).logits, host.model(ids).logits)


@pytest.mark.parametrize("name", ["adamw", "matrix_moment"])
def test_resumes_bit_for_bit(tiny: Tiny, tmp_path: Path, stopped: Stopped, name: str) -> None:
    changes = {**HOST, "optimizer.name": name, "model.architecture": "tscale"}
    train(tiny(tmp_path / "whole", **changes))
    train(stopped(tiny(tmp_path / "stopped", **changes), 7, None), resume=True)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_a_step_whose_gradient_is_not_finite_is_skipped(tiny: Tiny, tmp_path: Path, at_step: AtStep) -> None:
    factors = itertools.chain([float("nan")], itertools.repeat(1.0))

    def spoil(model: torch.nn.Module) -> None:
        matrices(model)[0].register_hook(lambda gradient: gradient * next(factors))

    at_step(3, spoil)
    changes = {**HOST, "model.architecture": "tscale", "optimizer.nonfinite": "skip"}
    with pytest.warns(UserWarning, match="of step 3 is not finite"):
        result = train(tiny(tmp_path / "run", **changes))
    assert metrics(result.output)[-1]["skipped_steps"] == 1
    assert all(parameter.isfinite().all() for parameter in result.model.parameters())


def test_what_it_cannot_do_is_refused(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"training\.master: 'host' given with training\.precision 'float32'"):
        train(tiny(tmp_path / "run", **{"training.master": "host"}))
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr("multilin.training.host_master.world_size", lambda: 2)
    with pytest.raises(InputError, match="'host' given on 2 devices, but it needs one process with one device"):
        check_host_master(tiny(tmp_path / "run", **HOST).training, torch.device("cpu"))


def test_without_a_gpu_it_says_that_it_saves_nothing(tiny: Tiny, tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a device")
    with pytest.warns(UserWarning, match="but this machine has no GPU"):
        train(tiny(tmp_path / "run", **HOST, **{"training.max_steps": 1}))
