"""Estimate the memory, network traffic, time and checkpoint size of a training run.

Weights, gradients, optimizer state, floating-point operations and the bytes that devices send each other are counted
from the model. Activations are estimated as in `multilin.model.memory`. For this machine, times come from
measured training steps; for other devices, from an assumed share of their peak speed.
"""

import statistics
import time
import timeit
from dataclasses import dataclass, replace

import torch
from rich.filesize import decimal
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import PreTrainedModel

from multilin.analysis.costs import parameter_counts, training_flops_per_token
from multilin.analysis.machine import device_name
from multilin.analysis.settings import PlanSettings
from multilin.data.prepared import read_manifest
from multilin.data.settings import BYTE_VOCAB_SIZE, DEFAULT_VOCAB_SIZE
from multilin.data.store import Store
from multilin.data.tasks import is_task, task_text
from multilin.data.tokenizers import load_tokenizer
from multilin.errors import duration
from multilin.model.factory import layers_of
from multilin.model.memory import (
    FLOAT_BYTES,
    activation_bytes,
    available_memory,
    check_memory,
    loss_bytes,
    parameter_bytes,
)
from multilin.ops.int8 import BLOCK
from multilin.ops.threads import adapt
from multilin.training.adapters import add_adapters
from multilin.training.assemble import create_network
from multilin.training.fsdp import check_shard
from multilin.training.optimizers import build_optimizer, optimizer_bytes
from multilin.training.precision import autocast_dtype
from multilin.training.processes import accelerator_or_cpu
from multilin.training.recipe import Recipe
from multilin.training.resolve import resolve_recipe

INT8_BYTES = 1 + FLOAT_BYTES / BLOCK
"""Bytes of a number that is sent as int8, with its part of the block's scale."""


@dataclass(frozen=True)
class Device:
    """The limits of a device.

    memory: bytes; None if it is not known.
    half, single: floating-point operations per second in bf16 and in float32 (without TF32).
    link: bytes per second that the device sends to other devices, in one direction.
    """

    name: str
    memory: float | None
    half: float
    single: float
    link: float


DEVICES = {
    "h200": Device("NVIDIA H200 SXM", 141e9, 989e12, 67e12, 450e9),
    "a100": Device("NVIDIA A100 SXM 80 GB", 80e9, 312e12, 19.5e12, 300e9),
}
"""GPUs with figures from NVIDIA's data sheets: speeds of dense matrix products and of NVLink."""
ETHERNET = 1.25e9
"""Bytes per second of a network of 10 Gbit/s, which is assumed between machines like this one."""
EFFICIENCY = 0.4  # share of a device's peak that training is assumed to reach
WARM_UP_STEPS, FEWEST_STEPS = 2, 5  # unmeasured steps first, then at least so many measured
MEASURED_SECONDS, LONGEST_STEP = 1.0, 5.0  # seconds that are measured; longest step to try


@dataclass(frozen=True)
class WayPlan:
    """One way to train on several devices.

    way: `ddp` (training.communication float), `int8` (communication int8) or `fsdp`.
    memory: bytes that a device needs at least: weights, gradients, optimizer, activations and gathered weights.
    fits: whether the device has this memory; True if its memory is not known.
    sent_bytes: bytes that a device sends in one step.
    communication_seconds: time to send these bytes at the full speed of the link.
    is_hidden: whether the device can send these bytes while it computes.
    tokens_per_second: training tokens per second of all devices together.
    hours, device_hours: duration of the run in hours, and this duration times the number of devices.
    cost: price of the device hours; None if no price was given.
    """

    way: str
    memory: int
    fits: bool
    sent_bytes: int
    communication_seconds: float
    is_hidden: bool
    tokens_per_second: float
    hours: float
    device_hours: float
    cost: float | None


