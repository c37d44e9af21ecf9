"""What int8 gains and loses: products, a model's forward pass and training step, and errors against float32.

Contestants take turns in one process, and medians are compared. On a busy machine use --threads 1: then the processor
time of the thread is measured instead of the time on the wall.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import _results
from benchmarks._models import add_sizes, build_for
from benchmarks._turns import repeated, seconds_in_turns
from multilin.analysis.machine import keep_freed_memory
from multilin.layers.linear import Arithmetic
from multilin.model import MultilinForCausalLM
from multilin.ops.int8 import int8_linear, quantize

SHAPES = ((4096, 512, 512), (4096, 512, 2048), (4096, 2048, 512), (2048, 2048, 2048))
FLOAT = Arithmetic()
INT8 = Arithmetic(products="int8")
BOTH_WAYS = Arithmetic(products="int8", backward="int8")
PUBLISHED = {"int8": "3.6", "int8, backward too": "31.2"}

Contestants = dict[str, Callable[[], object]]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks int8", description=__doc__)
    parser.add_argument("--part", choices=["products", "model", "precision"], help="only this table")
    parser.add_argument("--architecture", default="tscale", help="of the model that is timed")
    add_sizes(parser, hidden_size=512, num_layers=8, vocab_size=8192)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--turns", type=int, default=7)
    arguments = _results.parse(parser, argv, threads=True)
    keep_freed_memory()
    clock = "cpu" if torch.get_num_threads() == 1 else "wall"
    rows: list[dict[str, Any]] = []
    if arguments.part in (None, "products"):
        rows += _products(clock, arguments.turns)
    if arguments.part in (None, "model"):
        rows += _model(arguments, clock)
    if arguments.part in (None, "precision"):
        rows += _precision(arguments)
    _results.save("int8", arguments, rows)


@torch.no_grad()
def _products(clock: str, turns: int) -> list[dict[str, Any]]:
    print(
        f"products, GFLOP/s; {torch.get_num_threads()} threads; int8_linear rounds x (float32) and w, and scales back"
    )
    print(f"{'rows x n -> m':>22}{'float32':>10}{'bf16':>10}{'int8':>10}{'int8_linear':>13}")
    found_rows = []
    for rows, n, m in SHAPES:
        x, weight = torch.randn(rows, n), torch.randn(m, n)
        low_x, low_weight = x.bfloat16(), weight.bfloat16()
        int8_x, int8_weight = quantize(x).values, quantize(weight, per="matrix").values
        contestants: Contestants = {
            "float32": lambda x=x, w=weight: x @ w.T,
            "bf16": lambda x=low_x, w=low_weight: x @ w.T,
            "int8": lambda x=int8_x, w=int8_weight: torch._int_mm(x, w.T),
            "int8_linear": lambda x=x, w=weight: int8_linear(x, w),
        }
        medians = seconds_in_turns({name: repeated(run, 10) for name, run in contestants.items()}, turns, clock)
        rates = [2e-9 * rows * n * m / (seconds / 10) for seconds in medians.values()]
        print(
            f"{f'{rows} x {n} -> {m}':>22}"
            + "".join(f"{rate:{w}.0f}" for rate, w in zip(rates, (10, 10, 10, 13), strict=True))
        )
        gflops = dict(zip(medians, rates, strict=True))
        found_rows.append({"part": "products", "rows": rows, "n": n, "m": m, "gflops": gflops})
    return found_rows


def _build(architecture: str, arguments: argparse.Namespace) -> MultilinForCausalLM:
    torch.manual_seed(0)
    model = build_for(architecture, arguments, arguments.length)
    assert isinstance(model, MultilinForCausalLM)
    for parameter in model.parameters():
        if not parameter.any():  # a matrix that starts at zero would hide what comes before it
            torch.nn.init.normal_(parameter, std=model.config.initializer_range)
    return model


def _model(arguments: argparse.Namespace, clock: str) -> list[dict[str, Any]]:
    model = _build(arguments.architecture, arguments)
    ids = torch.randint(arguments.vocab_size, (arguments.batch_size, arguments.length))

    def forward(arithmetic: Arithmetic) -> None:
        model.set_arithmetic(arithmetic)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model.eval()(ids, use_cache=False)

    def step(arithmetic: Arithmetic) -> None:
        model.set_arithmetic(arithmetic)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.train()(ids, labels=ids).loss
        loss.backward()
        model.zero_grad()

    print(f"\n{arguments.architecture}, hidden {arguments.hidden_size}, {arguments.num_layers} layers, ", end="")
    print(
        f"{arguments.batch_size} x {arguments.length} tokens, all else in bf16 autocast, "
        f"{torch.get_num_threads()} threads"
    )
    rows = []
    for title, run, ways in (
        ("forward pass with logits", forward, {"bf16": FLOAT, "int8": INT8}),
        ("loss and gradients", step, {"bf16": FLOAT, "int8": INT8, "int8, backward too": BOTH_WAYS}),
    ):
        contestants: Contestants = {name: lambda run=run, way=way: run(way) for name, way in ways.items()}
        medians = seconds_in_turns(contestants, arguments.turns, clock)
        for name, seconds in medians.items():
            gain = medians["bf16"] / seconds
            print(f"{title:26}{name:20}{1e3 * seconds:10.0f} ms{gain:8.2f} x")
            rows.append({"part": "model", "task": title, "arithmetic": name, "seconds": seconds, "gain": gain})
    return rows


def _precision(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    print("\nerror against float32, in basis points (1e-4)")
    print(
        "rms: |difference| / |exact|; cosine: 1 - cosine of the angle; TScale publishes one figure, without its formula"
    )
    print(f"{'':10}{'':20}{'logits':>16}{'gradients':>16}{'published':>11}")
    print(f"{'':10}{'':20}{'rms':>8}{'cosine':>8}{'rms':>8}{'cosine':>8}")
    rows = []
    for architecture in ("tscale", "threelin"):
        model = _build(architecture, arguments).train()
        ids = torch.randint(arguments.vocab_size, (2, arguments.length), generator=torch.Generator().manual_seed(1))
        exact = _logits_and_gradients(model, ids, FLOAT, autocast=False)
        for name, arithmetic in (("bf16", FLOAT), ("int8", INT8), ("int8, backward too", BOTH_WAYS)):
            actual = _logits_and_gradients(model, ids, arithmetic, autocast=name == "bf16")
            cells = [cell for x, y in zip(actual, exact, strict=True) for cell in _basis_points(x, y)]
            line = "".join(f"{cell:8.1f}" for cell in cells)
            rows.append({"part": "precision", "model": architecture, "arithmetic": name, "basis_points": cells})
            print(f"{architecture:10}{name:20}{line}{PUBLISHED.get(name, '') if architecture == 'tscale' else '':>11}")
    return rows


def _logits_and_gradients(
    model: MultilinForCausalLM, ids: torch.Tensor, arithmetic: Arithmetic, *, autocast: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the gradients of all layers' parameters, each laid end to end."""
    model.set_arithmetic(arithmetic)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with torch.no_grad():
            logits = model.eval()(ids, use_cache=False).logits
        loss = model.train()(ids, labels=ids).loss
    gradients = torch.autograd.grad(loss, list(model.model.layers.parameters()))
    return logits.double().flatten(), torch.cat([gradient.double().flatten() for gradient in gradients])


def _basis_points(actual: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    rms = (actual - exact).norm() / exact.norm()
    cosine = 1 - (actual @ exact) / (actual.norm() * exact.norm())
    return 1e4 * float(rms), 1e4 * float(cosine)
