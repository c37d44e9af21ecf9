"""What transformers, PEFT, accelerate and TRL ask of a causal language model, asked of every architecture."""

import copy
import os
import subprocess
import sys

import peft
import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig, Trainer, TrainingArguments, pipeline

from multilin import InputError, MultilinForCausalLM
from multilin.model.factory import create_model
from tests.contract.conftest import without_dropout
from tests.model.conftest import GREEDY, VARIANTS, VOCAB_SIZE, cross_entropy, ids, make

# Losses


def test_the_label_smoothing_of_trainer_shifts_the_labels(architecture: str, tmp_path) -> None:
    model, batch = make(architecture), {"input_ids": ids(2, 20), "labels": ids(2, 20)}
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.2, use_cpu=True, report_to="none")
    loss = Trainer(model, arguments).compute_loss(model, dict(batch))
    expected = cross_entropy(model(batch["input_ids"]).logits, batch["labels"], label_smoothing=0.2)
    torch.testing.assert_close(loss, expected)


def test_labels_of_another_length_are_refused(architecture: str) -> None:
    """A kernel would read beside them."""
    model, tokens = make(architecture), ids(2, 20)
    for name in ("labels", "shift_labels"):
        for labels in (ids(2, 40), ids(4, 20), tokens[:1], tokens[:, :5], tokens.float()):
            with pytest.raises(InputError, match=rf"^{name}: .* given, but it must be int64 of shape \(2, 20\)"):
                model(tokens, **{name: labels})


def test_shifted_labels_are_taken_as_they_are(architecture: str) -> None:
    model, tokens = make(architecture), ids(2, 20)
    shifted = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    expected = model(tokens, labels=tokens).loss
    torch.testing.assert_close(model(tokens, shift_labels=shifted).loss, expected)
    torch.testing.assert_close(model(tokens, labels=ids(2, 20) * 0, shift_labels=shifted).loss, expected)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_an_adapter_on_the_head_is_part_of_loss_and_logits(architecture: str, scale: float) -> None:
    model, tokens = make(architecture, final_scale=scale, tie_word_embeddings=False), ids(2, 20)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["lm_head"]))
    torch.nn.init.normal_(adapted.base_model.model.lm_head.lora_B["default"].weight)
    loss = adapted(input_ids=tokens, labels=tokens).loss
    loss.backward()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in trained)
    logits = adapted(input_ids=tokens).logits
    torch.testing.assert_close(loss, cross_entropy(logits, tokens))
    losses = model.token_losses(tokens)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(merged.token_losses(tokens), losses, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_prompts_of_peft_are_trained_and_read(architecture: str, kind: str) -> None:
    """As embeddings before the text, with and without a state."""
    model, tokens = make(architecture), ids(2, 9)
    tuned = get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    tuned(input_ids=tokens, labels=tokens).loss.backward()
    assert all(weight.grad is not None for weight in tuned.parameters() if weight.requires_grad)
    prompt = tuned.get_prompt(2)
    embeddings = torch.cat([prompt, model.get_input_embeddings()(tokens)], dim=1)
    expected = model(inputs_embeds=embeddings).logits
    torch.testing.assert_close(tuned(input_ids=tokens).logits, expected)
    how = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "max_new_tokens": 4, **GREEDY}
    assert torch.equal(tuned.generate(**how), tuned.generate(**how, use_cache=False))
    assert tuned.generate(**how)[0, 9] == expected[0, -1].index_fill(0, torch.tensor([1]), -torch.inf).argmax()


def test_prefix_tuning_is_refused_in_a_sentence() -> None:
    tuned = get_peft_model(make("additive"), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(InputError, match="past_key_values: DynamicCache given"):
        tuned(input_ids=ids(2, 9))


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapters_reach_every_matrix(variant: tuple[str, dict]) -> None:
    name, options = variant
    torch.manual_seed(0)
    model = create_model(
        name, hidden_size=64, num_layers=2, vocab_size=VOCAB_SIZE, n_positions=64, options=options,
        initializer_range=0.3, bos_token_id=2,
    )  # fmt: skip
    layers, tokens = model.model.layers, ids(2, 20)
    num_weights = sum(parameter.numel() for parameter in layers.parameters())
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=3, target_modules="all-linear"))
    reached = [module.get_base_layer().weight for module in layers.modules() if isinstance(module, LoraLayer)]
    assert sum(weight.numel() for weight in reached) >= 0.95 * num_weights
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    for parameter in trained.values():
        torch.nn.init.normal_(parameter, std=0.1)
    result = adapted.eval()(input_ids=tokens, labels=tokens)
    result.loss.backward()
    assert [name for name, parameter in trained.items() if parameter.grad is None or not parameter.grad.any()] == []
    generated = adapted.generate(input_ids=tokens[:1, :5], max_new_tokens=5, **GREEDY)
    merged = adapted.merge_and_unload()
    largest = result.logits.detach().abs().max().item()
    torch.testing.assert_close(merged(tokens).logits, result.logits, rtol=1e-5, atol=1e-5 * largest)
    assert torch.equal(merged.generate(tokens[:1, :5], max_new_tokens=5, **GREEDY), generated)


