"""Speed of prefill and of generating one token after short and long sequences, and the size of the state.

Ours keep a state of constant size, the peers (transformers, their own cache) keys and values of every token read; all
have the same width, depth, heads and vocabulary, random weights, float32. Prefill is of one sequence, at once or
streamed in chunks, with the logits of its last token. Generating a token is one forward pass and the argmax of its
logits, for a batch of one or several sequences; tokens per second are those of the whole batch. The limit is the bare
products with all weight matrices of a model, one vector for each sequence: no model of this size that reads its weights
once per token can be faster. All take turns in one process; a turn has as many tokens as go into --turn-seconds. Memory
is the peak above that held before, during prefill and while a token is generated; there the state is added.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from benchmarks import _plots, _results
from benchmarks._memory import peak_bytes
from benchmarks._models import multiplied
from benchmarks._turns import device, synchronize
from multilin.analysis.costs import state_bytes
from multilin.architectures import architectures
from multilin.errors import InputError
from multilin.model import MultilinForCausalLM
from multilin.model.factory import BASELINES, create_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]


class Prefilled:
    """A model after the prefill of a batch, ready to generate from there again and again."""

    def __init__(self, model: PreTrainedModel, cache: Cache, batch_size: int, arguments: argparse.Namespace) -> None:
        self.model, self.cache = model, copy.deepcopy(cache)
        self.cache.batch_repeat_interleave(batch_size)
        self.start = torch.randint(arguments.vocab_size, (batch_size, 1), device=model.device)
        self.bytes = sum(state_bytes(self.cache))

    def generate(self, num_tokens: int) -> float:
        """Seconds per token over so many tokens."""
        grows = not isinstance(self.model, MultilinForCausalLM)
        # A copy of keys and values would take longer than the tokens: they are cut off again instead.
        cache, ids = self.cache if grows else copy.deepcopy(self.cache), self.start
        synchronize()
        begin = time.perf_counter()
        with torch.inference_mode():
            for _ in range(num_tokens):
                ids = self.model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(dim=-1)
        synchronize()
        seconds = (time.perf_counter() - begin) / num_tokens
        if grows:
            cache.crop(-num_tokens)
        return seconds


def bare_products(model: PreTrainedModel, batch_size: int) -> Callable[[int], float]:
    """Seconds per token of nothing but the products with the model's matrices."""
    matrices = [matrix.flatten(1) for matrix in multiplied(model)]
    vectors = [torch.randn(batch_size, matrix.shape[1], device=matrix.device) for matrix in matrices]

    def run(num_tokens: int) -> float:
        synchronize()
        begin = time.perf_counter()
        with torch.inference_mode():
            for _ in range(num_tokens):
                for vector, matrix in zip(vectors, matrices, strict=True):
                    nn.functional.linear(vector, matrix)
        synchronize()
        return (time.perf_counter() - begin) / num_tokens

    return run


@torch.inference_mode()
def prefill(model: PreTrainedModel, ids: Tensor, chunk: int) -> Cache:
    """The cache after a sequence that is read in chunks of so many tokens."""
    cache = None
    for piece in ids.split(chunk, dim=1):
        cache = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    return cache


def main(argv: list[str]) -> None:
    arguments = _results.parse(_parser(), argv, draws=True)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    positions = {name: _readable(name, arguments) for name in arguments.models}
    models = {name: _model(name, max(chosen), arguments) for name, chosen in positions.items() if chosen}
    if not models:
        raise InputError(f"--positions: {arguments.positions} given, but no model can be measured at any of them")
    _print_sizes(arguments)
    caches, rows = _prefill(models, positions, arguments)
    rows += _generate(models, caches, arguments)
    _results.save("decode", arguments, rows, draw)


def _readable(name: str, arguments: argparse.Namespace) -> list[int]:
    """The positions at which a model is measured; the others are named."""
    chosen = []
    for position in sorted(set(arguments.positions)):
        if name in BASELINES and position > arguments.longest_peer:
            reason = "its prefill takes time in proportion to the square of the length (--longest-peer)"
        elif (needed := _weight_bytes(name, position, arguments)) > _memory_bytes() / 4:
            reason = f"its weights would take {needed / 1e9:,.0f} GB for that length, more than a quarter of the memory"
        else:
            chosen.append(position)
            continue
        print(f"{name} is left out after {position:,} tokens: {reason}")
    return chosen


