"""Build the parts of a run from its recipe: text, model and data order."""

import dataclasses
import inspect
import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from multilin.data.packed_text import BLOCK_FIELDS, check_cuts
from multilin.data.prepare import prepare_text
from multilin.data.prepared import MixedBlocks, PreparedText
from multilin.data.progress import Progress, no_progress
from multilin.data.tasks import TaskText, is_task, task_text
from multilin.data.tokenizers import tokenizer_hash
from multilin.errors import InputError, plural
from multilin.model.baselines import attend_without_mask
from multilin.model.factory import create_config, create_model
from multilin.model.memory import FLOAT_BYTES, ID_BYTES, activation_bytes, check_memory, loss_bytes, parameter_bytes
from multilin.runs.load import read_config
from multilin.training.adapters import add_adapters
from multilin.training.environment import num_processes
from multilin.training.fsdp import check_shard
from multilin.training.ngrams import is_much_unlike, unlikeness
from multilin.training.optimizers import optimizer_bytes
from multilin.training.order import BlockOrder, MixedOrder
from multilin.training.precision import autocast_dtype, set_arithmetic
from multilin.training.processes import accelerator_or_cpu
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import Recipe
from multilin.training.start import load_start, open_start


def read_text(recipe: Recipe, progress: Progress = no_progress, run: Path | None = None) -> PreparedText:
    """Read the text of a recipe: its tokenizer, and the packed training and validation text.

    Args:
        recipe: the recipe, with the sources and the tokenizer.
        progress: called repeatedly while the text is read.
        run: folder of a run of the recipe, or of a checkpoint; the tokenizer there replaces the tokenizer of
            `model.start`.

    Raises:
        InputError: the text cannot be read, or holds less than one block of training text.
    """
    source = recipe.data.name
    if is_task(source):
        raise InputError(f"data.source: {source} is a task, which has no text; name a text")
    tokenizer = recipe.tokenizer
    if recipe.model.start is not None and run is not None:
        tokenizer = dataclasses.replace(tokenizer, path=str(run))
    text = prepare_text(recipe.data, tokenizer, progress=progress)
    check_cuts(text.train, recipe.model.n_positions, "data.source")
    other = "data.source (validation part)" if recipe.data.validation is None else "data.validation"
    check_cuts(text.validation, recipe.model.n_positions, other)
    if not text.train.description.is_chat and text.train.num_tokens < recipe.model.n_positions:
        raise InputError(
            f"data.source: {source} holds {plural(text.train.num_tokens, 'token')} to train on, less than one "
            f"block of model.n_positions = {recipe.model.n_positions}; give more text or a smaller block"
        )
    return text


def report_validation(recipe: Recipe, text: PreparedText, progress: TrainingProgress) -> None:
    """Report what the validation text is; warn if it is very unlike the training text."""
    if summary := text.validation.description.summary:
        progress.validation(summary)
    if is_much_unlike(ratio := unlikeness(text)):
        warnings.warn(
            f"{'data.validation' if recipe.data.validation else 'data.source'}: the validation text is unlike the "
            f"training text (an n-gram model needs {ratio:.1f} times as many bits per byte), so validation bits per "
            "byte say little about text like the training text; give a validation text more like the training text "
            "(data.validation)",
            stacklevel=2,
        )


def read_data(recipe: Recipe, progress: Progress = no_progress, run: Path | None = None) -> PreparedText | TaskText:
    """Read the training data of a recipe: a text, or the sequences of a task; arguments as for `read_text`.

    Raises:
        InputError: see `read_text`; or the task is unknown, or the blocks are too short for the task.
    """
    if not is_task(recipe.data.name):
        return read_text(recipe, progress, run)
    task = task_text(recipe.data.name)
    task.train.blocks(recipe.model.n_positions)  # raises if blocks are too short
    return task


def check_model(recipe: Recipe, vocab_size: int | None = None, checkpoint: Path | None = None) -> None:
    """Raise if a model cannot be built or does not fit into the memory; this check allocates no weights.

    Args:
        recipe: the recipe, with every default filled in.
        vocab_size: size of the text's tokenizer; None takes the size in the recipe.
        checkpoint: checkpoint of a resumed run, which reads `model.start` only if it trains adapters; else None.

    Raises:
        InputError: sizes or options contradict each other, or training needs more memory than is free.
    """
    with torch.device("meta"):
        network = create_network(recipe, vocab_size or recipe.tokenizer.vocab_size or 1, checkpoint)
        if recipe.training.lora is not None:
            add_adapters(network, recipe)
    _check_memory(recipe, network)
    check_shard(recipe.training)
    set_arithmetic(network, recipe.training)


