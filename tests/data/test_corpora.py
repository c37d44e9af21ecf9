"""Every kind of source gives its documents; every kind of bad source is refused with one sentence."""

import csv
import gzip
import json
import warnings
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from multilin.data.corpora import cut_source, read_documents, source_fingerprint
from multilin.data.files import Document
from multilin.errors import InputError

TEXTS = ["first\nline", "zweite Zeile: naïve 你好 😀", 'third,\r\nwith "quotes"']


def read(source: Path | str, **options: str) -> list[Document]:
    return list(read_documents(str(source), **options))


def write_rows(path: Path, texts: list[str]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)))
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as stream:
            csv.writer(stream).writerows([("id", "text"), *enumerate(texts)])
    else:
        table = pyarrow.table({"id": range(len(texts)), "text": texts})
        pyarrow.parquet.write_table(table, path)


def compressed(path: Path, how: str) -> Path:
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[how]
    result = path.with_name(path.name + how)
    result.write_bytes(pack(path.read_bytes()))
    return result


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Hello\n", encoding="utf-8-sig")
    assert [document.text for document in read(tmp_path / "book.txt")] == ["Hello\n"]


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_rows_are_documents_in_every_format(tmp_path: Path, suffix: str, compression: str) -> None:
    path = tmp_path / f"rows{suffix}"
    write_rows(path, TEXTS)
    documents = read(compressed(path, compression))
    assert [document.text for document in documents] == TEXTS
    assert documents[2].name == f"rows{suffix}{compression}:3"


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_a_text_file_is_one_document_with_its_exact_text(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "a.md"
    path.write_bytes(TEXTS[2].encode())
    name = compressed(path, compression).name
    assert read(tmp_path / name) == [Document(name, TEXTS[2])]


def test_a_folder_is_read_with_its_subfolders_in_order_without_hidden_and_other_files(tmp_path: Path) -> None:
    for name in ["b.txt", "a/z.txt", "a/empty.txt", ".git/c.txt", "d.log", "a/x.PDF", "y.pdf", "LICENSE", ".e.log"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else name)
    (tmp_path / "gone").symlink_to("nowhere")
    kinds = r"skipped 5 files of other kinds: \.pdf \(2\), without a suffix \(1\), \.log \(1\), broken links \(1\)$"
    with pytest.warns(UserWarning, match=kinds):
        first = read(tmp_path)
    assert first == read(tmp_path) == [Document("a/z.txt", "a/z.txt"), Document("b.txt", "b.txt")]  # warned once
    assert read(tmp_path / "*.txt") == [Document("b.txt", "b.txt")]
    assert read(tmp_path / "**" / "z*") == [Document("a/z.txt", "a/z.txt")]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("books", ["a.txt", "linked/c.txt", "near/b.txt"]),
        ("./books", ["a.txt", "linked/c.txt", "near/b.txt"]),
        ("books/**/*.txt", ["a.txt", "linked/c.txt", "near/b.txt"]),
        ("books/**/**/*.txt", ["a.txt", "linked/c.txt", "near/b.txt"]),
        ("books/**/c.txt", ["linked/c.txt"]),
        ("books/**/linked/*", ["linked/c.txt"]),
        ("books/aloop/**/b.txt", ["near/b.txt"]),
        ("books/[ano]*/*.txt", ["aloop/a.txt", "near/b.txt"]),
        ("books/*.txt", ["a.txt"]),
        ("books/linked", ["c.txt"]),
        ("far", ["c.txt"]),
    ],
)
def test_folders_behind_links_are_read_and_every_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: list[str]
) -> None:
    for name in ("books/a.txt", "books/near/b.txt", "far/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    for link, target in {"books/linked": "../far", "books/aloop": ".", "books/near/up": "../../books"}.items():
        (tmp_path / link).symlink_to(target)
    (tmp_path / "books" / "a copy.txt").symlink_to("a.txt")  # comes first, but is a link
    (tmp_path / "books" / "near" / "other").symlink_to(tmp_path / "books" / "near")
    monkeypatch.chdir(tmp_path)
    assert [document.name for document in read(source)] == expected
    assert [name for part in cut_source(source)[0] for name, _ in part.files] == expected
    before = source_fingerprint(source)
    last = Path(expected[-1]).name
    Path({"a.txt": "books", "b.txt": "books/near", "c.txt": "far"}[last], last).write_text("new")
    assert source_fingerprint(source) != before


def test_a_tangle_of_links_is_walked_in_linear_time(tmp_path: Path) -> None:
    for one in range(12):
        (tmp_path / f"{one}").mkdir()
        for other in range(12):
            (tmp_path / f"{one}" / f"to {other}").symlink_to(tmp_path / f"{other}")
    (tmp_path / "3" / "text.txt").write_text("text")
    assert read(tmp_path) == read(f"{tmp_path}/**/*.txt") == [Document("3/text.txt", "text")]


@pytest.mark.parametrize("name", ["text.txt", "rows.csv.gz"])
def test_a_text_that_cannot_be_found_is_not_passed_over(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(InputError, match=rf"{name} cannot be read \(No such file"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["python-docs", "python-source"])
def test_a_folder_with_the_name_of_a_built_in_corpus_is_named_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "a.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("multilin.errors._warned", set())
    with pytest.warns(UserWarning, match=rf"{name} is read as the built-in corpus; write \./{name} for"):
        assert next(read_documents(name)).text != "mine"
    assert read(f"./{name}") == read(f"{name}/") == [Document("a.txt", "mine")]


@pytest.mark.filterwarnings("ignore")  # datasets' own
def test_a_hub_dataset_is_streamed_here_from_a_local_folder(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", TEXTS)
    write_rows(tmp_path / "test.jsonl", TEXTS[:1])
    assert read(f"hub:{tmp_path}") == [Document(f"train:{i}", text) for i, text in enumerate(TEXTS, start=1)]
    assert read(f"hub:{tmp_path}:test") == [Document("test:1", TEXTS[0])]
    with pytest.raises(InputError, match=r"no field 'body'.*id, text"):
        read(f"hub:{tmp_path}", text_field="body")
    with pytest.raises(InputError, match="neither a file or folder here nor a dataset"):
        read(f"hub:{tmp_path}:nosplit")
    before = source_fingerprint(f"hub:{tmp_path}")
    (tmp_path / "linked").symlink_to(tmp_path)
    with pytest.raises(InputError, match=r"linked is a link to a folder, which `datasets` does not follow"):
        read(f"hub:{tmp_path}")
    assert source_fingerprint(f"hub:{tmp_path}") == before  # a loop ends


@pytest.mark.filterwarnings("ignore")  # datasets' own
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("owner/name", ("owner/name", None, "train")),
        ("owner/name:test", ("owner/name", None, "test")),
        ("owner/name/config:train[:5%]", ("owner/name", "config", "train[:5%]")),
        ("hub:name", ("name", None, "train")),
    ],
)
def test_a_hub_name_is_owner_name_configuration_and_split(
    monkeypatch: pytest.MonkeyPatch, source: str, expected: tuple[str, str | None, str]
) -> None:
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, config: str | None, split: str, **options: object) -> list[dict[str, str]]:
        assert options == {"streaming": True, "revision": None}
        asked.append((name, config, split))
        return [{"text": "from the hub"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert [document.text for document in read(source)] == ["from the hub"]
    assert asked == [expected]


def test_the_built_in_documentation_is_text_of_every_python() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        documents = {document.name: document.text for document in read_documents("python-docs")}
    assert sum(len(text.encode()) for text in documents.values()) > 1_500_000
    assert "json.dumps" not in documents
    assert "\ndumps(obj, *, skipkeys=False," in documents["json"]
    assert "assert_stmt" in documents["topic assert"]


def test_the_built_in_source_is_the_standard_library_in_a_fixed_order() -> None:
    documents = list(read_documents("python-source"))
    names = [document.name for document in documents]
    assert "json" in names
    assert len(names) == len(set(names))
    assert not [name for name in names if "test.test_" in name or "pytest" in name]
    assert 8e6 < sum(len(document.text) for document in documents) < 16e6
    assert documents[0] == next(read_documents("python-source"))


def test_the_fingerprint_follows_content_and_names_only(tmp_path: Path) -> None:
    def fingerprint(folder: str, name: str, text: str) -> str:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
        return source_fingerprint(str(tmp_path / folder))

    first = fingerprint("1", "a.txt", "text")
    assert first == fingerprint("2", "a.txt", "text")
    assert first != fingerprint("3", "b.txt", "text")
    assert first != fingerprint("4", "a.txt", "texts")
    assert source_fingerprint("python-docs") != source_fingerprint("python-source")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "is empty"),
        ("empty.jsonl", b"\n\n", "is empty"),
        ("latin.txt", b"abc\ncaf\xe9\n", r"latin.txt: byte 7 is not UTF-8.*encoding_errors to replace"),
        ("latin.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"latin.jsonl: byte 24 is not UTF-8"),
        ("bad.jsonl", b'{"text": "a"}\n\n{"text": \n', r"bad.jsonl:3: not a line of JSON"),
        ("nested.jsonl", b'{"text": ' + b"[" * 900 + b"]" * 900 + b"}\n", r"nested.jsonl:1: .*should (hold|be) a"),
        ("nested chat.jsonl", b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}\n", r"nested chat.jsonl:1: "),
        ("list.jsonl", b"[1, 2]\n", r"list.jsonl:1: a line should be a JSON object"),
        ("field.jsonl", b'{"txt": "a", "id": 1}\n', r"jsonl:1: no field 'text'.*txt, id; did you mean 'txt'"),
        ("twice.jsonl", b'{"id": 1, "id": 1}\n', r"twice.jsonl:1: .*'id' occurs twice"),
        (
            "deep.jsonl",
            b'{"messages": [{"content": "a", "content": "b"}]}\n',
            r"deep.jsonl:1: .*'content' occurs twice",
        ),
        ("type.jsonl", b'{"text": 5}\n', r"type.jsonl:1: field 'text' holds 5, but it should hold a text"),
        ("half.jsonl", b'{"text": "a\\ud83d"}\n', r"half.jsonl:1: character 1 .* half a surrogate pair"),
        ("field.csv", b"id,body\n1,hello\n", r"field.csv: line 2: no field 'text'.*id, body"),
        ("short.csv", b"text,id\na,1\nb\n", r"short.csv: line 3 has 1 cell, but the header has 2; put quotes"),
        ("long.csv", b'id,text\n1,"a\nb"\n\n2,a mast, a rope\n', r"long.csv: line 5 has 3 cells, but the header has 2"),
        ("one.csv", b"text\na mast, a rope\n", r"one.csv: line 2 has 2 cells, but the header has 1"),
        ("comma.csv", b"id,text\n1,a mast,\n", r"comma.csv: line 2 has 3 cells, but the header has 2"),
        ("twice.csv", b"text,id,text\na,1,b\n", r"twice.csv: line 1: the column or field 'text' occurs twice"),
        ("open.csv", b'text,b\nx,y\n"foo,1\nbar,2\n', r"open.csv: line 3 is not CSV \(unexpected end of data\)"),
        ("later.csv", b'a,text\n1,"never\n2,"y"\n', r"later.csv: line 2 is not CSV"),
        ("after.csv", b'a,text\r\n1,"x\r\ny"\r\n\r\n2,"x" y\r\n', r"after.csv: line 5 is not CSV \(',' expected"),
        ("head.csv", b'a,"te"xt\n1,x\n', r"head.csv: line 1 is not CSV"),
        ("mac.csv", b"a,text\r1,x\r", r"mac.csv: line 1 is not CSV \(new-line character seen in unquoted field\)"),
        ("mac row.csv", b"a,text\n1,x\ry\n", r"mac row.csv: line 2 is not CSV"),
        ("bad.parquet", b"PAR1 not", r"bad.parquet: not a Parquet file"),
        ("cut.txt.gz", gzip.compress(b"text" * 1000, mtime=0)[:-9], r"cut.txt.gz: cannot be read \(Truncated"),
        ("cut.txt.zst", zstandard.compress(bytes(range(256)) * 9)[:-9], r"cut.txt.zst: cannot be read \(Truncated"),
        ("no.txt.zst", b"plain text", r"no.txt.zst: cannot be read"),
        ("notes.log", b"text", r"notes.log' is not a supported file; supported are .txt .md .jsonl"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        read(tmp_path / name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("python-doc", "'python-doc' does not exist.*did you mean 'python-docs'"),
        ("missing.txt", "'missing.txt' does not exist: give a file, a folder, a glob, a hub dataset"),
        ("here/mistyped", "'here/mistyped' does not exist"),
        ("here/*.txt", "'here/.*' matches no file"),
        ("here/**.txt", r"'here/.*' given, but \*\* should be a whole folder name"),
        ("./mistyped", "'./mistyped' does not exist"),
        (
            "here",
            "'here' holds no supported file; supported are .txt .md .jsonl .csv .parquet, each also with .gz or .zst",
        ),
    ],
)
def test_a_missing_source_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a.log").write_text("text")
    (tmp_path / "here" / ".hidden.md").write_text("text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        read(source)
    with pytest.raises(InputError, match=message):
        source_fingerprint(source)


def test_bytes_that_are_not_utf8_are_replaced_on_request(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.csv").write_bytes(b"text\ncaf\xe9\n")
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "caf\\ud83d"}\n{"text": "caf\xe9"}\n')
    for path in [*tmp_path.iterdir()]:
        assert {document.text for document in read(path, encoding_errors="replace")} == {"caf\ufffd"}
        with pytest.raises(InputError, match=rf"{path.name}.*set encoding_errors to replace"):
            read(path)


BINARIES = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}
NESTS = {
    "list": lambda part: pyarrow.ListArray.from_arrays(pyarrow.array([0, 2], pyarrow.int32()), part),
    "large list": lambda part: pyarrow.LargeListArray.from_arrays(pyarrow.array([0, 2], pyarrow.int64()), part),
    "fixed list": lambda part: pyarrow.FixedSizeListArray.from_arrays(part, 2),
}


@pytest.mark.parametrize("kind", [*BINARIES, "dictionary"])
def test_every_type_of_text_in_parquet_is_replaced_on_request(tmp_path: Path, kind: str) -> None:
    """Also in conversations; a string view is inside or outside its buffer, and the writer takes none in a list."""
    raw = pyarrow.array([b"caf\xe9", b"caf\xe9 and more than twelve bytes"])
    name = "string" if kind == "dictionary" else kind
    texts = raw.cast(getattr(pyarrow, BINARIES[name])()).view(getattr(pyarrow, name)())
    texts = texts.dictionary_encode() if kind == "dictionary" else texts
    tables = {"flat": pyarrow.table({"text": texts, "id": [1, 2]})}
    if kind != "string_view":
        talk = pyarrow.StructArray.from_arrays([pyarrow.array(["user", "assistant"]), texts], ["role", "content"])
        tables |= {nest: pyarrow.table({"messages": NESTS[nest](talk)}) for nest in NESTS}
    for name, table in tables.items():
        path = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(table, path)
        replaced = [document.text for document in read(path, encoding_errors="replace")]
        assert "\n\n".join(replaced) == "caf\ufffd\n\ncaf\ufffd and more than twelve bytes"
        with pytest.raises(InputError, match=r"parquet:1: byte 3 of field '(text|messages)' is not UTF-8; .*replace$"):
            read(path)


@pytest.mark.parametrize("name", ["chats.jsonl", "pairs.jsonl"])
def test_half_characters_of_conversations_are_replaced_on_request(tmp_path: Path, name: str) -> None:
    chats = {"messages": [{"role": "user", "content": "half \ud83d"}, {"role": "assistant", "content": "yes"}]}
    row = {"prompt": chats["messages"][:1], "completion": "yes"} if name == "pairs.jsonl" else chats
    (tmp_path / name).write_text(json.dumps(row) + "\n")
    assert read(tmp_path / name, encoding_errors="replace")[0].text == "half \ufffd\n\nyes"
    with pytest.raises(InputError, match=rf"{name}:1: character 5 of field .* half a surrogate pair; .*replace$"):
        read(tmp_path / name)


def test_columns_of_one_name_in_parquet_are_refused(tmp_path: Path) -> None:
    """Also in the messages of a conversation."""
    one, other = pyarrow.array(["user", "assistant"]), pyarrow.array(["a", "b"])
    talk = pyarrow.StructArray.from_arrays([one, other, other], ["role", "content", "content"])
    tables = {
        "text": pyarrow.Table.from_arrays([one, other], names=["text", "text"]),
        "content": pyarrow.table({"messages": NESTS["list"](talk)}),
    }
    for name, table in tables.items():
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
        with pytest.raises(InputError, match=rf"the column or field '{name}' occurs twice"):
            read(tmp_path / f"{name}.parquet")


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_wide_characters_are_named_and_never_read_with_zero_bytes(
    tmp_path: Path, encoding: str, compression: str
) -> None:
    """With and without a mark, and whatever is to be done with bytes that are not UTF-8."""
    contents = {
        **{
            "a.txt": "Ebb and flow",
            "b.md": "\u7b2c\u4e00\u7ae0 \u4f60\u597d\n",
            "c.txt": "\u041f\u0440\u0438 \u0432\n",
        },
        **{"d.csv": "id,text\n1,flow\n", "e.jsonl": '{"text": "flow"}\n', "f.txt": "\u4f60\u597d\n"},
    }
    for name, text in contents.items():
        (tmp_path / name).write_bytes(text.encode(encoding))
        path = compressed(tmp_path / name, compression)
        for errors in ("strict", "replace"):
            with pytest.raises(InputError, match=rf"{path.name} holds {encoding[:6].upper()}, or no text; convert it"):
                read(path, encoding_errors=errors)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("text.jsonl", '{"text": null}\n{"text": "kept"}\n{"text": NaN}\n'),
        ("text.csv", 'id,text\n1,\n2,kept\n3,""\n'),
        ("pairs.csv", "prompt,completion\n,a\nq,\nkept,kept\n"),
        ("pairs.jsonl", '{"prompt": null, "completion": "a"}\n{"prompt": "q", "completion": null}\n'),
        ("chats.jsonl", '{"messages": null}\n{"messages": [{"role": "user", "content": null}]}\n'),
        ("text.parquet", ""),
    ],
)
def test_rows_of_null_are_left_out_and_counted_once(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    if name == "text.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": [None, "kept", None]}), path)
    elif path.suffix == ".jsonl" and "kept" not in content:
        path.write_text(content + '{"prompt": "kept", "completion": "kept"}\n')
    with pytest.warns(UserWarning, match=rf"{name}': left out 2 rows whose text is null"):
        first = read(path)
    assert first == read(path)  # warned once
    assert [document.text for document in first] in (["kept"], ["kept\n\nkept"])


def test_files_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\nbad\n')
    documents = read_documents(str(tmp_path))
    assert next(documents).text == "good"
    with pytest.raises(InputError, match=r"a.jsonl:2"):
        next(documents)