def _weight_bytes(name: str, position: int, arguments: argparse.Namespace) -> int:
    with torch.device("meta"):
        return sum(parameter.nbytes for parameter in _build(name, position, arguments).parameters())


def _memory_bytes() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _build(name: str, position: int, arguments: argparse.Namespace) -> PreTrainedModel:
    options = {"num_heads": arguments.num_heads}
    if name in architectures() and getattr(architectures()[name].preset_options(), "num_heads", None) is None:
        options = {}
    return create_model(
        name,
        hidden_size=arguments.hidden_size,
        num_layers=arguments.num_layers,
        vocab_size=arguments.vocab_size,
        n_positions=position + arguments.tokens,
        options=options,
    )


def _model(name: str, position: int, arguments: argparse.Namespace) -> PreTrainedModel:
    return _build(name, position, arguments).eval().to(device())


def _prefill(
    models: dict[str, PreTrainedModel], positions: dict[str, list[int]], arguments: argparse.Namespace
) -> tuple[dict[tuple[str, int], Cache], list[Row]]:
    """The cache of each model after each length, and the speed of its prefill, at once and, ours, in chunks."""
    print(
        f"{'prefill of one sequence':28}{'tokens':>8}{'':>23}{'tokens/s':>10}{'slowest - fastest':>20}{'peak MB':>14}"
    )
    for name, model in models.items():  # a short sequence first, so that memory of the first call is not counted
        prefill(model, torch.randint(arguments.vocab_size, (1, min(256, positions[name][0])), device=device()), 256)
    caches, rows = {}, []
    for position in sorted({position for chosen in positions.values() for position in chosen}):
        ids = torch.randint(arguments.vocab_size, (1, position), device=device())
        tasks: dict[tuple[str, str], Callable[[], Cache]] = {}
        for name in (name for name in models if position in positions[name]):
            if name not in BASELINES and position > arguments.chunk:
                tasks[name, f"by {arguments.chunk:,}"] = partial(prefill, models[name], ids, arguments.chunk)
            tasks[name, "at once"] = partial(prefill, models[name], ids, position)
        peaks = {}
        for (name, way), task in tasks.items():
            caches[name, position], peaks[name, way] = peak_bytes(task)
        timed = {key: partial(_seconds, task) for key, task in tasks.items()}
        for (name, way), seconds in _in_turns(timed, arguments.prefill_turns).items():
            row = {"task": "prefill", "model": name, "position": position, "way": way, **_speeds(seconds, position)}
            rows.append({**row, "peak_bytes": peaks[name, way]})
            _print_row(rows[-1], way, rows[-1]["peak_bytes"])
    return caches, rows


def _generate(
    models: dict[str, PreTrainedModel], caches: dict[tuple[str, int], Cache], arguments: argparse.Namespace
) -> list[Row]:
    print(
        f"{'generation':28}{'after':>8}{'batch':>8}{'state bytes':>15}{'tokens/s':>10}{'slowest - fastest':>20}", end=""
    )
    print(f"{'memory MB':>14}")
    tasks: dict[tuple[str, int, int], Callable[[int], float]] = {}
    extra: dict[tuple[str, int, int], Row] = {}
    for batch_size in arguments.batch_sizes:
        for name, position in sorted(caches, key=lambda key: list(models).index(key[0])):
            prefilled = Prefilled(models[name], caches[name, position], batch_size, arguments)
            _, peak = peak_bytes(partial(prefilled.generate, 1))
            tasks[name, position, batch_size] = prefilled.generate
            memory = None if peak is None else peak + prefilled.bytes
            extra[name, position, batch_size] = {"state_bytes": prefilled.bytes, "memory_bytes": memory}
        for name in (name for name in models if name not in BASELINES):
            tasks[f"limit: products of {name}", 0, batch_size] = bare_products(models[name], batch_size)
    timed = {
        key: partial(generate, min(max(int(arguments.turn_seconds / generate(1)), 1), arguments.tokens))
        for key, generate in tasks.items()
    }
    rows = []
    for (name, position, batch_size), seconds in _in_turns(timed, arguments.turns).items():
        row = {"task": "generate", "model": name, "position": position, "batch_size": batch_size}
        costs = extra.get((name, position, batch_size), {"state_bytes": None, "memory_bytes": None})
        rows.append({**row, **_speeds(seconds, batch_size), **costs})
        kept = f"{costs['state_bytes']:,}" if position else ""
        _print_row(rows[-1], f"{batch_size:>8}{kept:>15}", costs["memory_bytes"])
    return rows


