"""Models of given sizes, and their weight matrices."""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from multilin.architectures import architectures
from multilin.model.factory import BASELINES, create_config, create_model


def add_sizes(parser: argparse.ArgumentParser, **sizes: int) -> None:
    """Add a flag for each size of a model, with these defaults."""
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)


def build(name: str, arguments: argparse.Namespace, position: int) -> PreTrainedModel:
    """A model of the sizes in the arguments; `position` is the longest text of models that have a limit."""
    sizes: dict[str, Any] = {
        "hidden_size": arguments.hidden_size, "num_layers": arguments.num_layers, "vocab_size": arguments.vocab_size,
        "n_positions": arguments.n_positions, "options": options_of(name, arguments.num_heads),
    }  # fmt: skip
    if create_config(name, **sizes).max_position_embeddings is not None:
        sizes["n_positions"] = position
    return create_model(name, **sizes)


def build_for(name: str, arguments: argparse.Namespace, length: int, **more: Any) -> PreTrainedModel:
    """A model of the width, depth and vocabulary in the arguments, for texts of `length` tokens."""
    return create_model(
        name, hidden_size=arguments.hidden_size, num_layers=arguments.num_layers, vocab_size=arguments.vocab_size,
        n_positions=length, **more,
    )  # fmt: skip


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, *, bf16: bool = False, clip_norm: float = 0.0
) -> Tensor:
    """The loss of one training step on these tokens, under autocast and with clipped gradients on request."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
        loss: Tensor = model(input_ids=ids, labels=ids.clone()).loss
    loss.backward()
    if clip_norm:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def options_of(name: str, num_heads: int) -> dict[str, Any]:
    """The number of heads and no dropout, if the model has these options."""
    options = {"num_heads": num_heads, "dropout": 0.0}
    if name in BASELINES:
        return options
    preset = architectures()[name].preset_options()
    return {key: value for key, value in options.items() if getattr(preset, key, None) is not None}


def multiplied(model: nn.Module) -> list[Tensor]:
    """The weights that multiply every token; not embeddings that are only looked up."""
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    in_products = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    matrices = {id(p): p for p in model.parameters() if p.ndim > 1}
    return [p for key, p in matrices.items() if key not in looked_up or key in in_products]
