"""multilin explain: what the page, the JSON and the terminal say is what the model computed with."""

import base64
import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from multilin.analysis.explain import Explanation
from multilin.analysis.explain.explanation import Removal, Step
from multilin.analysis.explain.page import picture
from multilin.analysis.explain.run import Report, answer
from multilin.architectures import architectures
from multilin.layers.reading import Reader, Reading, record_readings
from multilin.runs.load import load_run
from tests.cli.conftest import N_POSITIONS

Call = Callable[..., str]
TEXT = "the cat sat on 世\nthe mat"


@pytest.fixture
def explained(run_folder: Callable[[str], Path], cli: Call, tmp_path: Path) -> Callable[[str], tuple[dict, str, str]]:
    """explained("elita"): the JSON, the page and what is printed."""

    def call(architecture: str, *arguments: object) -> tuple[dict, str, str]:
        shown = cli("explain", run_folder(architecture), "--text", TEXT, "--output", tmp_path / "out", *arguments)
        assert (tmp_path / "out" / "explain.png").read_bytes().startswith(b"\x89PNG")
        content = (tmp_path / "out" / "explain.json").read_text(encoding="utf-8")
        return json.loads(content), (tmp_path / "out" / "explain.html").read_text(encoding="utf-8"), shown

    return call


def ids_of(folder: Path) -> torch.Tensor:
    run = load_run(folder)
    return torch.tensor([[run.tokenizer.eos_token_id, *run.tokenizer.encode(TEXT, add_special_tokens=False)]])


@pytest.mark.parametrize("architecture", architectures())
def test_the_weights_are_those_of_the_forward_pass(
    architecture: str, explained: Callable, run_folder: Callable[[str], Path]
) -> None:
    content, _, _ = explained(architecture)
    folder = run_folder(architecture)
    model = load_run(folder).model
    with record_readings(model.model.layers) as readings, torch.no_grad():
        model(ids_of(folder), use_cache=False)
    steps = [step for step in content["steps"] if step["layer"]]
    assert len(steps) == len(readings)
    assert bool(readings) == any(isinstance(module, Reader) for module in model.modules())
    for step, (_, reading) in zip(steps, readings, strict=True):
        assert step["meaning"] == reading.meaning
        for head, weights_TS in zip(step["heads"], reading.weights_BHTS[0], strict=True):
            for row, weights_S in zip(head["rows"], weights_TS, strict=True):
                stop = row["first"] + len(row["values"])
                np.testing.assert_allclose(row["values"], weights_S[row["first"] : stop], rtol=1e-6)
                assert (weights_S[: row["first"]] == 0).all()
                assert (weights_S[stop:] == 0).all()


@pytest.mark.parametrize("architecture", ["additive", "elita", "tscale", "gpt2", "llama"])
def test_what_a_position_reads_sums_to_one(architecture: str, explained: Callable) -> None:
    content, _, _ = explained(architecture)
    assert content["steps"][0]["label"] == "mean of all layers"
    for step in content["steps"]:
        for head in step["heads"]:
            for place, row in enumerate(head["rows"]):
                terms = [head[name][place] for name in ("own", "null") if head[name]]
                assert sum(row["values"]) + sum(terms) == pytest.approx(1.0, abs=1e-5)


def test_the_mean_counts_every_layer_and_head_alike(explained: Callable) -> None:
    content, _, _ = explained("elita")
    first, *others = content["steps"]
    for place, row in enumerate(first["heads"][0]["rows"]):
        expected = np.zeros(place + 1)
        for step in others:
            for head in step["heads"]:
                expected += np.array(head["rows"][place]["values"]) / len(step["heads"]) / len(others)
                expected[-1] += head["own"][place] / len(step["heads"]) / len(others)
        np.testing.assert_allclose(row["values"], expected, rtol=1e-4, atol=1e-7)


def test_the_page_holds_the_same_numbers_and_asks_no_network(explained: Callable) -> None:
    content, page, _ = explained("tscale")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data["tokens"] == content["tokens"]
    for packed, step in zip(data["steps"], content["steps"], strict=True):
        rows = [row["values"] for head in step["heads"] for row in head["rows"]]
        values = np.frombuffer(b"".join(base64.b64decode(head["rows"]) for head in packed["heads"]), "<f4")
        np.testing.assert_allclose(values, np.concatenate(rows), rtol=1e-6)
    values = np.frombuffer(base64.b64decode(data["removal"]["divergence"]), "<f4")
    expected = [value for row in content["removal"]["divergence"] for value in row["values"]]
    np.testing.assert_allclose(values, np.array(expected, dtype=float), rtol=1e-5)
    assert not re.search(r"https?://|src=|@import|url\(", page)
    for meaning in content["meaning"].values():
        assert html.escape(meaning, quote=False).replace("'", "&#39;") in page or meaning in data["meaning"].values()


