"""Speed of prefill and of generation after short and long sequences, and the size of the state.

Our models keep a state of constant size, the peers the keys and values of every token. All have the same width, depth,
heads and vocabulary, and random weights. --engines chooses the engines: PyTorch, ONNX Runtime (our models as `multilin
export` writes them, GPT-2 with a growing cache) and CTranslate2 (GPT-2 only).

Prefill reads one sequence, in the pieces of the engine, and returns the logits of its last token. Generation of a token
is one call of the engine and the argmax of the logits, for a batch of one or more sequences; tokens per second count
the whole batch. Limits, in PyTorch and float32: the bare products with all weight matrices of a model, one vector for
each sequence; and one product with a single matrix of as many numbers. All tasks of one batch size take turns in one
process; a turn generates the tokens that fit into --turn-seconds. Memory (PyTorch only) is the peak above the memory
held before, state included.
"""

import argparse
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks import _plots, _results
from benchmarks._engines import (
    ENGINES,
    Decoder,
    Generate,
    bare_products,
    check_installed,
    engines_of,
    make_decoder,
    one_product,
)
from benchmarks._memory import peak_bytes
from benchmarks._models import add_sizes, build, multiplied
from benchmarks._turns import results_in_turns, seconds_of, speeds
from multilin.architectures import architectures
from multilin.errors import InputError
from multilin.model.factory import BASELINES
from multilin.model.memory import available_memory, parameter_bytes
from multilin.training.processes import accelerator_or_cpu as device

Row = dict[str, Any]


def main(argv: list[str]) -> None:
    arguments = _results.parse(_parser(), argv, threads=True)
    torch.manual_seed(0)
    check_installed(arguments.engines)
    positions = {name: _readable(name, arguments) for name in arguments.models}
    models = {
        name: build(name, arguments, max(chosen) + arguments.tokens + 2).eval().to(device())
        for name, chosen in positions.items()
        if chosen
    }
    if not models:
        raise InputError(f"--positions: {arguments.positions} given, but no model can be measured at any of them")
    sizes = f"width {arguments.hidden_size}, {arguments.num_layers} layers, {arguments.num_heads} heads"
    print(f"{sizes}, vocabulary {arguments.vocab_size}, threads: {torch.get_num_threads()}")
    with tempfile.TemporaryDirectory() as temporary:
        rows = _measure(models, positions, Path(arguments.exports or temporary), arguments)
    _results.save("decode", arguments, rows)


def _measure(
    models: dict[str, PreTrainedModel], positions: dict[str, list[int]], folder: Path, arguments: argparse.Namespace
) -> list[Row]:
    decoders: dict[str, Decoder] = {}
    for name, model in models.items():
        for engine in engines_of(name, arguments.engines):
            label = name if engine == "torch" else f"{name}: {engine}"
            try:
                decoders[label] = _decoder(model, name, engine, folder, arguments)
            except InputError as error:
                print(f"{label} is left out: {error}")
    if not decoders:
        raise InputError(f"--engines: {' '.join(arguments.engines)} given, but none can run any of the models")
    states, rows = _prefill(decoders, {label: positions[_name(label)] for label in decoders}, arguments)
    for batch_size in arguments.batch_sizes:
        rows += _generate(models, decoders, states, batch_size, arguments)
    return rows


def _name(label: str) -> str:
    """The name of the model, without its engine."""
    return label.partition(":")[0]


def _decoder(model: PreTrainedModel, name: str, engine: str, folder: Path, arguments: argparse.Namespace) -> Decoder:
    length = getattr(model.config, "max_position_embeddings", None) or arguments.n_positions
    sizes = [arguments.hidden_size, arguments.num_layers, arguments.num_heads, arguments.vocab_size, length]
    kind = engine.removesuffix("-int8")  # CTranslate2 makes integers when it loads a model
    path = folder / "-".join(map(str, [name, *sizes, kind]))
    return make_decoder(model, engine, torch.get_num_threads(), path)


def _readable(name: str, arguments: argparse.Namespace) -> list[int]:
    """The positions at which a model is measured; prints the others with the reason."""
    chosen = []
    for position in sorted(set(arguments.positions)):
        if name in BASELINES and position > arguments.longest_peer:
            reason = "its prefill takes time proportional to the square of the length (--longest-peer)"
        elif (needed := _weight_bytes(name, position, arguments)) > (available_memory(device()) or math.inf) / 4:
            reason = f"its weights for this length take {needed / 1e9:,.0f} GB, more than a quarter of the free memory"
        else:
            chosen.append(position)
            continue
        print(f"{name} is left out after {position:,} tokens: {reason}")
    return chosen


def _weight_bytes(name: str, position: int, arguments: argparse.Namespace) -> int:
    with torch.device("meta"):
        return parameter_bytes(build(name, arguments, position + arguments.tokens + 2))


