"""The choice of a token: the rules of the field, checked against transformers' own and by counting draws."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from multilin import InputError
from multilin.inference.generate import check_settings
from multilin.inference.sampling import RandomNumbers, adjust, candidates, choose_tokens
from multilin.inference.settings import GenerationSettings

V = 23


def logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=V).astype(np.float32) * 3


@given(
    st.integers(0, 99),
    st.floats(0.1, 3.0),
    st.none() | st.integers(1, V + 5),
    st.none() | st.floats(0.05, 0.99),
    st.none() | st.floats(0.01, 0.9),
    st.sets(st.integers(0, V - 1), max_size=6),
)
def test_probabilities_are_those_of_transformers(seed, temperature, top_k, top_p, min_p, seen) -> None:
    settings = GenerationSettings(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=1.3, logit_bias={"3": 1.5}
    )
    scores = torch.from_numpy(logits(seed))[None]
    if seen:
        scores = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([sorted(seen)]), scores)
    scores = scores.clone()
    scores[0, 3] += 1.5
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for warp in warpers:
        scores = warp(None, scores)
    expected = scores.double().softmax(dim=-1)[0].numpy()

    given_logits = logits(seed)
    adjust(given_logits, settings, seen)
    tokens, shares = candidates(given_logits, settings)
    probabilities = np.zeros(V)
    probabilities[tokens] = shares / shares.sum()
    np.testing.assert_allclose(probabilities, expected, atol=2e-5)


def test_presence_counts_once_and_frequency_each_time() -> None:
    before, after = logits(2), logits(2)
    adjust(after, GenerationSettings(presence_penalty=0.5, frequency_penalty=0.25), {4: 1, 9: 3, 11: 0})
    assert before[4] - after[4] == pytest.approx(0.75)
    assert before[9] - after[9] == pytest.approx(1.25)
    others = [token for token in range(V) if token not in (4, 9)]  # 11 was in the prompt only
    np.testing.assert_array_equal(after[others], before[others])


def test_draws_follow_the_probabilities() -> None:
    numbers, settings = RandomNumbers(3), GenerationSettings(temperature=1.0)
    draws = [choose_tokens(logits(1)[None], [settings], [{}], [numbers])[0] for _ in range(4000)]
    shares = np.exp(logits(1).astype(np.float64))
    shares /= shares.sum()
    counts = np.bincount(draws, minlength=V) / len(draws)
    assert np.abs(counts - shares).max() < 0.03
    greedy = GenerationSettings(temperature=0)
    assert choose_tokens(logits(1)[None], [greedy], [{}], [numbers]) == [logits(1).argmax()]


@pytest.mark.parametrize("cut", [{}, {"min_p": 0.01}])
def test_a_temperature_near_0_takes_the_likeliest_token(cut: dict[str, float]) -> None:
    cold = GenerationSettings(temperature=1e-300, **cut)
    assert choose_tokens(logits(1)[None], [cold], [{}], [RandomNumbers(3)]) == [logits(1).argmax()]


@pytest.mark.parametrize("num_before", [0, 1, 311, 313, 1000])
def test_random_numbers_go_on_from_their_state_which_is_that_of_pytorch(num_before: int) -> None:
    """PyTorch makes other numbers of the same bits, but stands where we do after as many."""
    numbers, generator = RandomNumbers(7), torch.Generator().manual_seed(7)
    for _ in range(num_before):
        assert 0 <= numbers.uniform() < 1
        torch.rand((), dtype=torch.float64, generator=generator)
    np.testing.assert_array_equal(numbers.state, generator.get_state().numpy())
    again = RandomNumbers.from_state(numbers.state)
    assert [numbers.uniform() for _ in range(700)] == [again.uniform() for _ in range(700)]


@pytest.mark.parametrize("change", [slice(8, 12), slice(16, 24)])
def test_a_state_that_no_generator_has_is_refused(change: slice) -> None:
    state = RandomNumbers(1).state
    state[change] = 255
    with pytest.raises(InputError, match="not the state of a generator"):
        RandomNumbers.from_state(state)


def test_settings_that_mean_nothing_are_refused() -> None:
    for settings, words in (
        (GenerationSettings(temperature=0, min_p=0.5), "min_p: 0.5 given together with temperature: 0"),
        (GenerationSettings(logit_bias={"x": 1.0}), "logit_bias: 'x' given"),
        (GenerationSettings(logit_bias={str(V): 1.0}), f"a number from 0 to {V - 1}"),
        (GenerationSettings(stop=("",)), "stop: an empty string"),
    ):
        with pytest.raises(InputError, match=words):
            check_settings(settings, V)
