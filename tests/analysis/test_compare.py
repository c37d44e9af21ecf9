"""A comparison's reports hold the figures of its runs, and say of them what may be said."""

import dataclasses
import itertools
import json
import random
import re
import shlex
import statistics
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from multilin.analysis.compare import measure
from multilin.analysis.compare import rows as planning
from multilin.analysis.compare import sweep as sweeps
from multilin.analysis.compare.answers import cost_sentence, remarks_on
from multilin.analysis.compare.record import (
    FAILED,
    FINISHED,
    Comparison,
    Point,
    RowRecord,
    RunRecord,
    further_choice,
    ranking,
)
from multilin.analysis.compare.report import as_html, as_json, as_markdown, dots, table
from multilin.analysis.compare.run import compare
from multilin.analysis.compare.statistics import Spread, is_above_chance, pairwise, spread
from multilin.analysis.compare.sweep import Budget, Sweep, builtin_sweep, changed, find_sweep, nested
from multilin.analysis.compare.verdict import (
    caveats,
    cost_to_reach,
    headline,
    verdict_cell,
    verdict_on,
    verdict_sentences,
)
from multilin.cli.compare import CompareArguments, _next, print_comparison
from multilin.data.packed_text import PackedText
from multilin.errors import InputError
from multilin.training import loop
from multilin.training.losses import Evaluation, evaluate
from multilin.training.outcomes import TrainingInterrupted
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import Recipe, load_recipe, save_recipe

pytestmark = pytest.mark.filterwarnings("ignore:.*reads across document borders")

