"""What transformers' common test classes ask of its own models, asked of every architecture.

Left padding, beams, streamers and states given to generate() are in tests/contract/test_generation.py; assistants,
embeddings in place of ids, hidden states and offloading in test_field_tools.py.
"""

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from multilin import InputError, MultilinForCausalLM
from tests.contract.conftest import without_dropout
from tests.model.conftest import GREEDY, LONGEST, VARIANTS, VOCAB_SIZE, ids, make

BOTH = pytest.mark.parametrize("ties", [True, False])


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> tuple[str, dict]:
    return request.param


def make_variant(variant: tuple[str, dict], **config: object) -> MultilinForCausalLM:
    name, options = variant
    return make(name, options=options, hidden_size=64, **config)


def assert_equal_models(result: MultilinForCausalLM, expected: MultilinForCausalLM) -> None:
    tensors = result.state_dict()
    assert tensors.keys() == expected.state_dict().keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.state_dict().items())
    tokens = ids(2, 9) % expected.config.vocab_size
    assert torch.equal(result(tokens).logits, expected(tokens).logits)


# Saving and loading


@pytest.mark.slow_for_variants
@BOTH
def test_a_folder_holds_the_whole_model(variant: tuple[str, dict], ties: bool, tmp_path: Path) -> None:
    model = make_variant(variant, tie_word_embeddings=ties)
    for folder, largest in (("whole", "1GB"), ("parts", "20KB")):
        model.save_pretrained(tmp_path / folder, max_shard_size=largest)
        loaded, about = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(about.values())
        assert_equal_models(loaded, model)
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    names = load_file(tmp_path / "whole" / "model.safetensors").keys()
    assert ("lm_head.weight" in names) is not (ties and "model.embedding.embed_tokens.weight" in names)


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_devices_may_be_mapped(architecture: str, device_map: object, tmp_path: Path) -> None:
    model = make(architecture)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    assert_equal_models(loaded.cpu(), model)


@pytest.mark.slow_for_variants
def test_weights_that_a_file_lacks_are_drawn_anew(variant: tuple[str, dict]) -> None:
    """Also those of modules that transformers does not know."""
    expected = make_variant(variant)
    torch.manual_seed(0)
    model = MultilinForCausalLM.from_pretrained(None, config=expected.config, state_dict={})
    for name, parameter in model.named_parameters():
        (std, mean), (drawn_std, drawn_mean) = (
            (tensor.detach().std(correction=0), tensor.detach().mean())
            for tensor in (parameter, expected.get_parameter(name))
        )
        spread = 0.6 if parameter.numel() >= 16 else 0.999  # a few numbers say little of what they were drawn from
        torch.testing.assert_close(std, drawn_std, rtol=spread * max(1.0, float(std / drawn_std)), atol=1e-6, msg=name)
        torch.testing.assert_close(mean, drawn_mean, rtol=0, atol=float(std + drawn_std) + 1e-6, msg=name)


@pytest.mark.slow_for_variants
@BOTH
def test_copies_are_equal_and_independent(variant: tuple[str, dict], ties: bool) -> None:
    model = make_variant(variant, tie_word_embeddings=ties)
    for result in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal_models(result, model)
        assert (result.lm_head.weight is result.get_input_embeddings().weight) is ties
        with torch.no_grad():
            next(result.parameters()).add_(1)
        assert not torch.equal(next(result.parameters()), next(model.parameters()))


@pytest.mark.slow_for_variants
def test_copies_of_a_state_are_equal_and_independent(variant: tuple[str, dict]) -> None:
    """As transformers' guides keep the cache of a prompt; also one with gradients, and one with rings."""
    model, tokens = make_variant(variant), ids(1, 12)
    whole = model.generate(tokens, max_new_tokens=5, **GREEDY)
    states = [model(tokens[:, :8]).past_key_values]
    with torch.no_grad():
        states.append(model(tokens[:, :7]).past_key_values)
        model(tokens[:, 7:8], past_key_values=states[1])
    for state in states:
        for result in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
            with torch.no_grad():
                expected, found = (
                    model(tokens[:, 8:], past_key_values=each).logits for each in (state.clone(), result)
                )
            torch.testing.assert_close(found, expected)
            assert result.num_tokens.tolist() == [12]
            assert state.num_tokens.tolist() == [8]
            again = model.generate(tokens, past_key_values=copy.deepcopy(state), max_new_tokens=5, **GREEDY)
            assert torch.equal(again, whole)


# Embeddings


