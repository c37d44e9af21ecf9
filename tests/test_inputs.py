"""YAML, JSON and files from users: what is read back, and what is refused before it hangs or fills the memory."""

import gzip
import io
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilin.analysis import templates
from multilin.analysis.compare.sweep import load_sweep
from multilin.cli.arguments import flags
from multilin.cli.main import VERBS
from multilin.cli.messages import LARGEST_PROMPT, as_json, read_prompt
from multilin.cli.parser import parse
from multilin.data import files
from multilin.data.corpora import read_documents, source_fingerprint
from multilin.data.tokenizers import load_tokenizer, train_tokenizer
from multilin.errors import InputError
from multilin.layers.linear import Arithmetic
from multilin.model.factory import create_model
from multilin.runs.load import load_run
from multilin.serving.api import streams
from multilin.settings.inputs import LARGEST_YAML, parse_json, parse_yaml, read_bytes, to_json, to_yaml
from multilin.training.recipe import load_recipe

NUMBERS = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    [
        "1e5",
        "1e-3",
        "yes",
        "no",
        "null",
        "~",
        "12:30",
        "2020-01-01",
        "1_000",
        "0x1f",
        ".inf",
        "<<",
        "=",
        "-",
        "*a",
        "&a",
        "",
    ]
)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
BOMB = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


@given(
    st.recursive(st.floats() | st.text() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_json_has_null_for_numbers_that_are_not_finite(value: Any) -> None:
    def finite(value: Any) -> Any:
        if isinstance(value, list):
            return [finite(part) for part in value]
        if isinstance(value, dict):
            return {name: finite(part) for name, part in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    assert json.loads(to_json(value), parse_constant=pytest.fail) == finite(value)


def test_answers_and_pages_are_json_too() -> None:
    value, text = {"a": [math.nan, -math.inf], "b": 1.5}, '{"a":[null,null],"b":1.5}'
    assert streams.to_json(value).decode() == text
    page = templates._environment().from_string("{{ value|tojson }}").render(value=value)
    assert page.replace(" ", "") == as_json(value).replace(" ", "").replace("\n", "") == text


@given(PLAIN)
def test_what_is_written_as_yaml_is_read_back(value: Any) -> None:
    assert parse_yaml(to_yaml(value), "x") == value
    assert parse_json(json.dumps(value), "x") == value


def test_numbers_of_yaml_are_those_of_json() -> None:
    text = "a: 1e-3\nb: [1, -2.5, 1_000, true]\nc: {d: yes, e: 12:30, f: 2020-01-01, g: ~, h: }\n"
    assert parse_yaml(text, "x") == {
        "a": 1e-3,
        "b": [1, -2.5, 1000, True],
        "c": {"d": "yes", "e": "12:30", "f": "2020-01-01", "g": None, "h": None},
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "line 2 repeats a value by an alias"),
        ("[" * 100_000, "levels|nesting depth"),  # the second where the YAML parser has a limit of its own
        ("a:\n" + "".join(" " * depth + "- \n" for depth in range(1, 200)), "levels"),
        ("a: " + "9" * 5000, "an integer of 5000 digits"),
        ("\n".join(f"k{n}: 1" for n in range(60_000)), "100,000 values"),
        ("a: " + "x" * LARGEST_YAML, "characters given"),
        ("a: 1\nb: 2\na: 3", "line 3 gives 'a' a second time"),
        ("1: 2", "names should be texts"),
        ("? [a]\n: 3", "names should be texts"),
        ("a: !!python/object/apply:os.system [ls]", "only plain data"),
        ("a: !!binary aGk=", "only plain data"),
        ("a: !!set {b}", "only plain data"),
        ("a: !!timestamp 2020-01-01", "only plain data"),
        ("!!map {a: !x b}", "only plain data"),
        ("a: b\n---\na: c", "2 documents"),
        ("a: [", "flow node"),
        ("a: \x00", "control characters"),
        ("a: \ud800", "surrogates"),
    ],
)
def test_yaml_beyond_the_plain_part_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        parse_yaml(text, "recipe: x.yaml")
    assert str(caught.value).startswith("recipe: x.yaml")
    assert len(str(caught.value)) <= 350


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" * 60 + "]" * 60,
        '{"a": 1, "a": 2}',
        "[NaN]",
        "[-Infinity]",
        "[1e999]",
        "9" * 5000,
        '{"a": ' + "9" * 200 + "}",
        "[1",
    ],
)
def test_json_beyond_its_limits_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"config\.json") as caught:
        parse_json(text, "config.json")
    assert len(str(caught.value)) <= 350


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A pipe that nobody writes to: whoever opens it waits for ever."""
    os.mkfifo(tmp_path / "pipe.txt")
    return tmp_path / "pipe.txt"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of 3 GB that takes no room."""
    with (tmp_path / "large.txt").open("wb") as stream:
        stream.truncate(3 * 2**30)
    return tmp_path / "large.txt"