@dataclass(frozen=True)
class TrainingPlan:
    """The estimate for a run on several devices.

    flops_per_token: operations of training without adapters, see `training_flops_per_token`; with adapters, training
        needs up to a third fewer.
    weight_bytes, gradient_bytes, optimizer_bytes: bytes of the whole model, on one device.
    activation_bytes: estimated bytes of activations of one pass on one device, with the logits for the loss.
    checkpoint_bytes: bytes of a checkpoint: the weights or only the adapters, and the optimizer state.
    tokens: training tokens of the whole run.
    seconds_per_step: seconds of a step, without waiting for other devices.
    basis: how seconds_per_step was found, in words.
    """

    device: Device
    devices: int
    parameters: int
    vocab_size: int
    flops_per_token: float
    tokens_per_step: int
    steps: int
    tokens: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    checkpoint_bytes: int
    seconds_per_step: float
    basis: str
    ways: list[WayPlan]


def plan_training(recipe: Recipe, settings: PlanSettings) -> TrainingPlan:
    """Estimate the memory, communication and time of a recipe on several devices, without training.

    Args:
        recipe: the run; without `training.global_batch_size` every device has `training.batch_size` blocks. With
            `training.minutes` the run has as many steps as fit into the time.
        settings: the devices, the share of their peak that training reaches, and their price.

    Raises:
        InputError: a recipe that cannot be trained, or a tokenizer that is missing.
    """
    is_here = settings.kind not in DEVICES
    target = (
        accelerator_or_cpu() if settings.kind == "here" else torch.device("cpu" if settings.kind == "cpu" else "cuda")
    )
    if not is_here and recipe.training.precision == "auto":
        recipe = replace(recipe, training=replace(recipe.training, precision="bf16"))
    blocks = recipe.training.global_batch_size or recipe.training.batch_size * settings.devices
    recipe = resolve_recipe(replace(recipe, training=replace(recipe.training, global_batch_size=blocks)))
    check_shard(recipe.training)
    vocab_size = find_vocab_size(recipe)
    with torch.device("meta"):
        model = create_network(recipe, vocab_size, None)
        if recipe.training.lora is not None:
            add_adapters(model, recipe)
    training = recipe.training
    batch_size, passes = training.split(settings.devices)
    tokens = batch_size * recipe.model.n_positions
    flops = _flops(recipe, model, vocab_size)
    is_single = training.precision == "float32" or (is_here and autocast_dtype(training.precision) is None)
    device = _this_machine(target, is_single) if is_here else DEVICES[settings.kind]
    weights, optimizer = parameter_bytes(model), optimizer_bytes(recipe.optimizer, model)
    gradients = FLOAT_BYTES * model.num_parameters(only_trainable=True)
    activations = activation_bytes(
        model, tokens, number_bytes=FLOAT_BYTES if is_single else 2, recomputes=training.gradient_checkpointing
    ) + loss_bytes(model, tokens, target)
    seconds, basis = tokens * flops / (device.single if is_single else device.half), ""
    if is_here and settings.efficiency is None:
        fits = device.memory is None or weights + gradients + optimizer + activations <= device.memory
        if fits and seconds / EFFICIENCY <= LONGEST_STEP:
            one_pass = replace(recipe, training=replace(training, batch_size=batch_size))
            step_seconds(one_pass, vocab_size, 0.0, target)  # the first step may compile kernels
            seconds = step_seconds(one_pass, vocab_size, time.monotonic() + MEASURED_SECONDS, target)
            basis = "training steps of this model, measured on this machine"
    if not basis:
        efficiency = settings.efficiency or EFFICIENCY
        seconds /= efficiency
        peak = "speed of matrix products on this machine" if is_here else "peak of the device"
        basis = f"assumed to be {efficiency:.0%} of the {peak}"
    steps = training.num_steps
    if training.minutes is not None:
        steps = max(1, min(steps, int(60 * training.minutes / (seconds * passes))))
    plan = TrainingPlan(
        device=device, devices=settings.devices, parameters=parameter_counts(model)[0], vocab_size=vocab_size,
        flops_per_token=flops, tokens_per_step=tokens * passes * settings.devices, steps=steps,
        tokens=tokens * passes * settings.devices * steps,
        weight_bytes=weights, optimizer_bytes=optimizer, gradient_bytes=gradients, activation_bytes=activations,
        checkpoint_bytes=(weights if training.lora is None else gradients) + optimizer,
        seconds_per_step=seconds * passes, basis=basis, ways=[],
    )  # fmt: skip
    layers = [parameter_bytes(layer) for layer in layers_of(model)]
    gathered = 0.5 if training.precision == "bf16" else 1.0
    names = ("ddp", "int8", "fsdp") if training.lora is None else ("ddp", "int8")  # adapters are not sharded
    return replace(plan, ways=[_way(way, plan, layers, gathered, passes, settings.price) for way in names])


