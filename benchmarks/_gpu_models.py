"""Models on a GPU: training steps and decoding, ours beside transformers' and flash-linear-attention's."""

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._gpu_timing import Clock, attempt
from benchmarks._models import multiplied, options_of, train_step
from multilin.analysis.costs import state_bytes
from multilin.architectures import architectures
from multilin.inference.torch_engine import DecodingGraphs
from multilin.model import MultilinForCausalLM
from multilin.model.baselines import attend_without_mask
from multilin.model.factory import BASELINES, create_model
from multilin.training.precision import tf32_beside_bf16

PEERS_OF_FLA = ("gla", "mamba2", "gated_deltanet_fla")
Figures = dict[str, Any]


def peers() -> list[str]:
    """The models of transformers and, if the package fla is installed, of fla."""
    return [*BASELINES, *(PEERS_OF_FLA if importlib.util.find_spec("fla") else ())]


def build(name: str, hidden_size: int, num_layers: int, length: int, arguments: argparse.Namespace) -> nn.Module:
    """A model with random weights. Heads are 128 wide in architectures with a number of heads."""
    heads = max(hidden_size // 128, 1)
    if name in PEERS_OF_FLA:
        return _of_fla(name, hidden_size, num_layers, heads, arguments)
    sizes = {"hidden_size": hidden_size, "num_layers": num_layers, "n_positions": length}
    return create_model(name, vocab_size=arguments.vocab_size, options=options_of(name, heads), **sizes)


def _of_fla(name: str, hidden_size: int, num_layers: int, heads: int, arguments: argparse.Namespace) -> nn.Module:
    from fla.models import GatedDeltaNetConfig, GLAConfig, Mamba2Config
    from transformers import AutoModelForCausalLM

    shared = {"hidden_size": hidden_size, "num_hidden_layers": num_layers, "vocab_size": arguments.vocab_size}
    if name == "gla":
        return AutoModelForCausalLM.from_config(GLAConfig(num_heads=heads, tie_word_embeddings=True, **shared))
    if name == "gated_deltanet_fla":
        sizes = {"num_heads": heads, "head_dim": 128, "expand_v": 1.0, "tie_word_embeddings": True}
        return AutoModelForCausalLM.from_config(GatedDeltaNetConfig(**sizes, **shared))
    return AutoModelForCausalLM.from_config(Mamba2Config(head_dim=64, num_heads=hidden_size * 2 // 64, **shared))


def depth_for(name: str, parameters: float, hidden_size: int, length: int, arguments: argparse.Namespace) -> int:
    """The number of layers with which a model of this width comes nearest to a number of parameters."""
    counts = []
    for depth in (2, 4):
        with torch.device("meta"):
            counts.append(sum(p.numel() for p in build(name, hidden_size, depth, length, arguments).parameters()))
    per_layer = (counts[1] - counts[0]) / 2
    return max(1, round((parameters - counts[0]) / per_layer) + 2)


def models() -> list[str]:
    """All models that --models accepts."""
    return [*peers(), *architectures()]


def _chosen(names: list[str], arguments: argparse.Namespace) -> list[str]:
    return [name for name in names if not arguments.models or name in arguments.models]


def training(clock: Clock, device: torch.device, arguments: argparse.Namespace, limit: Figures) -> Figures:
    """Tokens per second of a training step in bf16, and its products with weights as a share of the peak (MFU)."""
    figures: Figures = {}
    for parameters, hidden_size in zip(arguments.parameters, arguments.hidden_sizes, strict=True):
        for length in arguments.lengths:
            for name in _chosen(models(), arguments):
                ways = ("compiled",) if name in BASELINES else ("eager", "compiled")
                for way in ways:
                    label = f"{name}, {way}, {parameters / 1e6:,.0f} M, texts of {length}"
                    work = partial(_step, clock, device, arguments, limit, name, way, parameters, hidden_size, length)
                    with tf32_beside_bf16("bf16"):
                        figures[label] = attempt(work, label)
    return figures


def _step(
    clock: Clock, device: torch.device, arguments: argparse.Namespace, limit: Figures,
    name: str, way: str, parameters: float, hidden_size: int, length: int,
) -> Figures:  # fmt: skip
    clock.check()
    depth = depth_for(name, parameters, hidden_size, length, arguments)
    with torch.device(device):
        model = build(name, hidden_size, depth, length, arguments).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    if name in BASELINES:
        attend_without_mask(model)
    rows = max(1, arguments.tokens // length)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(arguments.vocab_size, (rows, length), device=device)
    compute: Any = torch.compile(model) if way == "compiled" and not clock.is_dry else model

    step = partial(train_step, compute, optimizer, ids, bf16=True)
    if not torch.isfinite(step()):
        raise ArithmeticError("the loss is not finite")
    milliseconds = clock.milliseconds(step, at_most=3.0)
    weights = sum(weight.numel() for weight in multiplied(model))
    count = sum(p.numel() for p in model.parameters())
    figures: Figures = {"layers": depth, "parameters": count, "multiplied_weights": weights, "step_ms": milliseconds}
    if milliseconds:
        speed = rows * length / milliseconds * 1e3
        figures |= {"tokens_per_second": speed, "parameters_times_tokens_per_second": count * speed}
        peak = limit.get("bf16_teraflops")
        figures["mfu"] = 6 * weights * speed / peak / 1e12 if peak else None
        figures["memory_gigabytes"] = torch.cuda.max_memory_allocated() / 1e9
    return figures


def decoding(clock: Clock, device: torch.device, arguments: argparse.Namespace) -> Figures:
    """Milliseconds per token, by single kernels and by a CUDA graph; bytes of state per text; whether memory grows."""
    figures: Figures = {}
    parameters, hidden_size = arguments.parameters[0], arguments.hidden_sizes[0]
    for name in _chosen([*architectures(), "gpt2"], arguments):
        for batch in arguments.batches:
            work = partial(_decode, clock, device, arguments, name, batch, parameters, hidden_size)
            figures[f"{name}, batch {batch}"] = attempt(work, f"{name}, batch {batch}")
    return figures


def _decode(
    clock: Clock, device: torch.device, arguments: argparse.Namespace,
    name: str, batch: int, parameters: float, hidden_size: int,
) -> Figures:  # fmt: skip
    clock.check()
    read, steps = arguments.read, arguments.steps
    length = read + 80 * steps
    depth = depth_for(name, parameters, hidden_size, length, arguments)
    with torch.device(device):
        model = build(name, hidden_size, depth, length, arguments).eval().bfloat16()
    ids = torch.randint(arguments.vocab_size, (batch, read), device=device)
    with torch.inference_mode():
        cache: Any = model(ids, use_cache=True, logits_to_keep=1).past_key_values

        def call(token: Tensor) -> Tensor:
            logits: Tensor = model(token, past_key_values=cache, use_cache=True).logits[:, -1]
            return logits

        call(ids[:, -1:])
        figures: Figures = {"layers": depth, "state_bytes_per_text": sum(state_bytes(cache)) / batch}
        ways = {"": call}
        if isinstance(model, MultilinForCausalLM) and device.type == "cuda":
            graphs = DecodingGraphs(model)
            ways["graph_"] = lambda token: call(token) if (found := graphs.read(cache, token)) is None else found
        for way, read_token in ways.items():
            figures |= {f"{way}{name}": value for name, value in _tokens(clock, read_token, ids[:, -1:], steps).items()}
        figures["state_grew"] = sum(state_bytes(cache)) != batch * figures["state_bytes_per_text"]
    return figures


def _tokens(clock: Clock, read_token: Callable[[Tensor], Tensor], last_B1: Tensor, steps: int) -> Figures:
    """Milliseconds per step, tokens per second, and the bytes by which live tensors grow during generation."""

    def generate() -> None:
        token_B1 = last_B1
        for _ in range(steps):
            token_B1 = read_token(token_B1).argmax(dim=-1, keepdim=True)

    generate()
    before = _memory()
    milliseconds = clock.milliseconds(generate)
    if milliseconds is None:
        return {"step_ms": None}
    figures: Figures = {"step_ms": milliseconds / steps, "memory_grew_bytes": _memory() - before}
    figures["tokens_per_second"] = len(last_B1) * steps / milliseconds * 1e3
    return figures


def _memory() -> int:
    """Bytes in live tensors on the GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
