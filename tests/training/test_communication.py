"""Gradients that travel as int8, between two processes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from multilin.training.communication import mean_in_int8
from tests.processes import run, torchrun
from tests.training.conftest import Tiny, metrics
from tests.training.elastic import run_on
from tests.training.test_distributed import written

MEANS = """
import sys
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from multilin.training.communication import average, mean_in_int8

sent = 0

def counted(collective):
    def call(received, part):
        global sent
        sent += received.nbytes // 2  # the other half is this device's own
        collective(received, part)
    return call

for name in ("all_to_all_single", "all_gather_single", "all_gather_into_tensor"):
    if hasattr(dist, name):
        setattr(dist, name, counted(getattr(dist, name)))
dist.init_process_group("gloo")
rank = dist.get_rank()
gradient = torch.randn(100_003, generator=torch.Generator().manual_seed(rank)) * (1 + 9 * rank)
once, sent_once = mean_in_int8(gradient), torch.tensor(sent)

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(70, 3))
model.register_comm_hook(None, average)
model(torch.full((5, 70), 1.0 + rank)).sum().backward()
found = {"gradient": gradient, "once": once, "sent": sent_once, "weight": model.module.weight.grad}
save_file(found, f"{sys.argv[1]}/{rank}.safetensors")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """The tensors that each of two processes saved."""
    folder = tmp_path_factory.mktemp("means")
    (folder / "script.py").write_text(MEANS)
    run(torchrun(2, str(folder / "script.py"), str(folder)))
    return [load_file(folder / f"{rank}.safetensors") for rank in range(2)]


@pytest.mark.usefixtures("alone")
def test_a_device_alone_rounds_its_gradient() -> None:
    gradient = torch.randn(1003, generator=torch.Generator().manual_seed(0))
    assert 0 < (mean_in_int8(gradient) - gradient).norm() <= 0.01 * gradient.norm()


@pytest.mark.slow
def test_devices_agree_on_a_mean_near_the_exact_one(two: list[dict[str, torch.Tensor]]) -> None:
    exact = torch.stack([found["gradient"] for found in two]).mean(dim=0)
    assert torch.equal(two[0]["once"], two[1]["once"])
    assert (two[0]["once"] - exact).norm() <= 0.01 * exact.norm()
    torch.testing.assert_close(two[0]["weight"], torch.full((3, 70), 7.5), rtol=0.01, atol=0)


@pytest.mark.slow
def test_a_quarter_of_the_bytes_travels(two: list[dict[str, torch.Tensor]]) -> None:
    for found in two:
        # A ring of float32 sends every number once in each of its two rounds, but for a device's own share.
        assert 0 < found["sent"] <= 0.27 * 4 * 100_400


@pytest.mark.slow
def test_a_run_on_two_devices_learns_the_same(tiny: Tiny, tmp_path: Path) -> None:
    plain, rounded = tmp_path / "plain", tmp_path / "rounded"
    for output, changes in ((plain, {}), (rounded, {"training.communication": "int8"})):
        run_on(2, written(tmp_path, tiny(output, **{"model.options.dropout": 0.0}, **changes)))
    for one, other in zip(metrics(plain), metrics(rounded), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=0.02)
    assert metrics(plain) != metrics(rounded)