def _prefill(
    decoders: dict[str, Decoder], positions: dict[str, list[int]], arguments: argparse.Namespace
) -> tuple[dict[tuple[str, int], Any], list[Row]]:
    """The state of each model after each length, and the speed of its prefill."""
    print(
        f"{'prefill of one sequence':28}{'tokens':>8}{'':>23}{'tokens/s':>10}{'slowest - fastest':>20}{'peak MB':>14}"
    )
    states: dict[tuple[str, int], Any] = {}
    rows = []
    for label, decoder in decoders.items():  # a short sequence first, so that memory of the first call is not counted
        decoder.prefill(_random_ids(min(256, positions[label][0]), arguments))
    for position in sorted({position for chosen in positions.values() for position in chosen}):
        ids, peaks = _random_ids(position, arguments), {}
        labels = [label for label in decoders if position in positions[label]]
        for label in labels:
            states[label, position], peaks[label] = peak_bytes(partial(decoders[label].prefill, ids))
        timed = {label: partial(seconds_of, partial(decoders[label].prefill, ids)) for label in labels}
        for label, seconds in results_in_turns(timed, arguments.prefill_turns, warm_up=0).items():
            peak = None if ":" in label else peaks[label]
            row = {"task": "prefill", "model": label, "position": position, "peak_bytes": peak}
            rows.append({**row, **speeds(seconds, position)})
            _print_row(rows[-1], "", peak)
    return states, rows


def _random_ids(length: int, arguments: argparse.Namespace) -> list[int]:
    ids: list[int] = torch.randint(arguments.vocab_size, (length,)).tolist()
    return ids


def _generate(
    models: dict[str, PreTrainedModel],
    decoders: dict[str, Decoder],
    states: dict[tuple[str, int], Any],
    batch_size: int,
    arguments: argparse.Namespace,
) -> list[Row]:
    """The speed of each model after each length, for one batch size."""
    head = f"{'generation':28}{'after':>8}{'batch':>8}{'state bytes':>15}{'tokens/s':>10}"
    print(f"{head}{'slowest - fastest':>20}{'memory MB':>14}")
    tasks: dict[tuple[str, int], Generate] = {}
    costs: dict[tuple[str, int], Row] = {}
    for label in decoders:
        for position in (position for own, position in states if own == label):
            state = states[label, position]
            tasks[label, position], peak = peak_bytes(partial(_started, decoders[label], state, batch_size))
            num_bytes = decoders[label].num_bytes(state, batch_size)
            costs[label, position] = {"state_bytes": num_bytes, "memory_bytes": None if ":" in label else peak}
    for name in (name for name in models if name not in BASELINES):
        matrices = [matrix.flatten(1) for matrix in multiplied(models[name])]
        tasks[f"limit: products of {name}", 0] = bare_products(matrices, batch_size)
        tasks[f"limit: one product, {name}", 0] = one_product(matrices, batch_size)
    timed = {
        key: partial(generate, min(max(int(arguments.turn_seconds / generate(1)), 1), arguments.tokens))
        for key, generate in tasks.items()
    }
    rows = []
    for (label, position), seconds in results_in_turns(timed, arguments.turns, warm_up=0).items():
        row = {"task": "generate", "model": label, "position": position, "batch_size": batch_size}
        row |= costs.get((label, position), {"state_bytes": None, "memory_bytes": None})
        rows.append({**row, **speeds(seconds, batch_size)})
        kept = f"{row['state_bytes']:,}" if position else ""
        _print_row(rows[-1], f"{batch_size:>8}{kept:>15}", row["memory_bytes"])
    return rows


def _started(decoder: Decoder, state: Any, batch_size: int) -> Generate:
    generate = decoder.start(state, batch_size)
    generate(1)
    return generate


def _print_row(row: Row, middle: str, memory: int | None) -> None:
    label = f"peer: {_plots.title(row['model'])}" if _name(row["model"]) in BASELINES else row["model"]
    spread = f"{row['slowest']:,.0f} - {row['fastest']:,.0f}"
    shown = "" if memory is None else f"{memory / 1e6:,.1f}"
    print(f"{label:28}{row['position'] or '':>8}{middle:>23}{row['tokens_per_second']:>10,.0f}{spread:>20}{shown:>14}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks decode", description=__doc__)
    parser.add_argument("--models", nargs="+", default=[*architectures(), "gpt2"], help="architectures and peers")
    parser.add_argument("--engines", nargs="+", default=["torch"], choices=ENGINES, help="engines that run the models")
    parser.add_argument("--exports", metavar="FOLDER", help="folder to keep exported models for later runs")
    add_sizes(parser, hidden_size=256, num_layers=6, num_heads=4, vocab_size=4096)
    parser.add_argument("--positions", type=int, nargs="+", default=[128, 1024, 8192, 65536], help="tokens read before")
    parser.add_argument(
        "--n-positions", type=int, default=4096, help="longest training text of models that read any length"
    )
    parser.add_argument("--longest-peer", type=int, default=8192, help="longest sequence of the peers, in tokens")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16], help="sequences generated together")
    parser.add_argument("--tokens", type=int, default=50, help="most tokens generated in one turn")
    parser.add_argument("--turn-seconds", type=float, default=0.3, help="length of a turn")
    parser.add_argument("--turns", type=int, default=9, help="turns of each in generation; the table shows medians")
    parser.add_argument("--prefill-turns", type=int, default=3, help="turns of each in prefill")
    return parser
