import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest

from multilin.data.packed_text import IGNORED_LABEL
from multilin.data.tasks import BLANK, FIRST_SYMBOL, MARK, START, TASKS, Sequences, find_task, task_text
from multilin.errors import InputError

LENGTH = 41
COUNT = 400


def oracle_mqar(ids: list[int], place: int) -> int:
    earlier = next(i for i in range(1, place) if ids[i] == ids[place - 1])
    return ids[earlier + 1]


def oracle_marked(ids: list[int], place: int) -> int:
    return ids[ids.index(MARK) + 1]


def oracle_copy(ids: list[int], place: int) -> int:
    return ids[place - ids.index(MARK)]


def oracle_selective_copy(ids: list[int], place: int) -> int:
    mark = ids.index(MARK)
    return [token for token in ids[1:mark] if token != BLANK][place - mark - 1]


def oracle_majority(ids: list[int], place: int) -> int:
    bits = ids[1 : ids.index(MARK)]
    return max(set(bits), key=bits.count)


def oracle_parity(ids: list[int], place: int) -> int:
    return FIRST_SYMBOL + sum(token - FIRST_SYMBOL for token in ids[1 : ids.index(MARK)]) % 2


ORACLES: dict[str, Callable[[list[int], int], int]] = {
    "mqar": oracle_mqar,
    "induction": oracle_marked,
    "copy": oracle_copy,
    "selective_copy": oracle_selective_copy,
    "needle": oracle_marked,
    "majority": oracle_majority,
    "parity": oracle_parity,
}


def made(name: str, count: int = COUNT, length: int = LENGTH) -> Sequences:
    return find_task(name).generate(np.random.default_rng(0), count, length)


def test_every_task_has_an_oracle() -> None:
    assert ORACLES.keys() == TASKS.keys()


@pytest.mark.parametrize("name", TASKS)
def test_the_answers_follow_from_what_comes_before(name: str) -> None:
    """An oracle that sees the tokens before the asked one alone is always right."""
    found = made(name)
    rows, places = np.nonzero(found.labels != IGNORED_LABEL)
    assert len(rows) >= COUNT
    for row, place in zip(rows, places, strict=True):
        ids = found.input_ids[row].tolist()
        assert ORACLES[name](ids[:place], int(place)) == ids[place] == found.labels[row, place]


@pytest.mark.parametrize(
    "name",
    [
        *TASKS, "mqar?num_values=2", "mqar?num_pairs=3&num_keys=3&num_values=5", "induction?num_symbols=2",
        "copy?num_copied=1&num_symbols=7", "selective_copy?num_symbols=3", "needle?num_values=9&num_keys=2",
        "majority?num_bits=10", "majority?num_bits=1", "parity?num_bits=1", "parity?num_bits=2",
    ],
)  # fmt: skip
def test_the_best_guess_that_reads_nothing_is_right_by_chance(name: str) -> None:
    """The most frequent answer at each place, counted on half of the sequences, is scored on the other half."""
    found, task = made(name, count=8000), find_task(name)
    seen, asked = np.split(found.labels, 2)
    counts = np.stack([(seen == token).sum(axis=0) for token in range(task.num_tokens)])
    is_asked = asked != IGNORED_LABEL
    right = (asked == counts.argmax(axis=0))[is_asked].mean()
    deviation = math.sqrt(task.chance * (1 - task.chance) / is_asked.sum())
    assert abs(right - task.chance) < 5 * deviation
    assert len(np.unique(found.labels)) - 1 == round(1 / task.chance)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("max_tokens", [None, 1, 1000])
def test_the_answers_of_a_validation_are_counted(name: str, max_tokens: int | None) -> None:
    part = dataclasses.replace(task_text(f"task:{name}").validation, number=50)
    blocks = part.blocks(LENGTH)
    labels = [blocks[index]["labels"] for index in range(part.num_scored(LENGTH, max_tokens))]
    assert len(labels) == {None: 50, 1: 1, 1000: 24}[max_tokens]
    assert part.num_answers(LENGTH, max_tokens) == sum(int((row != IGNORED_LABEL).sum()) for row in labels)


@pytest.mark.parametrize("name", TASKS)
def test_sequences_have_their_length_and_vocabulary(name: str) -> None:
    task = find_task(name)
    found = made(name)
    assert found.input_ids.shape == found.labels.shape == (COUNT, LENGTH)
    assert (found.input_ids[:, 0] == START).all()
    assert found.input_ids.max() < task.num_tokens
    assert (made(name).input_ids == found.input_ids).all()
    other = task.generate(np.random.default_rng(1), COUNT, LENGTH)
    assert (other.input_ids != found.input_ids).any()


@pytest.mark.parametrize("name", [*TASKS, "majority?num_bits=10", "parity?num_bits=10"])
def test_the_shortest_sequence_is_the_shortest(name: str) -> None:
    task = find_task(name)
    found = task.generate(np.random.default_rng(0), 5, task.shortest)
    assert (found.labels[:, -1] != IGNORED_LABEL).all()
    with pytest.raises(InputError, match=rf"model\.n_positions: {task.shortest - 1} given, but the task {task.name}"):
        task.generate(np.random.default_rng(0), 5, task.shortest - 1)


def test_mqar_asks_for_every_key_once() -> None:
    found = find_task("mqar?num_pairs=5&num_keys=5&num_values=7").generate(np.random.default_rng(0), 50, 40)
    assert ((found.labels != IGNORED_LABEL).sum(axis=1) == 5).all()
    for ids in found.input_ids:
        keys = [token for token in ids if FIRST_SYMBOL <= token < FIRST_SYMBOL + 5]
        assert sorted(keys) == sorted([*range(FIRST_SYMBOL, FIRST_SYMBOL + 5)] * 2)


def test_majority_of_an_even_number_is_made_odd() -> None:
    found = find_task("majority?num_bits=4").generate(np.random.default_rng(0), 1, 12)
    assert list(found.input_ids[0]).index(MARK) == 6


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("mqra", "task: 'mqra' is not known; did you mean 'mqar'?; known are mqar, induction"),
        ("mqar?pairs=3", "task.mqar.pairs: unknown field"),
        ("mqar?num_pairs=0", "task.mqar.num_pairs: '0' given, but it should be at least 1"),
        ("mqar?num_pairs=40", "task.mqar.num_pairs: 40 given, but it must be at most num_keys 32"),
        ("parity?num_bits=x", "task.parity.num_bits: 'x' given"),
    ],
)
def test_what_is_no_task_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        find_task(text)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("name", TASKS)
def test_the_tokenizer_reads_what_it_writes(name: str) -> None:
    text = task_text(f"task:{name}")
    block = text.train.blocks(LENGTH)[3]["input_ids"]
    written = text.tokenizer.decode(block[1:].tolist())
    assert text.tokenizer.encode(written, add_special_tokens=False) == block[1:].tolist()
    assert len(text.tokenizer) == find_task(name).num_tokens


def test_training_and_validation_differ_and_stay() -> None:
    text = task_text("task:mqar")
    train, validation = text.train.blocks(LENGTH), text.validation.blocks(LENGTH)
    assert (train[0]["input_ids"] == text.train.blocks(LENGTH)[0]["input_ids"]).all()
    assert (train[0]["input_ids"] != validation[0]["input_ids"]).any()
    assert (train[0]["input_ids"] != train[1]["input_ids"]).any()
