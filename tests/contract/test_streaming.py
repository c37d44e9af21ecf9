"""The streaming law and what follows from it: causality, rows, padding, and a state that does not grow."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multilin.errors import InputError
from multilin.testing.laws import (
    Finding,
    causal,
    deterministic,
    pieces_are_whole,
    rows_independent,
    state_size,
    training_is_evaluation,
)
from tests.contract.conftest import LONGEST, VOCAB_SIZE, MakeModel, ModelSubject, layers_of, random_ids, read_in_pieces
from tests.ops.comparing import LargestTensor

EXACT = {"rtol": 1e-10, "atol": 1e-10}
Law = Callable[..., Finding]


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 69), max_size=5, unique=True).map(sorted))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_reading_in_pieces_is_reading_at_once(make_model: MakeModel, cuts, dtype, tolerance) -> None:
    model, ids = make_model(dtype), random_ids(2, 70)
    whole = model(ids)
    logits, state = read_in_pieces(model, ids, cuts)
    assert (logits - whole.logits).norm() <= tolerance * whole.logits.norm()
    for (name, expected), (_, tensor) in zip(whole.past_key_values.named_tensors(), state.named_tensors(), strict=True):
        expected, tensor = expected.double(), tensor.double()
        both = torch.isfinite(expected) & torch.isfinite(tensor)
        assert (torch.isfinite(expected) == torch.isfinite(tensor)).all(), name
        assert ((tensor - expected)[both]).norm() <= tolerance * max(expected[both].norm(), 1.0), name


@pytest.mark.parametrize("law", [causal, rows_independent, deterministic, pieces_are_whole])
def test_models_keep_the_laws(make_model: MakeModel, law: Law) -> None:
    finding = law(ModelSubject(make_model()))
    assert finding.result == "ok", finding.sentence


@pytest.mark.parametrize("law", [causal, rows_independent, deterministic, training_is_evaluation, pieces_are_whole])
def test_layers_keep_the_laws(make_model: MakeModel, law: Law) -> None:
    """Without the embedding: a layer that shifts by the maximum of the whole chunk reads ahead, by extreme tokens."""
    finding = law(layers_of(make_model()))
    assert finding.result == "ok", finding.sentence


def test_token_by_token_is_reading_at_once(make_model: MakeModel) -> None:
    finding = pieces_are_whole(ModelSubject(make_model()), range(1, 24), length=24)
    assert finding.result == "ok", finding.sentence


def test_extreme_tokens_stay_finite(make_model: MakeModel) -> None:
    subject = layers_of(make_model())
    x = subject.draw(1, 50)
    for scale in subject.scales:
        assert subject.read(torch.cat([x[:, :30], scale * x[:, 30:]], dim=1))[0].isfinite().all()


@pytest.mark.parametrize("split", [None, 3, 9])
def test_left_padding_is_inert(make_model: MakeModel, split: int | None) -> None:
    """Also when the padding is cut, so that a row's first call holds nothing else."""
    model, lengths = make_model(), [20, 13, 1]
    texts = [random_ids(1, length, seed=length) for length in lengths]
    ids = torch.cat([torch.nn.functional.pad(text, (20 - text.shape[1], 0), value=1) for text in texts])
    mask = torch.stack([(torch.arange(20) >= 20 - length).long() for length in lengths])
    cuts = [] if split is None else [split]
    logits, state = read_in_pieces(model, ids, cuts, attention_mask=mask)
    assert state.num_tokens.tolist() == lengths
    for row, text in enumerate(texts):
        alone = model(text)
        torch.testing.assert_close(logits[row, -text.shape[1] :], alone.logits[0], **EXACT)
        next_ids = random_ids(1, 1, seed=9)
        onward = model(next_ids, past_key_values=state.select([row])).logits
        torch.testing.assert_close(onward, model(next_ids, past_key_values=alone.past_key_values).logits, **EXACT)


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_a_batch_continue_with_pieces_of_different_lengths(make_model: MakeModel, seed: int) -> None:
    """Padded on the right, also where a row has no token at all: each row ends where it would have ended alone."""
    model, draw = make_model(), torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 12, (3, 4), generator=draw)  # of 4 pieces of 3 rows
    texts = [random_ids(1, int(length) + 1, seed=row) for row, length in enumerate(lengths.sum(dim=1))]
    state, first = model.new_state(), torch.zeros(3, dtype=torch.long)
    for piece in lengths.T:
        ids, mask = torch.ones(3, 12, dtype=torch.long), torch.zeros(3, 12, dtype=torch.long)
        for row, (text, begin, length) in enumerate(zip(texts, first.tolist(), piece.tolist(), strict=True)):
            ids[row, :length], mask[row, :length] = text[0, begin : begin + length], 1
        logits = model(ids, attention_mask=mask, past_key_values=state).logits
        for row, (text, begin, length) in enumerate(zip(texts, first.tolist(), piece.tolist(), strict=True)):
            if length:
                alone = model(text[:, : begin + length]).logits[0, begin:]
                torch.testing.assert_close(logits[row, :length], alone, **EXACT)
        first = first + piece
    assert state.num_tokens.tolist() == first.tolist()
    last = torch.cat([text[:, -1:] for text in texts])
    together = model(last, past_key_values=state).logits[:, 0]
    torch.testing.assert_close(together, torch.cat([model(text).logits[:, -1] for text in texts]), **EXACT)