def step_seconds(recipe: Recipe, vocab_size: int, until: float, device: torch.device) -> float:
    """Measure the median seconds of a recipe's training steps, on random tokens.

    until: value of `time.monotonic()` after which no further step begins; at least one step is measured.
    """
    recipe = resolve_recipe(recipe)
    plan, dtype = recipe.training, autocast_dtype(recipe.training.precision)
    with torch.random.fork_rng():
        model = create_network(recipe, vocab_size, None).to(device).train()
        ids = torch.randint(vocab_size, (plan.batch_size, recipe.model.n_positions)).to(device)
    optimizer = build_optimizer(recipe.optimizer, model, decayed=())
    seconds: list[float] = []
    begin = time.monotonic()
    while not seconds or (
        time.monotonic() < until
        and (len(seconds) < WARM_UP_STEPS + FEWEST_STEPS or time.monotonic() - begin < MEASURED_SECONDS)
    ):
        step = time.monotonic()
        adapt()
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits until a GPU is done
        seconds.append(time.monotonic() - step)
        begin = time.monotonic() if len(seconds) == WARM_UP_STEPS else begin
    return statistics.median(seconds[WARM_UP_STEPS:] or seconds[-1:])


def sent_bytes(way: str, layers: int, rest: int, devices: int, *, passes: int = 1, gathered: float = 1.0) -> float:
    """Bytes that each device sends in one step.

    For P bytes of float32 parameters, each of N devices sends P (N - 1) / N bytes in a reduce-scatter or all-gather. An
    all-reduce consists of both. A number takes 4 bytes, or 1.03 with communication int8. In every pass, FSDP gathers
    each layer twice, before its forward and its backward pass, gathers other parameters once, and reduces all
    gradients.

    Args:
        way: `ddp`, `int8` or `fsdp`.
        layers, rest: float32 bytes of the parameters of all layers, and of the parameters outside layers.
        devices: number of devices that train together.
        passes: forward passes of one step.
        gathered: bytes per gathered number of a layer, relative to float32.
    """
    share = (devices - 1) / devices
    if way == "fsdp":
        return share * passes * ((2 * gathered + 1) * layers + 2 * rest)
    return share * 2 * (layers + rest) * (INT8_BYTES / FLOAT_BYTES if way == "int8" else 1)