def _check_memory(recipe: Recipe, model: PreTrainedModel) -> None:
    plan, sizes, n_positions = recipe.training, model.config, recipe.model.n_positions
    batch_size, passes = plan.split(num_processes())
    num_shards = 1 if plan.shard == "none" else num_processes()
    trained = FLOAT_BYTES * model.num_parameters(only_trainable=True)
    weights = (parameter_bytes(model) + trained + optimizer_bytes(recipe.optimizer, model)) // num_shards
    activations = activation_bytes(
        model,
        batch_size * n_positions,
        number_bytes=FLOAT_BYTES if autocast_dtype(plan.precision) is None else 2,
        recomputes=plan.gradient_checkpointing,
    )
    subject = f"training.batch_size: {batch_size} blocks of {n_positions} tokens"
    if weights > activations:
        subject = (
            f"model: hidden_size {sizes.hidden_size}, {sizes.num_hidden_layers} layers, n_positions {n_positions} and "
            f"a vocabulary of {sizes.vocab_size}"
        )
    # All batches of a step are held at once: ids, labels and documents.
    batches = 3 * ID_BYTES * passes * batch_size * n_positions
    check_memory(f"training.global_batch_size: {plan.global_batch_size} blocks given, but one step", batches)
    if plan.master == "host":
        check_memory(f"{subject} given, but training", weights)
        weights = 0
    device = accelerator_or_cpu()
    activations += loss_bytes(model, batch_size * n_positions, device)
    check_memory(f"{subject} given, but training", weights + activations, device)


def build_model(recipe: Recipe, text: PreparedText | TaskText, checkpoint: Path | None = None) -> PreTrainedModel:
    """Build the model for a text: initialised from torch's global generator, or loaded from `model.start`.

    Args:
        recipe: the recipe, with every default filled in.
        text: the text to train on.
        checkpoint: checkpoint of a resumed run, else None; the weights in the checkpoint are loaded later.

    Raises:
        InputError: the model to start from was trained with another tokenizer.
    """
    tokenizer = text.tokenizer
    if recipe.model.start is None or (checkpoint is not None and recipe.training.lora is None):
        model = create_network(recipe, len(tokenizer), checkpoint)
    else:
        model = load_start(recipe.model.start, recipe.model.start_hash, tokenizer)
        rounding = (getattr(model.config, "arithmetic", None) or {}).get("weights", "none")
        if rounding not in ("none", recipe.training.quantization):
            warnings.warn(
                f"training.quantization: {recipe.training.quantization!r}, but the model to start from was trained "
                f"with {rounding!r}, which this run does not apply",
                stacklevel=2,
            )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, getattr(tokenizer, name))
        setattr(model.generation_config, name, getattr(tokenizer, name))
    model.config.tokenizer_hash = tokenizer_hash(tokenizer)
    if recipe.model.start is None and getattr(model.config, "output_bias", None) == "unigram":
        model.set_token_counts(torch.from_numpy(text.train.token_counts()))
    if hasattr(model.config, "label_smoothing"):
        model.config.label_smoothing = recipe.training.label_smoothing
    set_arithmetic(model, recipe.training)
    if recipe.training.lora is not None:
        add_adapters(model, recipe)
    if recipe.training.compile:
        attend_without_mask(model)
    if recipe.training.gradient_checkpointing:
        # transformers 5.23 renamed this method; the old name still works there, with a warning.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def create_network(recipe: Recipe, vocab_size: int, checkpoint: Path | None) -> PreTrainedModel:
    """A model with random weights; the recipe, or the model that the run starts from, gives the sizes."""
    model = recipe.model
    if model.start is not None:
        is_whole = checkpoint is not None and recipe.training.lora is None
        folder = checkpoint if checkpoint is not None and is_whole else open_start(model.start, model.start_hash)
        return AutoModelForCausalLM.from_config(read_config(folder))
    for name in model.config:
        if name in inspect.signature(create_config).parameters:
            raise InputError(f"model.config.{name}: given, but another field of the recipe decides it; leave it out")
    return create_model(
        model.architecture,
        vocab_size=vocab_size,
        **{name: getattr(model, name) for name in ("hidden_size", "num_layers", "n_positions", "options", "layers")},
        **model.config,
    )


def training_order(recipe: Recipe, model: PreTrainedModel, text: PreparedText | TaskText) -> BlockOrder:
    """The order of all blocks that a run reads, on all devices, from the first step to the last."""
    blocks = text.train.blocks(recipe.model.n_positions)
    if remark := packing_remark(recipe, model):
        warnings.warn(remark, stacklevel=2)
    plan = recipe.training
    assert plan.global_batch_size is not None, "training needs a recipe without open fields; see resolve_recipe"
    length = plan.num_steps * plan.global_batch_size
    fields = [field for field in blocks[0] if field not in _unread(model)]
    kind: type[BlockOrder] = MixedOrder if isinstance(blocks, MixedBlocks) else BlockOrder
    return kind(blocks, seed=plan.seed, length=length, fields=fields)


def packing_remark(recipe: Recipe, model: PreTrainedModel) -> str | None:
    """A warning if the model reads across document borders inside a block, else None."""
    if not is_task(recipe.data.name) and _unread(model):
        return f"{recipe.model.architecture} reads across document borders inside a block"
    return None


def _unread(model: PreTrainedModel) -> list[str]:
    """The fields of a block that the model does not read."""
    unread = [field for field in BLOCK_FIELDS if field not in inspect.signature(model.forward).parameters]
    return unread if getattr(model, "packs", True) else [*unread, "document_ids"]
