"""Tokens per second of a training step: our models, GPT-2 and Llama of the same sizes, and another package.

A step is forward, loss, backward and fused AdamW on random tokens, without dropout, under autocast to bf16 (in float32
on processors without bf16), with the same number of tokens at every text length. Peers are transformers' GPT-2 and
Llama with their own loss and `scaled_dot_product_attention` and, if installed (`pip install --no-deps
leap-transformer`), the two models of the package leap-transformer. All models have the same width, depth and
vocabulary, and the same heads if they have this option.

The limit is the machine's product of 2048 x 2048 matrices in the same precision, timed between the steps. Each model
shows two shares of it. "Of peak" counts products with weight matrices only, 6 floating-point operations for each weight
and token; attention, recomputation and mixing over time count as time, not as work. "All products" counts every matrix
product of a forward pass with logits at every position, attention included, times three. Full attention counts all
pairs of positions, though fused kernels skip half of them. Pointwise work, norms, running means and recomputation in
the backward pass do not count.
"""

import argparse
import copy
import gc
import importlib.util
import json
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks import _plots, _results
from benchmarks._models import add_sizes, build_for, multiplied, options_of, train_step
from benchmarks._turns import speeds, times_in_turns
from multilin.analysis.costs import forward_flops
from multilin.analysis.machine import keep_freed_memory
from multilin.architectures import architectures
from multilin.model import MultilinForCausalLM
from multilin.model.factory import BASELINES
from multilin.training.precision import has_bf16

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PACKAGE = ("package-leap", "package-fastformer")  # models of the package leap-transformer
GEMM_SIZE = 2048


class Trained:
    """A model with its optimizer, ready for steps."""

    def __init__(self, name: str, length: int, arguments: argparse.Namespace) -> None:
        self.model = _model(name, length, arguments).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        num_rows = max(1, arguments.tokens // length)
        self.ids = torch.randint(arguments.vocab_size, (num_rows, length))
        self.autocast = arguments.precision == "bf16"

    @property
    def weights(self) -> int:
        """The number of weights that multiply every token."""
        return sum(matrix.numel() for matrix in multiplied(self.model))

    def flops(self) -> int:
        """Floating-point operations of all matrix products of a forward pass."""
        model, ids = self.model, self.ids
        if not isinstance(model, MultilinForCausalLM):
            # On meta tensors, without memory for all pairs of positions; our kernels need real numbers.
            model, ids = copy.deepcopy(model).to("meta"), ids.to("meta")
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return forward_flops(model, ids)

    def step(self) -> None:
        """One training step."""
        train_step(self.model, self.optimizer, self.ids, bf16=self.autocast)


def main(argv: list[str]) -> None:
    arguments = _results.parse(_parser(), argv, draws=True, threads=True)
    keep_freed_memory()
    rows = [row for length in arguments.lengths for row in _measure(length, arguments)]
    _print(rows, arguments)
    _results.save("training_step", arguments, rows, draw)


def _measure(length: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    trained = {name: Trained(name, length, arguments) for name in arguments.models}
    product = _matrix_product(torch.bfloat16 if arguments.precision == "bf16" else torch.float32)
    tasks = {**{name: one.step for name, one in trained.items()}, "limit": product}
    seconds = times_in_turns(tasks, arguments.turns, "wall")
    peak = 2 * GEMM_SIZE**3 / statistics.median(seconds.pop("limit"))
    rows = []
    for name, times in seconds.items():
        found, flops = speeds(times, trained[name].ids.numel()), _flops(name, trained[name])
        rows.append(
            {
                "model": name,
                "length": length,
                "parameters": sum(p.numel() for p in trained[name].model.parameters()),
                **found,
                "share_of_peak": 6 * trained[name].weights * found["tokens_per_second"] / peak,
                "share_of_peak_all_products": flops and 3 * flops / statistics.median(times) / peak,
                "peak_gflops": peak / 1e9,
            }
        )
    del trained, tasks
    gc.collect()
    return rows


def _flops(name: str, trained: Trained) -> int | None:
    try:
        return trained.flops()
    except Exception as failure:  # models of other packages may raise anything
        print(f"{name}: cannot count its products ({type(failure).__name__}: {failure})")
        return None


def _matrix_product(dtype: torch.dtype) -> Callable[[], Tensor]:
    left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=dtype) for _ in range(2))
    return lambda: left @ right


