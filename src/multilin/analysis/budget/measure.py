"""What the rule must know: of a text, of this machine, and of a model."""

import dataclasses
import math
import statistics
import time

import torch

from multilin.analysis.budget.rule import Candidate, Size, Speed, fit_speed
from multilin.analysis.costs import parameter_counts, training_flops_per_token
from multilin.data.corpora import read_documents
from multilin.data.prepared import PreparedText
from multilin.data.settings import DataRecipe
from multilin.errors import prefixed
from multilin.model.memory import FLOAT_BYTES, activation_bytes, parameter_bytes
from multilin.ops.threads import adapt
from multilin.scoring.ngrams import NgramModel, is_much_unlike, repetition, unlikeness
from multilin.training.assemble import create_network
from multilin.training.optimizers import build_optimizer, optimizer_bytes
from multilin.training.precision import autocast_dtype
from multilin.training.processes import accelerator_or_cpu
from multilin.training.recipe import Recipe
from multilin.training.resolve import resolve_recipe

COUNTED_BYTES = 10**8  # of a text, as many as some hours of a small machine read
COUNTED_NGRAMS = 300_000  # of any text, so that the measure says how hard it is and not how long it is
COUNTING_POWER = 0.066  # twice as many trigrams save 4.5 % of their bits (docs/minutes.md)
PREDICTED_TOKENS = 20_000  # of its validation text, to see how it repeats itself
WARM_UP_STEPS, FEWEST_STEPS, SPEED_SECONDS = 2, 5, 2.0


@dataclasses.dataclass(frozen=True)
class TextMeasure:
    """A text as the law sees it.

    train_tokens, train_bytes: of the training text. trigram: bits per byte of the validation text under an interpolated
    trigram model, counted from `COUNTED_NGRAMS` trigrams of the training text; where it has only n, from all of them,
    times (n / `COUNTED_NGRAMS`)^`COUNTING_POWER`. repetition: the share of a trigram model's bits that is left when it
    also sees what was said just before (`multilin.scoring.ngrams.repetition`). is_unlike: the validation text is much
    unlike the training text, so that more training may not help.
    """

    train_tokens: int
    train_bytes: int
    trigram: float
    repetition: float
    is_unlike: bool = False


def measure_text(text: PreparedText) -> TextMeasure:
    """Measure a text in a few seconds, however large it is."""
    model = NgramModel(text.train, 3, COUNTED_NGRAMS)
    trigram = model.bits_per_byte(text.validation, COUNTED_NGRAMS)
    trigram *= min(1.0, text.train.num_tokens / COUNTED_NGRAMS) ** COUNTING_POWER
    repeated = repetition(model, text.validation, PREDICTED_TOKENS)
    is_unlike = is_much_unlike(unlikeness(text))
    return TextMeasure(text.train.num_tokens, text.train.num_bytes, round(trigram, 4), round(repeated, 4), is_unlike)


def count_bytes(data: DataRecipe) -> int:
    """Bytes of a text, counted up to about `COUNTED_BYTES`.

    Raises:
        InputError: the text cannot be read.
    """
    total = 0
    with prefixed("data.source: "):
        for document in read_documents(data.source, text_field=data.text_field, encoding_errors=data.encoding_errors):
            total += len(document.text.encode())
            if total >= COUNTED_BYTES:
                break
    return total


def candidate(recipe: Recipe, size: Size) -> Candidate:
    """What the rule must know of the model of a recipe.

    Raises:
        InputError: sizes or options that do not fit.
    """
    recipe = resolve_recipe(recipe)
    plan, length = recipe.training, recipe.model.n_positions
    with torch.random.fork_rng():
        model = create_network(recipe, size.vocab_size, None)
    total, in_embeddings = parameter_counts(model)
    number_bytes = FLOAT_BYTES if autocast_dtype(plan.precision) is None else 2
    weights = 2 * parameter_bytes(model) + optimizer_bytes(recipe.optimizer, model)
    memory = weights + activation_bytes(model, plan.batch_size * length, number_bytes=number_bytes)
    return Candidate(size, total - in_embeddings, training_flops_per_token(model, length), memory)


def measure_speed(small: tuple[Recipe, Size], large: tuple[Recipe, Size], until: float = math.inf) -> Speed:
    """The speed of this machine from training steps of two models, some seconds of each.

    Args:
        small, large: recipes and sizes; where the sizes are one, it is measured once.
        until: `time.monotonic()` after which a model makes one step at most.
    """
    training, length = small[0].training, small[0].model.n_positions
    models = (small,) if small[1] == large[1] else (small, large)
    times = [
        (candidate(recipe, size), step_seconds(recipe, size.vocab_size, until, accelerator_or_cpu()))
        for recipe, size in models
    ]
    return fit_speed(times[0], times[-1], training.batch_size * length)


def step_seconds(recipe: Recipe, vocab_size: int, until: float, device: torch.device) -> float:
    """Median seconds of a recipe's training step, on random tokens; see `measure_speed` for `until`."""
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
        and (len(seconds) < WARM_UP_STEPS + FEWEST_STEPS or time.monotonic() - begin < SPEED_SECONDS)
    ):
        step = time.monotonic()
        adapt()
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for a GPU
        seconds.append(time.monotonic() - step)
        begin = time.monotonic() if len(seconds) == WARM_UP_STEPS else begin
    return statistics.median(seconds[WARM_UP_STEPS:] or seconds[-1:])
