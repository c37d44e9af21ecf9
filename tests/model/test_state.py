"""TextState: what a user does with a state besides reading on."""

import re

import pytest
import torch
from transformers import DynamicCache

from multilin import InputError, TextState
from multilin.model.factory import create_model


@pytest.fixture
def model():
    sizes = {"hidden_size": 8, "num_layers": 2, "vocab_size": 13, "n_positions": 64}
    return create_model("additive", **sizes, options={"num_heads": 2}).eval()


def read(model, *rows: list[int]) -> TextState:
    with torch.no_grad():
        return model(torch.tensor(rows)).past_key_values


def test_rows_are_selected_repeated_and_reordered(model) -> None:
    state, first = read(model, [1, 2, 3], [4, 5, 6]), read(model, [1, 2, 3])
    for picked in (state.select([0]), state.select([1, 0]).select([1])):
        for (name, expected), (_, tensor) in zip(first.named_tensors(), picked.named_tensors(), strict=True):
            torch.testing.assert_close(tensor, expected, msg=name)
    state.reorder_cache(torch.tensor([0, 0]))
    state.batch_repeat_interleave(2)
    assert state.batch_size == 4
    state.batch_select_indices(torch.tensor([0, 3]))
    assert all(torch.equal(tensor[0], tensor[1]) for _, tensor in state.named_tensors())
    assert model.new_state().select([0, 1]).num_tokens is None  # it has read nothing, and fits any number of rows


def test_a_clone_is_independent(model) -> None:
    state = read(model, [1, 2, 3])
    snapshot = state.clone()
    model(torch.tensor([[4]]), past_key_values=state)
    assert state.num_tokens.tolist() == [4]
    assert snapshot.num_tokens.tolist() == [3]


def test_bytes_are_those_of_the_tensors_and_reset_forgets(model) -> None:
    state = read(model, [1, 2, 3])
    assert state.num_bytes == sum(t.numel() * t.element_size() for _, t in state.named_tensors())
    state.reset()
    assert state.num_tokens is None
    assert state.num_bytes == 0


def test_what_cannot_be_done_is_said(model) -> None:
    with pytest.raises(InputError, match="num_continuations: 0"):
        read(model, [1]).fork(0)
    with pytest.raises(InputError, match="no keys and values"):
        read(model, [1]).update(torch.zeros(1), torch.zeros(1), 0)
    with pytest.raises(InputError, match="DynamicCache given"):
        model(torch.tensor([[1]]), past_key_values=DynamicCache())
    other = create_model("additive", hidden_size=8, num_layers=1, vocab_size=13, n_positions=64).eval()
    with pytest.raises(InputError, match="a state of 1 layers"):
        model(torch.tensor([[1]]), past_key_values=read(other, [1]))
    for rows in ([], [9], [-1]):
        with pytest.raises(InputError, match=re.escape(f"rows: {rows} given, but it must list rows from 0 to 0")):
            read(model, [1]).select(rows)


def test_the_state_of_another_architecture_is_refused(model) -> None:
    num_layers = len(model.config.layers)
    other = create_model("mingru", hidden_size=8, num_layers=num_layers, vocab_size=13, n_positions=64).eval()
    for reader in (model, model.generate):
        with pytest.raises(InputError, match="the state belongs to another model: it has a layer of mingru of width 8"):
            reader(torch.tensor([[1, 2]]), past_key_values=read(other, [1]))


def test_rows_of_different_lengths_are_continued_as_far_as_the_longest_has_room(model) -> None:
    """The row that has read most may not be the one that is given most."""
    tokens, mask = torch.arange(2 * 50).view(2, 50) % 13, torch.ones(2, 50, dtype=torch.long)
    mask[1, :40] = 0
    state = model(tokens, attention_mask=mask).past_key_values
    new, new_mask = torch.arange(2 * 40).view(2, 40) % 13, torch.ones(2, 40, dtype=torch.long)
    new_mask[0, :38] = 0
    how = {"past_key_values": state, "new_tokens_only": True, "do_sample": False, "eos_token_id": None}
    found = model.generate(new, attention_mask=new_mask, max_new_tokens=13, **how)
    for row, (read, given) in enumerate(((tokens[:1], new[:1, 38:]), (tokens[1:, 40:], new[1:]))):
        alone = model.generate(torch.cat([read, given], dim=1), max_new_tokens=13, do_sample=False, eos_token_id=None)
        assert torch.equal(found[row, 40:], alone[0, -13:])
    with pytest.raises(InputError, match="max_new_tokens: 14 given after a text of 52 tokens"):
        model.generate(new, attention_mask=new_mask, max_new_tokens=14, **how)