def _model(name: str, length: int, arguments: argparse.Namespace) -> nn.Module:
    name, _, given = name.partition(":")
    if name in PACKAGE:
        return _package_model(name, length, arguments)
    options = options_of(name, arguments.num_heads) | (json.loads(given) if given else {})
    return build_for(name, arguments, length, options=options)


def _package_model(name: str, length: int, arguments: argparse.Namespace) -> nn.Module:
    import leap

    given = {
        "hidden_size": arguments.hidden_size, "n_layer": arguments.num_layers, "vocab_size": arguments.vocab_size,
        "n_positions": length, "hidden_dropout_prob": 0.0,
    }  # fmt: skip
    if name == "package-leap":
        return leap.LeapForCausalLM(leap.LeapConfig(**given, n_head=arguments.num_heads))
    return leap.FastformerForCausalLM(leap.FastformerLMConfig(**given, n_heads=arguments.num_heads))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks training_step", description=__doc__)
    names = [*architectures(), *BASELINES, *(PACKAGE if importlib.util.find_spec("leap") else ())]
    parser.add_argument("--models", nargs="+", default=names, help='NAME, or NAME:{"option": value}')
    add_sizes(parser, hidden_size=512, num_layers=8, num_heads=8, vocab_size=8192)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], help="tokens of a text")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a step; at least one text")
    own = "bf16" if has_bf16("cpu") else "float32"  # emulated bf16 is slower than float32
    parser.add_argument("--precision", default=own, choices=["float32", "bf16"], help=f"default {own} on this machine")
    parser.add_argument("--turns", type=int, default=5, help="timed steps of each model; the table shows medians")
    return parser


def _print(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    sizes = f"width {arguments.hidden_size}, {arguments.num_layers} layers, vocabulary {arguments.vocab_size}"
    print(f"{sizes}, {arguments.precision}, {arguments.tokens} tokens a step, {torch.get_num_threads()} threads")
    print(f"{'':26}{'text':>8}{'parameters':>12}{'tokens/s':>10}{'slowest - fastest':>20}{'over GPT-2':>12}", end="")
    print(f"{'of peak':>9}, all products")
    for row in rows:
        gpt2 = [r["tokens_per_second"] for r in rows if r["model"] == "gpt2" and r["length"] == row["length"]]
        ratio = f"{row['tokens_per_second'] / gpt2[0]:.2f}x" if gpt2 else ""
        counted = row["share_of_peak_all_products"]
        shown = "" if counted is None else f"{counted:.0%}"
        spread = f"{row['slowest']:,.0f} - {row['fastest']:,.0f}"
        print(
            f"{row['model']:26}{row['length']:>8}{row['parameters'] / 1e6:>11.1f}M{row['tokens_per_second']:>10,.0f}"
            f"{spread:>20}{ratio:>12}{row['share_of_peak']:>9.0%}"
            f"{shown:>15}"
        )
    for length in arguments.lengths:
        peak = next(row["peak_gflops"] for row in rows if row["length"] == length)
        print(f"limit at {length}: products of 2048 x 2048 at {peak:,.0f} GFLOP/s")


def draw(rows: _results.Rows, arguments: argparse.Namespace) -> "Figure":
    """Tokens per second over the length of a text."""
    figure, ((axis,),) = _plots.figure(1, 1, height=4.8)
    _plots.lines_of_models(axis, rows, "length", "tokens_per_second")
    _plots.scale_x(axis, arguments.lengths)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.set(xlabel="tokens of a text", ylabel="tokens per second of a training step")
    _plots.name_ends(axis)
    return figure
