"""The trainers of transformers and TRL compute the losses of single documents, whatever way these lie in rows."""

import copy
import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from multilin import InputError, MultilinForCausalLM
from tests.contract.conftest import without_dropout
from tests.model.conftest import LONGEST, VARIANTS, ids, make

LENGTHS = [20, 7, 33, 12, 5, 28]
QUIET = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
# TRL uses names that transformers has deprecated.
with_trl = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def documents() -> list[list[int]]:
    return [ids(length).roll(index).tolist() for index, length in enumerate(LENGTHS)]


def make_trained(name: str, **config: object) -> MultilinForCausalLM:
    """A model in training without dropout, whose biases are not zero."""
    model = without_dropout(make(name, **config))
    if model.lm_head.bias is not None:
        torch.nn.init.normal_(model.lm_head.bias)
    return model


def separate_loss(model: MultilinForCausalLM, texts: list[list[int]]) -> torch.Tensor:
    """Nats per scored token of texts that are read each by itself."""
    sums = []
    for text in texts:
        tokens = torch.tensor([text])
        logits = model(tokens, use_cache=False).logits
        sums.append(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum"))
    return torch.stack(sums).sum() / sum(len(text) - 1 for text in texts)


def gradients(model: MultilinForCausalLM, loss: torch.Tensor) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))


def assert_same_loss(model: MultilinForCausalLM, loss: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    for result, gradient in zip(gradients(model, loss), gradients(model, expected), strict=True):
        torch.testing.assert_close(result, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()) + 1e-6)


# transformers


@pytest.mark.parametrize("collator", ["padded", "packed"])
def test_trainer_steps_as_on_single_documents(
    architecture: str, collator: str, tokenizer: PreTrainedTokenizerBase, tmp_path
) -> None:
    """Also where a step is made of several batches of different lengths."""
    model = make_trained(architecture, vocab_size=len(tokenizer), tie_word_embeddings=True)
    alone = copy.deepcopy(model)
    padded = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=3, max_steps=1, optim="sgd",
        learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0, **QUIET,
    )  # fmt: skip
    data = Dataset.from_dict({"input_ids": documents()})
    collate = padded if collator == "padded" else DataCollatorWithFlattening()
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=collate)
    if collator == "packed" and not model.packs:
        with pytest.raises(InputError, match="several documents in a row"):
            trainer.train()
        return
    trainer.train()
    separate_loss(alone, documents()).backward()
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            step = 0 if parameter.grad is None else 0.1 * parameter.grad
            trained = model.get_parameter(name)
            torch.testing.assert_close(trained, parameter - step, rtol=1e-3, atol=1e-5, msg=name)


def test_trainer_evaluates_with_a_loss(architecture: str, tokenizer: PreTrainedTokenizerBase, tmp_path) -> None:
    """Trainer takes every argument of forward with `label` in its name for one that each batch has."""
    model = make_trained(architecture, vocab_size=len(tokenizer), tie_word_embeddings=True)
    data = Dataset.from_dict({"input_ids": documents()})
    trainer = Trainer(
        model, TrainingArguments(str(tmp_path), per_device_eval_batch_size=len(data), **QUIET), eval_dataset=data,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )  # fmt: skip
    assert trainer.evaluate()["eval_loss"] == pytest.approx(separate_loss(model, documents()).item(), rel=1e-4)


# TRL


def sft_trainer(model: object, tokenizer: PreTrainedTokenizerBase, folder: object, way: str, **options: object):
    trl = pytest.importorskip("trl")
    settings = {
        "padded": {}, "packed": {"packing": True}, "wrapped": {"packing": True, "packing_strategy": "wrapped"},
        "padding free": {"padding_free": True, "max_length": None},
    }[way]  # fmt: skip
    arguments = trl.SFTConfig(**{"output_dir": str(folder), "max_length": LONGEST, **QUIET, **options, **settings})
    data = Dataset.from_dict({"input_ids": documents()})
    return trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)


