"""generate(), snapshots and files: the same model through transformers' interface."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from multilin.errors import InputError
from multilin.inference.snapshot import Snapshot, load_snapshot, save_snapshot
from tests.contract.conftest import LONGEST, MakeModel, random_ids

# transformers takes a padding token in a prompt for padding, so none may be written.
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 1, "suppress_tokens": [1]}


@pytest.mark.slow_for_variants
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_generation_from_the_state_is_generation_without_one(make_model: MakeModel, options: dict) -> None:
    model, ids = make_model(), random_ids(2, 9)
    cached, plain = (model.generate(ids, max_new_tokens=12, use_cache=c, **options, **GREEDY) for c in (True, False))
    assert torch.equal(cached, plain)
    assert cached.shape[1] == 21


def test_sampling_is_reproducible_and_streamed(make_model: MakeModel) -> None:
    model, ids, seen = make_model(), random_ids(1, 5), []

    class Streamer:
        def put(self, tokens: torch.Tensor) -> None:
            seen.extend(tokens.flatten().tolist())

        def end(self) -> None:
            seen.append("end")

    settings = {"max_new_tokens": 8, "do_sample": True, "eos_token_id": None, "pad_token_id": 1}
    torch.manual_seed(3)
    first = model.generate(ids, streamer=Streamer(), **settings)
    torch.manual_seed(3)
    assert torch.equal(model.generate(ids, **settings), first)
    assert seen == [*first[0].tolist(), "end"]


@pytest.mark.slow_for_variants
def test_a_left_padded_batch_writes_what_its_rows_write_alone(make_model: MakeModel) -> None:
    model, texts = make_model(), [random_ids(1, length, seed=length) for length in (8, 3, 5)]
    ids = torch.cat([torch.nn.functional.pad(text, (8 - text.shape[1], 0), value=1) for text in texts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(t), (8 - t.shape[1], 0)) for t in texts])
    together = model.generate(ids, attention_mask=mask, max_new_tokens=10, **GREEDY)
    for row, text in enumerate(texts):
        alone = model.generate(text, max_new_tokens=10, **GREEDY)
        assert together[row, 8:].tolist() == alone[0, text.shape[1] :].tolist()


@pytest.mark.slow_for_variants
def test_a_given_state_is_continued_and_left_as_it_was(make_model: MakeModel) -> None:
    """With the whole text, which is transformers' convention, and with the new tokens alone."""
    model, ids = make_model(), random_ids(1, 12)
    whole = model.generate(ids, max_new_tokens=10, **GREEDY)
    state = model(ids[:, :8]).past_key_values
    for _ in range(2):
        assert torch.equal(model.generate(ids, past_key_values=state, max_new_tokens=10, **GREEDY), whole)
        onward = model.generate(ids[:, 8:], past_key_values=state, new_tokens_only=True, max_new_tokens=10, **GREEDY)
        assert torch.equal(onward, whole[:, 8:])
    assert state.num_tokens.tolist() == [8]
    with_mask = {"attention_mask": torch.ones_like(ids), "past_key_values": state}
    assert torch.equal(model.generate(ids[:, 8:], max_new_tokens=10, **with_mask, **GREEDY), whole[:, 8:])
    forked = model.generate(ids.repeat(3, 1), past_key_values=state.fork(3), max_new_tokens=10, **GREEDY)
    assert torch.equal(forked, whole.repeat(3, 1))
    beams = model.generate(ids, past_key_values=state, max_new_tokens=10, num_beams=3, **GREEDY)
    assert torch.equal(beams, model.generate(ids, max_new_tokens=10, num_beams=3, **GREEDY))


def test_left_padded_rows_are_continued(make_model: MakeModel) -> None:
    model, ids = make_model(), random_ids(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=6, **GREEDY)
    state = model(ids[:, :8], attention_mask=mask[:, :8]).past_key_values
    onward = model.generate(ids, attention_mask=mask, past_key_values=state, max_new_tokens=6, **GREEDY)
    assert torch.equal(onward, whole)


def test_another_text_than_the_state_has_read_is_refused(make_model: MakeModel) -> None:
    model, ids = make_model(), random_ids(2, 12)
    state = model(ids[:, :8]).past_key_values
    other = ids.clone()
    other[1, 3] = 2 + (other[1, 3] - 1) % 5
    for given, words in (
        (other, "row 1 does not begin with the 8 tokens"),
        (ids[:, :8], "row 0 holds 8 tokens, but the state has read 8"),
        (ids[:, 8:], "row 0 holds 4 tokens, but the state has read 8"),
    ):
        with pytest.raises(InputError, match=words):
            model.generate(given, past_key_values=state, max_new_tokens=2, **GREEDY)
    with pytest.raises(InputError, match="use_cache: False given, but past_key_values is a state to continue from"):
        model(ids[:, 8:], past_key_values=state, use_cache=False)


