"""The longest match in models: what it adds, states, GPT-2 and Llama, costs, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from multilin import InputError, MultilinConfig, MultilinForCausalLM
from multilin.analysis.costs import describe_model
from multilin.analysis.explain.explanation import explain
from multilin.inference.matching import from_window, read_tokens, to_window
from multilin.inference.rollout import rollout
from multilin.inference.snapshot import Snapshot, load_snapshot, save_snapshot
from multilin.model.factory import BASELINES, create_model
from multilin.model.match import find_matches
from multilin.ops.longest_match import longest_match

MATCH = {"window": 30, "longest": 4}
SIZES = {"hidden_size": 16, "num_layers": 2, "vocab_size": 9, "n_positions": 128, "match": MATCH}


def make(name: str, **changes: object):
    torch.manual_seed(0)
    model = create_model(name, **SIZES | changes).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 9, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["elita", *BASELINES])
def test_it_adds_the_predicted_token_and_the_length(name: str) -> None:
    model, ids = make(name), draw(2, 40)
    embedding = next(module for module in model.modules() if hasattr(module, "gate") and hasattr(module, "look_up"))
    matches = find_matches(model, ids)
    added = embedding(matches)
    for row, time in ((0, 0), (1, 39), (0, 25)):
        predicted, length = (int(numbers[row, time]) for numbers in matches)
        repeated = embedding.gate[length] * embedding.predicted.weight[predicted]
        torch.testing.assert_close(added[row, time], repeated + embedding.length.weight[length])
    assert matches.length_BT[:, 0].tolist() == [0, 0]
    with torch.no_grad():
        logits = model(ids).logits
        embedding.gate.zero_()
        assert not torch.allclose(model(ids).logits, logits)


@pytest.mark.parametrize("makes_cache", [True, False])
@pytest.mark.parametrize("name", BASELINES)
def test_a_cache_of_a_baseline_remembers_the_ids(name: str, makes_cache: bool) -> None:
    model, ids = make(name), draw(2, 60)
    whole = model(ids, use_cache=False).logits
    result = model(ids[:, :40], use_cache=True, past_key_values=None if makes_cache else DynamicCache())
    parts = [result.logits]
    for time in range(40, 60):
        result = model(ids[:, time : time + 1], past_key_values=result.past_key_values)
        parts.append(result.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mingru", *BASELINES])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_with_padding_and_beams_is_that_of_each_text(name: str, num_beams: int) -> None:
    model, ids = make(name), draw(2, 24)
    padded, mask = torch.nn.functional.pad(ids, (5, 0)), torch.nn.functional.pad(torch.ones_like(ids), (5, 0))
    mask[0, :9], padded[0, :9] = 0, 0
    options = {
        "max_new_tokens": 20,
        "do_sample": False,
        "num_beams": num_beams,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    together = model.generate(padded, attention_mask=mask, **options)
    for row, text in enumerate((ids[:1, 4:], ids[1:])):
        alone = model.generate(text, attention_mask=torch.ones_like(text), **options)
        assert together[row, -20:].tolist() == alone[0, -20:].tolist()


@pytest.mark.parametrize("name", BASELINES)
def test_packed_texts_of_a_baseline_do_not_match_each_other(name: str) -> None:
    model, ids = make(name), draw(1, 20).repeat(1, 2)
    positions = torch.arange(20).repeat(2)[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed[:, 20:], packed[:, :20], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["elita", *BASELINES])
def test_it_is_saved_with_the_model(name: str, tmp_path: Path) -> None:
    model, ids = make(name), draw(1, 30)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.match == MATCH
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["elita", *BASELINES])
def test_more_tokens_can_be_added(name: str) -> None:
    model, ids = make(name, tie_word_embeddings=False), draw(1, 30)
    before = model(ids).logits
    model.resize_token_embeddings(12)
    torch.testing.assert_close(model(ids).logits[..., :9], before)
    assert model(torch.full((1, 8), 11)).logits.shape == (1, 8, 12)


@pytest.mark.parametrize("name", ["mingru", *BASELINES])
def test_embeddings_have_no_matches(name: str) -> None:
    model, ids = make(name), draw(1, 1).repeat(1, 30)
    given = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    assert not torch.allclose(given[:, 1:], model(ids).logits[:, 1:])
    torch.testing.assert_close(given[:, :1], model(ids).logits[:, :1])


def test_state_files_hold_the_last_tokens(tmp_path: Path) -> None:
    model, ids = make("mingru"), draw(2, 50)
    state = model(ids).past_key_values
    save_snapshot(Snapshot(state.clone()), tmp_path / "state", model)
    loaded = load_snapshot(tmp_path / "state", model).state
    onward = draw(2, 5, seed=2)
    torch.testing.assert_close(
        model(onward, past_key_values=loaded).logits, model(onward, past_key_values=state).logits
    )


def test_a_state_of_a_model_without_it_is_refused() -> None:
    ids = draw(1, 5)
    state = make("mingru", match=None)(ids).past_key_values
    with pytest.raises(InputError, match="the state belongs to another model"):
        make("mingru")(ids, past_key_values=state)


@pytest.mark.parametrize(
    ("match", "words"),
    [({"window": 0}, "match.window"), ({"longest": 65}, "match.longest"), ({"size": 3}, "match.size")],
)
@pytest.mark.parametrize("name", ["tscale", "llama"])
def test_values_out_of_range_are_refused(name: str, match: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make(name, match=match)


def test_an_empty_section_takes_the_defaults() -> None:
    config = MultilinConfig.from_architecture("mingru", **SIZES | {"match": {}})
    assert MultilinForCausalLM(config).config.match == {"window": 4096, "longest": 8}


@pytest.mark.parametrize("name", ["tscale", "llama"])
def test_info_and_explain_show_it(name: str) -> None:
    model = make(name)
    assert describe_model(model).match == {**MATCH, "state_bytes": 120}
    explanation = explain(model, [1, 2, 3, 1, 2], remove=False)
    assert explanation.matches == [(0, 0), (0, 0), (0, 0), (2, 1), (3, 2)]


@pytest.mark.parametrize("window", [7, 300])
def test_the_search_in_strings_is_the_op(window: int) -> None:
    ids = draw(1, 200, seed=3)
    text, found = "", [[], []]
    for piece in ids[0].split([1, 60, 1, 100, 38]):
        text, *new = read_tokens(text, piece.tolist(), window, 6)
        found = [all_so_far + numbers for all_so_far, numbers in zip(found, new, strict=True)]
    predicted, length, state = longest_match(ids, window=window, longest=6)
    assert found == [predicted[0].tolist(), length[0].tolist()]
    tokens = to_window([text, ""], window)
    assert np.array_equal(tokens[:1], state.tokens_BS.numpy())
    assert from_window(tokens) == [text, ""]


def test_a_model_with_it_is_no_linear_map() -> None:
    options = {"positions": "none", "final_norm": "none", "n_positions": 32}
    model = make("linear_mixer", **options)
    with pytest.raises(InputError, match=r"match: .* given, but it must be 'none' for a model to be one linear map"):
        rollout(model, draw(1, 4), 3)
