"""transformers' Trainer, with checkpoints that hold no pickles and resume bit for bit.

Trainer brings the loop, autocast, compilation and training on several devices (DDP, FSDP). Replaced here are the
places it keeps private: how a checkpoint is written and read. Everything else goes through its public methods.
"""

import contextlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch.distributed.checkpoint import state_dict as distributed
from torch.utils.data import Sampler, SequentialSampler, default_collate
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerControl

from multilin.data.prepared import PreparedText
from multilin.data.task_text import TaskText
from multilin.files import atomic_files
from multilin.inference.run_files import ADAPTER_WEIGHTS
from multilin.scoring.answers import score_answers
from multilin.scoring.losses import evaluate
from multilin.training import checkpoints
from multilin.training.adapters import in_model, save_adapters
from multilin.training.assemble import training_arguments, training_order
from multilin.training.callbacks import StepCallback
from multilin.training.communication import compress_gradients
from multilin.training.host_master import HostMaster, Link
from multilin.training.metrics import Meter
from multilin.training.optimizers import build_optimizer
from multilin.training.outcomes import StopRequest, TrainingFailed
from multilin.training.precision import autocast_dtype
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import Recipe
from multilin.training.run_folder import RunFolder
from multilin.training.schedules import build_schedule

_WHOLE = distributed.StateDictOptions(full_state_dict=True, cpu_offload=True)


