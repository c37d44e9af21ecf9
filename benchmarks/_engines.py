"""Models ready to read prompts and to generate token by token, in PyTorch, ONNX Runtime and CTranslate2."""

import copy
import importlib.util
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from multilin.analysis.costs import state_bytes
from multilin.data.tokenizers import train_tokenizer
from multilin.errors import InputError
from multilin.export.folder import export_run
from multilin.files import atomic_folder
from multilin.inference.engine import Engine
from multilin.inference.state_file import StateContents
from multilin.inference.torch_engine import TorchEngine
from multilin.model import MultilinForCausalLM
from multilin.runs.load import Run

ENGINES = ("torch", "onnx", "onnx-8bit", "ctranslate2", "ctranslate2-int8")
_PACKAGES = {"onnx": ("onnxruntime", "onnx", "onnxscript"), "ctranslate2": ("ctranslate2",)}
_TO_INSTALL = {"onnx": "'multilin[export]'", "ctranslate2": "ctranslate2"}

Generate = Callable[[int], float]
"""Generates a number of tokens for each sequence, always from the same state; returns seconds per token."""


class Decoder(Protocol):
    """A model in an engine.

    prefill: the state of one sequence after these tokens.
    start: generation from this state, for a batch of copies of the sequence.
    num_bytes: the size of the state of such a batch; windows count in full.
    """

    def prefill(self, ids: list[int]) -> Any: ...

    def start(self, state: Any, batch_size: int) -> Generate: ...

    def num_bytes(self, state: Any, batch_size: int) -> int: ...


def check_installed(engines: list[str]) -> None:
    """Check that the packages of all engines are installed.

    Raises:
        InputError: a package is missing; the message says how to install it.
    """
    for engine in engines:
        kind = engine.partition("-")[0]
        if any(importlib.util.find_spec(package) is None for package in _PACKAGES.get(kind, ())):
            raise InputError(f"--engines: {engine} given, but it is not installed (pip install {_TO_INSTALL[kind]})")


def engines_of(name: str, chosen: list[str]) -> list[str]:
    """The chosen engines that can run a model."""
    known = {"gpt2": ("torch", "onnx", "ctranslate2", "ctranslate2-int8"), "llama": ("torch",)}
    return [engine for engine in chosen if engine in known.get(name, ENGINES[:3])]


def make_decoder(model: PreTrainedModel, engine: str, threads: int, folder: Path) -> Decoder:
    """A model in an engine. An export of the same sizes is read from `folder`, or written there."""
    if engine == "torch":
        in_torch = TorchEngine(model)
        return OurDecoder(in_torch) if in_torch.keeps_states else CacheDecoder(in_torch)
    if engine.startswith("ctranslate2"):
        return CTranslate2Decoder(model, folder, "int8" if engine.endswith("int8") else "float32", threads)
    if not isinstance(model, MultilinForCausalLM):
        return GrowingCacheDecoder(model, folder, threads)
    if not folder.exists():
        tokenizer = train_tokenizer(["abc"], "byte", None)
        source = folder.with_name("tokenizer")
        tokenizer.save_pretrained(source)
        export_run(Run(source, model, tokenizer), folder, "8bit" if engine == "onnx-8bit" else "float32")
    from multilin.inference.onnx_engine import OnnxEngine

    return OurDecoder(OnnxEngine(folder, threads))


def _generate(read: Callable[[list[list[int]]], Any], batch_size: int, num_tokens: int) -> float:
    """Seconds per token of greedy generation; `read` returns the logits after one more token of each sequence."""
    ids = read([[0]] * batch_size).argmax(-1)[:, None].tolist()  # lays the state out for single tokens
    begin = time.perf_counter()
    for _ in range(num_tokens):
        ids = read(ids).argmax(-1)[:, None].tolist()
    return (time.perf_counter() - begin) / num_tokens


class OurDecoder:
    """A model of multilin, which keeps a state of constant size."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def prefill(self, ids: list[int]) -> Any:
        state = self.engine.new_state()
        self.engine.read(state, [ids])
        return state

    def start(self, state: Any, batch_size: int) -> Generate:
        def run(num_tokens: int) -> float:
            own = state.select([0] * batch_size)
            return _generate(partial(self.engine.read, own), batch_size, num_tokens)

        return run

    def num_bytes(self, state: Any, batch_size: int) -> int:
        contents: StateContents = self.engine.save(state)
        return batch_size * sum(tensor.nbytes for tensor in contents.tensors.values())


class CacheDecoder(OurDecoder):
    """A model of transformers in the same engine, with its cache of keys and values."""

    def start(self, state: DynamicCache, batch_size: int) -> Generate:
        cache = copy.deepcopy(state)
        cache.batch_repeat_interleave(batch_size)

        def run(num_tokens: int) -> float:
            seconds = _generate(partial(self.engine.read, cache), batch_size, num_tokens)
            cache.crop(-num_tokens - 1)  # a copy of keys and values would take longer than the tokens
            return seconds

        return run

    def num_bytes(self, state: DynamicCache, batch_size: int) -> int:
        return batch_size * sum(state_bytes(state))


class CachedStep(nn.Module):
    """A model of transformers as a function of new tokens and of the cached keys and values."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        logits = self.model(input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        return logits, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))


