"""longest_match: every backend against the definition, pieces, rings, padding, and texts in one row."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multilin.errors import InputError
from multilin.model.state import from_ring, grow, to_ring, write
from multilin.ops.longest_match import LONGEST_MATCH, MatchState, longest_match
from multilin.ops.longest_match.reference import look_up

FEW = dataclasses.replace(LONGEST_MATCH.special_cases[0], device=None, refuses=lambda *_, **__: None)
BACKENDS = [*LONGEST_MATCH.backends, FEW]
REFERENCE = LONGEST_MATCH.backends[-1]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    use(request.param, monkeypatch)
    return request.param


def use(backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LONGEST_MATCH, "backends", [backend])
    monkeypatch.setattr(LONGEST_MATCH, "special_cases", [])


def texts(num_rows: int, num_time: int, vocab_size: int, seed: int, lowest: int = 0) -> Tensor:
    return torch.randint(lowest, vocab_size, (num_rows, num_time), generator=torch.Generator().manual_seed(seed))


def by_text(ids: list[int], window: int, longest: int) -> list[tuple[int, int]]:
    """The definition once more, with slices of lists: predicted id and length at every position."""
    found = []
    for now in range(len(ids)):
        past, best = ids[max(now - window, 0) : now + 1], (0, 0)
        for length in range(1, longest + 1):
            suffix = past[len(past) - length :]
            ends = [end for end in range(length, len(past)) if past[end - length : end] == suffix]
            if len(suffix) == length and ends:
                best = past[ends[-1]], length
        found.append(best)
    return found


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=40), window=st.integers(1, 45), longest=st.integers(1, 9))
def test_the_definition_is_that_of_suffixes(ids: list[int], window: int, longest: int) -> None:
    tokens = [token + 1 for token in ids]
    found = [look_up(tokens, now, max(now - window, 0), longest) for now in range(len(ids))]
    assert found == by_text(ids, window, longest)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("given", ["", "starts", "padding", "starts, padding", "no ids"])
def test_every_backend_is_the_definition_in_any_pieces(
    backend, given: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(seed)
    num_time, vocab_size, window, longest = (
        int(torch.randint(low, high, (1,), generator=draw)) for low, high in ((1, 150), (2, 7), (1, 60), (1, 9))
    )
    ids = texts(3, num_time, vocab_size, seed, lowest=-1 if given == "no ids" else 0)
    marks = {
        name: torch.rand(ids.shape, generator=draw) < share
        for name, share in (("starts", 0.1), ("padding", 0.3))
        if name in given
    }
    options = {"window": window, "longest": longest}
    cut = num_time // 2
    first = longest_match(ids[:, :cut], **options, **{name: mark[:, :cut] for name, mark in marks.items()})
    rest = longest_match(
        ids[:, cut:], **options, **{name: mark[:, cut:] for name, mark in marks.items()}, state=first[2]
    )
    whole = longest_match(ids, **options, **marks)
    use(REFERENCE, monkeypatch)
    expected = longest_match(ids, **options, **marks)
    for found in (whole, (torch.cat([first[0], rest[0]], 1), torch.cat([first[1], rest[1]], 1), rest[2])):
        torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=0)
        assert torch.equal(found[2].tokens_BS, expected[2].tokens_BS)


@pytest.mark.parametrize("window", [300, 20])
def test_single_tokens_from_a_ring_are_the_whole_text(backend, window: int) -> None:
    ids = texts(2, 400, 4, seed=1)
    predicted, length, state = longest_match(ids, window=window, longest=5)
    state_now, found = longest_match(ids[:, :3], window=window, longest=5)[2], []
    ring = to_ring(state_now, torch.tensor([3, 3]), 1)
    for now in range(3, 400):
        ring = grow(ring, 1)
        *pair, new = longest_match(ids[:, now : now + 1], window=window, longest=5, state=ring)
        found.append(torch.stack(pair))
        ring = write(ring, new, torch.tensor([now + 1, now + 1]))
    assert torch.equal(torch.cat(found, dim=2), torch.stack([predicted, length])[:, :, 3:])
    assert torch.equal(from_ring(ring).tokens_BS, state.tokens_BS)


def test_a_repeated_text_is_predicted_whole(backend) -> None:
    text = torch.randperm(50, generator=torch.Generator().manual_seed(0))[None]
    predicted, length, _ = longest_match(text.repeat(1, 2), window=64, longest=8)
    assert predicted[0, 50:99].tolist() == text[0, 1:].tolist()
    assert length[0, 50:].tolist() == [*range(1, 8), *[8] * 43]
    assert length[0, :50].sum() == 0


def test_the_most_recent_of_the_longest_is_taken(backend) -> None:
    predicted, length, _ = longest_match(torch.tensor([[1, 2, 3, 1, 2, 4, 9, 2, 5, 1, 2]]), window=64, longest=8)
    assert (predicted[0, -1], length[0, -1]) == (4, 2)
    assert longest_match(torch.tensor([[2, 3, 2, 4, 2]]), window=64, longest=8)[0][0, -1] == 4


@pytest.mark.parametrize("num_time", [1, 100, 3000])
def test_no_tokens_and_long_texts_use_equal_kernels(num_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = texts(2, num_time, 200, seed=3)
    found = longest_match(ids, window=700, longest=8)
    use(LONGEST_MATCH.backends[1], monkeypatch)
    torch.testing.assert_close(found[:2], longest_match(ids, window=700, longest=8)[:2], rtol=0, atol=0)
    assert longest_match(ids[:, :0], window=7, longest=2)[0].shape == (2, 0)


def test_it_compiles_without_a_break() -> None:
    ids, state = texts(2, 30, 5, seed=4), MatchState(texts(2, 20, 5, seed=5).int())
    compiled = torch.compile(
        lambda ids, state: longest_match(ids, window=20, longest=4, state=state), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(
        compiled(ids, state)[:2], longest_match(ids, window=20, longest=4, state=state)[:2], rtol=0, atol=0
    )


@pytest.mark.parametrize(("window", "longest"), [(0, 3), (3, 0)])
def test_a_search_of_nothing_is_refused(window: int, longest: int) -> None:
    with pytest.raises(InputError, match="both must be at least 1"):
        longest_match(torch.zeros(1, 1, dtype=torch.long), window=window, longest=longest)