def test_offloaded_weights_compute_the_same(architecture: str) -> None:
    model, tokens = make(architecture), ids(2, 20)
    with torch.no_grad():
        expected = model(tokens, labels=tokens)
        cpu_offload(model, execution_device="cpu")
        found, losses = model(tokens, labels=tokens), model.token_losses(tokens)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(losses.mean(), expected.loss)
    layers = {type(layer).__name__ for layer in model.model.layers}
    assert set(model._no_split_modules) == layers


@pytest.mark.parametrize("size", [VOCAB_SIZE + 6, VOCAB_SIZE - 5])
def test_a_fixed_bias_stays_fixed(architecture: str, size: int, tmp_path) -> None:
    model = make(architecture, output_bias="unigram")
    model.set_token_counts(torch.arange(VOCAB_SIZE))
    model.save_pretrained(tmp_path)
    loaded = MultilinForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.bias, model.lm_head.bias)
    loaded.resize_token_embeddings(size)
    assert loaded.get_input_embeddings().weight.shape[0] == loaded.config.vocab_size == size
    expected = torch.cat([model.lm_head.bias, model.lm_head.bias.min().expand(6)])[:size]
    torch.testing.assert_close(loaded.lm_head.bias, expected)
    for network in (model, loaded):
        assert "lm_head.bias" in network.state_dict()
        assert "lm_head.bias" not in dict(network.named_parameters())
    loaded.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(ids(1, 5) % size).logits, loaded.eval()(ids(1, 5) % size).logits)


# forward


def test_the_config_decides_what_is_returned(architecture: str) -> None:
    model, tokens = make(architecture), ids(1, 6)
    assert set(model(tokens)) == {"logits", "past_key_values"}
    model.config.use_cache, model.config.output_hidden_states = False, True
    assert set(model(tokens)) == {"logits", "hidden_states"}
    model.config.return_dict = False
    logits, hidden_states = model(tokens)
    assert len(hidden_states) == model.config.num_hidden_layers + 1
    torch.testing.assert_close(model(tokens, return_dict=True).logits, logits)


def test_the_last_hidden_states_are_what_the_head_reads(architecture: str) -> None:
    model, tokens = make(architecture), ids(2, 9)
    result = model(tokens, output_hidden_states=True)
    torch.testing.assert_close(model.lm_head(result.hidden_states[-1]), result.logits)
    torch.testing.assert_close(model.base_model(tokens).last_hidden_state, result.hidden_states[-1])


