"""Training on Ray: the processes of a run are Ray's workers, on one or many machines.

    from multilin.training.ray_app import train_on_ray
    train_on_ray("recipe.yaml", {"output": "/shared/runs/books"}, workers=16, use_gpu=True)

Ray Train starts the workers and connects them. If a worker dies, Ray Train restarts all workers, and the run continues
from its last checkpoint. All machines must reach the output folder.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from multilin.files import beside
from multilin.training.recipe import load_recipe

if TYPE_CHECKING:
    from ray.train import Result


def train_on_ray(
    recipe: str | None,
    changes: Mapping[str, Any] | None = None,
    *,
    workers: int,
    use_gpu: bool = False,
    resume: bool = False,
    max_failures: int = 3,
) -> "Result":
    """Train a recipe on Ray workers; the result is the same as with torchrun and equally many processes.

    Args:
        recipe, changes: the arguments of `load_recipe`. Paths should be absolute; all machines must reach these paths.
        workers: number of processes that train together.
        use_gpu: give each worker a GPU.
        resume: continue the run in the output folder.
        max_failures: the largest number of restarts.

    Raises:
        InputError: the recipe cannot be used.
        ray.train.base_trainer.TrainingFailedError: a worker failed, and no restart is left.
    """
    load_recipe(recipe, changes)
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        _work,
        train_loop_config={"recipe": recipe, "changes": dict(changes or {}), "resume": resume},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=max_failures)),
    )
    return trainer.fit()


def _work(given: Mapping[str, Any]) -> None:
    import torch
    from ray.train import get_context

    from multilin.training.loop import train
    from multilin.training.run_folder import RunFolder

    recipe = load_recipe(given["recipe"], given["changes"])
    # Restarted workers find a mark of this job and resume; any other run in the folder is refused.
    mark, name = beside(recipe.output, ".ray"), get_context().get_experiment_name()
    was_begun = [mark.is_file() and mark.read_text() == name and RunFolder(recipe.output).recipe.exists()]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(was_begun)
    if get_context().get_world_rank() == 0:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(name)
    train(recipe, resume=given["resume"] or was_begun[0])
    if get_context().get_world_rank() == 0:
        mark.unlink()
