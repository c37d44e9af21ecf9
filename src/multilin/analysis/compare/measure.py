"""What models cost to run: seconds for one more token and bytes kept, after texts of several lengths; and a sample."""

import copy
import dataclasses
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from multilin.analysis.compare.record import Decoding
from multilin.analysis.info import state_bytes
from multilin.errors import InputError
from multilin.inference.generate import generate_text
from multilin.inference.runs import load_run, longest_text
from multilin.inference.settings import GenerationSettings
from multilin.model.factory import create_model
from multilin.training.assemble import read_text
from multilin.training.recipe import Recipe, load_recipe

CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
TOKENS_PER_TURN, TURNS = 16, 5
PROMPT_TOKENS, SAMPLE_TOKENS = 12, 120


@dataclasses.dataclass(frozen=True)
class Measured:
    """The figures of one model, what to know of them, and the bytes it keeps of a text of its training length."""

    figures: list[Decoding]
    remarks: list[str]
    memory: int


class Reader:
    """A model with a text before it, ready to write from there again and again."""

    def __init__(self, model: PreTrainedModel, context: int) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(context)
        ids = torch.randint(model.config.vocab_size, (1, context), generator=generator).to(model.device)
        with torch.inference_mode():
            self.cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        self.start = ids[:, -1:]
        self.bytes = sum(state_bytes(self.cache))

    def write(self, num_tokens: int) -> float:
        """Seconds per token over so many tokens after the text."""
        cache, ids = copy.deepcopy(self.cache), self.start
        _synchronize()
        begin = time.perf_counter()
        with torch.inference_mode():
            for _ in range(num_tokens):
                ids = self.model(ids, past_key_values=cache, use_cache=True).logits.argmax(dim=-1)
        _synchronize()
        return (time.perf_counter() - begin) / num_tokens


def measure_decoding(folders: Mapping[str, Path]) -> dict[str, Measured]:
    """Tokens per second and state bytes of every model, the models taking turns at each context.

    Where a model reads no text of that length, one is built that just does, with the same sizes and random weights.

    Args:
        folders: name to run folder.
    """
    found, trained = {}, {name: load_run(folder).model for name, folder in folders.items()}
    for name, folder in folders.items():
        memory = Reader(trained[name], load_recipe(folder).model.n_positions).bytes
        found[name] = Measured([], _remarks(folder, trained[name]), memory)
    for context in CONTEXTS:
        models = {name: _reading(context, folder, trained[name]) for name, folder in folders.items()}
        readers = {name: Reader(model, context) for name, model in models.items() if model is not None}
        times: dict[str, list[float]] = {name: [] for name in readers}
        for turn in range(TURNS + 1):
            for name, reader in readers.items():
                seconds = reader.write(TOKENS_PER_TURN if turn else 2)
                if turn:  # the first one warms up
                    times[name].append(seconds)
        for name, reader in readers.items():
            found[name].figures.append(Decoding(context, round(1 / statistics.median(times[name]), 1), reader.bytes))
    return found


def _reads(model: PreTrainedModel, context: int) -> bool:
    limit = longest_text(model.config)
    return limit is None or limit >= context + TOKENS_PER_TURN


def _reading(context: int, folder: Path, trained: PreTrainedModel) -> PreTrainedModel | None:
    """The trained model, else one like it that reads so many tokens; None where there is none."""
    if _reads(trained, context):
        return trained
    model = load_recipe(folder).model
    try:
        longer = create_model(
            model.architecture, hidden_size=model.hidden_size, num_layers=model.num_layers,
            vocab_size=trained.config.vocab_size, n_positions=context + TOKENS_PER_TURN, options=model.options,
            layers=model.layers, **model.config,
        )  # fmt: skip
    except InputError:
        return None
    return longer.eval().to(trained.device) if _reads(longer, context) else None


def _remarks(folder: Path, trained: PreTrainedModel) -> list[str]:
    limit = longest_text(trained.config)
    if _reads(trained, CONTEXTS[-1]):
        return []
    if _reading(CONTEXTS[-1], folder, trained) is None:
        return [f"reads at most {limit:,} tokens, so writing was measured up to there"]
    return [
        f"was trained to read at most {limit:,} tokens; writing after longer texts was measured with models like it "
        "that read them, with random weights"
    ]


def prompt_of(recipe: Recipe) -> str:
    """How the first document of a recipe's validation text begins."""
    text = read_text(recipe)
    start = int(text.validation.document_starts[0]) + 1
    beginning: str = text.tokenizer.decode(text.validation.tokens[start : start + PROMPT_TOKENS].tolist())
    return beginning.rstrip("\ufffd")


def write_sample(folder: Path, prompt: str) -> str:
    """What the model of a run writes after a prompt; always the same."""
    run = load_run(folder)
    room = SAMPLE_TOKENS if run.longest_text is None else max(1, min(SAMPLE_TOKENS, run.longest_text - len(prompt) - 1))
    settings = GenerationSettings(max_new_tokens=room, temperature=0.7, seed=1, stop_at_end=False)
    with torch.random.fork_rng():
        return generate_text(run, prompt, settings).text


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
