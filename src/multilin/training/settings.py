"""The sections of a recipe that decide the network, the optimizer and the run, as dataclasses."""

import dataclasses
from dataclasses import field
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import MaxLen

from multilin.errors import InputError, plural
from multilin.settings import bounds, settings
from multilin.settings.bounds import Fraction

DEFAULT_MAX_STEPS = 1000
SectionT = TypeVar("SectionT")
Trackers = Annotated[list[Literal["tensorboard", "wandb", "mlflow", "trackio"]], MaxLen(4)]


@settings
class ModelRecipe:
    """The network."""

    architecture: str = "tscale"  # a registered architecture, or the baselines gpt2 and llama
    hidden_size: bounds.Width = 256  # width of the vectors between the layers
    num_layers: bounds.Depth | None = None  # number of layers; by default 6, or as many as `layers` lists
    n_positions: bounds.BlockLength = 256  # context length: tokens in one training block
    options: bounds.Section = field(default_factory=dict)  # options of the architecture
    layers: bounds.LayerList | None = None  # for hybrids: architecture and options of each layer, first to last
    config: bounds.Section = field(default_factory=dict)  # fields of the model's config that replace the preset's
    start: bounds.PathText | None = None  # run, folder or hub name that gives the first weights, sizes and tokenizer
    start_hash: bounds.Name | None = None  # SHA-256 of the weights in model.start; a run records it

    @property
    def kind(self) -> str:
        """The architecture, or all architectures of a hybrid."""
        listed = dict.fromkeys(str(layer.get("architecture")) for layer in self.layers or [])
        return " + ".join(listed or [self.architecture])


@settings
class OptimizerRecipe:
    """The optimizer. Null fields take the architecture's defaults, or the defaults of `name` if it is another one."""

    name: Literal["adamw", "normalized_sgd", "matrix_moment", "muon"] | None = None  # name of the optimizer
    learning_rate: bounds.Rate | None = None  # peak learning rate, reached after the warm-up
    betas: tuple[Fraction, Fraction] | None = None  # adamw: decay rates of its two running means
    row_average: Fraction | None = None  # normalized_sgd: decay rate of the running mean of an embedding's row
    weight_decay: bounds.Strength | None = None  # decoupled decay of weight matrices (not of biases, norms, embeddings)
    clip_norm: bounds.Strength | None = None  # largest norm of the gradient; 0 does not clip
    nonfinite: Literal["stop", "skip"] = "stop"  # if loss or gradient are not finite: end the run, or skip the step


@settings
class ScheduleRecipe:
    """The learning rate over time. Null fields take the defaults of the architecture."""

    name: Literal["linear", "cosine", "constant", "tail", "inverse_sqrt"] | None = None  # schedule after the warm-up
    warmup_steps: bounds.StepCount | None = None  # steps in which the learning rate rises to its peak
    tail: bounds.Rate | None = None  # tail: the rate falls to 0 in the last 1/tail of the run; 5 by default
    constant_steps: bounds.Steps | None = None  # inverse_sqrt: steps at the peak; 100 by default


@settings
class LoraRecipe:
    """Low-rank adapters: each matrix W becomes W + alpha / rank * B A, and A and B alone are trained."""

    rank: bounds.Count  # rows of A and columns of B, for each matrix
    alpha: bounds.Positive | None = None  # the update is multiplied by alpha / rank; twice the rank by default
    dropout: Fraction = 0.0  # dropout on the input of A, in training
    targets: bounds.Names | None = None  # modules, by the ends of their names; all matrices of the layers by default


@settings
class TrainingRecipe:
    """The run."""

    max_steps: bounds.Steps | None = None  # optimizer steps; 1000 by default, or as many as fit into minutes
    minutes: bounds.Minutes | None = None  # time limit of the run, including reading the text and saving
    batch_size: bounds.Batch = 16  # blocks per device and forward pass, at most
    global_batch_size: bounds.Blocks | None = None  # blocks per step on all devices; batch_size x devices by default
    label_smoothing: Fraction | None = None  # probability spread over the whole vocabulary, in training only
    seed: bounds.Seed = 0  # seed of initial weights, data order and dropout
    precision: Literal["auto", "float32", "bf16", "int8"] = "auto"  # auto: bf16 if the hardware has it, else float32
    int8_backward: bool = True  # with precision int8: compute gradients in int8 too, with stochastic rounding
    quantization: Literal["none", "sim_4bit", "sim_2bit", "ternary"] = "none"  # simulate weights rounded to few values
    master: Literal["device", "host"] = "device"  # with int8: place of float weights and optimizer; host is CPU memory
    shard: Literal["none", "fsdp"] = "none"  # fsdp: each device holds a part of every tensor; none: whole tensors
    communication: Literal["float", "int8"] = "float"  # format of gradients sent between devices; int8 in blocks of 128
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    compile: bool = False  # torch.compile the model
    eval_every_steps: bounds.StepCount = 100  # steps between validations; 0 validates after the last step only
    eval_max_tokens: bounds.Tokens | None = 100_000  # validation tokens read each time; null reads all
    save_every_steps: bounds.StepCount = 200  # steps between checkpoints; 0 saves after the last step only
    keep_checkpoints: bounds.Steps = 2  # number of newest checkpoints to keep
    log_every_steps: bounds.Steps = 10  # steps between lines of metrics.jsonl
    lora: LoraRecipe | None = None  # train low-rank adapters only: rank, alpha, dropout, targets
    report_to: Trackers = field(default_factory=list)  # also send metrics to: tensorboard, wandb, mlflow, trackio

    @property
    def length(self) -> str:
        """The length of the run in words, for a message."""
        unit = "minute" if self.minutes == 1 else "minutes"
        return plural(self.num_steps, "step") if self.minutes is None else f"{self.minutes:g} {unit}"

    @property
    def num_steps(self) -> int:
        """The largest number of optimizer steps."""
        return self.max_steps or (DEFAULT_MAX_STEPS if self.minutes is None else bounds.MOST_STEPS)

    def split(self, num_devices: int) -> tuple[int, int]:
        """Blocks per forward pass, and forward passes per step, on each of `num_devices` devices.

        Raises:
            InputError: the blocks of a step cannot be shared out evenly.
        """
        blocks = self.global_batch_size or self.batch_size * num_devices
        share, left = divmod(blocks, num_devices)
        if left:
            raise InputError(
                f"training.global_batch_size: {blocks} given, but it must be a multiple of the number of "
                f"processes, {num_devices}; start another number of processes"
            )
        if share > self.batch_size and share % self.batch_size:
            multiple = self.batch_size * num_devices
            raise InputError(
                f"training.global_batch_size: {blocks} given, but it must be a multiple of {multiple}: "
                f"training.batch_size {self.batch_size} on {plural(num_devices, 'device')}"
            )
        size = min(share, self.batch_size)
        return size, share // size


def fill(section: SectionT, **defaults: Any) -> SectionT:
    """The same section of a recipe, with these values for fields that are None."""
    missing = {name: value for name, value in defaults.items() if getattr(section, name) is None}
    return dataclasses.replace(section, **missing)  # type: ignore[type-var]