@pytest.mark.slow_for_variants
@BOTH
@pytest.mark.parametrize("size", [VOCAB_SIZE + 6, VOCAB_SIZE - 5])
def test_a_resized_vocabulary_keeps_the_logits_of_its_tokens(
    variant: tuple[str, dict], ties: bool, size: int, tmp_path: Path
) -> None:
    model = make_variant(variant, tie_word_embeddings=ties)
    kept = min(size, VOCAB_SIZE)
    tokens = ids(2, 9) % kept
    with torch.no_grad():
        before = model(tokens).logits
    assert model.resize_token_embeddings(size) is model.get_input_embeddings()
    result = model(tokens, labels=tokens)
    torch.testing.assert_close(result.logits[..., :kept], before[..., :kept])
    assert result.logits.shape[-1] == model.config.vocab_size == model.lm_head.out_features == size
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is ties
    result.loss.backward()
    assert model.get_input_embeddings().weight.grad.shape == (size, 64)
    model.save_pretrained(tmp_path)
    assert_equal_models(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_settings_of_the_model_count_where_a_call_has_none() -> None:
    for longest in (LONGEST, None):
        model, tokens = make("elita", n_positions=longest), ids(1, 4)
        expected = model.generate(tokens, max_new_tokens=6, **GREEDY)
        given = GenerationConfig(do_sample=False)
        model.generation_config.max_length = 10
        assert torch.equal(model.generate(tokens, **GREEDY), expected)
        assert torch.equal(model.generate(tokens, generation_config=given), expected)
        assert torch.equal(model.generate(tokens, max_new_tokens=2, **GREEDY), expected[:, :6])
        given.max_new_tokens = 5
        assert model.generate(generation_config=given)[0, 0] == model.config.bos_token_id


# Numbers


@pytest.mark.slow_for_variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_reads_and_generates(variant: tuple[str, dict], dtype: torch.dtype, tmp_path: Path) -> None:
    model, tokens = make_variant(variant, initializer_range=0.1), ids(2, 9)
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    expected, result = model(tokens, labels=tokens), half(tokens, labels=tokens)
    assert {parameter.dtype for parameter in half.parameters()} == {result.logits.dtype} == {dtype}
    error = (result.logits - expected.logits).norm() / expected.logits.norm()
    assert error < (0.1 if dtype == torch.bfloat16 else 0.02)
    torch.testing.assert_close(result.loss.float(), expected.loss, rtol=0.02, atol=0)
    generated = half.generate(tokens, max_new_tokens=4, output_logits=True, return_dict_in_generate=True, **GREEDY)
    assert all(logits.isfinite().all() for logits in generated.logits)
    assert generated.sequences.shape == (2, 13)
    if model.config.n_positions is None:  # float16 ends at 65,504
        late = 70_000 + torch.arange(9).expand(2, 9)
        assert half(tokens, position_ids=late).logits.isfinite().all()


def test_late_positions_of_elita_are_told_apart_in_half_precision() -> None:
    model, tokens = make("elita", initializer_range=0.5).bfloat16(), ids(1, 4)
    first, second = (model(tokens, position_ids=start + torch.arange(4)[None]).logits for start in (70_000, 70_004))
    assert not torch.equal(first, second)


@pytest.mark.slow_for_variants
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations_give_the_same_gradients(variant: tuple[str, dict], reentrant: bool) -> None:
    """Also where only adapters are trained, so that no gradient reaches the embedding."""
    tokens = ids(2, 9)
    for adapts in (False, True):
        gradients = []
        for recomputes in (False, True):
            model = without_dropout(make_variant(variant).double())
            if recomputes:
                model.activation_checkpointing_enable({"use_reentrant": reentrant})
            if adapts:
                torch.manual_seed(0)
                lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
                model = get_peft_model(model, lora).double()
            model(input_ids=tokens, labels=tokens).loss.backward()
            gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        assert gradients[0].keys() == gradients[1].keys()
        assert len(gradients[0]) > 3
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-9, atol=1e-12, msg=name)


# Generation


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha: 0.6 given, .* contrastive search"),
        ({"dola_layers": "low"}, "dola_layers: 'low' given, .* DoLa"),
        ({"force_words_ids": [[5]], "num_beams": 2}, "force_words_ids: .* constrained beam search"),
        ({"num_beam_groups": 2, "num_beams": 4}, "num_beam_groups: 2 given, .* group beam search"),
    ],
)
@pytest.mark.parametrize("trusts", [False, True])
def test_modes_that_run_code_of_the_hub_are_refused(settings: dict, words: str, trusts: bool) -> None:
    with pytest.raises(InputError, match=words):
        make("additive").generate(ids(1, 5), max_new_tokens=2, trust_remote_code=trusts, **settings)


def test_paged_batches_are_refused() -> None:
    with pytest.raises(InputError, match=r"generate_batch: .* no keys and values to page"):
        make("additive").generate_batch([[3, 4, 5], [6, 7]])


def test_attentions_asked_for_by_the_config_are_refused(architecture: str) -> None:
    model = make(architecture)
    model.config.output_attentions = True
    with pytest.raises(InputError, match="output_attentions: given"):
        model(ids(1, 5))
    assert model(ids(1, 5), output_attentions=False).logits.shape == (1, 5, VOCAB_SIZE)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 3}])
