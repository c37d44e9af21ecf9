"""State files of every architecture: a flipped bit is seen, and only what the model can have written is read."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from multilin.inference.snapshot import Snapshot, load_snapshot, save_snapshot
from multilin.inference.state_file import RNG_STATE
from multilin.model import MultilinForCausalLM
from tests.contract.conftest import LONGEST, VOCAB_SIZE, MakeModel
from tests.inference.test_snapshot import refused, rewrite

ROWS = 2


@pytest.fixture
def model(make_model: MakeModel) -> MultilinForCausalLM:
    return make_model(torch.float32)


@pytest.fixture
def state_file(model: MultilinForCausalLM, tmp_path: Path) -> Path:
    """The state of two texts of nine tokens."""
    ids = torch.randint(VOCAB_SIZE, (ROWS, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        state = model(ids).past_key_values
    save_snapshot(Snapshot(state, [[3], [4]], torch.get_rng_state()), tmp_path / "text.state", model)
    return tmp_path / "text.state"


@pytest.mark.slow_for_variants
def test_a_flipped_bit_anywhere_is_seen(model: MultilinForCausalLM, state_file: Path) -> None:
    content, draw = state_file.read_bytes(), random.Random(0)
    header = int.from_bytes(content[:8], "little") + 8
    for place in [*draw.sample(range(8 * header), 15), *draw.sample(range(8 * header, 8 * len(content)), 15)]:
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        state_file.write_bytes(flipped)
        refused(state_file, model, "damaged|is not a state|metadata|checksum")
    for size in [0, 7, 8, 9, header - 1, header, header + 1, len(content) - 1]:
        state_file.write_bytes(content[:size])
        refused(state_file, model, "damaged")


SHAPES: list[Callable[[Tensor], Tensor]] = [
    lambda t: t[:1].clone(),
    lambda t: t[..., None].clone(),
    lambda t: t.flatten()[0].clone(),
    lambda t: t.to(torch.float64 if t.dtype == torch.float32 else torch.int32),
    lambda t: t.to(torch.bfloat16 if t.is_floating_point() else torch.bool),
]


def test_every_tensor_has_the_shape_and_dtype_of_the_model(model: MultilinForCausalLM, state_file: Path) -> None:
    content = state_file.read_bytes()
    names = sorted(set(load_file(state_file)) - {RNG_STATE})
    for name, change in zip(names, itertools.cycle(SHAPES)):
        rewrite(state_file, lambda _, tensors, name=name, change=change: tensors.update({name: change(tensors[name])}))
        refused(state_file, model, "has shape|holds torch|rows|damaged")
        state_file.write_bytes(content)


def test_only_logits_may_be_minus_infinity_and_counts_fit_the_model(
    model: MultilinForCausalLM, state_file: Path
) -> None:
    content = state_file.read_bytes()

    def fill(name: str, value: float) -> None:
        state_file.write_bytes(content)
        rewrite(state_file, lambda _, tensors: tensors[name].view(-1)[0].fill_(value))

    tensors = load_file(state_file)
    one_of_each = {name.rpartition(".")[2]: name for name in tensors}
    for field, name in one_of_each.items():
        tensor = tensors[name]
        if tensor.is_floating_point():
            for value in (torch.nan, torch.inf, -torch.inf):
                fill(name, value)
                if value == -torch.inf and field.startswith("logits"):
                    load_snapshot(state_file, model)
                else:
                    refused(state_file, model, f"{name} holds values that are not finite")
        elif name != RNG_STATE:
            fill(name, -1)
            refused(state_file, model, f"{name} holds the number -1")


def test_a_count_that_fits_the_model_is_read_and_one_more_is_not(model: MultilinForCausalLM, state_file: Path) -> None:
    def read(number: int) -> Callable[..., object]:
        return lambda _, tensors: [tensor.fill_(number) for name, tensor in tensors.items() if "num_read" in name]

    longest = model.config.n_positions
    rewrite(state_file, read(longest or LONGEST))
    assert load_snapshot(state_file, model).state.num_tokens.tolist() == [longest or LONGEST] * ROWS
    rewrite(state_file, read(2**62 if longest is None else longest + 1))
    refused(state_file, model, "this model reads at most")
