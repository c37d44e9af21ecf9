"""`train --minutes`: the law, the rule, and what is picked and kept."""

import dataclasses
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks._law import (
    RUNS,
    MeasuredRun,
    best_rates,
    expected_of,
    fit_law,
    left_out_errors,
    load_runs,
    prediction_errors,
)
from multilin.analysis.budget import measure as measuring
from multilin.analysis.budget import pick as picking
from multilin.analysis.budget.law import REPEATS, Law, effective_bytes, shipped_law
from multilin.analysis.budget.measure import count_bytes, measure_text
from multilin.analysis.budget.pick import VALIDATIONS, Pick, pick
from multilin.analysis.budget.rule import (
    MOST_PASSES,
    Candidate,
    Choice,
    Size,
    Speed,
    choose,
    choose_vocabulary,
    fit_speed,
    recipe_values,
    sizes,
)
from multilin.data.settings import DataRecipe
from multilin.errors import InputError
from multilin.scoring.ngrams import NgramModel
from multilin.training.assemble import read_text
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import load_recipe
from tests.processes import PYTHON, run

BOOKS = {"train_tokens": 15_000_000, "train_bytes": 48_000_000}
MINUTES = (0.2, 0.5, 1, 2, 5, 10, 20, 40, 60, 120, 300, 1000)
SPEED = Speed(per_layer=0.002, per_flop=1.2e-11, tokens_per_step=1024)


def candidates(vocab_size: int = 2048) -> Iterator[Candidate]:
    """TScale's, counted by hand."""
    for size in sizes(vocab_size, {}):
        parameters = 10 * size.num_layers * size.hidden_size**2
        outer = vocab_size * size.hidden_size
        yield Candidate(size, parameters, 6.0 * (parameters + outer), 16.0 * (parameters + 2 * outer))


def chosen(minutes: float, memory: float | None = None, **text: int) -> Choice:
    return choose(
        candidates(), law=shipped_law(), speed=SPEED, seconds=60 * minutes, memory=memory, **{**BOOKS, **text}
    )


def test_more_time_is_never_a_smaller_model_nor_a_worse_one() -> None:
    choices = [chosen(minutes) for minutes in MINUTES]
    parameters = [choice.candidate.parameters for choice in choices]
    ratios = [choice.ratio for choice in choices]
    assert parameters == sorted(parameters)
    assert ratios == sorted(ratios, reverse=True)
    assert parameters[-1] > parameters[0]
    for shorter, longer in itertools.pairwise(choices):
        assert longer.tokens > shorter.tokens or longer.candidate.parameters > shorter.candidate.parameters


def test_all_of_the_time_is_used_for_a_long_text() -> None:
    for minutes in MINUTES[:-2]:
        choice = chosen(minutes)
        used = choice.tokens / SPEED.tokens_per_second(choice.candidate) / 60
        assert used == pytest.approx(minutes, rel=0.01)


def test_a_small_text_gets_few_parameters_and_passes() -> None:
    choice = chosen(600, train_tokens=100_000, train_bytes=300_000)
    assert choice.candidate.parameters <= 300_000
    ratios = [
        shipped_law().ratio(choice.candidate.parameters, passes * 300_000, 300_000)
        for passes in range(1, MOST_PASSES + 1)
    ]
    assert choice.tokens == (1 + ratios.index(min(ratios))) * 100_000
    assert choice.ratio == min(ratios)
    assert chosen(600, train_tokens=10, train_bytes=30).candidate.size.hidden_size == 64


@pytest.mark.parametrize("speed", [SPEED, Speed(0.01, 2.5e-12, 1024)])
def test_the_speed_of_a_machine_follows_from_two_models(speed: Speed) -> None:
    small, middle, large = (
        Candidate(Size(0, layers, 0), 0, flops, 0) for layers, flops in ((4, 1e6), (4, 2e7), (8, 9e7))
    )
    times = [(one, 1024 / speed.tokens_per_second(one)) for one in (small, middle)]
    found = fit_speed(times[0], times[1], 1024)
    assert found.tokens_per_second(large) == pytest.approx(speed.tokens_per_second(large))


def test_a_speed_that_was_measured_badly_is_still_one() -> None:
    small, large = (Candidate(Size(0, 4, 0), 0, flops, 0) for flops in (1e6, 2e7))
    for slow in (small, large):
        found = fit_speed((small, 0.2), (slow, 0.1), 1024)  # the larger is faster, or they are the same
        assert 0 < found.tokens_per_second(large) < 1024 / 0.01