@pytest.mark.slow
def test_a_compiled_model_heeds_the_mask(architecture: str) -> None:
    model, tokens, mask = without_dropout(make(architecture)), ids(1, 8), torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0]])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for is_training in (False, True):
            model.train(is_training)
            logits, expected = (network(tokens, attention_mask=mask).logits for network in (compiled, model))
            torch.testing.assert_close(logits[:, 2:], expected[:, 2:], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("infers", [False, True])
def test_a_compiled_model_reads_on_from_a_state(architecture: str, infers: bool) -> None:
    """As one graph; also from a state that was made in inference mode."""
    torch.compiler.reset()
    model, tokens = make(architecture), ids(2, 14)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = model(tokens).logits
        with torch.inference_mode() if infers else torch.no_grad():
            state = model(tokens[:, :8]).past_key_values
        for first, end in ((8, 13), (13, 14)):
            logits = compiled(tokens[:, first:end], past_key_values=state).logits
            torch.testing.assert_close(logits, expected[:, first:end], rtol=1e-4, atol=1e-4)
    assert state.num_tokens.tolist() == [14, 14]


@pytest.mark.slow
def test_a_compiled_model_reads_on_from_a_state_with_gradients() -> None:
    """As one graph, which cannot ask whether a tensor was made in inference mode."""
    model, tokens = make("gated_deltanet"), ids(2, 14)
    gradients = []
    for network in (torch.compile(model, backend="aot_eager", fullgraph=True), model):
        with torch.inference_mode():
            state = model(tokens[:, :8]).past_key_values
        logits = network(tokens[:, 8:], past_key_values=state).logits
        gradients.append(torch.autograd.grad(logits.logsumexp(-1).sum(), list(model.parameters()), allow_unused=True))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_compiled_model_has_the_same_gradients(architecture: str) -> None:
    torch.compiler.reset()
    model, tokens = make(architecture), ids(2, 40)
    compiled = torch.compile(model, backend="aot_eager")
    parameters = dict(model.named_parameters())
    gradients, expected = (
        torch.autograd.grad(network(tokens, labels=tokens).loss, list(parameters.values()), allow_unused=True)
        for network in (compiled, model)
    )
    for name, gradient, wanted in zip(parameters, gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5, msg=name)


def test_embeddings_are_read_in_place_of_ids(architecture: str) -> None:
    model, tokens = make(architecture), ids(2, 9)
    embeddings = model.get_input_embeddings()(tokens)
    torch.testing.assert_close(model(inputs_embeds=embeddings).logits, model(tokens).logits)
    model.to(torch.bfloat16)
    embeddings = model.get_input_embeddings()(tokens).float()
    torch.testing.assert_close(model(inputs_embeds=embeddings).logits, model(tokens).logits)


def test_the_body_loads_by_itself(architecture: str, tmp_path) -> None:
    model, tokens = make(architecture), ids(2, 9)
    model.save_pretrained(tmp_path)
    body = AutoModel.from_pretrained(tmp_path)
    torch.testing.assert_close(body(tokens).last_hidden_state, model.base_model(tokens).last_hidden_state)
    assert type(model.base_model) is type(body)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(tokens).logits, model(tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize("installed", [False, True])
def test_transformers_alone_says_what_to_install(installed: bool, tmp_path) -> None:
    """Nothing of the model's folder is run unless that is asked for; then multilin is imported, or named."""
    make("additive").save_pretrained(tmp_path / "model")
    load = """
import sys
class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "multilin":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
if sys.argv[2] == "False":
    sys.meta_path.insert(0, Missing())
from transformers import AutoModelForCausalLM
for trusts in (None, True):
    try:
        result = type(AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=trusts)).__name__
    except Exception as error:
        result = " ".join(str(error).split())
    print(f"\\n{trusts}: {result}")
"""
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    result = subprocess.run(
        [sys.executable, "-c", load, str(tmp_path / "model"), str(installed)],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = dict(line.split(": ", 1) for line in result.stdout.splitlines() if line.startswith(("None: ", "True: ")))
    assert "contains custom code" in found["None"]
    assert found["True"] == "MultilinForCausalLM" if installed else "pip install multilin" in found["True"]


# generate


def test_assistants_change_nothing_but_speed(architecture: str) -> None:
    """Speculative decoding takes tokens back: by a model that often errs, one that never does, and the prompt."""
    model, tokens = make(architecture), ids(1, 12)
    expected = model.generate(tokens, max_new_tokens=20, **GREEDY)
    other = make(architecture, initializer_range=0.2)
    for assistant in (other, copy.deepcopy(model)):
        assert torch.equal(model.generate(tokens, assistant_model=assistant, max_new_tokens=20, **GREEDY), expected)
    assert torch.equal(model.generate(tokens, prompt_lookup_num_tokens=3, max_new_tokens=20, **GREEDY), expected)


def test_a_prompt_padded_on_the_right_generates_what_it_generates_alone(architecture: str) -> None:
    model, tokens = make(architecture), ids(1, 9)
    expected = model.generate(tokens, max_new_tokens=6, **GREEDY)[:, 9:]
    padded, mask = torch.nn.functional.pad(tokens, (0, 4), value=1), torch.ones(1, 13, dtype=torch.long)
    mask[:, 9:] = 0
    for options in ({}, {"use_cache": False}, {"assistant_model": model}, {"prompt_lookup_num_tokens": 3}):
        generated = model.generate(padded, attention_mask=mask, max_new_tokens=6, **options, **GREEDY)
        assert torch.equal(generated[:, 13:], expected)


def test_the_state_after_an_assistant_continues(architecture: str) -> None:
    model, tokens = make(architecture), ids(1, 12)
    how = {"prompt_lookup_num_tokens": 3, "return_dict_in_generate": True, **GREEDY}
    first = model.generate(tokens, max_new_tokens=7, **how)
    onward = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=8, **GREEDY)
    assert torch.equal(onward, model.generate(tokens, max_new_tokens=15, **GREEDY))


def test_an_assistant_begins_where_a_state_ends(architecture: str) -> None:
    """What the state has read is not read again."""
    for seed in range(3):
        torch.manual_seed(seed)
        model, tokens = make(architecture), ids(1, 20)
        expected = model.generate(tokens, max_new_tokens=15, **GREEDY)
        with torch.no_grad():
            state = model(tokens[:, :15], use_cache=True).past_key_values
        for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": copy.deepcopy(model)}):
            found = model.generate(tokens, past_key_values=state, max_new_tokens=15, **options, **GREEDY)
            assert torch.equal(found, expected)


def test_embeddings_generate_what_their_tokens_do(architecture: str) -> None:
    """Also without a cache that is asked for, in which later tokens would have no embeddings before them."""
    model, tokens = make(architecture), ids(1, 9)
    expected = model.generate(tokens, max_new_tokens=6, **GREEDY)[:, 9:]
    embeddings = model.get_input_embeddings()(tokens)
    for use_cache in (True, False):
        found = model.generate(inputs_embeds=embeddings, max_new_tokens=6, use_cache=use_cache, **GREEDY)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("shape", "words"), [((0, 5), "no rows given"), ((2, 0), "no tokens given")])
def test_a_batch_of_nothing_is_refused(architecture: str, shape: tuple[int, int], words: str) -> None:
    with pytest.raises(InputError, match=f"input_ids: {words}"):
        make(architecture)(torch.zeros(shape, dtype=torch.long))


def test_generation_without_ids_begins_with_the_start_token(architecture: str) -> None:
    model = make(architecture)
    expected = model.generate(torch.tensor([[2]]), max_new_tokens=5, **GREEDY)
    assert torch.equal(model.generate(max_new_tokens=5, **GREEDY), expected)
    model.generation_config.bos_token_id = None
    with pytest.raises(InputError, match="input_ids: no tokens given"):
        model.generate(max_new_tokens=5)


def test_caches_of_other_kinds_are_refused(architecture: str) -> None:
    model = make(architecture)
    with pytest.raises(InputError, match="cache_implementation: 'static' given"):
        model.generate(ids(1, 5), cache_implementation="static", max_new_tokens=2)
    settings = GenerationConfig(cache_implementation="quantized", max_new_tokens=2)
    with pytest.raises(InputError, match="cache_implementation: 'quantized' given"):
        model.generate(ids(1, 5), settings)
    expected = model.generate(ids(1, 5), max_new_tokens=4, **GREEDY)
    found = model.generate(ids(1, 5), cache_implementation="dynamic", max_new_tokens=4, **GREEDY)
    assert torch.equal(found, expected)


def test_pipelines_generate_with_their_defaults(architecture: str, tokenizer) -> None:
    model = make(architecture, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert generate("the cat")[0]["generated_text"].startswith("the cat")
    assert len(generate("", return_full_text=False)[0]["generated_text"]) > 0
    features = pipeline("feature-extraction", model=model.base_model, tokenizer=tokenizer)("the cat")
    assert len(features[0][0]) == 16


def test_stop_strings_stop(architecture: str, tokenizer) -> None:
    model = make(architecture, vocab_size=len(tokenizer))
    prompt = tokenizer("the cat", return_tensors="pt").input_ids
    others = [token for token in range(len(tokenizer)) if not tokenizer.decode([token]).isalpha()]
    how = {**GREEDY, "suppress_tokens": others, "repetition_penalty": 3.0, "max_new_tokens": 20}
    whole = tokenizer.decode(model.generate(prompt, **how)[0, prompt.shape[1] :])
    middle = whole[len(whole) // 3 : len(whole) // 3 + 3]
    found = model.generate(prompt, stop_strings=[middle], tokenizer=tokenizer, **how)
    text = tokenizer.decode(found[0, prompt.shape[1] :])
    assert middle in text
    assert len(text) < len(whole)