class GrowingCacheDecoder:
    """GPT-2 in ONNX Runtime. A step appends to the keys and values, which stay in the memory of the runtime."""

    def __init__(self, model: PreTrainedModel, folder: Path, threads: int) -> None:
        import onnxruntime

        if not folder.exists():
            with atomic_folder(folder) as partial_folder:
                _export_step(model, partial_folder / "step.onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        self.session = onnxruntime.InferenceSession(str(folder / "step.onnx"), options)
        self.to_value = onnxruntime.OrtValue.ortvalue_from_numpy
        self.inputs = [given.name for given in self.session.get_inputs()]
        self.outputs = [given.name for given in self.session.get_outputs()]
        heads = model.config.num_attention_heads
        self.empty = torch.zeros(1, heads, 0, model.config.hidden_size // heads).numpy()

    def _read(self, past: list[Any], ids: list[list[int]]) -> Any:
        values = [self.to_value(torch.tensor(ids).numpy()), *past]
        logits, *past[:] = self.session.run_with_ort_values(self.outputs, dict(zip(self.inputs, values, strict=True)))
        return logits.numpy()

    def prefill(self, ids: list[int]) -> list[Any]:
        past = [self.to_value(self.empty) for _ in self.inputs[1:]]
        self._read(past, [ids])
        return past

    def start(self, state: list[Any], batch_size: int) -> Generate:
        past = [self.to_value(value.numpy().repeat(batch_size, axis=0)) for value in state]
        return lambda num_tokens: _generate(partial(self._read, list(past)), batch_size, num_tokens)

    def num_bytes(self, state: list[Any], batch_size: int) -> int:
        return batch_size * sum(value.numpy().nbytes for value in state)


@torch.no_grad()
def _export_step(model: PreTrainedModel, path: Path) -> None:
    config = model.config
    shape = (2, config.num_attention_heads, 7, config.hidden_size // config.num_attention_heads)
    names = [f"{kind}.{layer}" for layer in range(config.num_hidden_layers) for kind in ("keys", "values")]
    past = [torch.zeros(shape) for _ in names]
    batch, new, read = (torch.export.Dim(name) for name in ("batch", "new", "read"))
    dims = ({0: batch, 1: new}, tuple({0: batch, 2: read} for _ in names))
    ids = torch.zeros(2, 3, dtype=torch.long)
    outputs = ["logits", *(f"new.{name}" for name in names)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(CachedStep(model), (ids, *past), dynamic_shapes=dims, strict=False)
        graph = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=["input_ids", *names], output_names=outputs
        )
    assert graph is not None
    graph.save(path)


class CTranslate2Decoder:
    """GPT-2 in CTranslate2. Its state is the list of tokens; the library keeps their keys and values."""

    def __init__(self, model: PreTrainedModel, folder: Path, compute_type: str, threads: int) -> None:
        import ctranslate2
        from ctranslate2.converters.transformers import GPT2Loader

        self.bytes_per_token = 2 * 4 * model.config.hidden_size * model.config.num_hidden_layers
        if not folder.exists():
            spec = GPT2Loader().get_model_spec(model)
            spec.register_vocabulary([str(index) for index in range(model.config.vocab_size)])
            spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
            spec.validate()
            spec.optimize(quantization=None)
            with atomic_folder(folder) as partial_folder:
                spec.save(str(partial_folder))
        self.generator = ctranslate2.Generator(str(folder), intra_threads=threads, compute_type=compute_type)

    def _run(self, start: list[list[str]], num_tokens: int, **options: Any) -> None:
        self.generator.generate_batch(
            start, max_length=num_tokens, min_length=num_tokens, include_prompt_in_result=False, **options
        )

    def prefill(self, ids: list[int]) -> list[str]:
        tokens = [str(index) for index in ids]
        self._run([tokens], 1)
        return tokens

    def start(self, state: list[str], batch_size: int) -> Generate:
        def run(num_tokens: int) -> float:
            times: list[float] = []  # when each token of each sequence came
            self._run(
                [["1"]] * batch_size, num_tokens + 1, static_prompt=state,
                callback=lambda _: times.append(time.perf_counter()),
            )  # fmt: skip
            return (times[-1] - times[batch_size - 1]) / num_tokens

        return run

    def num_bytes(self, state: list[str], batch_size: int) -> int:
        return batch_size * len(state) * self.bytes_per_token


def bare_products(matrices: list[Tensor], batch_size: int) -> Generate:
    """Only the products with these matrices, one vector for each sequence."""
    vectors = [torch.randn(batch_size, matrix.shape[1], device=matrix.device) for matrix in matrices]

    @torch.inference_mode()
    def run(num_tokens: int) -> float:
        begin = time.perf_counter()
        for _ in range(num_tokens):
            results = [nn.functional.linear(*pair) for pair in zip(vectors, matrices, strict=True)]
            results[-1][0, 0].item()  # waits for an accelerator
        return (time.perf_counter() - begin) / num_tokens

    return run


def one_product(matrices: list[Tensor], batch_size: int) -> Generate:
    """One product with a single matrix of as many numbers, which reads the weights once."""
    numbers = sum(matrix.numel() for matrix in matrices)
    return bare_products([torch.randn(max(numbers // 1024, 1), 1024, device=matrices[0].device)], batch_size)
