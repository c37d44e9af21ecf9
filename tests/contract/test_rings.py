"""Windows in rings: token by token without gradients, a state is changed in place and means what it always meant."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multilin import TextState
from multilin.model.state import map_windows
from multilin.ops.ring import Ring
from tests.contract.conftest import MakeModel, random_ids

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def rings(state: TextState) -> list[Ring]:
    found: list[Ring] = []
    for part in state.parts:
        map_windows(lambda window: found.append(window), part)
    return [window for window in found if isinstance(window, Ring)]


def assert_equal_states(given_state: TextState, expected: TextState) -> None:
    assert given_state.num_bytes == expected.num_bytes
    pairs = zip(given_state.named_tensors(), expected.named_tensors(), strict=True)
    for (name, tensor), (expected_name, expected_tensor) in pairs:
        assert name == expected_name
        torch.testing.assert_close(tensor, expected_tensor, **EXACT, msg=name)


@pytest.mark.slow_for_variants
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.sampled_from([1, 1, 1, 2, 5, 16, 17, 30]), min_size=2, max_size=12))
def test_reading_in_place_is_reading_at_once(make_model: MakeModel, lengths: list[int]) -> None:
    model, ids = make_model(), random_ids(3, min(sum(lengths), 120))
    with torch.inference_mode():
        whole, state, logits = model(ids), model.new_state(), []
        for piece in ids.split([n for n in _cut(lengths, ids.shape[1]) if n], dim=1):
            logits.append(model(piece, past_key_values=state).logits)
        torch.testing.assert_close(torch.cat(logits, dim=1), whole.logits, **EXACT)
        assert_equal_states(state, whole.past_key_values)


def _cut(lengths: list[int], total: int) -> list[int]:
    ends = [min(end, total) for end in itertools.accumulate(lengths)]
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]


@pytest.mark.parametrize("before", [torch.float32, torch.float64])
def test_a_state_is_read_on_by_a_model_of_another_dtype(make_model: MakeModel, before: torch.dtype) -> None:
    model, after = make_model(), torch.float32 if before == torch.float64 else torch.float64
    ids = random_ids(2, 12)
    with torch.inference_mode():
        whole = model(ids).logits
        state = model.to(before)(ids[:, :5]).past_key_values
        model.to(after)
        pieces = [model(piece, past_key_values=state).logits for piece in (ids[:, 5:6], ids[:, 6:9], ids[:, 9:])]
    torch.testing.assert_close(torch.cat(pieces, dim=1).double(), whole[:, 5:].double(), rtol=1e-3, atol=1e-4)


def test_rows_of_different_lengths_go_on_in_rings(make_model: MakeModel) -> None:
    """Left padding, selection, forks and clones in the middle of a generation."""
    model, lengths = make_model(), [30, 13, 2]
    ids = torch.cat([torch.nn.functional.pad(random_ids(1, n, seed=n), (30 - n, 0), value=1) for n in lengths])
    mask = torch.stack([(torch.arange(30) >= 30 - n).long() for n in lengths])
    more = random_ids(3, 12)
    with torch.inference_mode():
        state = model(ids, attention_mask=mask).past_key_values
        for column in range(6):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            model(more[:, column : column + 1], past_key_values=state, attention_mask=mask)
        clone, picked = state.clone(), state.select([2, 0])
        for column in range(6, 12):
            model(more[:, column : column + 1], past_key_values=state)
            model(more[[2, 0], column : column + 1], past_key_values=picked)
        for row, length in enumerate(lengths):
            text = torch.cat([ids[row : row + 1, 30 - length :], more[row : row + 1]], dim=1)
            assert_equal_states(state.select([row]), model(text).past_key_values)
            assert_equal_states(clone.select([row]), model(text[:, :-6]).past_key_values)
        assert_equal_states(picked, state.select([2, 0]))
        forked = state.fork(2)
        state.reorder_cache(torch.tensor([0, 0, 1]))
        assert_equal_states(forked.select([0, 1, 2]), state)


def test_gradients_and_plain_reading_go_on_from_rings(make_model: MakeModel) -> None:
    model, ids = make_model(), random_ids(2, 40)
    with torch.inference_mode():
        state = model(ids[:, :9]).past_key_values
        model(ids[:, 9:10], past_key_values=state)
    with torch.no_grad():
        model(ids[:, 10:11], past_key_values=state)
        model(ids[:, 11:12], past_key_values=state)
    model(ids[:, 12:13], past_key_values=state.clone()).logits.sum().backward()
    with torch.no_grad():
        model(ids[:, 12:39], past_key_values=state)
        logits = model(ids[:, 39:], past_key_values=state).logits
        torch.testing.assert_close(logits, model(ids).logits[:, -1:], **EXACT)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_step_changes_windows_in_place(make_model: MakeModel, num_rows: int) -> None:
    model = make_model(torch.float32)
    with torch.inference_mode():
        state = model(random_ids(num_rows, 20)).past_key_values
        model(random_ids(num_rows, 1), past_key_values=state)
        before = [tensor.data_ptr() for ring in rings(state) for tensor in ring.tokens[:2]]
        for _ in range(5):
            model(random_ids(num_rows, 1), past_key_values=state)
        after = [tensor.data_ptr() for ring in rings(state) for tensor in ring.tokens[:2]]
    if not any(entry["architecture"] == "linear_mixer" for entry in model.config.layers):
        assert before == after