READERS: dict[str, Callable[[Path], Any]] = {
    "bytes": lambda path: read_bytes(path, "--file", 10),
    "prompt": lambda path: read_prompt(None, str(path)),
    "sweep": load_sweep,
    "text": lambda path: list(read_documents(str(path))),
    "fingerprint": lambda path: source_fingerprint(str(path)),
    "tokenizer": lambda path: load_tokenizer(str(path)),
}


@pytest.mark.parametrize("reader", READERS)
def test_devices_pipes_and_huge_files_are_refused(reader: str, pipe: Path, large: Path) -> None:
    for path, words in ((pipe, "is a pipe"), (large, "MB"), (Path("/dev/zero"), "/dev/zero")):
        with pytest.raises(InputError, match=words):
            READERS[reader](path)


def test_a_recipe_is_no_pipe(pipe: Path) -> None:
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(InputError, match="recipe: "):
            load_recipe(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be"])
def test_a_prompt_of_wide_characters_is_refused(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "prompt.txt").write_bytes("It was".encode(encoding))
    with pytest.raises(InputError, match=rf"--prompt-file: .*prompt\.txt holds {encoding[:6].upper()}"):
        read_prompt(None, str(tmp_path / "prompt.txt"))


def test_a_prompt_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            return len(buffer)

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Endless())))
    with pytest.raises(InputError, match=f"longer than {LARGEST_PROMPT // 2**20} MB"):
        read_prompt(None, None)


def test_lines_documents_and_expansions_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_LINE", 1000)
    monkeypatch.setattr(files, "LARGEST_DOCUMENT", 2000)
    monkeypatch.setattr(files, "SMALL", 3000)
    rows = json.dumps({"text": "a cat"}) + "\n"
    contents = {
        "line.jsonl": (json.dumps({"text": "x" * 2000}).encode(), "a line of more than"),
        "cell.csv": (b'text\n"' + b"x\n" * 1000 + b'"\n', "not CSV"),
        "one.txt": (b"x" * 2001, "in one document"),
        "one.txt.gz": (gzip.compress(b"x" * 2500), "in one document"),
        "bomb.jsonl.gz": (gzip.compress(rows.encode() * 50_000), "expands to more than 250 times"),
    }
    for name, (content, words) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=words):
            list(read_documents(str(tmp_path / name)))
    (tmp_path / "good.jsonl.gz").write_bytes(gzip.compress(rows.encode() * 100))
    assert len(list(read_documents(str(tmp_path / "good.jsonl.gz")))) == 100