def test_a_long_prompt_may_be_read_in_pieces(architecture: str, options: dict) -> None:
    model, tokens = make(architecture), ids(2, 11)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    how = {"attention_mask": mask, "max_new_tokens": 6, **options, **GREEDY}
    expected = model.generate(tokens, **how)
    assert torch.equal(model.generate(tokens, prefill_chunk_size=3, **how), expected)
    state = model(tokens[:, :5], attention_mask=mask[:, :5]).past_key_values
    assert torch.equal(model.generate(tokens, past_key_values=state, prefill_chunk_size=3, **how), expected)


def test_a_short_row_has_a_token_in_the_last_piece(architecture: str) -> None:
    model, how = make(architecture), {"max_new_tokens": 3, **GREEDY}
    tokens, mask = ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, 3:] = 0
    with pytest.raises(InputError, match=r"^prefill_chunk_size: 4 given, but the last piece .* row 0; pad prompts on"):
        model.generate(tokens, attention_mask=mask, prefill_chunk_size=4, **how)
    mask[0, 3:] = torch.tensor([0, 0, 0, 0, 1])
    alone = model.generate(tokens[:1, [0, 1, 2, 7]], **how)
    together = model.generate(tokens, attention_mask=mask, prefill_chunk_size=4, **how)
    assert torch.equal(together[0, 8:], alone[0, 4:])


def test_tokens_are_generated_one_after_the_other(architecture: str) -> None:
    """Positions and documents of a packed row would be read in the prompt and lost in what follows."""
    model, tokens = make(architecture), ids(1, 10)
    positions = torch.arange(10)[None]
    expected = model.generate(tokens, max_new_tokens=3, **GREEDY)
    assert torch.equal(model.generate(tokens, position_ids=positions, max_new_tokens=3, **GREEDY), expected)
    for fields in ({"position_ids": positions % 5}, {"document_ids": positions // 5}):
        with pytest.raises(InputError, match=f"^{next(iter(fields))}: given, but generate"):
            model.generate(tokens, **fields, max_new_tokens=3, **GREEDY)


def test_a_state_of_inference_mode_is_read_with_gradients(architecture: str) -> None:
    model, tokens = make(architecture), ids(1, 10)
    state, other = model.new_state(), model.new_state()
    with torch.inference_mode():
        model(tokens[:, :5], past_key_values=state)
    with torch.no_grad():
        model(tokens[:, :5], past_key_values=other)
    results = [model(tokens[:, 5:], past_key_values=one).logits for one in (state, other)]
    torch.testing.assert_close(*results)
    results[0].sum().backward()


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (torch.tensor([1, 2, 3]), "int64 of shape (3,) given, but it must be a tensor (B, T) of token ids"),
        (torch.ones(1, 3), "float32 of shape (1, 3) given"),
        ([[1, 2, 3]], "[[1, 2, 3]] given, but it must be a tensor"),
        (torch.tensor([[1, 2, VOCAB_SIZE]]), f"{VOCAB_SIZE} given, but ids are 0 to {VOCAB_SIZE - 1}"),
        (torch.tensor([[1, -2]]), f"-2 given, but ids are 0 to {VOCAB_SIZE - 1}"),
    ],
)
def test_what_is_no_token_is_named(tokens: Any, words: str) -> None:
    model = make("elita")
    for call in (model, model.generate):
        with pytest.raises(InputError, match=re.escape(f"input_ids: {words}")):
            call(tokens)
    with pytest.raises(InputError, match=r"^inputs_embeds: float32 of shape \(1, 3, 15\) given, but"):
        model(inputs_embeds=torch.zeros(1, 3, 15))


@pytest.mark.parametrize("convert", [torch.Tensor.tolist, torch.Tensor.numpy])
@pytest.mark.parametrize("name", ["input_ids", "labels", "attention_mask", "position_ids", "document_ids"])
def test_what_is_no_tensor_is_named(name: str, convert: Callable[[torch.Tensor], Any]) -> None:
    arguments = dict.fromkeys(("input_ids", "labels", name), ids(1, 2))
    with pytest.raises(InputError, match=rf"^{name}: (array\()?\[\[.*\]\]\)? given, but it must be"):
        make("elita")(**arguments | {name: convert(ids(1, 2))})


def test_returned_scores_are_those_of_the_sequences(architecture: str) -> None:
    model, tokens = make(architecture), ids(2, 7)
    how = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    result = model.generate(tokens, output_hidden_states=True, **how, **GREEDY)
    logits = model(result.sequences).logits
    torch.testing.assert_close(torch.stack(result.logits, dim=1), logits[:, 6:-1], rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.stack(result.scores, dim=1).argmax(dim=-1), result.sequences[:, 7:])
    assert len(result.hidden_states) == 5
    for step in result.hidden_states:
        assert len(step) == model.config.num_hidden_layers + 1