def test_a_model_that_the_memory_is_too_small_for_is_not_picked() -> None:
    free = chosen(1000)
    bounded = chosen(1000, memory=free.candidate.memory - 1)
    assert bounded.candidate.parameters < free.candidate.parameters
    with pytest.raises(InputError, match=r"--minutes: training the smallest model takes \d+ MB of memory, and 0 are"):
        chosen(20, memory=1)


def vocabulary(train_bytes: int, minutes: float) -> int:
    return choose_vocabulary(candidates, shipped_law(), speed=SPEED, seconds=60 * minutes, train_bytes=train_bytes)


def test_the_vocabulary_grows_with_text_and_time() -> None:
    of_texts = [vocabulary(size, 60) for size in (0, 10_000, 40_000, 400_000, 10**6, 10**9)]
    assert of_texts == sorted(of_texts)
    assert of_texts[:5] == [258, 258, 512, 1024, 2048]
    of_times = [vocabulary(10**9, minutes) for minutes in MINUTES]
    assert of_times == sorted(of_times)
    assert of_times[-1] > of_times[0]


def test_models_that_are_too_large_for_the_time_are_not_looked_at() -> None:
    """To build and count a large one takes a second of the time."""
    seen: set[int] = set()

    def watched(vocab_size: int) -> Iterator[Candidate]:
        for one in candidates(vocab_size):
            seen.add(one.size.hidden_size)
            yield one

    choose_vocabulary(watched, shipped_law(), speed=SPEED, seconds=12, train_bytes=10**9)
    assert 64 in seen
    assert max(seen) <= 256


def test_given_sizes_are_kept() -> None:
    assert {size.hidden_size for size in sizes(512, {"model.hidden_size": 48})} == {48}
    assert {size.num_layers for size in sizes(512, {"model.num_layers": 3})} == {3}
    assert len(sizes(512, {"model.hidden_size": 48, "model.num_layers": 3})) == 1


def test_what_is_read_again_counts_for_less() -> None:
    assert effective_bytes(50, 100) == 50
    assert effective_bytes(100, 100) == 100
    assert 199 > effective_bytes(200, 100) > 180
    assert effective_bytes(10**9, 100) == pytest.approx(100 * (1 + REPEATS))


def test_a_model_that_knows_its_text_by_heart_is_expected_to_be_worse() -> None:
    law = Law(0.6, 4.0, 40.0, memory=0.06)
    ratios = {passes: law.ratio(10**6, passes * 10**6, 10**6) for passes in (1, 2, 3, 4, 10)}
    assert ratios[2] < ratios[1]
    assert ratios[10] > ratios[4]
    text = {"train_tokens": 300_000, "train_bytes": 1_000_000}
    choice = choose(candidates(), law=law, speed=SPEED, seconds=36_000, **text)
    assert choice.tokens < MOST_PASSES * 300_000
    assert choice.ratio <= min(law.ratio(choice.candidate.parameters, p * 10**6, 10**6) for p in range(1, 11))


def made_up(law: Law, width: int, tokens: int, architecture: str = "tscale", text: str = "one") -> MeasuredRun:
    run = MeasuredRun(
        text, architecture, width, 4, 2048, 256, 4, 0.06, 0.01, tokens, 6e6, 40 * width**2, 10**7, 3 * 10**7, 2.0, 0.9,
        0.0, "",
    )  # fmt: skip
    return dataclasses.replace(run, bits_per_byte=expected_of(law, run))


def test_a_law_is_found_in_runs_that_follow_it() -> None:
    law = Law(0.6, 4.0, 10.0, memory=0.0, main="tscale", factors={"elita": 1.2})
    grid = itertools.product((64, 128, 256), (10**5, 10**6, 10**7), ("one", "another"))
    runs = [made_up(law, width, tokens, text=text) for width, tokens, text in grid]
    found = fit_law([*runs, made_up(law, 128, 10**6, "elita")])
    assert expected_of(found, runs[4]) == pytest.approx(runs[4].bits_per_byte, rel=1e-3)
    assert found.factors == {"elita": pytest.approx(1.2, rel=1e-3)}
    assert found.most_flops == 6e13
    assert found.error == pytest.approx(0.02)