@pytest.mark.parametrize("name", ["one.txt", "rows.jsonl", "chats.jsonl", "pairs.csv"])
@pytest.mark.parametrize("before", ["", "a cat ", "a " * 499, "a " * 500])
def test_a_text_without_spaces_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, before: str
) -> None:
    """Wherever the word begins, in conversations too."""
    monkeypatch.setattr(files, "LONGEST_WORD", 1000)
    monkeypatch.chdir(tmp_path)

    def read(text: str) -> int:
        chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
        contents = {
            "one.txt": text,
            "rows.jsonl": json.dumps({"text": text}),
            "pairs.csv": f"prompt,completion\nq,{text}",
        }
        Path(name).write_text(contents.get(name, json.dumps({"messages": chat})))
        return len(list(read_documents(name)))

    for length in (1001, 1500, 2500):
        with pytest.raises(InputError, match=rf"{name}.*: more than 1,000 characters without a space"):
            read(before + "x" * length + " end")
    assert read(before + "x" * 1000 + " " + "y" * 1000 + "\t" + "z" * 1000) == 1


@pytest.mark.parametrize("name", ["model.norm.bias", "lm_head.bias", "model.layers.0.feed_forward.expand.weight_scale"])
def test_weights_that_are_not_finite_are_refused(name: str, tmp_path: Path) -> None:
    """Also those that are not trained: a fixed bias, and the scale of int8 weights."""
    sizes = {"hidden_size": 8, "num_layers": 1, "vocab_size": 258, "n_positions": 8}
    model = create_model("additive", **sizes, output_bias="unigram")
    model.set_arithmetic(Arithmetic(stored_as_int8=True))
    model.state_dict()[name].view(-1)[0] = float("nan")
    model.save_pretrained(tmp_path)
    train_tokenizer([], "byte", None).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"{name} holds values that are not finite"):
        load_run(tmp_path)


def test_a_tokenizer_whose_ids_have_gaps_is_refused(tmp_path: Path) -> None:
    train_tokenizer([], "byte", None).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    del content["model"]["vocab"]["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="257 tokens with ids up to 257"):
        load_tokenizer(str(tmp_path))


def test_files_of_a_model_are_bounded(tmp_path: Path) -> None:
    def written() -> Path:
        folder = tmp_path / "run"
        create_model("additive", hidden_size=8, num_layers=1, vocab_size=258, n_positions=8).save_pretrained(folder)
        train_tokenizer([], "byte", None).save_pretrained(folder)
        return folder

    folder = written()
    config = json.loads((folder / "config.json").read_text())
    for values in ({"hidden_size": 10**9}, {"layers": config["layers"] * 1000}, {"n_positions": "many"}, {"layers": 3}):
        (folder / "config.json").write_text(json.dumps(config | values))
        with pytest.raises(InputError, match=next(iter(values))):
            load_run(folder)
    for name in ("config.json", "tokenizer_config.json"):
        (written() / name).write_text("[" * 100_000)
        with pytest.raises(InputError, match=f"{name} is not JSON"):
            load_run(folder)
    for name in ("model.safetensors", "tokenizer.json", "special_tokens_map.json"):
        (written() / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with pytest.raises(InputError, match=f"{name} is a pipe"):
            load_run(folder)
        (folder / name).unlink()


@pytest.mark.parametrize("verb", VERBS)
def test_words_of_the_command_line_are_bounded(verb: str) -> None:
    """A reader of YAML that recurses would end in a segmentation fault."""
    required = ["x" for flag in flags(VERBS[verb]) if flag.is_positional and not flag.is_list]
    for flag in (flag for flag in flags(VERBS[verb]) if flag.takes):
        for word in ("[" * 100_000, "{" + BOMB.replace("\n", ", ") + "}", "9" * 10_000):
            message = refusal(verb, [*required, f"{flag.text}={word}"])
            assert message or flag.takes.startswith("TEXT"), flag
            assert len(message) <= 350


def refusal(verb: str, words: list[str]) -> str:
    try:
        parse(verb, VERBS[verb], words)
    except InputError as error:
        return str(error)
    return ""


def test_names_that_no_file_can_have_are_refused() -> None:
    for name in ("x" * 300, "a\0b", "é" * 200, "folder/" + "x" * 256, "é" * 200 + "/" + "x" * 210):
        with pytest.raises(InputError, match=r"data\.source: a name (of|with)"):
            load_recipe(None, {"data.source": name})
    load_recipe(None, {"data.source": "folder/" * 100 + "x" * 255})