def test_the_state_reached_is_returned(make_model: MakeModel) -> None:
    model, ids = make_model(), random_ids(2, 6)
    result = model.generate(ids, max_new_tokens=5, return_dict_in_generate=True, **GREEDY)
    assert result.past_key_values.num_tokens.tolist() == [10, 10]
    longer = model.generate(ids, max_new_tokens=10, **GREEDY)
    again = model.generate(result.sequences, past_key_values=result.past_key_values, max_new_tokens=5, **GREEDY)
    assert torch.equal(again, longer)


def test_snapshots_roll_back_fork_and_travel_by_file(make_model: MakeModel, tmp_path) -> None:
    model, ids = make_model(torch.float32), random_ids(2, 20)
    snapshot = Snapshot(model(ids[:, :10]).past_key_values, unread_ids=[[4], [5]], rng_state=torch.get_rng_state())
    earlier = snapshot.clone()
    after = model(ids[:, 10:], past_key_values=snapshot.state).logits
    torch.testing.assert_close(model(ids[:, 10:], past_key_values=earlier.clone().state).logits, after)

    save_snapshot(earlier, tmp_path / "text.state", model)
    loaded = load_snapshot(tmp_path / "text.state", model)
    assert loaded.unread_ids == [[4], [5]]
    assert torch.equal(loaded.rng_state, earlier.rng_state)
    assert torch.equal(model(ids[:, 10:], past_key_values=loaded.state).logits, after)
    forked = earlier.fork(2)
    assert forked.unread_ids == [[4], [4], [5], [5]]
    onward = model(ids[:, 10:].repeat_interleave(2, dim=0), past_key_values=forked.state).logits
    torch.testing.assert_close(onward[::2], after)


def test_a_state_file_of_another_model_is_refused(make_model: MakeModel, tmp_path) -> None:
    model, path = make_model(torch.float32), tmp_path / "text.state"
    save_snapshot(Snapshot(model(random_ids(1, 5)).past_key_values), path, model)
    other = make_model(torch.float32)
    with torch.no_grad():
        next(other.parameters()).view(-1)[0] += 1
    with pytest.raises(InputError, match="belongs to another model"):
        load_snapshot(path, other)
    with pytest.raises(InputError, match="does not exist"):
        load_snapshot(tmp_path / "none", model)
    with pytest.raises(InputError, match="nothing was read"):
        save_snapshot(Snapshot(model.new_state()), path, model)


def test_saved_and_loaded_through_the_auto_classes(make_model: MakeModel, tmp_path) -> None:
    model, ids = make_model(torch.float32), random_ids(2, 20)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    assert loaded.config.layers == model.config.layers
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    for name, parameter in model.named_parameters():
        assert torch.equal(dict(loaded.named_parameters())[name], parameter), name


def test_logits_to_keep(make_model: MakeModel) -> None:
    model, ids = make_model(), random_ids(2, 9)
    whole = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, whole[:, -2:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([3, 5])).logits, whole[:, [3, 5]])


def test_too_long_a_generation_is_refused_before_work(make_model: MakeModel) -> None:
    model = make_model()
    if model.config.n_positions is None:
        assert model.generate(random_ids(1, LONGEST), max_new_tokens=5, **GREEDY).shape[1] == LONGEST + 5
        return
    with pytest.raises(InputError, match="max_new_tokens"):
        model.generate(random_ids(1, 100), max_new_tokens=LONGEST - 98, **GREEDY)
    with pytest.raises(InputError, match="n_positions"):
        model.generate(random_ids(1, LONGEST + 1), max_new_tokens=1, **GREEDY)
    assert model.generate(random_ids(1, 100), max_new_tokens=LONGEST - 99, **GREEDY).shape[1] == LONGEST + 1


def test_a_state_of_other_rows_is_refused(make_model: MakeModel) -> None:
    model = make_model()
    state = model(random_ids(2, 5)).past_key_values
    with pytest.raises(InputError, match="2 rows given for 3 rows"):
        model(random_ids(3, 5), past_key_values=state)
    with pytest.raises(InputError, match="cannot be taken back"):
        state.crop(3)
