"""transformers' Trainer for the blocks of a run.

Trainer brings the loop, autocast, compilation and training on several devices (DDP). Its private method
`_get_train_sampler` is overridden for the order of the blocks; checkpoints are in `saving_trainer`.
"""

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch.utils.data import Sampler, SequentialSampler, default_collate
from transformers import (
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    PrinterCallback,
    TrainerControl,
    set_seed,
)

from multilin.data.prepared import PreparedText
from multilin.data.task_text import TaskText
from multilin.model.loss import sequence_loss
from multilin.ops.linear_cross_entropy.portable import IGNORED
from multilin.ops.threads import adapt
from multilin.scoring.answers import score_answers
from multilin.scoring.losses import evaluate
from multilin.training.assemble import training_arguments, training_order
from multilin.training.callbacks import StepCallback
from multilin.training.communication import compress_gradients
from multilin.training.host_master import HostMaster
from multilin.training.metrics import Meter
from multilin.training.nonfinite import find_nonfinite
from multilin.training.optimizers import build_optimizer
from multilin.training.outcomes import StopRequest
from multilin.training.precision import autocast_dtype
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import Recipe
from multilin.training.run_folder import RunFolder
from multilin.training.saving_trainer import SavingTrainer, bare_optimizer
from multilin.training.schedules import build_schedule
from multilin.training.sharding import ShardWriter, shard
from multilin.training.time_limit import TimeLimit


