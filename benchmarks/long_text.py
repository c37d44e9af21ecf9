"""Memory and speed of long texts: a training step on a whole text, and reading a text in chunks.

Every row is its own process. Its memory is the peak above the memory held before the first token. The memory of a
training step (forward, backward, AdamW; with --checkpoint gradient checkpointing) grows in proportion to the text. The
memory of a stream must not grow. The peer reads the text at once, without gradients.
"""

import argparse
import multiprocessing
import time

import torch

from benchmarks import _results
from benchmarks._memory import own_peak_bytes
from benchmarks._models import add_sizes, build_for, train_step
from multilin import MultilinForCausalLM
from multilin.analysis.machine import keep_freed_memory


def main(argv: list[str]) -> None:
    arguments = _results.parse(_parser(), argv, threads=True)
    sizes = f"width {arguments.hidden_size}, {arguments.num_layers} layers, vocabulary {arguments.vocab_size}"
    print(f"{arguments.architecture}, {sizes}, batch 1, {arguments.precision}, chunks of {arguments.chunk}")
    print(f"{'':20}{'tokens':>9}{'seconds':>9}{'tokens/s':>10}{'peak MB':>9}{'bytes/token':>13}")
    rows = []
    for task in arguments.tasks:
        for length in arguments.lengths:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                seconds, peak = pool.apply(_measure, (task, length, arguments))
            line = f"{task:20}{length:>9}{seconds:>9.1f}{length / seconds:>10,.0f}{peak / 1e6:>9.0f}"
            print(f"{line}{peak / length:>13,.0f}", flush=True)
            rows.append({"task": task, "length": length, "seconds": seconds, "peak_bytes": peak})
    _results.save("long_text", arguments, rows)


def _measure(task: str, length: int, arguments: argparse.Namespace) -> tuple[float, int]:
    """Seconds, and the peak memory in bytes above the memory held before."""
    keep_freed_memory()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = build_for(arguments.architecture, arguments, max(arguments.lengths))
    # A short text first, so that one-time allocations are not counted.
    TASKS[task](model, torch.randint(arguments.vocab_size, (1, min(256, length))), arguments)
    ids, before = torch.randint(arguments.vocab_size, (1, length)), own_peak_bytes()
    started = time.perf_counter()
    TASKS[task](model, ids, arguments)
    return time.perf_counter() - started, own_peak_bytes() - before


def _train(model: MultilinForCausalLM, ids: torch.Tensor, arguments: argparse.Namespace) -> None:
    model.train()
    if arguments.checkpoint:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train_step(model, optimizer, ids, bf16=arguments.precision == "bf16")


def _stream(model: MultilinForCausalLM, ids: torch.Tensor, arguments: argparse.Namespace) -> None:
    state = model.eval().new_state()
    with torch.inference_mode(), _autocast(arguments):
        for piece in ids.split(arguments.chunk, dim=1):
            model(piece, past_key_values=state, logits_to_keep=1)


def _read_at_once(model: MultilinForCausalLM, ids: torch.Tensor, arguments: argparse.Namespace) -> None:
    with torch.inference_mode(), _autocast(arguments):
        model.eval()(ids, logits_to_keep=1)


TASKS = {"train": _train, "stream": _stream, "read at once": _read_at_once}


def _autocast(arguments: argparse.Namespace) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=arguments.precision == "bf16")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks long_text", description=__doc__)
    parser.add_argument("--architecture", default="elita")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[16_384, 32_768, 100_000])
    parser.add_argument("--chunk", type=int, default=4096)
    add_sizes(parser, hidden_size=256, num_layers=4, vocab_size=4096)
    parser.add_argument("--precision", default="float32", choices=["float32", "bf16"])
    parser.add_argument("--checkpoint", action="store_true", help="gradient checkpointing")
    return parser
