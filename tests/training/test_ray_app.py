"""Ray's workers train the run that one process trains with as many times the batch."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multilin.errors import InputError
from multilin.training.loop import train
from multilin.training.ray_app import _work, train_on_ray
from multilin.training.recipe import save_recipe
from tests.training.conftest import Tiny, metrics


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    pytest.importorskip("ray.train.torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # which would leave a token in the home folder
        yield from _cluster(ray)


def _cluster(ray: Any) -> Iterator[None]:
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "XDG_CACHE_HOME") if name in os.environ}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": environment | {"OMP_NUM_THREADS": "1"}})
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those that Ray gives itself
@pytest.mark.usefixtures("cluster")
def test_two_workers_are_one_with_twice_the_batch(tiny: Tiny, tmp_path: Path) -> None:
    exact = {"model.options.dropout": 0.0}
    accumulated = train(tiny(tmp_path / "one", **exact))
    save_recipe(tiny(tmp_path / "two", **exact), tmp_path / "recipe.yaml")
    train_on_ray(str(tmp_path / "recipe.yaml"), workers=2)
    for one, two in zip(metrics(accumulated.output), metrics(tmp_path / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("output", ["run/", "."])
def test_the_mark_of_a_run_lies_beside_its_folder(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run" if output == "." else tmp_path)
    context = SimpleNamespace(get_experiment_name=lambda: "experiment", get_world_rank=lambda: 0)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda: context))
    seen: list[Path] = []
    monkeypatch.setattr("multilin.training.loop.train", lambda *_, **__: seen.extend(tmp_path.rglob("*")))
    save_recipe(tiny(Path("anywhere")), tmp_path / "recipe.yaml")
    _work({"recipe": str(tmp_path / "recipe.yaml"), "changes": {"output": output}, "resume": False})
    assert sorted(path.name for path in seen) == ["recipe.yaml", "run", "run.ray"]


def test_a_recipe_that_cannot_be_used_is_refused_before_ray_starts() -> None:
    with pytest.raises(InputError, match="recipe: 'nowhere' is neither"):
        train_on_ray("nowhere", workers=2)
