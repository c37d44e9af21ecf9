"""Models of every registered architecture, small and drawn wide, and a tokenizer."""

import pytest
import torch

from multilin import MultilinForCausalLM
from multilin.architectures import architectures
from multilin.data.tokenizers import train_tokenizer
from multilin.model.factory import create_model

VOCAB_SIZE, LONGEST = 31, 64
VARIANTS = [
    pytest.param((name, dict(options)), id=f"{name}-{variant}")
    for name, architecture in architectures().items()
    for variant, options in {"default": {}, **architecture.variants}.items()
]
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 1, "suppress_tokens": [1]}


@pytest.fixture(params=list(architectures()))
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


def make(architecture: str, **config: object) -> MultilinForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_layers": 2, "vocab_size": VOCAB_SIZE, "n_positions": LONGEST}
    tokens = {"bos_token_id": 2, "eos_token_id": 0, "pad_token_id": 1}
    return create_model(architecture, **{**sizes, **tokens, "initializer_range": 0.3, **config}).eval()


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(2, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(1))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, **options: float) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


@pytest.fixture(scope="module")
def tokenizer():
    words = [f"the cat number {i} sat on the mat and it was {i} times " * (1 + i % 3) for i in range(24)]
    return train_tokenizer(iter(words), "bpe", 290)