class RunTrainer(Trainer):  # type: ignore[misc]
    """Trains on the blocks of a run, in their order, and keeps its checkpoints.

    Args:
        model: a causal language model whose forward returns a loss.
        recipe: with every default filled in.
        text: the text or task to train and validate on.
        folder: where checkpoints and metrics go.
        progress: told of each step and each line of metrics.
        stop_request: notes a signal that asks the run to end.
    """

    control: TrainerControl

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: Recipe,
        text: PreparedText | TaskText,
        folder: RunFolder,
        progress: TrainingProgress,
        stop_request: StopRequest,
    ) -> None:
        devices, plan = PartialState(), recipe.training
        self.recipe, self.text, self.folder = recipe, text, folder
        self.order = order = training_order(recipe, model, text, devices.num_processes)
        blocks_per_step = len(order) // plan.max_steps
        self.callback = StepCallback(
            recipe=recipe,
            meter=Meter(tokens_per_step=blocks_per_step * recipe.model.n_positions),
            progress=progress,
            writers=self._metrics_writers() if devices.is_main_process else [],
            stop_request=stop_request,
            describe_batch=lambda step: order.describe((step - 1) * blocks_per_step, step * blocks_per_step),
        )
        args = training_arguments(recipe, model, folder.checkpoints)
        self.host = HostMaster(model, Link(args.device)) if plan.master == "host" else None
        model = model if self.host is None else self.host.copy
        use_cache = getattr(model.config, "use_cache", True)
        super().__init__(
            model=model, args=args, train_dataset=order, data_collator=default_collate, callbacks=[self.callback]
        )
        self.remove_callback(PrinterCallback)
        model.config.use_cache = use_cache  # Trainer turns it off, and would save it so
        # Trainer looks for **kwargs only.
        if "num_items_in_batch" in inspect.signature(model.forward).parameters:
            self.model_accepts_loss_kwargs = True

    @property
    def master(self) -> Any:
        """The module that the optimizer changes and checkpoints keep: the trained model, or its floats on the host."""
        return self.model if self.host is None else self.host.model

    def _metrics_writers(self) -> list[Callable[[dict[str, Any]], None]]:
        """Functions that store a line of metrics; the last tells the trackers that transformers knows."""
        writers = self.folder.metrics_writers(tensorboard="tensorboard" in self.recipe.training.report_to)
        return [*writers, lambda line: self.callback_handler.on_log(self.args, self.state, self.control, {**line})]

    def create_accelerator_and_postprocess(self) -> None:
        """Also note each gradient norm where it is computed: transformers 5.0 hands it to no callback."""
        super().create_accelerator_and_postprocess()
        prepare_model, clip = self.accelerator.prepare_model, self.accelerator.clip_grad_norm_

        def prepare_and_compress(*args: Any, **kwargs: Any) -> Any:
            return compress_gradients(prepare_model(*args, **kwargs))

        if self.recipe.training.communication == "int8":
            self.accelerator.prepare_model = prepare_and_compress

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
            bare = _bare(optimizer or self.optimizer)
            self.lr_scheduler: Any = build_schedule(self.recipe.schedule, bare, num_training_steps)
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """Weight decay is for matrices: not for biases, norms, embeddings, nor an output tied to an embedding."""
        embeddings = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        names = super().get_decay_parameter_names(model)
        return [name for name in names if parameters[name].ndim > 1 and id(parameters[name]) not in embeddings]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one batch; its loss is metered."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.callback.meter.add_loss(loss)
        return loss

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The loss of one batch; no state is kept for a text that goes on."""
        return super().compute_loss(model, {**inputs, "use_cache": False}, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Validate, without touching the random numbers that training draws."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        dtype = autocast_dtype(self.recipe.training.precision)
        autocast = torch.autocast(self.model.device.type, dtype, enabled=dtype is not None)
        with self.callback.meter.paused(), torch.random.fork_rng(devices=devices), autocast:
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
        batches = list(itertools.islice(epoch_iterator, num_batches))
        if not batches or not self.model_accepts_loss_kwargs:
            return batches, None
        predicted = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in batches]).sum().to(device)
        return batches, self.accelerator.gather(predicted).sum()

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: it would walk over all parameters at every step."""
        return 0

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model in Hugging Face's layout, or its adapters in PEFT's, gathered from all devices.

        Raises:
            OSError: the folder cannot be written.
        """
        model = self.accelerator.unwrap_model(self.master, keep_torch_compile=False)
        weights = distributed.get_model_state_dict(self.master, options=_WHOLE) if self.args.world_size > 1 else None
        if not self.is_world_process_zero():
            return
        folder = Path(output_dir or self.folder.path)
        if self.recipe.training.lora is None:
            model.save_pretrained(str(folder), state_dict=weights)
        else:
            save_adapters(model, folder, weights)

    def publish_model(self) -> None:
        """Put the model at the top of the run folder, each file complete or not there."""
        if self.is_world_process_zero():
            with atomic_files(self.folder.path) as partial:
                self.save_model(str(partial))
        else:
            self.save_model()

    def bare_model(self) -> PreTrainedModel:
        """The model as it was before training wrapped it, for use."""
        model: PreTrainedModel = self.accelerator.unwrap_model(
            self.master, keep_fp32_wrapper=False, keep_torch_compile=False
        )
        model.train(False)
        return model

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        # The order is decided by the dataset itself, so that it is the same after a stop.
        return SequentialSampler(self.order)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        step, parent, wait = self.state.global_step, self.folder.checkpoints, self.accelerator.wait_for_everyone
        try:
            with self.callback.meter.paused():
                with contextlib.ExitStack() as stack:
                    if self.is_world_process_zero():
                        keep = self.recipe.training.keep_checkpoints
                        stack.enter_context(checkpoints.published(parent, step, keep))
                    wait()  # until the folder is there, which every process writes into
                    self._write_checkpoint(checkpoints.partial_folder(parent, step))
                    wait()
                wait()
        except checkpoints.WRITE_ERRORS as error:
            raise TrainingFailed(f"the checkpoint of step {step} could not be written to {parent} ({error})") from error

    def _write_checkpoint(self, folder: Path) -> None:
        self.save_model(str(folder))
        checkpoints.write_random_state(folder / f"random-{self.args.process_index}.safetensors")
        state = distributed.get_optimizer_state_dict(self.master, _bare(self.optimizer), options=_WHOLE)
        if self.is_world_process_zero():
            checkpoints.write_optimizer(folder, state)
            checkpoints.write_json(folder / "schedule.json", self.lr_scheduler.state_dict())
            checkpoints.write_json(folder / "meter.json", self.callback.meter.state_dict())
            self.folder.write_record(folder, self.args.world_size)
            self.state.save_to_json(str(folder / checkpoints.STATE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        is_whole = self.recipe.training.lora is None
        path = Path(resume_from_checkpoint) / ("model.safetensors" if is_whole else ADAPTER_WEIGHTS)
        with checkpoints.loading(path):
            weights: dict[str, Any] = {**checkpoints.read_tensors(path)}
            if not is_whole:
                weights = in_model(weights, self.accelerator.unwrap_model(self.master, keep_torch_compile=False))
            # Not strict: a weight that is tied to another is stored once.
            options = distributed.StateDictOptions(full_state_dict=True, strict=False)
            distributed.set_model_state_dict(model or self.master, weights, options=options)
        if self.host is not None:
            self.host.send()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        state = checkpoints.read_optimizer(folder)
        with checkpoints.loading(folder / "optimizer.json"):
            checkpoints.check_like(_plain_groups(state), _plain_groups(_bare(self.optimizer).state_dict()), "groups")
        with checkpoints.loading(folder / "optimizer.safetensors"):
            options = distributed.StateDictOptions(full_state_dict=True)
            distributed.set_optimizer_state_dict(self.master, _bare(self.optimizer), state, options=options)
        for name, holder in (("schedule.json", self.lr_scheduler), ("meter.json", self.callback.meter)):
            with checkpoints.loading(folder / name):
                values, own = checkpoints.read_json(folder / name), holder.state_dict()
                checkpoints.check_like(values, own)
                holder.load_state_dict(values)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.read_random_state(Path(checkpoint) / f"random-{self.args.process_index}.safetensors")


def _plain_groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of each group of an optimizer's parameters."""
    return [
        {name: list(v) if isinstance(v, tuple) else v for name, v in group.items() if name != "params"}
        for group in state["param_groups"]
    ]


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    bare: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return bare