def test_two_validations_under_way_forecast_the_end() -> None:
    """Exactly, where the log of the bits per byte falls along one curve, times a number of each run."""
    law = Law(0.6, 4.0, 10.0, main="tscale")
    runs = []
    for width, tokens, text in itertools.product((64, 128, 256), (10**5, 10**6, 10**7), ("one", "another")):
        run = made_up(law, width, tokens, text=text)
        under_way = tuple((share, run.bits_per_byte * width ** ((1 - share) ** 2 / 10)) for share in (0.2, 0.4, 0.6))
        runs.append(dataclasses.replace(run, validations=under_way))
    found = fit_law(runs)
    for run in runs:
        for earlier, later in itertools.pairwise(run.validations):
            forecast = found.forecast([earlier, later], 2 * run.bits_per_byte)
            assert forecast == (pytest.approx(run.bits_per_byte), pytest.approx(0, abs=1e-9))
    assert found.forecast([(0.5, 2.0), (1.0, 1.8)], 2.0) == (1.8, 0.0)


def test_validations_that_are_early_or_close_together_forecast_nothing() -> None:
    law = shipped_law()
    assert law.forecast([(0.5, 2.0)], 1.8) is None
    assert law.forecast([(0.05, 2.3), (0.1, 2.0)], 1.8) is None
    assert law.forecast([(0.5, 2.0), (0.55, 1.9)], 1.8) is None
    assert law.forecast([(0.35, 2.2), (0.5, 2.0), (0.55, 1.9)], 1.8) == law.forecast([(0.35, 2.2), (0.55, 1.9)], 1.8)


def test_a_forecast_lies_between_its_validations_and_the_prediction() -> None:
    law = dataclasses.replace(shipped_law(), error=0.02, ends=((0.4, 0.5, 0.04), (0.6, 0.5, 0.02), (1.0, 1.0, 0.0)))
    half = [(0.4, 2.0), (0.6, 1.8)]
    alone = 1.8 * 0.9
    assert law.forecast(half, alone) == (pytest.approx(alone), pytest.approx(alone * 0.02 / 2**0.5))
    middle = (alone * 1.6) ** 0.5
    assert law.forecast(half, 1.6) == (pytest.approx(middle), pytest.approx(middle * 0.02 / 2**0.5))
    early = law.forecast([(0.2, 2.0), (0.4, 1.8)], 1.6)
    straight = 1.8 * 0.9**1.5
    assert early == (pytest.approx(1.6**0.8 * straight**0.2), pytest.approx(early[0] * 0.04 / 5**0.5))


def test_the_shipped_runs_forecast_their_ends() -> None:
    ends = shipped_law().ends
    assert len(ends) == VALIDATIONS
    errors = [error for _, _, error in ends]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 0.03
    assert all(0 < factor < 2 for _, factor, _ in ends)


def test_a_forecast_is_better_than_the_prediction_and_than_going_on_from_its_validations() -> None:
    law, found = shipped_law(), prediction_errors(load_runs(RUNS))
    for share, _, going_on in law.ends[:-1]:
        forecast = np.sqrt(np.mean([error**2 for _, error in found[share]]))
        assert forecast < law.error
        assert forecast < going_on or going_on < law.error / 3  # late, the prediction hardly counts


def test_the_shipped_law_is_that_of_the_shipped_runs() -> None:
    fitted, shipped = (dataclasses.asdict(law) for law in (fit_law(load_runs(RUNS)), shipped_law()))
    for name, value in fitted.items():
        assert np.allclose(value, shipped[name], rtol=1e-6) if name == "ends" else shipped[name] == pytest.approx(value)


def test_of_several_rates_the_best_counts() -> None:
    run = made_up(shipped_law(), 128, 10**6)
    worse = dataclasses.replace(run, learning_rate=0.01, bits_per_byte=9.0, validations=((0.5, 9.5),))
    assert best_rates([worse, run]) == [run]


def test_the_law_predicts_the_runs_on_each_text_from_those_on_the_others() -> None:
    runs = best_rates(load_runs(RUNS))
    assert all(run.commit for run in runs)
    assert len(left_out_errors(runs)) >= 10
    assert shipped_law().error < 0.03


def test_repetition_helps_the_more_the_more_was_read() -> None:
    law = shipped_law()
    shares = [
        law.ratio(10**6, read, 10**9, repetition=0.8) / law.ratio(10**6, read, 10**9)
        for read in (10**5, 10**6, 10**7, 10**8)
    ]
    assert shares[:2] == pytest.approx([1, 1])
    assert 0.8 < shares[2] < 0.9
    assert shares[3] == pytest.approx(shares[2] ** 2)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 6))) for _ in range(3000)]
    path = tmp_path / "text.txt"
    path.write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(2000)))
    return path


