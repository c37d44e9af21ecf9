"""Scores on tasks of EleutherAI's lm-eval: `multilin evaluate RUN --tasks ...`, and lm-eval's own `--model multilin`.

Versions of lm-eval with plug-ins find the model through the entry point `lm_eval.models`. For older versions, this
module runs lm-eval's command line with the model registered:

    python -m multilin.analysis.evaluate.tasks run --model multilin --model_args pretrained=RUN --tasks ...
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from multilin.analysis.evaluate.run import block_size, recipe_of
from multilin.data.tokenizers import start_token_id
from multilin.errors import InputError, as_input_error, nearest, shorten, shown
from multilin.inference.generate_run import text_codec
from multilin.runs.load import Run, load_run
from multilin.settings.inputs import check_regular


@register_model("multilin")
class MultilinLM(HFLM):
    """A run as a model of lm-eval.

    Texts are cut into windows as in `evaluate`: a window predicts as many tokens as a block, the start token precedes a
    text, and special tokens spelled out in a text are read as text. If the last window is full, `bits_per_byte` and
    `byte_perplexity` therefore equal the results of `evaluate`. Otherwise lm-eval gives the last window more context.
    In tasks that do not score whole texts, contexts have no start token; this is lm-eval's default.
    """

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 8,
        max_length: int | None = None,
        trust_remote_code: bool = False,
        device: str | None = None,
        max_batch_size: int | None = None,
        run: Run | None = None,
        **others: Any,
    ) -> None:
        if trust_remote_code:
            raise InputError("trust_remote_code: True given, but multilin never runs code that comes with a model")
        if others:
            raise InputError(f"{next(iter(others))}: not an argument of lm-eval's model `multilin`")
        run = run or load_run(pretrained)
        # lm-eval's command line asks for cuda:0 by default, also on machines without a GPU.
        if device is not None and (torch.cuda.is_available() or not device.startswith("cuda")):
            run.model.to(device)
        self._codec = text_codec(run.tokenizer)
        super().__init__(
            pretrained=run.model,
            tokenizer=run.tokenizer,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            max_length=max_length or block_size(run, recipe_of(run)) - 1,
            prefix_token_id=start_token_id(run.tokenizer),
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **_: Any
    ) -> list[int]:
        """Encode a text as in training."""
        ids = self._codec.encode(string)
        return ids[-left_truncate_len:] if left_truncate_len else ids


def evaluate_tasks(
    run: Run,
    tasks: Sequence[str],
    *,
    folder: str | None = None,
    trust_task_code: bool = False,
    limit: int | None = None,
    batch_size: int = 8,
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Score a run on tasks of lm-eval, as {task: {metric: {"value": ..., "standard_error": ... or None}}}.

    Args:
        run: the model and its tokenizer.
        tasks: names of tasks or groups.
        folder: a folder with further tasks (YAML).
        trust_task_code: allow code in the folder to run. lm-eval imports the Python files that `!function` names and
            evaluates templates without a sandbox; the YAML file alone does not show what this code does.
        limit: number of examples of each task; None takes all.
        batch_size: sequences per forward pass.

    Raises:
        InputError: an unknown task, a task whose data cannot be loaded, or a folder that is not trusted.
    """
    if folder is not None:
        _check_folder(Path(folder), trust_task_code)
    # A mistake in a user's task can raise any exception; tasks of lm-eval fail only if their data is missing.
    with as_input_error(
        lambda reason: f"tasks: {shorten(', '.join(tasks))} cannot be run ({reason})",
        OSError if folder is None else Exception,
    ):
        manager = _find_tasks(tasks, folder)
        results = simple_evaluate(
            model=MultilinLM(str(run.folder), run=run, batch_size=batch_size),
            tasks=list(tasks), task_manager=manager, limit=limit, bootstrap_iters=1000,
        )  # fmt: skip
    return {
        task: {
            metric.removesuffix(",none"): {"value": float(value), "standard_error": _standard_error(scores, metric)}
            for metric, value in scores.items()
            if isinstance(value, int | float) and "," in metric and "_stderr" not in metric
        }
        for task, scores in (results or {})["results"].items()
    }


def _check_folder(folder: Path, is_trusted: bool) -> None:
    """Refuse a folder that is missing or not trusted, or has pipes or broken links, which lm-eval cannot read."""
    if not is_trusted:
        raise InputError(
            f"--task-folder: {shorten(str(folder))} can run code, as lm-eval imports Python from it and evaluates its "
            "templates; inspect the folder, then add --trust-task-code"
        )
    if not folder.is_dir():
        raise InputError(f"--task-folder: there is no folder {shown(str(folder))}")
    for path in sorted(folder.rglob("*.yaml")):
        check_regular(path, "--task-folder")


def _find_tasks(tasks: Sequence[str], folder: str | None) -> TaskManager:
    """Return a manager that knows the tasks. The thousands of files in lm-eval are searched only if needed."""
    if folder is not None:
        manager = TaskManager(include_path=folder, include_defaults=False)
        if set(tasks) <= set(manager.all_tasks):
            return manager
    manager = TaskManager(include_path=folder)
    for task in tasks:
        if task not in manager.all_tasks:
            hint = nearest(task, manager.all_tasks) or "; `lm_eval ls tasks` lists them"
            raise InputError(f"tasks: {task!r} is not known to lm-eval{hint}")
    return manager


def _standard_error(scores: dict[str, Any], metric: str) -> float | None:
    name, _, kind = metric.partition(",")
    value = scores.get(f"{name}_stderr,{kind}")
    return float(value) if isinstance(value, int | float) else None


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    sys.exit(cli_evaluate())