@pytest.mark.parametrize("way", [pytest.param(w, marks=with_trl) for w in ("padded", "packed", "padding free")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sft_scores_single_documents(variant: tuple[str, dict], way: str, tokenizer, tmp_path) -> None:
    name, options = variant
    model = make_trained(name, vocab_size=len(tokenizer), hidden_size=64, options=options)
    trainer = sft_trainer(model, tokenizer, tmp_path, way, per_device_train_batch_size=len(LENGTHS))
    batch = next(iter(trainer.get_train_dataloader()))
    if way != "padded" and not model.packs:
        with pytest.raises(InputError, match="several documents in a row"):
            trainer.compute_loss(model, batch)
        return
    assert_same_loss(model, trainer.compute_loss(model, batch), separate_loss(model, documents()))


@pytest.mark.parametrize("way", [pytest.param(w, marks=with_trl) for w in ("padded", "packed", "wrapped")])
def test_sft_learns(architecture: str, tokenizer, way: str, tmp_path) -> None:
    """From a folder, as with a name of the hub."""
    model = make(architecture, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    if way == "packed" and not model.packs:
        pytest.skip("refuses packed rows")
    model.save_pretrained(tmp_path / "model")
    options = {"max_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 3e-2, "logging_steps": 1}
    trainer = sft_trainer(str(tmp_path / "model"), tokenizer, tmp_path, way, **options)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.9 * losses[0]


def dpo_trainer(model: object, tokenizer: PreTrainedTokenizerBase, folder: object, **options: object):
    trl = pytest.importorskip("trl")
    settings = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1}
    arguments = trl.DPOConfig(output_dir=str(folder), max_length=LONGEST, beta=0.3, **QUIET, **settings)
    texts = {"prompt": ["the cat", "the cat number 3"], "chosen": [" sat", " sat on the mat"], "rejected": [" was", ""]}
    data = Dataset.from_dict(texts)
    return trl.DPOTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer, **options)


def answer_log_prob(model: MultilinForCausalLM, tokens: torch.Tensor, in_answer: torch.Tensor) -> torch.Tensor:
    log_probs = model(tokens[None], use_cache=False).logits[0, :-1].log_softmax(dim=-1)
    return log_probs.gather(1, tokens[1:, None])[in_answer[1:].bool()].sum()


@pytest.mark.parametrize("variant", [pytest.param(v.values[0], id=v.id, marks=with_trl) for v in VARIANTS])
def test_dpo_prefers_by_the_probabilities_of_single_answers(variant: tuple[str, dict], tokenizer, tmp_path) -> None:
    name, options = variant
    model, other = (
        make_trained(name, vocab_size=len(tokenizer), hidden_size=64, options=options, initializer_range=std)
        for std in (0.3, 0.2)
    )
    trainer = dpo_trainer(model, tokenizer, tmp_path, ref_model=other)
    batch = next(iter(trainer.get_train_dataloader()))
    rows = [
        (tokens[mask.bool()], answer[mask.bool()])
        for tokens, mask, answer in zip(
            batch["input_ids"], batch["attention_mask"], batch["completion_mask"], strict=True
        )
    ]
    gains = torch.stack([answer_log_prob(model, *row) - answer_log_prob(other.eval(), *row).detach() for row in rows])
    chosen, rejected = gains.chunk(2)
    expected = -torch.nn.functional.logsigmoid(0.3 * (chosen - rejected)).mean()
    assert_same_loss(model, trainer.compute_loss(model, batch), expected)


@pytest.mark.parametrize("adapts", [pytest.param(adapts, marks=with_trl) for adapts in (False, True)])
def test_dpo_begins_at_its_reference_and_learns(architecture: str, adapts: bool, tokenizer, tmp_path) -> None:
    """The reference is a second model from the same folder, or the model without its adapter."""
    make(architecture, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    adapter = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules="all-linear") if adapts else None
    trainer = dpo_trainer(str(tmp_path / "model"), tokenizer, tmp_path, peft_config=adapter)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3)
    assert losses[-1] < losses[0]
