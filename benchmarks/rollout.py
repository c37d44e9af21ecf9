"""How fast a linear model's raw outputs are fed back, all at once and one after the other.

`rollout` computes every output in parallel, `rollout_sequential` reads one vector at a time through the model's layers.
The bare recurrence is the strongest sequential peer: no layers, no state, one step is a row of the triangle times the
inputs so far and two products with (V, D) matrices. The limit is what no way can leave out: one product of the two
(V, D) matrices with each other, one of all N hidden vectors with the output matrix. All take turns in one process.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import _results
from benchmarks._models import add_sizes
from benchmarks._turns import times_in_turns
from multilin.inference.rollout import rollout, rollout_sequential
from multilin.model import MultilinForCausalLM
from multilin.model.factory import create_model
from multilin.training.processes import accelerator_or_cpu as device

SEQUENTIAL, LIMIT = "rollout_sequential", "limit: bare products"


def main(argv: list[str]) -> None:
    arguments = _results.parse(_parser(), argv, threads=True)
    torch.manual_seed(0)
    model = create_model(
        "linear_mixer", hidden_size=arguments.hidden_size, num_layers=1, vocab_size=arguments.vocab_size,
        n_positions=arguments.n_positions,
    ).to(device())  # fmt: skip
    assert isinstance(model, MultilinForCausalLM)
    rows = []
    for dtype in (torch.float32, torch.float64):
        for num_prompt in arguments.prompts:
            prompt = torch.randint(arguments.vocab_size, (1, num_prompt), device=device())
            rows += _measure(model.to(dtype=dtype), prompt, arguments)
    _print(rows, arguments)
    _results.save("rollout", arguments, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks rollout", description=__doc__)
    add_sizes(parser, hidden_size=256, vocab_size=4096, n_positions=512)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 16], help="tokens read before")
    parser.add_argument("--steps", type=int, default=256, help="outputs")
    parser.add_argument("--turns", type=int, default=7, help="turns of each; the table shows medians")
    return parser


def _measure(model: MultilinForCausalLM, prompt: Tensor, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    tasks: dict[str, Callable[[], Tensor]] = {
        "rollout": lambda: rollout(model, prompt, arguments.steps),
        SEQUENTIAL: lambda: rollout_sequential(model, prompt, arguments.steps),
        "peer: bare recurrence": _recurrence(model, prompt, arguments.steps),
        LIMIT: _bare_products(model, arguments.steps),
    }
    expected = tasks[SEQUENTIAL]()
    seconds = times_in_turns(tasks, arguments.turns, "wall")
    return [
        {
            "way": name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "prompt": prompt.shape[1],
            "seconds": statistics.median(times),
            "fastest": min(times),
            "slowest": max(times),
            "sequential_over_this": statistics.median(
                slow / other for slow, other in zip(seconds[SEQUENTIAL], times, strict=True)
            ),
            "difference": None if name == LIMIT else _difference(tasks[name](), expected),
        }
        for name, times in seconds.items()
    ]


@torch.no_grad()
def _recurrence(model: MultilinForCausalLM, prompt: Tensor, num_steps: int) -> Callable[[], Tensor]:
    """t_{n+1} = H (C + 1)[n] e, e the embeddings of all inputs so far."""
    weights, head = model.model.embedding.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    mixing = model.model.layers[0].linear_map()[0].detach()

    @torch.inference_mode()
    def run() -> Tensor:
        num_prompt, outputs = prompt.shape[1], []
        inputs = weights.new_empty(num_prompt + num_steps, weights.shape[1])
        inputs[:num_prompt] = weights[prompt[0]]
        for n in range(num_prompt - 1, num_prompt - 1 + num_steps):
            outputs.append(head @ (mixing[n, : n + 1] @ inputs[: n + 1]))
            inputs[n + 1] = outputs[-1] @ weights
        return torch.stack(outputs)[None]

    return run


def _bare_products(model: MultilinForCausalLM, num_steps: int) -> Callable[[], Tensor]:
    weights, head = model.model.embedding.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    hidden = torch.randn(num_steps, head.shape[1], dtype=head.dtype, device=head.device)

    def run() -> Tensor:
        _ = weights.T @ head
        return hidden @ head.T

    return run


def _difference(actual: Tensor, expected: Tensor) -> float:
    """The largest relative difference of an output vector."""
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def _print(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    sizes = f"width {arguments.hidden_size}, vocabulary {arguments.vocab_size}, {arguments.n_positions} positions"
    print(f"{arguments.steps} outputs, {sizes}, one layer, {torch.get_num_threads()} threads")
    print(f"{'':24}{'dtype':>9}{'prompt':>8}{'ms':>10}{'fastest - slowest':>22}{'speed':>9}{'difference':>12}")
    for row in rows:
        spread = f"{1e3 * row['fastest']:,.1f} - {1e3 * row['slowest']:,.1f}"
        difference = "" if row["difference"] is None else f"{row['difference']:.1e}"
        print(
            f"{row['way']:24}{row['dtype']:>9}{row['prompt']:>8}{1e3 * row['seconds']:>10,.1f}{spread:>22}"
            f"{row['sequential_over_this']:>8.1f}x{difference:>12}"
        )
    print("speed: how many times as fast as rollout_sequential; difference: largest relative one of an output from its")