def _seconds(task: Callable[[], object]) -> float:
    synchronize()
    begin = time.perf_counter()
    task()
    synchronize()
    return time.perf_counter() - begin


def _in_turns(tasks: dict[Any, Callable[[], float]], turns: int) -> dict[Any, list[float]]:
    """The seconds that each task returns, all of them warm already."""
    seconds: dict[Any, list[float]] = {key: [] for key in tasks}
    for _ in range(turns):
        for key, task in tasks.items():
            seconds[key].append(task())
    return seconds


def _speeds(seconds: list[float], num_tokens: int) -> Row:
    median = num_tokens / statistics.median(seconds)
    return {"tokens_per_second": median, "fastest": num_tokens / min(seconds), "slowest": num_tokens / max(seconds)}


def _print_sizes(arguments: argparse.Namespace) -> None:
    sizes = f"width {arguments.hidden_size}, {arguments.num_layers} layers, {arguments.num_heads} heads"
    print(f"{sizes}, vocabulary {arguments.vocab_size}, float32, {torch.get_num_threads()} threads")


def _print_row(row: Row, middle: str, memory: int | None) -> None:
    label = f"peer: {_plots.title(row['model'])}" if row["model"] in BASELINES else row["model"]
    spread = f"{row['slowest']:,.0f} - {row['fastest']:,.0f}"
    shown = "" if memory is None else f"{memory / 1e6:,.1f}"
    print(f"{label:28}{row['position'] or '':>8}{middle:>23}{row['tokens_per_second']:>10,.0f}{spread:>20}{shown:>14}")


def draw(rows: _results.Rows, arguments: argparse.Namespace) -> "Figure":
    """Tokens per second and bytes of the state over the tokens read before, a row of panels per batch size."""
    from matplotlib.ticker import EngFormatter

    figure, panels = _plots.figure(len(arguments.batch_sizes), 2, height=3.4)
    for axes, batch_size in zip(panels, arguments.batch_sizes, strict=True):
        shown = [
            row for row in rows if row["task"] == "generate" and row["position"] and row["batch_size"] == batch_size
        ]
        for axis, key in zip(axes, ("tokens_per_second", "state_bytes"), strict=True):
            _plots.lines_of_models(axis, shown, "position", key)
            _plots.scale_x(axis, arguments.positions)
        axes[0].set_ylim(bottom=0)
        axes[0].yaxis.set_major_formatter("{x:,.0f}")
        axes[1].set_yscale("log")
        axes[1].yaxis.set_major_formatter(EngFormatter(unit="B"))
        axes[0].set_title(f"tokens per second, batch of {batch_size}", fontsize=10)
        axes[1].set_title("bytes of state", fontsize=10)
        for axis in axes:
            _plots.name_ends(axis)
    for axis in panels[-1]:
        axis.set_xlabel("tokens read before")
    return figure


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks decode", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["additive", "elita", "gpt2"], help="architectures and peers")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--positions", type=int, nargs="+", default=[128, 1024, 8192, 65536], help="tokens read before")
    parser.add_argument("--longest-peer", type=int, default=8192, help="longest sequence of the peers, in tokens")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16], help="sequences generated side by side")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a chunk of a streamed sequence")
    parser.add_argument("--tokens", type=int, default=50, help="tokens generated in one turn, at most")
    parser.add_argument("--turn-seconds", type=float, default=0.3, help="length of a turn")
    parser.add_argument("--turns", type=int, default=9, help="turns of each in generation; the table shows medians")
    parser.add_argument("--prefill-turns", type=int, default=3, help="turns of each in prefill")
    parser.add_argument("--threads", type=int, help="threads of torch; one gives steadier figures on a busy machine")
    return parser