def test_a_text_cannot_break_out_of_the_page(run_folder: Callable[[str], Path], cli: Call, tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    cli("explain", run_folder("elita"), "--text", evil, "--output", tmp_path / "out", "--no-remove")
    page = (tmp_path / "out" / "explain.html").read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script>") == 2


def test_the_terminal_names_the_largest_weights_and_what_they_mean(explained: Callable) -> None:
    content, _, shown = explained("additive")
    shown = " ".join(shown.split())
    assert content["finding"] in shown
    assert content["steps"][0]["meaning"] in shown
    weights = content["steps"][0]["heads"][0]["rows"][-1]["values"]
    assert f"{max(weights):.4g}" in shown
    assert "nearness" in shown
    assert "explain.html" in shown


@pytest.mark.parametrize("architecture", ["additive", "gpt2", "gated_deltanet", "linear_mixer"])
@pytest.mark.parametrize("arguments", [[], ["--no-remove"]])
def test_the_answer_comes_first_and_names_the_largest_numbers(
    architecture: str, arguments: list[str], explained: Callable
) -> None:
    content, page, shown = explained(architecture, *arguments)
    answer, words = content["answer"], " ".join(shown.split())
    assert next(iter(content)) == "answer"
    assert html.escape(answer).replace("&#x27;", "&#39;") in page
    assert words.index(answer) < words.index(content["finding"]) < words.index("Weights at the last position")
    (best, *_), texts = content["tokens"][-1]["guesses"], [token["text"] for token in content["tokens"]]
    assert answer.startswith(
        f"After this text the model expects {best['text']!r} ({best['probability']:.0%}). Largest weights"
    )
    rows = [head["rows"][-1] for head in content["steps"][0]["heads"]]
    assert len({row["first"] for row in rows}) == 1
    weights = np.mean([row["values"] for row in rows], axis=0)
    place = rows[0]["first"] + int(np.abs(weights).argmax())
    assert f": {repr(texts[place]) + f' at {place}' if place else 'the start of the text'} (" in answer
    if arguments:
        assert answer.endswith("so it is unknown which tokens change the prediction.")
    else:
        effects = np.array(content["removal"]["divergence"][-1]["values"][:-1], dtype=float)
        strongest = int(np.nanargmax(effects))
        if effects[strongest] >= 0.01:
            assert f"ithout {texts[strongest]!r} at {strongest} the prediction changes most, by" in answer
        else:
            assert answer.endswith("changes the prediction by less than 0.01 nats.")


A, B, LAST = [np.nan, 0.5, 0.02, 1.0], [np.nan, 0.02, 0.5, 1.0], [0.1, 0.6, 0.05, 0.25]
MOST = "Largest weights: 'a' at 1 (0.6), 'c' at 3 (0.25) and the start of the text (0.1)"


@pytest.mark.parametrize(
    ("weights", "effects", "said"),
    [
        (LAST, A, f"{MOST}. Removal confirms this: without 'a' at 1 the prediction changes most, by 0.5 nats."),
        (LAST, B, f"{MOST}. Removal does not confirm this: without 'b' at 2 the prediction changes most, by 0.5 "
         "nats; without 'a' at 1 by 0.02."),
        ([0, 0.5, -0.7, 0], B, "Largest weights: 'b' at 2 (-0.7) and 'a' at 1 (0.5). Removal confirms this: "
         "without 'b' at 2 the prediction changes most, by 0.5 nats; without 'a' at 1 by 0.02."),
        (LAST, None, "and the start of the text (0.1). Removal was not measured, so it is unknown which"),
        (LAST, [np.nan, 1e-3, 0, 1.0], "(0.1). Removing any token before the last one changes the prediction by less"),
        (None, B, "The model has no readable weights. Without 'b' at 2 the prediction changes most, by 0.5 nats;"),
        (None, None, "The model has no readable weights. Removal was not measured, so"),
        ([0, 0, 0, 0], A, "At the last position the model's layers read no token. Without 'a' at 1 the"),
        (LAST, [np.nan] * 4, "(0.1). There is no token before the last one that can be removed."),
    ],
)  # fmt: skip
def test_what_is_weighed_most_is_checked_by_removal(
    weights: list[float] | None, effects: list[float] | None, said: str
) -> None:
    square = np.full((4, 4), np.nan)
    if effects is not None:
        square[-1] = effects
    removal = None if effects is None else Removal(square, square)
    reading = None if weights is None else Reading("", torch.tensor([[[weights] * 4]], dtype=torch.float64), 0, None)
    steps = [] if reading is None else [Step(0, "", reading, [])]
    explanation = Explanation([0, 1, 2, 3], np.zeros(3), [[(5, 0.62)]] * 4, steps, removal)
    report = Report("run", "", ["", "a", "b", "c"], [(1, ""), (1, "a"), (1, "b"), (1, "c")], {5: "d"}, explanation)
    assert answer(report).startswith("After this text the model expects 'd' (62%). ")
    assert said in answer(report)


def test_losses_and_texts_of_tokens(explained: Callable, run_folder: Callable[[str], Path]) -> None:
    content, _, _ = explained("gpt2")
    ids = ids_of(run_folder("gpt2"))
    with torch.no_grad():
        losses = -load_run(run_folder("gpt2")).model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    assert [token["loss_of_next"] for token in content["tokens"][:-1]] == pytest.approx(losses[:, 0].tolist(), rel=1e-4)
    assert content["tokens"][-1]["loss_of_next"] is None
    texts = [token["text"] for token in content["tokens"][1:]]
    assert "".join(texts) == TEXT.replace("世", r"\xe4\xb8\x96")  # three tokens, none of them a character


def test_characters_of_several_tokens_are_shown_whole(explained: Callable) -> None:
    content, page, shown = explained("elita")
    start, *runs = content["characters"]
    assert start == {"first": 0, "tokens": 1, "text": "<|endoftext|>"}
    assert "".join(run["text"] for run in runs) == TEXT
    assert [run["tokens"] for run in runs] == [len(character.encode()) for character in TEXT]
    assert [run["first"] for run in runs] == [1 + len(TEXT[:place].encode()) for place in range(len(TEXT))]
    assert json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["characters"] == content["characters"]
    assert "the cat sat on 世" in shown
    assert "\\x" not in shown


def test_a_character_has_the_largest_value_of_its_tokens() -> None:
    report = Report("run", "the given text", [], [(1, "a"), (3, "世"), (2, "ï")], {}, None)
    values = np.array([0.5, 0.1, -0.4, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(report.by_character(values), [0.5, -0.4, np.nan])
    parts = ["'a'", "'世' (1 of 3)", "'世' (2 of 3)", "'世' (3 of 3)", "'ï' (1 of 2)", "'ï' (2 of 2)"]
    assert report.labels == parts


def test_dollars_in_a_text_and_in_the_name_of_a_run_are_no_formulas() -> None:
    nothing = Explanation([], [], [], [], None)
    report = Report("a$b^$", "the given text", ["", "$x^$"], [(1, ""), (1, "$x^$")], {}, nothing)
    assert picture(report).startswith(b"\x89PNG")


def test_json_is_what_is_written(run_folder: Callable[[str], Path], cli: Call, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT + "\n", encoding="utf-8")
    arguments = ["explain", run_folder("elita"), "--file", tmp_path / "text.txt", "--output", tmp_path / "out"]
    assert json.loads(cli(*arguments, "--json")) == json.loads((tmp_path / "out" / "explain.json").read_text())


def test_a_model_that_gives_no_weights_away_shows_removal(explained: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multilin.analysis.explain.explanation.attentions", lambda *_: [])
    content, page, shown = explained("gpt2")
    assert content["finding"].startswith("This model has no readable attention weights; only the effects of")
    assert content["steps"] == []
    assert content["finding"] in " ".join(shown.split())
    assert content["finding"] in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "x" * N_POSITIONS], f"text: {N_POSITIONS + 1} tokens given, the start token included, but this "
         f"model reads at most {N_POSITIONS}; give a shorter text"),
        (["--text", "x" * 9, "--max-tokens", "8"], "text: 9 tokens given, but at most 8 are explained"),
        (["--text", ""], "text: no token given; give some text to explain"),
        (["--text", "x", "--file", "y"], "--file: given together with --text; give one of them"),
        (["--file", "nowhere.txt"], "--file: nowhere.txt cannot be read"),
        (["--text", "x", "--output", "no/where"], "--output: the folder no does not exist"),
        (["--text", "x", "--max-tokens", "0"], "--max-tokens: 0 given, but it should be at least 1"),
        ([], "text: none given, and"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused(additive: Path, refusal: Call, arguments: list[str], message: str) -> None:
    assert refusal("explain", additive, *arguments).startswith(message)
    assert not (additive / "explain").exists()
