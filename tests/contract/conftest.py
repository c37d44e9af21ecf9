"""The models under contract: found in the registry, so a new architecture is tested by being registered."""

import itertools
from collections.abc import Callable

import pytest
import torch

from multilin import MultilinForCausalLM, TextState
from multilin.architectures import architectures
from multilin.model import MultilinConfig
from multilin.testing import Subject

VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS, LONGEST = 31, 16, 3, 128

HYBRIDS = {
    "window below, running sums above": [
        {"architecture": "tscale", "width": 5, "slope": 0.5, "head_size": 8},
        {"architecture": "threelin", "window": 7, "hyper": 2.0, "initializer_range": 0.5},
        {"architecture": "additive", "window": 6},
        {"architecture": "elita", "position_period": 50.0},
    ],
    "with learned mixing": [
        {"architecture": "linear_mixer", "context": LONGEST},
        {"architecture": "additive", "stabilizer": "head_norm"},
    ],
}

MATCH = {"window": 20, "longest": 4}

CASES = [
    *(
        pytest.param({"architecture": name, "options": dict(options)}, id=f"{name}-{variant}")
        for name, architecture in architectures().items()
        for variant, options in {"default": {}, **architecture.variants}.items()
    ),
    *(
        pytest.param({"architecture": "additive", "layers": layers}, id=f"hybrid-{name}")
        for name, layers in HYBRIDS.items()
    ),
    *(
        pytest.param({"architecture": name, "options": {}, "match": MATCH}, id=f"{name}-longest_match")
        for name in ("tscale", "mingru")
    ),
]

MakeModel = Callable[..., MultilinForCausalLM]


class ModelSubject(Subject):
    """A whole model under the laws of layers: it reads ids and gives logits."""

    module: MultilinForCausalLM
    scales = (1.0,)

    def __init__(self, model: MultilinForCausalLM) -> None:
        super().__init__(width=HIDDEN_SIZE, longest=model.config.n_positions)
        self.module = model

    def draw(self, rows: int, length: int, seed: int = 1) -> torch.Tensor:
        return random_ids(rows, length, seed=seed)

    def read(self, x: torch.Tensor, state: TextState | None = None) -> tuple[torch.Tensor, TextState]:
        state = self.module.new_state() if state is None else state.clone()
        return self.module(x, past_key_values=state).logits, state

    def select(self, state: TextState, rows: list[int]) -> TextState:
        return state.select(rows)

    def tensors(self, state: TextState) -> list[torch.Tensor]:
        return [tensor for _, tensor in state.named_tensors()]


def layers_of(model: MultilinForCausalLM) -> Subject:
    """The layers of a model under the laws."""
    return Subject(*model.model.layers, width=HIDDEN_SIZE, longest=model.config.n_positions)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> dict:
    return request.param


@pytest.fixture
def make_model(case: dict) -> MakeModel:
    """Builds the model under contract.

    Weights are drawn wide, also those that start at zero, so that every part matters; `initial=True` leaves a model as
    training begins with it.
    """

    def make(dtype: torch.dtype = torch.float64, *, initial: bool = False, **model: object) -> MultilinForCausalLM:
        config = MultilinConfig.from_architecture(
            case["architecture"],
            hidden_size=HIDDEN_SIZE,
            num_layers=None if "layers" in case else NUM_LAYERS,
            layers=case.get("layers"),
            vocab_size=VOCAB_SIZE,
            n_positions=LONGEST,
            options=case.get("options"),
            eos_token_id=0,
            pad_token_id=1,
            match=case.get("match"),
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
def packs(case: dict) -> bool:
    kinds = [layer["architecture"] for layer in case.get("layers", [case])]
    return all(architectures()[kind].packs for kind in kinds)


def without_dropout(model: MultilinForCausalLM) -> MultilinForCausalLM:
    """Training mode, in which dropout would make two runs differ."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def random_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    """Token ids without the end and padding tokens."""
    return torch.randint(2, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))


def read_in_pieces(
    model: MultilinForCausalLM, ids: torch.Tensor, cuts: list[int], **arguments: torch.Tensor
) -> tuple[torch.Tensor, TextState]:
    """The logits of all tokens, read in pieces that end at the cuts, and the state after them."""
    state, logits = model.new_state(), []
    for first, last in itertools.pairwise([0, *cuts, ids.shape[1]]):
        piece = {name: tensor[:, first:last] for name, tensor in arguments.items()}
        logits.append(model(ids[:, first:last], past_key_values=state, **piece).logits)
    return torch.cat(logits, dim=1), state