@pytest.fixture
def picked(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pick]:
    """picked(20, "tscale", **{"model.hidden_size": 64}), on a machine of a known speed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(picking, "measure_speed", lambda small, large, until: SPEED)

    def make(minutes: float, name: str | None = None, **changes: object) -> Pick:
        given = {"data.source": str(text_file), "output": str(tmp_path / "run"), **changes}
        return pick(name, given, minutes, time.monotonic(), TrainingProgress())

    return make


def test_trigrams_of_a_short_text_count_for_less(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a longer text of its kind would have better counts; one that is long enough is measured as it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = read_text(load_recipe(None, {"data.source": str(text_file), "tokenizer.kind": "byte"}))
    counted = NgramModel(text.train, 3).bits_per_byte(text.validation)
    for longer, least in ((1, 1.0), (4, 0.85), (16, 0.75)):
        monkeypatch.setattr(measuring, "COUNTED_NGRAMS", longer * text.train.num_tokens)
        measured = measure_text(text).trigram
        assert least * counted - 1e-4 <= measured <= counted * (1 + 1e-4)
        assert measured < counted - 0.1 or longer == 1


def test_a_recipe_is_picked_and_what_is_given_is_kept(picked: Callable[..., Pick]) -> None:
    free = picked(1)
    assert free.recipe.model.architecture == "tscale"
    assert free.recipe.training.minutes == 1
    assert 0 < free.spread < free.expected
    kept = picked(1, **{"model.architecture": "elita", "model.hidden_size": 40, "optimizer.learning_rate": 0.001})
    assert kept.recipe.model.architecture == "elita"
    assert kept.recipe.model.hidden_size == kept.choice.candidate.size.hidden_size == 40
    assert kept.recipe.optimizer.learning_rate == 0.001
    assert kept.expected > 0
    byte = picked(1, **{"tokenizer.kind": "byte"}).recipe.tokenizer
    assert (byte.kind, byte.vocab_size) == ("byte", None)


def test_a_vocabulary_is_picked_that_the_text_supports(picked: Callable[..., Pick], tmp_path: Path) -> None:
    draw, path = random.Random(0), tmp_path / "digits.txt"
    path.write_text("\n".join(" ".join(str(draw.randrange(10)) for _ in range(40)) for _ in range(1500)))
    free = picked(1, **{"data.source": str(path)}).recipe.tokenizer
    assert (free.kind, free.vocab_size) == ("byte", None)
    merged = picked(1, **{"data.source": str(path), "tokenizer.kind": "bpe"}).recipe.tokenizer
    assert merged.kind == "bpe"
    assert 258 < (merged.vocab_size or 0) < 512
    with pytest.raises(InputError, match=r"tokenizer\.vocab_size: 1024 given, but the corpus supports"):
        picked(1, **{"data.source": str(path), "tokenizer.vocab_size": 1024})


def test_the_machine_is_measured_for_a_part_of_the_time_at_most(picked: Callable[..., Pick]) -> None:
    probes = picked(1).recipe, sizes(512, {})[0]
    assert measuring.measure_speed(probes, probes, time.monotonic()).tokens_per_step > 0
    with pytest.raises(InputError, match="reading and measuring left 4 s; give more"):
        picking._training_seconds(0.1, 4.0)


def test_a_named_recipe_is_kept_whole(picked: Callable[..., Pick]) -> None:
    found = picked(1, "threelin", **{"training.batch_size": 2}).recipe
    assert (found.model.hidden_size, found.model.num_layers, found.tokenizer.vocab_size) == (128, 6, 2048)
    named = load_recipe("threelin").optimizer
    assert (found.optimizer.name, found.optimizer.learning_rate) == (named.name, named.learning_rate)
    assert found.training.batch_size == 2
    assert found.training.minutes == 1


def test_a_long_run_has_larger_steps(picked: Callable[..., Pick], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    for least in (10**12, 1):
        monkeypatch.setattr(picking, "LONG_TOKENS", least)
        recipe = picked(1, **{"model.architecture": "elita"}).recipe
        steps.append((recipe.training.batch_size, recipe.model.n_positions, recipe.optimizer.learning_rate))
    assert steps == [(4, 256, 0.004), (8, 512, 0.008)]
    kept = picked(1, **{"training.batch_size": 3, "optimizer.learning_rate": 0.01}).recipe
    assert (kept.training.batch_size, kept.model.n_positions, kept.optimizer.learning_rate) == (3, 512, 0.01)


def test_a_text_that_is_learned_by_heart_gets_a_stronger_weight_decay(
    picked: Callable[..., Pick], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of TScale, unless one is given; in larger steps so much more of it that the weights decay alike over a text."""
    small = {"model.hidden_size": 64, "model.num_layers": 4}  # 160 thousand parameters, for 100 kB of text
    assert picked(20, **small).recipe.optimizer.weight_decay == 0.05
    assert picked(20, **small, **{"optimizer.weight_decay": 0.2}).recipe.optimizer.weight_decay == 0.2
    assert picked(20, **small, **{"model.architecture": "elita"}).recipe.optimizer.weight_decay == 0.01
    monkeypatch.setattr(picking, "measure_speed", lambda small, large, until: Speed(0.5, 1.2e-11, 1024))
    assert picked(1, **small).recipe.optimizer.weight_decay == 0.01  # a part of the text
    rates = [recipe_values("tscale", Size(64, 4, 512), 100, step, by_heart=2.0) for step in ((4, 256), (8, 512))]
    short, long = (values["optimizer.learning_rate"] * values["optimizer.weight_decay"] for values in rates)
    assert long / (8 * 512) == pytest.approx(short / (4 * 256))


