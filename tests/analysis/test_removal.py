"""The effect of a token's removal, and its rank correlation with weights."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from multilin.analysis.explain.explanation import Removal, agreement, measure_removal, rank_correlation
from multilin.model.factory import create_model

LENGTH, VOCAB_SIZE = 9, 31


def model_of(architecture: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = create_model(architecture, hidden_size=16, num_layers=2, vocab_size=VOCAB_SIZE, n_positions=32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


def text() -> torch.Tensor:
    return torch.randint(2, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("architecture", ["additive", "linear_mixer", "llama", "gpt2"])
def test_equals_reading_the_text_without_the_token(architecture: str) -> None:
    """One text and one prediction at a time, the tokens after the removed one at their own positions."""
    model, ids = model_of(architecture), text()
    found = measure_removal(model, ids, batch_size=3)

    def prediction(places: list[int]) -> torch.Tensor:
        row = torch.tensor(places)[None]
        with torch.no_grad():
            logits = model(input_ids=ids[row], position_ids=row, attention_mask=torch.ones_like(row)).logits
        return logits[0, -1].log_softmax(-1)

    for place in range(LENGTH):
        for removed in range(1, place + 1):
            with_it = prediction(list(range(place + 1)))
            without = prediction([other for other in range(place + 1) if other != removed])
            divergence = (with_it.exp() * (with_it - without)).sum()
            assert found.divergence_TS[place, removed] == pytest.approx(float(divergence), rel=1e-6, abs=1e-12)
            if place + 1 < LENGTH:
                change = with_it[ids[place + 1]] - without[ids[place + 1]]
                assert found.loss_change_TS[place, removed] == pytest.approx(float(change), rel=1e-6, abs=1e-12)


def test_what_was_not_removed_or_not_read_is_not_a_number() -> None:
    found = measure_removal(model_of("elita"), text())
    measured = np.tril(np.ones((LENGTH, LENGTH), dtype=bool))
    measured[:, 0] = False
    np.testing.assert_array_equal(~np.isnan(found.divergence_TS), measured)
    measured[-1] = False
    np.testing.assert_array_equal(~np.isnan(found.loss_change_TS), measured)
    assert (found.divergence_TS[~np.isnan(found.divergence_TS)] >= -1e-12).all()


def test_a_token_out_of_reach_changes_nothing() -> None:
    """Two layers of windows of 3 tokens, the second pooling reading the first: nothing 9 tokens back matters."""
    torch.manual_seed(0)
    model = create_model(
        "additive", hidden_size=16, num_layers=1, vocab_size=VOCAB_SIZE, n_positions=32, options={"windows": 2}
    )
    found = measure_removal(model.double().eval(), text())
    # Two poolings of two tokens reach two tokens back; what is removed inside lets them reach one further.
    assert np.nanmax(np.abs(np.tril(found.divergence_TS, -3))) < 1e-12
    assert np.nanmin(np.diagonal(found.divergence_TS)[1:]) > 1e-12


@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=12))
def test_rank_correlation_is_that_of_counted_ranks(pairs: list[tuple[int, int]]) -> None:
    """A rank is the number of smaller values, and half of the equal ones."""
    left, right = np.array(pairs).T
    ranks = [[(values < value).sum() + (values == value).sum() / 2 for value in values] for values in (left, right)]
    found = rank_correlation(left, right)
    if min(map(np.std, ranks)) == 0:
        assert found is None
    else:
        assert found == pytest.approx(np.corrcoef(ranks)[0, 1], abs=1e-9)


def test_agreement_ranks_what_each_position_reads() -> None:
    draw = np.random.default_rng(0)
    effects = draw.random((LENGTH, LENGTH))
    removal = Removal(effects, effects)
    same = agreement(effects, removal, 0, None)
    assert (same.correlation, same.positions) == (pytest.approx(1.0), LENGTH - 4)
    assert agreement(-effects, removal, 0, None).correlation == pytest.approx(1.0)  # the size of a weight counts
    assert agreement(1 - effects, removal, 0, None).correlation == pytest.approx(-1.0)
    # In a window of the last 4 tokens before the position nothing else is ranked.
    within = effects.copy()
    distance = np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH))
    within[(distance > 4) | (distance < 1)] = draw.random()
    assert agreement(within, removal, 1, 4).correlation == pytest.approx(1.0)
    nearness = np.broadcast_to(np.arange(LENGTH), (LENGTH, LENGTH)).astype(float)
    assert agreement(effects, Removal(nearness, nearness), 0, None).nearness == pytest.approx(1.0)


def test_too_short_a_text_agrees_with_nothing() -> None:
    effects = np.random.default_rng(0).random((3, 3))
    found = agreement(effects, Removal(effects, effects), 0, None)
    assert (found.correlation, found.nearness, found.positions) == (None, None, 0)