def test_padding_between_two_calls_is_inert(make_model: MakeModel) -> None:
    model, ids, state = make_model(), random_ids(2, 12), make_model().new_state()
    padded = torch.nn.functional.pad(ids[:, 4:], (3, 2), value=1)
    mask = torch.nn.functional.pad(torch.ones_like(ids[:, 4:]), (3, 2))
    mask[1], padded[1, :8] = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]), 1
    padded[1, mask[1] == 1] = ids[1, 4:]
    model(ids[:, :4], past_key_values=state)
    logits = model(padded, past_key_values=state, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask == 1].view(2, 8, -1), model(ids).logits[:, 4:], **EXACT)
    onward = [model(random_ids(2, 2), past_key_values=s).logits for s in (state, model(ids).past_key_values)]
    torch.testing.assert_close(*onward, **EXACT)


@pytest.mark.parametrize("mode", ["first call", "second call", "no state", "training"])
def test_padding_anywhere_in_a_row_is_inert(make_model: MakeModel, mode: str) -> None:
    """Padding has the hidden state of the token before it, so that the last column predicts what comes next."""
    model, ids = make_model(embedding_dropout=0.0), random_ids(3, 24)
    mask = torch.rand(3, 24, generator=torch.Generator().manual_seed(2)) < 0.6
    mask[0, 0], mask[1, -1], mask[2, -3:] = True, True, False
    for module in model.modules():
        module.training = mode == "training" and not isinstance(module, torch.nn.Dropout)
    begin, state = random_ids(3, 5), None
    if mode == "second call":
        state = model(begin).past_key_values
    given = {"past_key_values": state} if state else {"use_cache": mode == "first call"}
    padded = model(ids, attention_mask=mask, **given)
    for row in range(3):
        alone = ids[row : row + 1, mask[row]]
        if state:
            alone = torch.cat([begin[row : row + 1], alone], dim=1)
        result = model(alone, use_cache=True)
        torch.testing.assert_close(padded.logits[row, mask[row]], result.logits[0, -int(mask[row].sum()) :], **EXACT)
        torch.testing.assert_close(padded.logits[row, -1], result.logits[0, -1], **EXACT)
        if padded.past_key_values:
            token = random_ids(1, 1)
            onward = model(token, past_key_values=padded.past_key_values.select([row])).logits
            torch.testing.assert_close(onward, model(token, past_key_values=result.past_key_values).logits, **EXACT)


def test_the_state_does_not_grow(make_model: MakeModel) -> None:
    subject = ModelSubject(make_model(torch.float32))
    sizes = state_size(subject, (1, 1, 5, 60, 1)).numbers
    assert sizes["smallest"] == sizes["bytes"]
    tensors = subject.tensors(subject.read(subject.draw(2, 9))[1])
    assert {tensor.dtype for tensor in tensors} <= {torch.float32, torch.float64, torch.int32, torch.int64}
    assert {len(tensor) for tensor in tensors} == {2}


def test_streaming_a_longer_text_needs_no_more_memory(make_model: MakeModel) -> None:
    """Neither what is made on the way nor what the state keeps alive, views of larger tensors included."""
    needs = []
    for num_chunks in (2, 8):
        model, ids = make_model(torch.float32), random_ids(1, 16 * num_chunks)
        with torch.inference_mode(), LargestTensor() as watch:
            _, state = read_in_pieces(model, ids, list(range(16, ids.shape[1], 16)))
        needs.append((watch.numbers, sum(tensor.untyped_storage().nbytes() for _, tensor in state.named_tensors())))
    assert needs[0][1] == needs[1][1]
    # The test itself puts all logits together.
    assert needs[1][0] <= max(needs[0][0], ids.shape[1] * VOCAB_SIZE)


def test_a_low_precision_model_keeps_its_state_in_float32_or_better(make_model: MakeModel) -> None:
    _, state = read_in_pieces(make_model(torch.bfloat16), random_ids(1, 9), [4])
    assert {tensor.dtype for _, tensor in state.named_tensors()} <= {
        torch.float32,
        torch.float64,
        torch.int32,
        torch.int64,
    }


def test_a_text_beyond_the_limit_is_refused_and_leaves_the_state(make_model: MakeModel) -> None:
    model = make_model()
    if model.config.n_positions is None:
        assert model(random_ids(1, 2 * LONGEST)).past_key_values.num_tokens.tolist() == [2 * LONGEST]
        return
    with pytest.raises(InputError, match=f"at most {LONGEST}"):
        model(random_ids(1, LONGEST + 1))
    state = model.new_state()
    model(random_ids(1, LONGEST), past_key_values=state)
    before = {name: tensor.clone() for name, tensor in state.named_tensors()}
    with pytest.raises(InputError, match=f"at most {LONGEST}"):
        model(random_ids(1, 1), past_key_values=state)
    assert all(torch.equal(before[name], tensor) for name, tensor in state.named_tensors())


def test_a_state_holds_no_more_memory_than_its_tensors(make_model: MakeModel) -> None:
    """A view of what was read would keep all of it."""
    model = make_model(torch.float32)
    state = model.new_state()
    model(random_ids(2, 100), past_key_values=state)
    storages = [tensor.untyped_storage() for _, tensor in state.named_tensors()]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert sum(held.values()) <= state.num_bytes
