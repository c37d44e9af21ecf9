"""The device that a machine has, and what the environment of a process may decide."""

import os
import socket
from pathlib import Path

import pytest
import torch

from multilin.analysis.machine import examine
from multilin.cli.main import main
from multilin.errors import InputError
from multilin.training.environment import is_launched, num_processes
from multilin.training.loop import train
from multilin.training.processes import accelerator_or_cpu, recipe_decides
from tests.training.conftest import Tiny, assert_same_run


def test_a_build_for_cuda_on_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert accelerator_or_cpu() == torch.device("cpu")
    assert examine().device.startswith("cpu")


FLAGS = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG")
CONFLICTS = {
    **{"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
    **{"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7", "ACCELERATE_USE_FSDP": "true", "ACCELERATE_TORCH_DEVICE": "meta"},
    **dict.fromkeys(FLAGS, "true"),
}
# What accelerate launch sets by default, details of what is not asked for, and what no launcher has completed.
IDLE = {
    **{"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_DYNAMO_MODE": "default"},
    **{"ACCELERATE_USE_CPU": "False", "ACCELERATE_DEBUG_MODE": "maybe", "ACCELERATE_ALLOW_CP_STANDALONE": "true"},
    **{"FSDP_VERSION": "x", "MEGATRON_LM_TP_DEGREE": "x", "PARALLELISM_CONFIG_CP_SIZE": "2", "FORK_LAUNCHED": "x"},
    **{"KUBEFLOW_TRAINER_SERVER_URL": "http://localhost", "SLURM_NTASKS": "4", "SLURM_PROCID": "1"},
    **{"WORLD_SIZE": "", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "29500", "PMI_SIZE": "1"},
    **{"TORCHELASTIC_RESTART_COUNT": "2", "GROUP_WORLD_SIZE": "1"},
}


def test_the_environment_does_not_change_a_run(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"training.max_steps": 3, "training.log_every_steps": 1}
    plain = train(tiny(tmp_path / "plain", **changes))
    for name, value in IDLE.items():
        monkeypatch.setenv(name, value)
    assert_same_run(train(tiny(tmp_path / "idle", **changes)).output, plain.output)
    for name, value in CONFLICTS.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match="in the environment is ignored") as said:
        assert_same_run(train(tiny(tmp_path / "conflicts", **changes)).output, plain.output)
    sentences = [str(warning.message) for warning in said]
    assert {sentence.partition("=")[0] for sentence in sentences} == CONFLICTS.keys()
    assert sentences[0].endswith(
        "ACCELERATE_MIXED_PRECISION=bf16 in the environment is ignored: training.precision is float32"
    )
    assert {name: os.environ[name] for name in CONFLICTS} == CONFLICTS


@pytest.mark.parametrize(
    ("variables", "changes"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"training.precision": "bf16"}),
        ({"ACCELERATE_USE_FSDP": "1", "ACCELERATE_USE_CPU": "true"}, {"training.shard": "fsdp"}),
    ],
)
def test_nothing_is_said_of_an_environment_that_agrees(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], changes: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with recipe_decides(tiny(tmp_path / "run", **changes).training):  # warnings are errors here
        assert not variables.keys() & os.environ.keys()


LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        *(({name: value}, name) for name, value in {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "3"}.items()),
        *(({name: "2"}, name) for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")),
        *(({name: "abc"}, name) for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")),
        *(({name: "-2"}, name) for name in ("WORLD_SIZE", "RANK")),
        *((LAUNCHED | {name: ""}, "WORLD_SIZE" if name == "RANK" else "RANK") for name in LAUNCHED if name != "RANK"),
        (LAUNCHED | {"RANK": "2"}, "RANK"),
        (LAUNCHED | {"MASTER_PORT": "99999"}, "MASTER_PORT"),
    ],
)
def test_a_launcher_that_is_not_there_is_named(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], named: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=rf"^{named}: .* in the environment"):
        train(tiny(tmp_path / "run"))
    assert not list(tmp_path.iterdir())


def test_launched_processes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (num_processes(), is_launched()) == (1, False)
    for name, value in (LAUNCHED | {"PMI_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    assert (num_processes(), is_launched()) == (2, True)


def test_processes_that_do_not_meet_are_one_sentence(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("localhost", 0)) as taken:
        for name, value in (LAUNCHED | {"RANK": "0", "MASTER_PORT": str(taken.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match="MASTER_ADDR: the processes cannot reach each other"):
            train(tiny(tmp_path / "run"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "PMI_SIZE"])
def test_no_verb_stumbles_over_an_empty_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv(name, "")
    assert main(["info"]) == 0
    assert "multilin info" in capsys.readouterr().err  # the command to type next
    monkeypatch.setenv(name, "x")
    assert main(["info"]) == 2
    assert f"{name}: 'x' in the environment" in capsys.readouterr().err
