"""The optimizer's step alone: milliseconds and bytes of state, ours beside PyTorch's AdamW.

All work on copies of one model's parameters, with the same gradients, in turns within one process; the median over
turns counts. The limit is one pass that reads gradients and parameters and writes the parameters, as any update must.
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn

from benchmarks import _results
from benchmarks._models import add_sizes, build_for
from benchmarks._turns import seconds_in_turns
from multilin.model.factory import model_names
from multilin.training.optimizers import MatrixMoment, NormalizedSGD, parameter_groups
from multilin.training.processes import accelerator_or_cpu as device


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks optimizer", description=__doc__)
    parser.add_argument("--architecture", default="tscale", choices=model_names())
    add_sizes(parser, hidden_size=512, num_layers=6, vocab_size=8192)
    parser.add_argument("--turns", type=int, default=15, help="turns of each")
    arguments = _results.parse(parser, argv, threads=True)
    measured = optimizers(arguments)
    medians = seconds_in_turns({name: step for name, (step, _) in measured.items()}, arguments.turns, "wall")
    sizes = {name: state_bytes(optimizer) for name, (_, optimizer) in measured.items()}
    print(f"{arguments.architecture}, width {arguments.hidden_size}, {arguments.num_layers} layers, ", end="")
    print(f"vocabulary {arguments.vocab_size}, float32, {torch.get_num_threads()} threads")
    adam = "peer: AdamW, fused"
    print(f"{'':24}{'ms/step':>10}{'/ fused AdamW':>15}{'state, MB':>12}{'/ AdamW':>10}")
    for name, size in sizes.items():
        print(f"{name:24}{1e3 * medians[name]:10.2f}{medians[name] / medians[adam]:15.2f}", end="")
        print(f"{size / 1e6:12.2f}{size / sizes[adam]:10.3f}")
    rows = [{"name": name, "seconds": medians[name], "state_bytes": size} for name, size in sizes.items()]
    _results.save("optimizer", arguments, rows)


def optimizers(
    arguments: argparse.Namespace,
) -> dict[str, tuple[Callable[[], object], torch.optim.Optimizer | None]]:
    """Each row of the table: a step, and the optimizer whose state is counted."""

    def model() -> nn.Module:
        network = build_for(arguments.architecture, arguments, 1024).to(device())
        torch.manual_seed(0)
        for parameter in network.parameters():
            parameter.grad = torch.randn_like(parameter)
        return network

    def groups() -> list[dict]:
        return parameter_groups(model(), decayed=(), weight_decay=0.0, by_rows=True)

    built: dict[str, torch.optim.Optimizer] = {
        "matrix_moment": MatrixMoment(groups()),
        "normalized_sgd": NormalizedSGD(groups()),
        "peer: AdamW, fused": torch.optim.AdamW(model().parameters(), weight_decay=0.0, fused=True),
        "peer: AdamW, foreach": torch.optim.AdamW(model().parameters(), weight_decay=0.0, foreach=True),
    }
    parameters = [parameter.detach() for parameter in model().parameters()]
    gradients = [torch.randn_like(parameter) for parameter in parameters]

    def pass_over() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.lerp_(gradient, 1e-3)

    rows = {name: (optimizer.step, optimizer) for name, optimizer in built.items()}
    return {**rows, "limit: one lerp": (pass_over, None)}


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of every tensor of an optimizer's state."""
    states = optimizer.state.values() if optimizer is not None else ()
    return sum(slot.numel() * slot.element_size() for state in states for slot in state.values())
