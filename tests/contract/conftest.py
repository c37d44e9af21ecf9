"""The models under contract: found in the registry, so a new architecture is tested by being registered."""

from collections.abc import Callable

import pytest
import torch

from multilin import MultilinForCausalLM, architectures
from multilin.model import MultilinConfig

VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS, LONGEST = 31, 16, 3, 128

CASES = [
    pytest.param((name, dict(options)), id=f"{name}-{variant}")
    for name, architecture in architectures().items()
    for variant, options in {"default": {}, **architecture.variants}.items()
]

MakeModel = Callable[..., MultilinForCausalLM]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, dict]:
    return request.param


@pytest.fixture
def make_model(case: tuple[str, dict]) -> MakeModel:
    """Builds the model under contract.

    Weights are drawn wide, also those that start at zero, so that every part matters; `initial=True` leaves a model as
    training begins with it.
    """

    def make(dtype: torch.dtype = torch.float64, *, initial: bool = False, **model: object) -> MultilinForCausalLM:
        name, options = case
        config = MultilinConfig.from_architecture(
            name,
            hidden_size=HIDDEN_SIZE,
            num_layers=NUM_LAYERS,
            vocab_size=VOCAB_SIZE,
            n_positions=LONGEST,
            options=options,
            eos_token_id=0,
            pad_token_id=1,
            **{**({} if initial else {"initializer_range": 0.3}), "embedding_dropout": 0.0, **model},
        )
        torch.manual_seed(0)
        language_model = MultilinForCausalLM(config)
        if not initial:
            for parameter in language_model.parameters():
                if not parameter.any():
                    torch.nn.init.normal_(parameter, std=0.3)
        return language_model.to(dtype).eval()

    return make


@pytest.fixture
def packs(case: tuple[str, dict]) -> bool:
    return architectures()[case[0]].packs


def random_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    """Token ids without the end and padding tokens."""
    return torch.randint(2, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))
