"""How fast one more token is written, early and late in a text, and what has to be kept for it.

Ours keeps a state of constant size, the peer GPT-2 (transformers, its own cache) keys and values of every token read;
both have the same width, depth, heads and vocabulary, random weights, float32, one text. A token is one forward pass
and the argmax of its logits. The limit is the bare products with all weight matrices of ours, one vector at a time: no
model of this size that reads its weights once per token can be faster. All take turns in one process.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from multilin.analysis.info import state_bytes
from multilin.model.factory import create_model


class Reader:
    """A model with a text before it, ready to write from there again and again."""

    def __init__(self, model: PreTrainedModel, position: int, vocab_size: int) -> None:
        self.model, self.position = model, position
        ids = torch.randint(vocab_size, (1, position), device=model.device)
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


def bare_products(model: PreTrainedModel) -> Callable[[int], float]:
    """Seconds per token of nothing but the products with the model's matrices."""
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    vectors = [torch.randn(1, matrix.shape[1], device=matrix.device) for matrix in matrices]

    def run(num_tokens: int) -> float:
        _synchronize()
        begin = time.perf_counter()
        with torch.inference_mode():
            for _ in range(num_tokens):
                for vector, matrix in zip(vectors, matrices, strict=True):
                    nn.functional.linear(vector, matrix)
        _synchronize()
        return (time.perf_counter() - begin) / num_tokens

    return run


def main(argv: list[str]) -> None:
    arguments = _parser().parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    models = {name: _model(name, arguments) for name in (arguments.architecture, "gpt2")}
    readers = {
        (name, position): Reader(model, position, arguments.vocab_size)
        for position in arguments.positions
        for name, model in models.items()
    }
    limit = bare_products(models[arguments.architecture])
    tasks = {**{key: reader.write for key, reader in readers.items()}, ("limit", 0): limit}
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in tasks}
    for turn in range(arguments.turns + 1):
        for key, task in tasks.items():
            found = task(arguments.tokens)
            if turn:  # the first one warms up
                seconds[key].append(found)
    rows = [
        {
            "model": name,
            "position": position,
            "tokens_per_second": 1 / statistics.median(times),
            "fastest": 1 / min(times),
            "slowest": 1 / max(times),
            "state_bytes": readers[name, position].bytes if name != "limit" else 0,
        }
        for (name, position), times in seconds.items()
    ]
    _print(rows, arguments)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"arguments": vars(arguments), "rows": rows}, indent=2) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks decode", description=__doc__)
    parser.add_argument("--architecture", default="additive", help="ours")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--positions", type=int, nargs="+", default=[100, 4000], help="tokens read before")
    parser.add_argument("--tokens", type=int, default=50, help="tokens written in one turn")
    parser.add_argument("--turns", type=int, default=9, help="turns of each; the table shows medians")
    parser.add_argument("--threads", type=int, help="threads of torch; one gives steadier figures on a busy machine")
    parser.add_argument("--json", help="file to write the figures to")
    return parser


def _model(name: str, arguments: argparse.Namespace) -> PreTrainedModel:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = create_model(
        name,
        hidden_size=arguments.hidden_size,
        num_layers=arguments.num_layers,
        vocab_size=arguments.vocab_size,
        n_positions=max(arguments.positions) + arguments.tokens,
        options={"num_heads": arguments.num_heads},
    )
    return model.eval().to(device)


def _print(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    sizes = f"width {arguments.hidden_size}, {arguments.num_layers} layers, {arguments.num_heads} heads"
    print(f"{sizes}, vocabulary {arguments.vocab_size}, float32, {torch.get_num_threads()} threads")
    print(f"{'':28}{'after':>8}{'tokens/s':>10}{'slowest - fastest':>20}{'state bytes':>14}")
    for row in rows:
        label = {"limit": "limit: bare products", "gpt2": "peer: GPT-2"}.get(row["model"], row["model"])
        after = row["position"] or ""
        spread = f"{row['slowest']:,.0f} - {row['fastest']:,.0f}"
        kept = f"{row['state_bytes']:,}" if row["state_bytes"] else ""
        print(f"{label:28}{after:>8}{row['tokens_per_second']:>10,.0f}{spread:>20}{kept:>14}")


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