WORDS = ("the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "saw", "big", "green", "house")
BASE = {
    "model": {"hidden_size": 16, "num_layers": 1, "n_positions": 16},
    "tokenizer": {"kind": "byte", "vocab_size": None},
    "schedule.warmup_steps": 2,
    "training": {
        "batch_size": 2,
        "eval_max_tokens": 200,
        "log_every_steps": 3,
        "eval_every_steps": 4,
        "save_every_steps": 4,
    },
}
STEPS = 10
FAILING = {"optimizer.learning_rate": 1e3, "optimizer.weight_decay": 1e6}  # every step multiplies weights by -1e9


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a text; prepared texts go there too, and decoding is measured after short texts."""
    folder = tmp_path_factory.mktemp("compare")
    draw = random.Random(0)
    documents = [{"text": " ".join(draw.choices(WORDS, k=60))} for _ in range(60)]
    (folder / "text.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(measure, "CONTEXTS", (8, 40))
        patch.setattr(measure, "SAMPLE_TOKENS", 5)
        patch.setattr(measure, "TOKENS_PER_TURN", 3)
        patch.setattr(measure, "TURNS", 1)
        yield folder
    torch.set_num_threads(threads)


def a_sweep(sandbox: Path, name: str, **fields: Any) -> Sweep:
    base = BASE | {"data.source": str(sandbox / "text.jsonl")}
    return Sweep(
        **{
            "title": "Cats & <dogs>",
            "base": base,
            "rows": {"elita": {}, "gpt2": {}},
            "seeds": [0, 1],
            "budget": Budget(tokens=STEPS * 32),
            "output": str(sandbox / name),
        }
        | fields
    )


@pytest.fixture(scope="module")
def found(sandbox: Path) -> Comparison:
    rows = {"elita": {}, "gpt2": {}, "broken": {"model.architecture": "llama", **FAILING}}
    return compare(a_sweep(sandbox, "runs", rows=rows))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_figure_is_that_of_the_runs_metrics(found: Comparison, sandbox: Path) -> None:
    written = json.loads((sandbox / "runs" / "comparison.json").read_text())
    assert [row["name"] for row in written["rows"]] == ["elita", "gpt2", "broken"]
    for row in written["rows"][:2]:
        finals = []
        for run in row["runs"]:
            lines = lines_of(sandbox / "runs" / run["folder"])
            validated = [line for line in lines if "validation_loss" in line]
            assert [p["step"] for p in run["course"]] == [4, 8, 10]
            for name, metric in (("tokens", "tokens"), ("loss", "validation_loss")):
                assert [p[name] for p in run["course"]] == [line[metric] for line in validated]
            bits = [line["validation_bits_per_byte"] for line in validated]
            assert [p["bits_per_byte"] for p in run["course"]] == bits
            assert run["course"][-1]["tokens"] == STEPS * 32
            assert run["course"][-1]["flops"] == STEPS * 32 * row["flops_per_token"]
            speeds = [line["tokens_per_second"] for line in lines]
            assert run["tokens_per_second"] == statistics.median(speeds[1:])
            # Lines stand at steps 3, 4, 6, 8, 9 and 10; the first is taken at the median speed.
            sizes = [96, 32, 64, 64, 32, 32]
            seconds = sum(n / s for n, s in zip(sizes, [statistics.median(speeds[1:]), *speeds[1:]], strict=True))
            assert run["course"][-1]["seconds"] == pytest.approx(seconds, abs=1e-3)
            finals.append(bits[-1])
        assert row["score"] == {
            "mean": statistics.fmean(finals), "deviation": statistics.stdev(finals), "count": 2,
        }  # fmt: skip


def test_html_and_markdown_show_the_same_figures(found: Comparison, sandbox: Path) -> None:
    html = (sandbox / "runs" / "comparison.html").read_text()
    markdown = (sandbox / "runs" / "comparison.md").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])
    assert [row["name"] for row in data["rows"]] == found.order
    for shown in data["rows"]:
        row = found.row(shown["name"])
        assert shown["score"] == row.score.mean
        finals = [run.last.bits_per_byte for run in row.runs]
        last = shown["course"][-1]
        assert (last["bits_per_byte"], last["low"], last["high"]) == (row.score.mean, min(finals), max(finals))
        text = f"{row.score.mean:.3f} ± {row.score.deviation:.3f}"
        assert f"<td>{text}</td>" in html
        assert f"| {text} |" in markdown
        assert [d["state_bytes"] for d in shown["decoding"]] == [d.state_bytes for d in row.decoding]
    for run in (run for row in found.rows for run in row.finished):
        assert f'<th scope="row">{run.folder}</th>' in html
        assert f"{run.last.bits_per_byte:.4f}" in html
        assert f"{run.last.bits_per_byte:.4f}" in markdown


def test_the_html_needs_nothing_else(found: Comparison, sandbox: Path) -> None:
    html = (sandbox / "runs" / "comparison.html").read_text()
    assert re.findall(r"(?:src|href)\s*=|@import|url\(", html) == []
    assert html.count("<script") == 3


def test_samples_are_text_to_the_browser(found: Comparison) -> None:
    evil = "</script><script>alert(1)</script><img src=x>"
    rows = [dataclasses.replace(row, sample=evil) for row in found.rows]
    html = as_html(dataclasses.replace(found, rows=rows, prompt=evil, title=evil))
    assert "alert(1)</script>" not in html
    assert "<img" not in html
    assert "&lt;img src=x&gt;" in html


def test_a_failed_row_is_shown_as_failed_and_the_rest_stands(found: Comparison, sandbox: Path) -> None:
    broken = found.row("broken")
    assert broken.status == "failed"
    assert "is nan" in broken.runs[0].failure
    assert sorted(found.order) == ["elita", "gpt2"]
    assert "<strong>broken</strong> failed: the " in (sandbox / "runs" / "comparison.html").read_text()
    assert any(remark == "No figures for broken: all runs failed." for remark in found.remarks)


def test_the_state_of_gpt2_grows_and_that_of_elita_does_not(found: Comparison) -> None:
    states = {row.name: [d.state_bytes for d in row.decoding] for row in found.rows}
    assert states["elita"][0] == states["elita"][1]
    # Keys and values, 16 numbers of 4 bytes each, of 8 and of 40 tokens.
    assert states["gpt2"] == [2 * 16 * 4 * 8, 2 * 16 * 4 * 40]
    assert found.row("gpt2").memory == 2 * 16 * 4 * 16
    assert "the state of gpt2 grows with the sequence" in cost_sentence(found)


def test_finished_runs_are_not_trained_again(found: Comparison, sandbox: Path) -> None:
    files = [path for row in ("elita", "gpt2") for path in sandbox.glob(f"runs/{row}-s*/metrics.jsonl")]
    before = [path.stat().st_mtime_ns for path in files]
    rows = {"elita": {}, "gpt2": {}}
    again = compare(a_sweep(sandbox, "runs", rows=rows))
    assert [path.stat().st_mtime_ns for path in files] == before
    assert again.row("elita").runs == found.row("elita").runs


def test_another_sweep_in_the_same_folder_is_refused(found: Comparison, sandbox: Path) -> None:
    with pytest.raises(
        InputError, match=r"elita-s0 holds a run with training\.max_steps 10, but this comparison has 20"
    ):
        compare(a_sweep(sandbox, "runs", budget=Budget(tokens=640)))


def test_a_folder_in_the_text_is_refused_before_anything_is_written_there(sandbox: Path) -> None:
    folder = sandbox / "texts"
    folder.mkdir()
    (folder / "text.jsonl").write_text((sandbox / "text.jsonl").read_text())
    with pytest.raises(InputError, match=r"output: .* lies in data\.source, .*texts, whose files are all read as text"):
        compare(a_sweep(sandbox, "texts/compared", base=BASE | {"data.source": str(folder)}))
    assert [path.name for path in folder.iterdir()] == ["text.jsonl"]


def test_a_stopped_comparison_goes_on(found: Comparison, sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the second run, after a checkpoint, it ends with the very figures of one that was not stopped."""
    begun, set_rates = [], loop._set_rates

    def stop_there(run: Any) -> float:
        begun.append(run.step)
        if len(begun) == STEPS + 8:
            raise KeyboardInterrupt
        return set_rates(run)

    sweep = a_sweep(sandbox, "stopped", rows={"elita": {}})
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_set_rates", stop_there)
        with pytest.raises(KeyboardInterrupt):
            compare(sweep)
        begun.clear()
        patch.setattr(loop, "_set_rates", lambda run: (begun.append(run.step), set_rates(run))[1])
        again = compare(sweep)
    assert begun[0] == 4  # where the last checkpoint was saved
    for one, other in zip(again.row("elita").runs, found.row("elita").runs, strict=True):
        assert [p.loss for p in one.course] == [p.loss for p in other.course]


@pytest.mark.parametrize(
    ("overwrite", "command"), [(False, "same command"), (True, "same command without --overwrite")]
)
def test_a_stopped_comparison_says_how_it_goes_on(
    sandbox: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool, command: str
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise TrainingInterrupted("stopped after step 5 of 10; the checkpoint is saved", 2)

    monkeypatch.setattr("multilin.analysis.compare.run.train", interrupted)
    with pytest.raises(TrainingInterrupted, match=f"elita-s0 stopped after step 5 of 10; the {command} resumes there"):
        compare(a_sweep(sandbox, "interrupted", rows={"elita": {}}), overwrite=overwrite)


def test_runs_of_another_sweep_do_not_stand_in_the_way_after_a_stop(
    sandbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(recipe: Recipe, **_: Any) -> None:
        Path(recipe.output).mkdir()
        save_recipe(recipe, Path(recipe.output, "recipe.yaml"))
        Path(recipe.output, "notes.txt").touch()
        raise InputError("not trained")

    def interrupted(*_: Any, **__: Any) -> None:
        raise TrainingInterrupted("stopped after step 5 of 20; the checkpoint is saved", 2)

    monkeypatch.setattr("multilin.analysis.compare.run.train", begun)
    said: list[str] = []
    progress = TrainingProgress()
    progress.message = said.append
    # Of two stages the second depends on the best of the first: here the own value of both is tried once.
    stages = [{"optimizer.learning_rate": [1e-3]}, {"optimizer.weight_decay": ["x1", 0.5]}]
    compare(a_sweep(sandbox, "replaced", stages=stages), progress=progress)
    assert [text.split("]")[0] for text in said if text.startswith("[")][-2:] == ["[5/6", "[6/6"]
    monkeypatch.setattr("multilin.analysis.compare.run.train", interrupted)
    longer = a_sweep(sandbox, "replaced", rows={"elita": {}}, budget=Budget(tokens=640), stages=stages)
    for overwrite in (True, False):
        with pytest.raises(TrainingInterrupted):
            compare(longer, overwrite=overwrite)
    left = {path.name for path in (sandbox / "replaced").glob("elita-s*/*")}
    assert left == {"notes.txt"}
    assert len(list((sandbox / "replaced").glob("gpt2-s*/recipe.yaml"))) == 3  # of no row of the second


def test_a_stage_is_tried_on_one_seed_and_the_best_trained_with_all(sandbox: Path) -> None:
    stages = [{"optimizer.learning_rate": [1e-6, 1e-2]}]
    found = compare(a_sweep(sandbox, "stage", rows={"elita": {}}, stages=stages))
    folders = {path.name for path in (sandbox / "stage").iterdir() if path.is_dir() and path.suffix != ".checkpoints"}
    assert folders == {"elita-s0-lr1e-06", "elita-s0-lr0.01", "elita-s1-lr0.01"}
    row = found.row("elita")
    tried = {run.choice["optimizer.learning_rate"]: run.last.bits_per_byte for run in row.tuning}
    assert tried[1e-2] < tried[1e-6]
    assert row.choice == {"optimizer.learning_rate": 1e-2}
    assert row.recipe["optimizer"]["learning_rate"] == 1e-2
    assert [run.folder for run in row.runs] == ["elita-s0-lr0.01", "elita-s1-lr0.01"]
    assert any("is the lowest or highest tried" in remark for remark in found.remarks)


class Ahead(TrainingProgress):
    """Asks before every run how long the others take after one of a second."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def ahead(self, seconds: Callable[[float], float]) -> None:
        self.seconds.append(seconds(1.0))


def test_the_time_of_the_runs_that_follow_is_estimated(sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=itertools.count(0, 5).__next__)
    monkeypatch.setattr("multilin.analysis.compare.run.time", clock)
    stages, trials = [{"optimizer.learning_rate": [1e-6, 1e-2]}], 2 * 0.5  # of half of a run
    sweep = dataclasses.replace(a_sweep(sandbox, "ahead", stages=stages, seeds=[0, 1]), trial_share=0.5)
    progress = Ahead()
    found = compare(sweep, progress=progress)
    ratio = found.row("gpt2").flops_per_token / found.row("elita").flops_per_token
    of_elita, of_gpt2 = [trials + 2 - 0.5, trials + 2 - 1], trials + 2
    # The first run, of half the steps, takes 1 s, so that a whole one takes 2 s; then one has taken 5 s.
    assert progress.seconds[0] == pytest.approx(2 * (of_elita[0] + of_gpt2 * ratio))
    assert progress.seconds[1] == pytest.approx(10 * of_elita[1] + 2 * of_gpt2 * ratio)
    assert progress.seconds[-2:] == pytest.approx([5, 0])
    assert len(progress.seconds) == 8
    compare(sweep, progress=(again := Ahead()))
    assert again.seconds == []  # nothing is trained


def test_trials_have_their_share_of_the_budget(sandbox: Path) -> None:
    stages = [{"optimizer.learning_rate": [1e-6, 1e-2]}]
    sweep = dataclasses.replace(a_sweep(sandbox, "share", rows={"elita": {}}, stages=stages), trial_share=0.5)
    found = compare(sweep)
    (row,) = found.rows
    assert [run.last.step for run in row.tuning] == [row.max_steps // 2] * 2
    assert [run.last.step for run in row.runs] == [row.max_steps] * len(sweep.seeds)
    assert row.choice == {"optimizer.learning_rate": 1e-2}
    assert len({run.folder for run in row.all_runs}) == 2 + len(sweep.seeds)
    assert any("2 trials of 1/2 of the steps each" in remark for remark in found.remarks)


def test_a_stage_goes_on_where_its_last_value_is_the_best(sandbox: Path) -> None:
    stages = [{"optimizer.learning_rate": [1e-5, 1e-4]}]
    sweep = dataclasses.replace(a_sweep(sandbox, "further", rows={"elita": {}}, seeds=[0], stages=stages), extend=2)
    found = compare(sweep)
    assert [run.choice["optimizer.learning_rate"] for run in found.row("elita").tuning] == [1e-5, 1e-4, 1e-3, 1e-2]
    assert any("further values were tried: 0.001, 0.01 for elita" in remark for remark in found.remarks)
    assert any(
        "The best optimizer.learning_rate of elita is the lowest or highest" in remark for remark in found.remarks
    )


STAGES = [
    {"optimizer.learning_rate": ["x0.1", "x1", "x3"]},
    {"model.hidden_size": [16, 24]},
    {"training.batch_size": [4]},
]


def test_stages_give_every_row_the_same_trials_and_never_read_the_final_half(
    sandbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validated, scored = [], []

    def watch(seen: list[tuple[int, int]]) -> Callable[..., Evaluation]:
        def evaluate_and_note(model: Any, packed: PackedText, **options: Any) -> Evaluation:
            seen.append((packed.num_documents, hash(packed.tokens.tobytes())))
            return evaluate(model, packed, **options)

        return evaluate_and_note

    monkeypatch.setattr("multilin.training.loop.evaluate", watch(validated))
    monkeypatch.setattr("multilin.analysis.compare.measure.evaluate", watch(scored))
    sweep = a_sweep(sandbox, "stages", stages=STAGES, final_half=True, seeds=[0])
    sweep = dataclasses.replace(sweep, base=sweep.base | {"data.validation_fraction": 0.2})
    found = compare(sweep)
    (tuning,), (final,) = set(validated), set(scored)
    assert (tuning[0], final[0]) == (6, 6)  # of twelve documents
    assert tuning != final
    for row in found.rows:
        sizes = [tuple(run.choice.values()) for run in row.tuning]
        assert len(sizes) == len(set(sizes)) == 3 + 1 + 1
        rates = [rate for rate, *_ in sizes[:3]]
        assert rates[::2] == pytest.approx([0.1 * rates[1], 3 * rates[1]])
        best = min(row.tuning, key=lambda run: run.last.bits_per_byte)
        assert row.choice == best.choice
        assert row.recipe["model"]["hidden_size"] == row.choice["model.hidden_size"]
        assert [run.final.bits_per_byte for run in row.runs] != [run.last.bits_per_byte for run in row.runs]
        assert row.score == spread([run.final.bits_per_byte for run in row.runs])
        for place, number in enumerate((3, 4)):  # the first of a stage changes one field of the best so far
            best = min(row.tuning[:number], key=lambda run: run.last.bits_per_byte).choice
            new = row.tuning[number].choice
            assert [name for name in new if new[name] != best[name]] == list(STAGES[place + 1])
    assert any("(5 trials each)" in remark for remark in found.remarks)
    text = (sandbox / "stages" / "comparison.md").read_text()
    assert all(f"{row.score.mean:.3f}" in text for row in found.rows)
    assert compare(sweep).rows[0].tuning == found.rows[0].tuning  # kept, not trained again


@pytest.mark.filterwarnings("ignore:the loss or the gradient of step")
def test_a_model_that_ends_as_nan_has_failed_and_wins_nothing(sandbox: Path) -> None:
    """`nonfinite: skip` goes on after such a loss, and the last step may be the one that spoils the weights."""
    spoiled = {"optimizer.nonfinite": "skip", "optimizer.clip_norm": 0.0, **FAILING}
    rows = {"spoiled": {"model.architecture": "mingru", **spoiled}, "elita": {}}
    found = compare(a_sweep(sandbox, "spoiled", rows=rows))
    assert [row.status for row in found.rows] == [FAILED, FINISHED]
    assert found.order == ["elita"]
    json.loads((sandbox / "spoiled" / "comparison.json").read_text(), parse_constant=pytest.fail)
    stages = [{"optimizer.weight_decay": [FAILING["optimizer.weight_decay"], 0.0]}]
    row = {"model.architecture": "mingru", "optimizer.nonfinite": "skip", "optimizer.learning_rate": 1e3}
    (tuned,) = compare(a_sweep(sandbox, "spoiled-stages", rows={"row": row}, seeds=[0], stages=stages)).rows
    assert [run.status for run in tuned.tuning] == [FAILED, FINISHED]
    assert tuned.choice == {"optimizer.weight_decay": 0.0}


def test_a_sample_is_as_long_as_the_model_can_read(sandbox: Path, found: Comparison) -> None:
    base = BASE | {"data.source": str(sandbox / "text.jsonl"), "model": {**BASE["model"], "n_positions": 8}}
    short = compare(a_sweep(sandbox, "short", rows={"gpt2": {}, "elita": {}}, base=base, seeds=[0]))
    assert [row.sample is None for row in short.rows] == [True, False]
    assert as_html(short)


def test_a_choice_that_cannot_be_trained_has_failed(sandbox: Path) -> None:
    """A width that suits the first number of heads, not the second."""
    stages = [{"model.options": [{"num_heads": 4}, {"num_heads": 8}]}, {"model.hidden_size": [16, 12]}]
    base = BASE | {"data.source": str(sandbox / "text.jsonl"), "model.options": {"num_heads": 4}}
    (row,) = compare(a_sweep(sandbox, "unfit", rows={"gpt2": {}}, base=base, seeds=[0], stages=stages)).rows
    assert len(row.tuning) == 3
    last = row.tuning[-1]
    if row.choice["model.options"]["num_heads"] == 8:
        assert last.status == FAILED
        assert "num_heads: 8 given" in last.failure


def tuning_run(rate: float, bits_per_byte: float | None) -> RunRecord:
    course = [] if bits_per_byte is None else [Point(1, 1, 1.0, 1.0, 1.0, bits_per_byte)]
    return RunRecord(0, "run", {"rate": rate}, FINISHED if course else FAILED, course=course)


@pytest.mark.parametrize(
    ("tried", "further"),
    [
        ({0.1: 3.0, 0.2: 2.0}, 0.4),
        ({0.2: 2.0, 0.1: 3.0, 0.4: 2.5}, None),
        ({0.3: 2.0, 0.9: 3.0}, 0.1),
        ({0.1: 3.0, 0.2: 2.0, 0.4: None}, None),  # one that failed was tried too
        ({0.1: None, 0.2: None}, None),
        ({0.1: 3.0}, None),  # `x1` and the same rate as a number
        ({3: 3.0, 5: 2.0}, 8),  # a batch of 25 / 3 texts would be refused
        ({1: 2.0, 2: 3.0}, 0.5),
    ],
)
def test_what_is_tried_next_lies_beyond_the_best(tried: dict[float, float | None], further: float | None) -> None:
    found = further_choice([tuning_run(*pair) for pair in tried.items()], "bits_per_byte")
    assert found == (None if further is None else {"rate": further})
    assert found is None or type(found["rate"]) is type(further)


def test_other_tokenizers_are_compared_by_bytes_and_one_seed_says_nothing(sandbox: Path) -> None:
    rows = {
        "elita": {},
        "words": {"model.architecture": "elita", "tokenizer": {"kind": "bpe", "vocab_size": 280}},
    }
    found = compare(a_sweep(sandbox, "tokenizers", rows=rows, seeds=[3]))
    assert not found.one_tokenizer
    assert found.measure == "bits_per_byte"
    assert any("losses per token cannot be compared; bits per byte can" in remark for remark in found.remarks)
    assert [d.p for d in found.differences] == [None]
    assert ": cannot say whether this is noise." in verdict_sentences(found)
    assert "the best other row; the sweep has no Transformer" in verdict_sentences(found)
    assert ": cannot say |" in (sandbox / "tokenizers" / "comparison.md").read_text()


@pytest.mark.parametrize("budget", [Budget(tokens=20 * 32), Budget(seconds=0.2)])
def test_a_row_that_the_builtin_sweep_lacks_has_trials_of_its_rate(
    sandbox: Path, monkeypatch: pytest.MonkeyPatch, budget: Budget
) -> None:
    def lacking(task: str | None = None) -> Sweep:
        sweep = builtin_sweep(task)
        return dataclasses.replace(sweep, rows={name: row for name, row in sweep.rows.items() if name != "elita"})

    for module in (sweeps, planning):
        monkeypatch.setattr(module, "builtin_sweep", lacking)
    monkeypatch.setattr(planning, "MEASURED_STEPS", 8)
    monkeypatch.setattr(planning, "MEASURED_TURNS", 1)
    assert find_sweep(["mingru", "gpt2"]).stages == []
    sweep, values = find_sweep(["elita", "gpt2"]), nested(BASE | {"data.source": str(sandbox / "text.jsonl")}, "base")
    output = str(sandbox / f"lacking-{next(iter(budget.given))}")
    given = {"budget": budget, "num_seeds": 1, "task": None}
    sweep = changed(sweep, changes={**values, "output": output}, **given)
    said: list[str] = []
    progress = TrainingProgress()
    progress.message = said.append
    elita, gpt2 = (found := compare(sweep, progress=progress)).rows
    line = "elita: learning rate from 3 trials of 1/4 of the steps (0.002, 0.004, 0.008), then up to 2 more if the best"
    assert any(text.startswith(line) for text in said)
    assert 3 <= len(elita.tuning) <= 5
    assert {run.last.step for run in elita.tuning} == {round(elita.max_steps / 4)}
    assert (gpt2.tuning, gpt2.choice) == ([], {})
    assert gpt2.recipe["optimizer"]["learning_rate"] == 2e-3
    if budget.tokens:
        sentence = f"chosen from {len(elita.tuning)} trials of 1/4 of the steps); gpt2 kept the rates of the built-in"
        assert any(sentence in text for text in caveats(found))
    fixed = changed(sweep, changes={"optimizer.learning_rate": 0.1}, **given)
    assert all(fixed.stages_of(name) == [] for name in fixed.rows)


def test_adapters_that_a_row_lacks_are_not_tuned(sandbox: Path) -> None:
    sweep = a_sweep(sandbox, "adapters", rows={"elita": {}}, stages=[{"training.lora.rank": [2, 4]}])
    with pytest.raises(InputError, match=r"^rows.elita: stages.training.lora.rank: given, but the row has no adapters"):
        compare(sweep)


def test_a_warm_up_longer_than_a_trial_is_refused(sandbox: Path) -> None:
    sweep = a_sweep(sandbox, "warm-up", rows={"elita": {}}, stages=[{"schedule.warmup_steps": [1, 500]}])
    with pytest.raises(InputError, match=r"schedule\.warmup_steps: 500 given, but a trial has \d+ steps"):
        compare(sweep)


def test_the_warm_up_takes_at_most_half_of_a_trial(sandbox: Path) -> None:
    row = {"schedule.warmup_steps": 6, "model.num_layers": 1}
    stages = [{"optimizer.learning_rate": ["x0.5", "x1"]}]
    sweep = a_sweep(sandbox, "short", rows={"elita": row}, seeds=[0], stages=stages, trial_share=0.4)
    (elita,) = compare(sweep).rows
    folders = [sandbox / "short" / run.folder for run in (*elita.tuning, *elita.runs)]
    warm_ups = [load_recipe(str(folder)).schedule.warmup_steps for folder in folders]
    assert warm_ups == [2, 2, 6]  # of 4, 4 and 10 steps


def test_a_task_is_judged_by_its_answers(sandbox: Path) -> None:
    task = "copy?num_copied=4&num_symbols=4"
    rows = {"elita": {}, "llama": {}}
    found = compare(a_sweep(sandbox, "task", task=task, rows=rows, seeds=[0]))
    for row in found.rows:
        lines = lines_of(sandbox / "task" / row.runs[0].folder)
        assert row.runs[0].last.accuracy == lines[-1]["validation_accuracy"]
        assert row.score.mean == pytest.approx(statistics.fmean(run.last.accuracy for run in row.runs))
        assert row.sample is None
    best, worst = (found.row(name).score.mean for name in found.order)
    assert best >= worst
    html = (sandbox / "task" / "comparison.html").read_text()
    assert 'id="memory"' in html
    assert f"{100 * best:.1f} %" in html


SEEDS = {
    "a": [1.0, 1.2, 1.1], "b": [1.3, 1.5, 1.35], "c": [3.1, 3.2, 3.0, 3.3, 3.15], "d": [3.0, 3.01, 2.99],
}  # fmt: skip


@pytest.mark.parametrize(("better", "worse"), [("a", "b"), ("d", "c"), ("b", "d")])
def test_p_and_interval_are_those_of_welchs_test(better: str, worse: str) -> None:
    expected = stats.ttest_ind(SEEDS[worse], SEEDS[better], equal_var=False)
    (found,) = pairwise({name: spread(SEEDS[name]) for name in (better, worse)}, "bits_per_byte")
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval(0.95)), rel=1e-9)
    lower = 1 - statistics.fmean(SEEDS[better]) / statistics.fmean(SEEDS[worse])
    assert found.share == pytest.approx(lower)


def test_p_is_corrected_for_the_number_of_pairs() -> None:
    found = pairwise({name: spread(SEEDS[name]) for name in "abdc"}, "bits_per_byte")
    single = [stats.ttest_ind(SEEDS[d.one], SEEDS[d.other], equal_var=False).pvalue for d in found]
    order, corrected = sorted(range(6), key=lambda place: single[place]), {}
    for rank, place in enumerate(order):  # Holm's method as in his paper: no p is below one that is more significant
        corrected[place] = min(1.0, max((6 - earlier) * single[order[earlier]] for earlier in range(rank + 1)))
    assert [d.p for d in found] == pytest.approx([corrected[place] for place in range(6)])


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (Spread(2.0, None, 1), Spread(1.0, 0.1, 3), "too few seeds"),
        (Spread(2.0, 0.1, 2), Spread(1.0, 0.1, 9), "too few seeds"),
        (Spread(2.0, 0.0, 2), Spread(1.0, 0.0, 2), "too few seeds"),
        (Spread(2.0, 0.0, 3), Spread(1.0, 0.0, 3), "all seeds of a row have"),
        (Spread(2.0, 0.1, 3), Spread(1.0, 0.0, 3), "all seeds of a row have"),
    ],
)
def test_no_p_is_given_for_few_seeds_or_without_spread(one: Spread, other: Spread, reason: str) -> None:
    (found,) = pairwise({"better": other, "worse": one}, "bits_per_byte")
    assert (found.p, found.interval, found.within_noise) == (None, None, None)
    assert reason in found.unknown


@pytest.mark.parametrize(
    ("share", "is_above"), [(0.5, False), (0.45, False), (0.53, False), (0.56, True), (1.0, True), (0.0, False)]
)
def test_accuracy_is_above_chance_where_guessing_hardly_has_so_much(share: float, is_above: bool) -> None:
    """Of 781 answers of a bit; the binomial test of SciPy agrees."""
    assert is_above_chance(share, 0.5, 781, 10) == is_above
    p = stats.binomtest(round(781 * share), 781, 0.5, alternative="greater").pvalue
    assert is_above == (p <= 0.05 / 10)


def made_up(found: Comparison, elita: list[list[float]], gpt2: list[list[float]]) -> Comparison:
    """The comparison with other scores at its validations, seed by seed; gpt2 takes twice as long."""
    rows, measure = [], found.measure
    for factor, courses in ((1, elita), (2, gpt2)):
        row = found.row("elita" if factor == 1 else "gpt2")
        runs = []
        for seed, course in enumerate(courses):
            points = [
                dataclasses.replace(point, seconds=factor * point.step / 2, **{measure: score})
                for point, score in zip(row.runs[0].course, course, strict=True)
            ]
            runs.append(dataclasses.replace(row.runs[0], seed=seed, course=points))
        score = spread([course[-1] for course in courses])
        rows.append(dataclasses.replace(row, runs=runs, score=score))
    return ranked(dataclasses.replace(found, rows=rows, seeds=list(range(len(elita)))))


def ranked(comparison: Comparison) -> Comparison:
    """The comparison as its rows and its budget would have it."""
    found = ranking(comparison.rows, comparison.measure, comparison.budget, comparison.chance)
    return dataclasses.replace(comparison, **found._asdict())


CLEAR = [[4, 3, 2.0], [4, 3, 2.01], [4, 3, 1.99]], [[5, 4, 2.5], [5, 4, 2.51], [5, 4, 2.49]]
NOISY = [[4, 3, 2.0], [4, 3, 2.2], [4, 3, 2.0]], [[5, 4, 2.1], [5, 4, 2.2], [5, 4, 2.0]]


def test_the_verdict_says_what_the_figures_do(found: Comparison) -> None:
    clear = made_up(found, *CLEAR)
    assert clear.order == ["elita", "gpt2"]
    # Of standard deviations of 0.01 and four degrees of freedom: 0.5 +- 2.776 sqrt(2 * 0.01^2 / 3). elita ends after
    # 5 s, when gpt2 is between its validations after 4 and 8 s, at 5 - 1/4. From 3 after 256 tokens to 2 after 320,
    # elita passes 2.5 after 288.
    flops = {row.name: row.flops_per_token for row in clear.rows}
    ends = 320 * min(flops.values())
    elita, gpt2 = (
        np.interp(ends, [tokens * flops[name] for tokens in (128, 256, 320)], course[0])
        for name, course in zip(("elita", "gpt2"), CLEAR, strict=True)
    )
    assert cost_to_reach(clear.row("elita"), 2.5, "tokens", "bits_per_byte") == pytest.approx(288)
    assert cost_to_reach(clear.row("elita"), 1.9, "tokens", "bits_per_byte") is None
    assert verdict_sentences(clear) == (
        "elita reaches 2.000 bits per byte, 20.0 % below gpt2's 2.500, after 320 training tokens each (95 % interval "
        "19.1 to 20.9 %, 3 seeds): sure (p < 0.001). "
        f"At equal training FLOPs it is {100 - 100 * elita / gpt2:.1f} % below, at equal time 57.9 % below; it reaches "
        f"gpt2's score with {288 * flops['elita'] / (320 * flops['gpt2']):.2f} times gpt2's compute."
    )
    assert verdict_cell(clear, clear.row("elita")) == "-20.0 % (-20.9 to -19.1): sure"
    assert verdict_cell(clear, clear.row("gpt2")) == "reference"
    worse = made_up(found, *CLEAR[::-1])
    assert verdict_sentences(worse).startswith(
        "elita reaches 2.500 bits per byte, 25.0 % above gpt2's 2.000, after 320"
    )
    assert verdict_sentences(worse).endswith("; it does not reach gpt2's score within this budget.")
    alone = ranked(dataclasses.replace(clear, rows=[clear.row("elita")]))
    assert verdict_sentences(alone) == "elita reaches 2.000 ± 0.010 bits per byte with 320 training tokens."
    assert list(caveats(alone)) == []
    assert verdict_cell(alone, alone.row("elita")) == "only row"
    assert re.match(
        r"After [\d,]+ tokens elita generates [\d,]+ tokens a second, with a state of", cost_sentence(alone)
    )


@pytest.mark.parametrize("multiplier", [0.3, 0.5, 0.8, 1.0])
def test_a_known_compute_multiplier_is_recovered(found: Comparison, multiplier: float) -> None:
    """A row whose curve is the reference's, at a share of its FLOPs."""
    rows = []
    for name, factor in (("elita", multiplier), ("gpt2", 1.0)):
        row = dataclasses.replace(found.row(name), flops_per_token=2.0)
        steps = [k / 20 for k in range(1, 21)]
        runs = [
            dataclasses.replace(
                row.runs[0], seed=seed,
                course=[Point(1, int(320 * x), x, 640 * x, 1.0, 1 + (x / factor) ** -0.3 + seed / 1000) for x in steps],
            )
            for seed in range(3)
        ]  # fmt: skip
        scores = [run.last.bits_per_byte for run in runs]
        rows.append(dataclasses.replace(row, runs=runs, score=spread(scores)))
    (verdict,) = [verdict_on(ranked(dataclasses.replace(found, rows=rows)), "elita")]
    assert verdict.compute == pytest.approx(multiplier, rel=0.01)
    assert verdict.compute >= multiplier - 1e-9  # the straight line between two validations lies above the curve
    assert verdict.at["flops"].difference == pytest.approx(100 * ((1 + multiplier**0.3) / 2.001 - 1), abs=0.1)
    assert {axis: gap.within_noise for axis, gap in verdict.at.items()} == dict.fromkeys(verdict.at, multiplier == 1)


@pytest.mark.parametrize(
    ("courses", "said"),
    [
        (NOISY, "3 seeds): noise (p = 0.7"),
        (([[4, 3, 2.0], [4, 3, 2.01]], [[5, 4, 2.5], [5, 4, 2.51]]), "(2 seeds): cannot say whether this is noise ("),
        (([[4, 3, 2.0]], [[5, 4, 2.5]]), "below gpt2's 2.500, after 320 training tokens each (one seed): cannot"),
        (([[4, 3, 2.0]] * 3, [[5, 4, 2.5]] * 3), "noise (all seeds of a row have the same score)."),
        (([[4, 3, 2.0]] * 3, [[5, 4, 2.0]] * 3), "elita reaches 2.000 bits per byte, equal to gpt2's 2.000, after"),
        (([[4, 3, 2.5], [4, 3, 2]], [[5, 4, 2], [5, 4, 2.5]]), "equal to gpt2's 2.250, after"),
    ],
)  # fmt: skip
def test_no_difference_is_called_sure_that_may_be_noise(
    found: Comparison, courses: tuple[list[list[float]], list[list[float]]], said: str
) -> None:
    comparison = made_up(found, *courses)
    assert said in verdict_sentences(comparison)
    assert "sure" not in verdict_sentences(comparison)
    assert not any(dot["is_best"] for dot in dots(comparison))
    assert ": sure" not in verdict_cell(comparison, comparison.row("elita"))


def test_the_verdict_comes_first_in_every_report(found: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    name = "<my>_net|"
    clear = made_up(found, *CLEAR)
    rows = [dataclasses.replace(row, name=name if row.name == "elita" else row.name) for row in clear.rows]
    clear = ranked(dataclasses.replace(clear, rows=rows, title="Mine"))
    shown = shown_in(clear, capsys)
    sentences = verdict_sentences(clear)
    assert shown["terminal"].startswith(sentences)
    assert shown["markdown"].startswith(f"# Mine\n\n**{sentences}**")
    body = unescape(re.sub("<[^>]*>", "", shown["raw html"].split("</h1>")[1].split("</p>")[0]))
    assert body.strip() == sentences
    assert "<my>" not in shown["raw html"].split('id="data"')[0]
    assert json.loads(shown["json"])["verdicts"][0]["reference"] == "gpt2"


def test_the_reference_is_the_best_transformer_or_else_the_best_other_row(found: Comparison) -> None:
    clear = made_up(found, *CLEAR[::-1])  # gpt2 is best
    elita, gpt2 = clear.rows

    def renamed(row: RowRecord, name: str, shift: float = 0.0) -> RowRecord:
        return dataclasses.replace(row, name=name, score=dataclasses.replace(row.score, mean=row.score.mean + shift))

    recipe = {**elita.recipe, "model": {**elita.recipe["model"], "architecture": "mingru"}}
    other = dataclasses.replace(elita, recipe=recipe)
    llama = renamed(gpt2, "llama", 0.1)
    for rows, expected in (
        ([renamed(other, "new", -1.0), renamed(other, "next", -0.9), llama, gpt2], ("new", "gpt2")),
        ([renamed(other, "new", 1.0), llama, gpt2], ("new", "gpt2")),
        ([llama, gpt2], ("llama", "gpt2")),
        ([renamed(other, "new", -1.0), renamed(other, "next", -0.9), other], ("new", "next")),
    ):
        comparison = ranked(dataclasses.replace(clear, rows=rows))
        verdict = headline(comparison)
        assert (verdict.row, verdict.reference) == expected
        without = "the sweep has no Transformer" in verdict_sentences(comparison)
        assert without == (expected[1] == "next")


def tuned(comparison: Comparison, stages: list[dict[str, Any]], *trials: int) -> Comparison:
    rows = [
        dataclasses.replace(row, tuning=[tuning_run(rate, 2.0) for rate in range(number)])
        for row, number in zip(comparison.rows, trials, strict=True)
    ]
    return dataclasses.replace(comparison, rows=rows, stages=stages)


RATES = {"optimizer.learning_rate": [1e-3, 2e-3, 4e-3]}


@pytest.mark.parametrize(
    ("stages", "trials", "sentence"),
    [
        ([], (0, 0), "The learning rates were not tuned: each row has the rate of"),
        ([{"optimizer.weight_decay": [0, 1]}], (2, 2), "The learning rates were not tuned: each"),
        ([RATES], (3, 3), ""),
        ([RATES], (3, 5), ""),  # gpt2's best was twice the last of those tried
        ([RATES, {"model.hidden_size": [16, 24]}], (4, 5), "The rows were not tuned equally: elita had 4 trials and"),
        ([RATES, {"model.hidden_size": [16, 24]}], (5, 5), ""),
    ],
)  # fmt: skip
def test_a_sentence_says_which_rows_were_not_tuned_alike(
    found: Comparison, stages: list[dict[str, Any]], trials: tuple[int, int], sentence: str
) -> None:
    said = " ".join(caveats(tuned(made_up(found, *CLEAR), stages, *trials)))
    assert said.startswith(sentence) if sentence else said == ""


@pytest.mark.parametrize(
    ("elita", "gpt2", "said"),
    [
        ([4, 3, 2.0], [4, 2.9, 1.5], "at equal time 46.3 % below; it does not reach"),
        ([2.5, 2.4, 2.3], [2.0, 1.9, 1.5], "at equal time 16.5 % above; it does not reach"),
        ([4, 3, 1.975], [2.0, 1.9, 1.5], "at equal time equal; it does not reach"),
    ],
)
def test_who_leads_at_equal_time(found: Comparison, elita: list[float], gpt2: list[float], said: str) -> None:
    comparison = made_up(found, [elita] * 3, [gpt2] * 3)
    assert said in verdict_sentences(comparison)
    late = [dataclasses.replace(point, seconds=point.seconds + 9) for point in comparison.rows[1].runs[0].course]
    slow = dataclasses.replace(comparison.rows[1], runs=[dataclasses.replace(comparison.rows[1].runs[0], course=late)])
    comparison = dataclasses.replace(comparison, rows=[comparison.rows[0], slow])
    assert "at equal time unknown (no validation yet)" in verdict_sentences(comparison)
    timed = dataclasses.replace(comparison, budget={"seconds": 5.0}, off_budget={})
    assert "after 5 seconds of training each" in verdict_sentences(timed)
    assert "At equal tokens it is" in verdict_sentences(timed)


@pytest.fixture(scope="module")
def guessed(sandbox: Path) -> Comparison:
    """A task that nothing learns in so few steps, on three seeds."""
    rows = {"elita": {}, "gpt2": {}, "broken": {"model.architecture": "llama", **FAILING}}
    base = BASE | {"model": {**BASE["model"], "n_positions": 8}}
    return compare(a_sweep(sandbox, "guessed", task="parity?num_bits=4", rows=rows, base=base, seeds=[0, 1, 2]))


def shown_in(comparison: Comparison, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Every report."""
    comparison = dataclasses.replace(comparison, remarks=list(remarks_on(comparison)))
    print_comparison(comparison)
    return {
        "html": unescape(as_html(comparison)),
        "raw html": as_html(comparison),
        "markdown": as_markdown(comparison).replace("\\", ""),
        "json": as_json(comparison),
        "terminal": " ".join(capsys.readouterr().out.split()),
    }


def test_guessing_is_not_called_best(guessed: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    assert guessed.chance == 0.5
    assert guessed.row("elita").answers == 25  # of 200 tokens in sequences of 8
    assert (sorted(guessed.at_chance), guessed.best, guessed.differences) == (["elita", "gpt2"], [], [])
    for text in shown_in(guessed, capsys).values():
        assert (
            "No row has learned the task: with 320 training tokens for each run, no row is above chance, 50.0 % of the"
            in text
        )
        assert not re.search(r"class=\"best\"|: sure|within noise of", text)
    assert table(guessed, ("row", "validation"))[-1] == ["chance", "50.0 %"]
    assert '"chance": 0.5' in as_json(guessed)
    assert 'class="chance"' in as_html(guessed)


@pytest.mark.parametrize("gpt2", [[0.5, 0.5, 0.44], [0.5, 0.48, 0.52]])
def test_a_row_at_chance_is_said_to_be(
    guessed: Comparison, gpt2: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    before = [0.5] * (len(guessed.rows[0].runs[0].course) - 1)
    elita = [[*before, score] for score in (0.9, 1.0, 0.95)]
    comparison = made_up(guessed, elita, [[*before, score] for score in gpt2])
    assert (comparison.at_chance, comparison.best) == (["gpt2"], ["elita"])
    sentence = verdict_sentences(comparison)
    assert " of the answers right, " in sentence
    assert " points above gpt2's " in sentence
    assert "compute" not in sentence
    assert list(caveats(comparison))[-2:] == ["Chance is 50.0 %.", "gpt2 is no better than chance."]
    assert verdict_cell(comparison, comparison.row("gpt2")) == "no better than chance"
    assert all(sentence in text for name, text in shown_in(comparison, capsys).items() if name != "raw html")


def test_rows_at_chance_are_not_compared_with_each_other() -> None:
    scores = {
        "learned": spread([0.9, 0.8, 0.7]),
        "one": spread([0.52, 0.53, 0.54]),
        "other": spread([0.45, 0.44, 0.46]),
    }
    found = {(d.one, d.other): d for d in pairwise(scores, "accuracy", ["one", "other"])}
    assert found["other", "one"].unknown == "both rows are at chance"
    assert [pair for pair, d in found.items() if d.p is None] == [("other", "one")]
    assert found["one", "learned"].share == pytest.approx(1 - 0.2 / 0.47)
    assert pairwise({"all": Spread(1.0, 0.0, 3), "too": Spread(1.0, 0.0, 3)}, "accuracy")[0].share is None


def test_a_row_keeps_its_colour_whatever_its_rank_and_its_company(found: Comparison, sandbox: Path) -> None:
    assert [row.colour for row in found.rows] == [0, 1, 2]
    assert {dot["name"]: dot["colour"] for dot in dots(found)} == {"elita": 0, "gpt2": 1}
    for courses in (CLEAR, CLEAR[::-1]):
        html = as_html(made_up(found, *courses))
        assert re.findall(r'--row: var\(--c(\d)\)">\s*<span class="name">(\w+)<', html) in (
            [("0", "elita"), ("1", "gpt2")], [("1", "gpt2"), ("0", "elita")],
        )  # fmt: skip
    whole = a_sweep(sandbox, "colours")
    part = changed(whole, budget=Budget(), num_seeds=None, task=None, changes={}, only=["gpt2"])
    again = changed(part, budget=Budget(), num_seeds=3, task=None, changes={})
    assert {sweep.colour("gpt2") for sweep in (whole, part, again)} == {1}


def test_every_report_says_what_the_validation_text_is(found: Comparison, sandbox: Path) -> None:
    text = json.loads((sandbox / "runs" / found.rows[0].runs[0].folder / "data.json").read_text())["validation"]
    assert " of 60 documents, " in text["summary"]
    for report in (found.remarks, as_markdown(found), as_html(found)):
        assert f"Validation text: {text['summary']}." in report


def test_the_prompt_is_of_the_first_document_alone(tmp_path: Path) -> None:
    source, other = tmp_path / "text.jsonl", tmp_path / "other.txt"
    other.write_text("other " * 99)
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("Hi.", "Yes", "No", "x" * 999)))
    recipe = load_recipe(None, {"data.source": str(other), "data.validation": str(source), "tokenizer.kind": "byte"})
    assert measure.prompt_of(recipe) == "Hi."


@pytest.mark.parametrize(("seconds", "is_ranked"), [((20.6, 45.4), False), ((28.0, 32.9), True), ((30.0, 33.1), False)])
def test_nothing_is_best_where_a_row_left_its_budget(
    found: Comparison, sandbox: Path, capsys: pytest.CaptureFixture[str], seconds: tuple[float, float], is_ranked: bool
) -> None:
    clear = made_up(found, *CLEAR)
    rows = [dataclasses.replace(row, seconds=value) for row, value in zip(clear.rows, seconds, strict=True)]
    comparison = ranked(dataclasses.replace(clear, rows=rows[::-1], budget={"seconds": 30.0}))
    sentence, shown = verdict_sentences(comparison), shown_in(comparison, capsys)
    if is_ranked:
        assert comparison.order == ["elita", "gpt2"]
        assert all("after 30 seconds of training each" in shown[place] for place in ("html", "markdown"))
        return
    assert sentence.startswith("The rows are not ranked: ")
    assert "each run had a budget of 30 seconds of training, but" in sentence
    assert f"gpt2 used {seconds[1]:g} seconds of training" in sentence
    assert all(sentence in text for text in shown.values())
    assert comparison.order == ["gpt2", "elita"]  # as in the sweep
    assert comparison.differences == []
    for text in shown.values():
        assert not re.search(r"class=\"best\"|: sure|: noise|within noise of", text)
    assert shown["markdown"].count("| not ranked |") == 2


def test_the_command_to_type_next_follows_from_the_result(found: Comparison, guessed: Comparison) -> None:
    arguments = CompareArguments(rows=["elita", "gpt2"], tokens=320.0, overwrite=True)
    sweep = Sweep(rows={}, seeds=[0, 1, 2], budget=Budget(tokens=320.0), output="runs/cats")

    def commands(comparison: Comparison) -> list[str]:
        return [
            shlex.join(map(str, words)) for words in _next(arguments, {"data.source": "my books"}, sweep, comparison)
        ]

    again = "multilin compare elita gpt2 --tokens {} --data.source 'my books'"
    clear = made_up(found, *CLEAR)
    generate = f"multilin generate runs/cats/{clear.row('elita').finished[0].folder}"
    assert commands(clear) == [generate]
    assert commands(made_up(found, *NOISY)) == [generate, again.format(320).replace(" --data", " --seeds 7 --data")]
    assert commands(guessed) == [again.format(1280) + " --output runs/cats-longer"]
    assert commands(dataclasses.replace(clear, off_budget={"gpt2": 1.0})) == [again.format(320) + " --overwrite"]
    nothing = dataclasses.replace(clear, rows=[], order=[], differences=[])
    assert commands(nothing) == [again.format(320)]