def test_a_small_text_ends_early_and_says_so(picked: Callable[..., Pick]) -> None:
    """By its passes: a speed that was measured too low would let it read more of them in the same time."""
    found = picked(600)
    plan, positions = found.recipe.training, found.recipe.model.n_positions
    assert plan.minutes == 600
    assert plan.num_steps * plan.batch_size * positions == pytest.approx(found.choice.tokens, rel=0.02)
    assert "passes over this text would overfit: the run ends after them, in about" in found.remarks[0]


def test_a_run_that_turns_out_faster_than_measured_reads_no_more_than_helps(
    picked: Callable[..., Pick], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"model.hidden_size": 64, "model.num_layers": 4}
    whole = picked(600, **small)
    monkeypatch.setattr(picking, "measure_speed", lambda small, large, until: Speed(0.5, 1.2e-11, 1024))
    part = picked(1, **small)
    assert part.choice.tokens < 0.2 * whole.choice.tokens
    assert part.recipe.training.max_steps == whole.recipe.training.max_steps
    assert not any("passes" in remark for remark in part.remarks)


def test_what_no_run_was_measured_for_is_said(picked: Callable[..., Pick], monkeypatch: pytest.MonkeyPatch) -> None:
    law = dataclasses.replace(shipped_law(), most_flops=1.0, fewest_tokens=10**12)
    monkeypatch.setattr(picking, "shipped_law", lambda: law)
    remarks = " ".join(picked(1, **{"model.architecture": "leap"}).remarks)
    assert "The expectation goes beyond the measured runs" in remarks
    assert "The expectation is a guess: this run reads" in remarks
    assert "No measured run has the architecture leap; expected is what tscale would reach." in remarks


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data.source": "task:mqar"}, "data.source: task:mqar is a task, but --minutes picks a model for a text"),
        ({"model.hidden_size": 30, "model.options.head_size": 32}, "head_size: 32 given, but it must divide"),
        ({"data.source": "nowhere.txt"}, "nowhere.txt"),
        ({"model.architecture": "nothing"}, "model.architecture: 'nothing' is not known"),
        ({"training.lora.rank": 4}, "training.lora: given without model.start"),
    ],
)
def test_what_cannot_be_completed_is_refused(
    picked: Callable[..., Pick], changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        picked(20, **changes)


def test_bytes_are_counted_as_far_as_they_matter(text_file: Path) -> None:
    assert count_bytes(DataRecipe(source=str(text_file))) == text_file.stat().st_size


@pytest.mark.slow
def test_the_whole_command_ends_on_time(text_file: Path, tmp_path: Path) -> None:
    command = [*PYTHON, "-m", "multilin", "train", "--minutes", "3", "--data.source", str(text_file)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    begin = time.monotonic()
    printed = run([*command, "--output", str(tmp_path / "run")], environment=environment)
    taken, plan = time.monotonic() - begin, load_recipe(tmp_path / "run").training
    steps = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert taken < 60 * 3 * 1.05 + 10  # Python starts and ends slowly on a busy machine
    assert steps == plan.max_steps or taken > 60 * 3 * 0.95  # after its passes, or after its time
    assert "bits per byte (forecast " in printed
    assert json.loads((tmp_path / "run" / "expected.json").read_text())["bits_per_byte"] > 0