def _way(way: str, plan: TrainingPlan, layers: list[int], gathered: float, passes: int, price: float | None) -> WayPlan:
    """Estimate one way to train; `layers` has the bytes of each layer's parameters."""
    devices = plan.devices
    rest = (plan.weight_bytes if way == "fsdp" else plan.gradient_bytes) - sum(layers)  # others send only gradients
    held = plan.weight_bytes + plan.gradient_bytes + plan.optimizer_bytes
    if way == "fsdp" and devices > 1:
        # A device holds two layers' weights and one layer's gradients unsharded, and all parameters outside layers.
        held = held // devices + int((2 * gathered + 1) * max(layers)) + 2 * rest
    elif devices > 1:
        held += plan.gradient_bytes  # the buckets that are sent are copies of the gradients
    sent = sent_bytes(way, sum(layers), rest, devices, passes=passes, gathered=gathered)
    sending = sent / plan.device.link
    # Gradients are sent during the last backward pass, two thirds of the pass; FSDP sends during the whole step.
    room = plan.seconds_per_step if way == "fsdp" else plan.seconds_per_step / passes * 2 / 3
    step = plan.seconds_per_step + max(sending - room, 0.0)
    hours = plan.steps * step / 3600
    memory = held + plan.activation_bytes
    return WayPlan(
        way=way, memory=memory, fits=plan.device.memory is None or memory <= plan.device.memory,
        sent_bytes=round(sent), communication_seconds=sending, is_hidden=sending <= room,
        tokens_per_second=plan.tokens_per_step / step, hours=hours, device_hours=hours * devices,
        cost=None if price is None else hours * devices * price,
    )  # fmt: skip


def find_vocab_size(recipe: Recipe) -> int:
    """The vocabulary size of a recipe's tokenizer, found without reading its text.

    Raises:
        InputError: a tokenizer or a prepared text that is missing.
    """
    if is_task(recipe.data.name):
        return task_text(recipe.data.name).train.task.num_tokens
    if recipe.data.is_prepared:
        field, address = ("mix", next(iter(recipe.data.mix))) if recipe.data.mix else ("source", recipe.data.source)
        manifest, _ = read_manifest(Store(f"data.{field}", address))
        return manifest.validation.describe().vocab_size
    if recipe.tokenizer.path is not None:
        return len(load_tokenizer(recipe.tokenizer.path))
    return recipe.tokenizer.vocab_size or (BYTE_VOCAB_SIZE if recipe.tokenizer.kind == "byte" else DEFAULT_VOCAB_SIZE)


def _this_machine(device: torch.device, is_single: bool) -> Device:
    """This machine. Both `half` and `single` hold the one speed that is measured: float32 if `is_single`, else bf16."""
    rate = _product_rate(torch.float32 if is_single else torch.bfloat16, device)
    return Device(f"this machine, {device_name(device)}", available_memory(device), rate, rate, ETHERNET)


def _product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the floating-point operations per second of matrix products on this machine."""
    matrix = torch.ones(1024, 1024, dtype=dtype, device=device)
    return 2 * len(matrix) ** 3 / min(timeit.repeat(lambda: (matrix @ matrix)[0, 0].item(), number=1))


def _flops(recipe: Recipe, model: PreTrainedModel, vocab_size: int) -> float:
    """Count the training FLOPs per token; weights are allocated only if the forward pass depends on their values."""
    length = recipe.model.n_positions
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return training_flops_per_token(create_network(recipe, vocab_size, None), length)
    except DataDependentOutputException:
        check_memory("model: counting its operations", 2 * parameter_bytes(model))
        return training_flops_per_token(create_network(recipe, vocab_size, None), length)


def describe_plan(plan: TrainingPlan) -> dict[str, str]:
    """The figures that do not depend on the way to train, as texts by name."""
    each = "" if plan.device.memory is None else f", {decimal(int(plan.device.memory))} each"
    return {
        "device": f"{plan.devices} x {plan.device.name}{each}",
        "parameters": f"{plan.parameters:,}, with a vocabulary of {plan.vocab_size:,}",
        "training FLOPs per token": f"{plan.flops_per_token:,.0f}",
        "tokens": f"{plan.tokens:,}: {plan.steps:,} steps of {plan.tokens_per_step:,}",
        "time per step, without waiting": f"{duration(plan.seconds_per_step)}: {plan.basis}",
        "bytes of a checkpoint": decimal(plan.checkpoint_bytes),
        "memory without sharding": ", ".join(
            f"{name} {decimal(getattr(plan, f'{name}_bytes'))}"
            for name in ("weight", "gradient", "optimizer", "activation")
        ),
    }
