"""Recall against the size of the state, in the settings of figure 2 of Zoology (arXiv 2312.04927).

Multi-query associative recall with a vocabulary of 8,192, from 4 pairs in 64 tokens to 64 pairs in 512. `multilin
compare` compares all models in each setting with the same learning rates, of which the best counts. Finished runs in
the folder are used again. Differences from Zoology: queries are spread evenly instead of mostly soon after the pairs,
the value follows its key when the key is asked for, and training is shorter.
"""

import argparse
import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import _plots, _results
from multilin.analysis.compare.run import compare
from multilin.analysis.compare.sweep import Budget, Sweep, builtin_sweep, changed, nested
from multilin.data.tasks import FIRST_SYMBOL
from multilin.training.fields import merge

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BY_NAME_ONLY = "it trains many models"
TOKENS_PER_STEP = 4096


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks recall", description=__doc__)
    parser.add_argument("--pairs", type=int, nargs="+", default=[4, 8, 16, 64])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512], help="tokens, for each --pairs")
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[64])
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 4e-3, 1.6e-2, 6.4e-2])
    parser.add_argument("--tokens", type=float, default=4e6, help="training tokens of a run")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=list(builtin_sweep("mqar").rows))
    parser.add_argument("--folder", default="runs/recall", help="folder of the runs")
    arguments = _results.parse(parser, argv, draws=True)
    points = list(zip(arguments.pairs, arguments.lengths, strict=True))
    rows = [row for point in itertools.product(points, arguments.hidden_sizes) for row in _measure(*point, arguments)]
    _results.save("recall", arguments, rows, draw)


def sweep_of(pairs: int, length: int, hidden_size: int, arguments: argparse.Namespace) -> Sweep:
    """The comparison at one setting."""
    num_keys = arguments.vocab_size // 2
    num_values = arguments.vocab_size - num_keys - FIRST_SYMBOL
    sweep = changed(
        builtin_sweep("mqar"),
        budget=Budget(tokens=arguments.tokens),
        num_seeds=arguments.seeds,
        task=f"mqar?num_pairs={pairs}&num_keys={num_keys}&num_values={num_values}",
        changes={
            "model.n_positions": length, "model.hidden_size": hidden_size, "model.config.tie_word_embeddings": True,
            "training.batch_size": max(1, TOKENS_PER_STEP // length),
            "output": str(Path(arguments.folder, f"{pairs}-in-{length}-width-{hidden_size}")),
        },
        only=arguments.models,
    )  # fmt: skip
    rows = dict(sweep.rows)
    if "threelin" in rows:  # its initial embedding suits a separate output; a shared one must be narrower
        narrow = nested({"model.config.embedding_range": hidden_size**-0.5}, "rows.threelin")
        rows["threelin"] = merge(rows["threelin"], narrow)
    stages = [{"optimizer.learning_rate": arguments.rates}]
    return dataclasses.replace(sweep, title=f"{pairs} pairs in {length} tokens", rows=rows, stages=stages)


def _measure(point: tuple[int, int], hidden_size: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    pairs, length = point
    print(f"\n{pairs} pairs in {length} tokens, width {hidden_size}", flush=True)
    rows = []
    for row in compare(sweep_of(pairs, length, hidden_size, arguments)).ordered:
        accuracy = row.score.mean if row.score else None
        print(
            f"{row.name:20}{'failed' if accuracy is None else f'{accuracy:8.1%}'}{row.memory or 0:>12,} bytes of state"
        )
        rows.append({
            "model": row.name, "pairs": pairs, "length": length, "hidden_size": hidden_size, "accuracy": accuracy,
            "state_bytes": row.memory, "learning_rate": row.choice["optimizer.learning_rate"],
            "parameters": row.parameters, "tokens": row.max_steps * row.tokens_per_step,
        })  # fmt: skip
    return rows


def draw(rows: _results.Rows, arguments: argparse.Namespace) -> "Figure":
    """Accuracy against bytes of state, one panel for each setting."""
    points = list(zip(arguments.pairs, arguments.lengths, strict=True))
    figure, panels = _plots.figure(-(-len(points) // 2), 2, height=3.2)
    for axis, (pairs, length) in zip(panels.flat, points, strict=False):
        shown = [
            row | {"percent": 100 * row["accuracy"]}
            for row in rows
            if (row["pairs"], row["length"]) == (pairs, length) and row["accuracy"] is not None
        ]
        _plots.lines_of_models(axis, shown, "state_bytes", "percent")
        axis.set_xscale("log")
        axis.set_ylim(-24, 103)  # space below zero for the names of models with no right answer
        axis.set_title(f"{pairs} pairs in {length} tokens")
        axis.set_xlabel("bytes of state after a sequence")
        axis.set_ylabel("% right")
        _plots.name_ends(axis)
    for axis in panels.flat[len(points) :]:
        axis.set_visible(False)
    return figure