class RunTrainer(SavingTrainer):
    """Trains on the blocks of a run, in their order, and keeps its checkpoints.

    Args:
        model: a causal language model whose forward returns a loss.
        recipe: with every default filled in.
        text: the text or task to train and validate on.
        folder: where checkpoints and metrics go.
        progress: told of each step and each line of metrics.
        stop_request: notes a signal that asks the run to end.
        began: `time.monotonic()` when the minutes of the recipe began, if it has a time.
    """

    control: TrainerControl
    _batches: list[dict[str, torch.Tensor]]  # of the step that is made
    _num_items: torch.Tensor | None

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: Recipe,
        text: PreparedText | TaskText,
        folder: RunFolder,
        progress: TrainingProgress,
        stop_request: StopRequest,
        began: float,
    ) -> None:
        devices, plan = PartialState(), recipe.training
        self.recipe, self.text, self.folder = recipe, text, folder
        self.order = order = training_order(recipe, model, text)
        blocks_per_step = len(order) // plan.num_steps
        self.callback = StepCallback(
            recipe=recipe,
            meter=Meter(tokens_per_step=blocks_per_step * recipe.model.n_positions),
            progress=progress,
            writers=self._metrics_writers() if devices.is_main_process else [],
            stop_request=stop_request,
            describe_batch=lambda step: order.describe((step - 1) * blocks_per_step, step * blocks_per_step),
            find_nonfinite=self._find_nonfinite,
            limit=self._time_limit(began, blocks_per_step * recipe.model.n_positions),
        )
        args = training_arguments(recipe, model, folder.checkpoints)
        self.host = HostMaster(model, args.device) if plan.master == "host" else None
        model = model if self.host is None else self.host.copy
        self.background, self.shards = ThreadPoolExecutor(1), None
        if plan.shard != "none" and devices.num_processes > 1:
            shard(model, args.device, baseline_loss=baseline_loss)
            self.shards = ShardWriter()
        use_cache = getattr(model.config, "use_cache", True)
        super().__init__(
            model=model, args=args, train_dataset=order, data_collator=default_collate, callbacks=[self.callback]
        )
        self.remove_callback(PrinterCallback)
        model.config.use_cache = use_cache  # Trainer turns it off, and would save it so
        # Trainer looks for **kwargs only.
        if "num_items_in_batch" in inspect.signature(model.forward).parameters:
            self.model_accepts_loss_kwargs = True

    def _time_limit(self, began: float, tokens_per_step: int) -> TimeLimit | None:
        if (minutes := self.recipe.training.minutes) is None:
            return None
        tokens = self.recipe.training.eval_max_tokens or sys.maxsize
        if not isinstance(self.text, TaskText):
            tokens = min(tokens, self.text.validation.num_tokens)
        return TimeLimit(minutes, self.recipe.training.num_steps, began, tokens / tokens_per_step)

    def _metrics_writers(self) -> list[Callable[[dict[str, Any]], None]]:
        """Functions that store a line of metrics; the last tells the trackers that transformers knows."""
        writers = self.folder.metrics_writers(tensorboard="tensorboard" in self.recipe.training.report_to)
        return [*writers, lambda line: self.callback_handler.on_log(self.args, self.state, self.control, {**line})]

    def close(self) -> None:
        """End what goes on beside the steps: a checkpoint that is still being written, and event files."""
        self.background.shutdown()
        with contextlib.suppress(OSError):  # lines were flushed before; an error here would hide why the run ended
            self.folder.close()

    def create_accelerator_and_postprocess(self) -> None:
        """Also note each gradient norm where it is computed: transformers hands it to no callback."""
        super().create_accelerator_and_postprocess()
        prepare_model, clip = self.accelerator.prepare_model, self.accelerator.clip_grad_norm_
        if self.shards is not None:  # it is distributed already
            self.accelerator.prepare_model = functools.partial(
                prepare_model, device_placement=False, evaluation_mode=True
            )
        if self.recipe.training.communication == "int8":
            self.accelerator.prepare_model = lambda *args, **kwargs: compress_gradients(prepare_model(*args, **kwargs))

        def clip_and_note(parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            norm: torch.Tensor = clip(parameters if self.host is None else self.master.parameters(), *args, **kwargs)
            self.callback.grad_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            return norm

        self.accelerator.clip_grad_norm_ = clip_and_note

    def create_optimizer(self, model: Any = None) -> Any:
        """The recipe's optimizer."""
        if getattr(self, "optimizer", None) is None:
            model = model or self.master
            names = self.get_decay_parameter_names(model)
            self.optimizer: Any = build_optimizer(self.recipe.optimizer, model, decayed=names)
            if self.host is not None:
                self.host.follow(self.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The recipe's schedule."""
        if getattr(self, "lr_scheduler", None) is None:
            bare = bare_optimizer(optimizer or self.optimizer)
            limit = self.callback.limit
            num_steps = (lambda step: num_training_steps) if limit is None else limit.num_steps
            self.lr_scheduler: Any = build_schedule(self.recipe.schedule, bare, num_steps)
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """Weight decay is for matrices: not for biases, norms, embeddings, nor an output tied to an embedding."""
        embeddings = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        names = super().get_decay_parameter_names(model)
        return [name for name in names if parameters[name].ndim > 1 and id(parameters[name]) not in embeddings]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one batch; its loss is metered."""
        self._seed(self._passes_done)
        self._passes_done += 1
        adapt()
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.callback.meter.add_loss(loss)
        return loss

    def _seed(self, number: int) -> None:
        """Seed what the pass of this number in its step draws: as its blocks, the same on any number of devices."""
        place = number * self.args.world_size + self.args.process_index
        source = np.random.SeedSequence([self.args.seed, self.state.global_step, place])
        set_seed(int(source.generate_state(1)[0]))

    def _find_nonfinite(self) -> str | None:
        """Repeat this process's passes of the step, without the other processes; see `find_nonfinite`."""
        if self.shards is not None:  # each pass of a divided model needs all processes
            return None
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

        def loss(number: int) -> torch.Tensor:
            self._seed(number)
            batch, num_items = self._prepare_inputs(self._batches[number]), self._num_items
            with self.compute_loss_context_manager():
                result: torch.Tensor = self.compute_loss(model, batch, num_items_in_batch=num_items)
            return result

        found = (find_nonfinite(model, functools.partial(loss, number)) for number in range(len(self._batches)))
        return next(filter(None, found), None)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The loss of one batch; no state is kept for a text that goes on."""
        inputs = {**inputs, "use_cache": False}
        smoothing = self.args.label_smoothing_factor
        # Trainer of transformers 5.10 divides a smoothed loss by the tokens of a pass, not by those of the whole step.
        is_special = smoothing > 0 or (inputs["labels"] == IGNORED).float().mean() > 0.5
        if isinstance(model, GPT2LMHeadModel | LlamaForCausalLM) and is_special:
            loss = getattr(model, "baseline_loss", functools.partial(baseline_loss, model))
            # Gradients are averaged over devices, and divided by the tokens of all of them.
            return self.args.world_size * loss(inputs, smoothing, kwargs.get("num_items_in_batch"))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Validate, without touching the random numbers that training draws."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        dtype = autocast_dtype(self.recipe.training.precision)
        autocast = torch.autocast(self.model.device.type, dtype, enabled=dtype is not None)
        with self.callback.paused("validation"), torch.random.fork_rng(devices=devices), autocast:
            metrics = self._validate()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _validate(self) -> dict[str, float]:
        """The figures of a validation, as metrics.jsonl names them."""
        plan, length, text = self.recipe.training, self.recipe.model.n_positions, self.text
        if isinstance(text, TaskText):
            number = min(text.validation.number, max(1, (plan.eval_max_tokens or sys.maxsize) // length))
            answers = score_answers(
                self.model, text.validation.blocks(length), number=number, batch_size=plan.batch_size
            )
            return {"validation_loss": answers.loss, "validation_accuracy": answers.accuracy}
        result = evaluate(
            self.model, text.validation, block_size=length, batch_size=plan.batch_size, max_tokens=plan.eval_max_tokens
        )
        return {"validation_loss": result.loss, "validation_bits_per_byte": result.bits_per_byte}

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, torch.Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor | None]:
        """The batches of one step, and the number of tokens predicted in them on all devices.

        The first token of a row is not predicted, whatever name the model's loss goes by.
        """
        self._passes_done = 0  # of the step that begins
        # transformers asks whether training is over after a step only.
        batches = list(itertools.islice(epoch_iterator, 0 if self.callback.is_finished else num_batches))
        self._batches, self._num_items = batches, None
        if batches and self.model_accepts_loss_kwargs:
            predicted = torch.stack([(batch["labels"][:, 1:] != IGNORED).sum() for batch in batches]).sum().to(device)
            self._num_items = self.accelerator.gather(predicted).sum()
        return batches, self._num_items

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: it would walk over all parameters at every step."""
        return 0

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        # The order is decided by the dataset itself, so that it is the same after a stop.
        return SequentialSampler(self.order)


def baseline_loss(
    model: PreTrainedModel, inputs: Mapping[str, Any], label_smoothing: float = 0.0, num_items: Any = None
) -> torch.Tensor:
    """The loss of one of transformers' models as ours compute theirs: never all logits, and none without a target.

    So a recall task, in which most tokens have no target, takes each model as long as its layers do.

    Args:
        model: GPT-2 or Llama.
        inputs: of its forward, with `labels`, -100 where there is no target.
        label_smoothing: share of the target distribution spread evenly over the vocabulary.
        num_items: targets that the sum is divided by; None counts those here.
    """
    hidden_BTD = model.base_model(**{name: value for name, value in inputs.items() if name != "labels"})[0]
    hidden_ND, targets_N = hidden_BTD[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
    loss = sequence_loss(model.get_output_embeddings(), hidden_ND, targets_N, label_smoothing=label_smoothing)
    mean: torch.Tensor = loss / ((targets_N != IGNORED).sum() if num_items is None else num_items)
    return mean
