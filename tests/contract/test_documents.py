"""Documents packed into a row, in every way that collators of the field say it: each is read as if it stood alone."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from multilin.errors import InputError
from tests.contract.conftest import VOCAB_SIZE, MakeModel, random_ids, read_in_pieces

LENGTHS = [10, 1, 25, 4]
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def packed_ids() -> torch.Tensor:
    return torch.cat([random_ids(1, length, seed=length) for length in LENGTHS], dim=1)


def positions() -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])[None]


def separate_logits(model) -> torch.Tensor:
    return torch.cat([model(random_ids(1, length, seed=length)).logits for length in LENGTHS], dim=1)


def ways() -> dict[str, dict]:
    document_ids = torch.repeat_interleave(torch.tensor([4, 7, 8, 5]), torch.tensor(LENGTHS))[None]
    cu_seqlens = torch.tensor([0, 10, 11, 36, 40])
    return {
        "document_ids": {"document_ids": document_ids},
        "cu_seqlens": {"cu_seqlens": cu_seqlens},
        "position_ids": {"position_ids": positions()},
        "seq_idx": {"seq_idx": document_ids.int()},
        "cu_seq_lens_q": {
            "cu_seq_lens_q": cu_seqlens.int(), "cu_seq_lens_k": cu_seqlens.int(),
            "max_length_q": 25, "max_length_k": 25,
        },
    }  # fmt: skip


@pytest.mark.parametrize("way", ways())
def test_documents_do_not_see_each_other(make_model: MakeModel, packs: bool, way: str) -> None:
    model, arguments = make_model(), ways()[way]
    if not packs:
        with pytest.raises(InputError, match="several documents in a row"):
            model(packed_ids(), **arguments)
        return
    logits, ids = separate_logits(model), packed_ids()
    torch.testing.assert_close(model(ids, **arguments).logits, logits, **EXACT)
    if way == "document_ids":
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        torch.testing.assert_close(model.token_losses(ids, **arguments), losses, **EXACT)


def test_the_collator_of_transformers_packs(make_model: MakeModel, packs: bool) -> None:
    """All that it sends at once, and its labels, which leave out what would be predicted across documents."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt")
    rows = [{"input_ids": random_ids(length, seed=length).tolist()} for length in LENGTHS]
    batch, model = collate(rows), make_model()
    if not packs:
        with pytest.raises(InputError, match="position_ids"):
            model(**batch)
        return
    result = model(**batch)
    expected = separate_logits(model)
    torch.testing.assert_close(result.logits, expected, **EXACT)
    ids, inside = packed_ids()[0], positions()[0, 1:] > 0
    losses = torch.nn.functional.cross_entropy(expected[0, :-1], ids[1:], reduction="none")
    torch.testing.assert_close(result.loss, losses[inside].mean(), **EXACT)


@pytest.mark.parametrize("cuts", [[7], [10, 11, 30]])
@pytest.mark.parametrize("way", ["document_ids", "position_ids"])
def test_documents_are_separate_also_across_calls(
    make_model: MakeModel, packs: bool, way: str, cuts: list[int]
) -> None:
    if not packs:
        return
    model = make_model()
    logits, state = read_in_pieces(model, packed_ids(), cuts, **ways()[way])
    torch.testing.assert_close(logits, separate_logits(model), **EXACT)
    assert state.num_tokens.tolist() == [4]


def test_positions_of_padding_begin_no_document(make_model: MakeModel) -> None:
    """Collators give padding the position 0 or 1, on the left as on the right."""
    model, text = make_model(), random_ids(1, 12)
    for left, right in ((5, 0), (0, 5)):
        ids = torch.nn.functional.pad(text, (left, right), value=1)
        mask = torch.nn.functional.pad(torch.ones_like(text), (left, right))
        position_ids = (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 1)
        state = model.new_state()
        logits = model(ids, attention_mask=mask, position_ids=position_ids, past_key_values=state).logits
        expected, expected_state = model(text).logits, model(text).past_key_values
        torch.testing.assert_close(logits[:, left : left + 12], expected, **EXACT)
        assert state.num_tokens.tolist() == [12]
        onward = [model(random_ids(1, 3), past_key_values=s).logits for s in (state, expected_state)]
        torch.testing.assert_close(*onward, **EXACT)


def test_positions_that_rise_are_one_document(make_model: MakeModel) -> None:
    model, ids = make_model(), random_ids(2, 20)
    counted = model(ids).logits
    torch.testing.assert_close(model(ids, position_ids=torch.arange(20)[None]).logits, counted, **EXACT)
    changed = ids.clone()
    changed[:, 15] = 2 + (ids[:, 15] - 1) % (VOCAB_SIZE - 2)
    later = {"position_ids": torch.arange(20)[None] * 3}
    before, after = (model(x, **later).logits for x in (ids, changed))
    torch.testing.assert_close(after[:, :15], before[:, :15], **EXACT)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cu_seqlens": torch.tensor([0, 10, 30])}, "cu_seqlens: .* must rise from 0 to 40"),
        ({"cu_seqlens": torch.tensor([0, 10.5, 40])}, "cu_seqlens: .* its integers must rise from 0 to 40"),
        ({"cu_seqlens": torch.tensor([0, 30, 10, 40])}, "cu_seqlens: .* must rise from 0 to 40"),
        ({"document_ids": torch.ones(1, 7).int()}, r"document_ids: int32 of shape \(1, 7\) given"),
        ({"position_ids": torch.ones(3, 40).long()}, r"position_ids: int64 of shape \(3, 40\) given"),
        ({"position_ids": torch.arange(40.0)[None]}, "position_ids: float32 of .* must be integers of shape"),
        ({"position_ids": torch.arange(-1, 39)[None]}, "position_ids: -1 given"),
        ({"seq_idx": torch.zeros(1, 40), "document_ids": torch.zeros(1, 40)}, "seq_idx: given together with document"),
        ({"output_attentions": True}, "output_attentions: given, but a multilin model does not take it"),
        ({"attention_masks": torch.ones(1, 40)}, "attention_masks: given"),
        ({"attention_mask": torch.ones(1, 1, 40, 40)}, r"attention_mask: shape \(1, 1, 40, 40\) given"),
        ({"attention_mask": 2 * torch.ones(1, 40)}, "attention_mask: 2 given"),
        ({"attention_mask": torch.full((1, 40), 0.5)}, "attention_mask: 0.5 given"),
        ({"inputs_embeds": torch.ones(1, 40, 16)}, "input_ids: both of input_ids and inputs_embeds given"),
    ],
)
def test_what_does_not_fit_is_refused(make_model: MakeModel, arguments: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_model()(packed_ids(), **arguments)


def test_rows_laid_end_to_end_begin_documents(make_model: MakeModel) -> None:
    model, ids = make_model(), random_ids(2, 20)
    torch.testing.assert_close(model(ids, cu_seqlens=torch.tensor([0, 20, 40])).logits, model(ids).logits, **EXACT)
    with pytest.raises(InputError, match="a document continues in the next row"):
        model(ids, cu_seqlens=torch.tensor([0, 15, 40]))
