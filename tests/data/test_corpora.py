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

from multilin.data.corpora import read_documents, source_fingerprint
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
    for name in ["b.txt", "a/z.txt", "a/empty.txt", ".git/c.txt", "d.log"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else name)
    assert read(tmp_path) == [Document("a/z.txt", "a/z.txt"), Document("b.txt", "b.txt")]
    assert read(tmp_path / "*.txt") == [Document("b.txt", "b.txt")]
    assert read(tmp_path / "**" / "z*") == [Document("a/z.txt", "a/z.txt")]


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
        ("list.jsonl", b"[1, 2]\n", r"list.jsonl:1: a line should be a JSON object"),
        ("field.jsonl", b'{"txt": "a", "id": 1}\n', r"jsonl:1: no field 'text'.*txt, id; did you mean 'txt'"),
        ("type.jsonl", b'{"text": 5}\n', r"type.jsonl:1: field 'text' holds 5, but it should hold a text"),
        ("half.jsonl", b'{"text": "a\\ud83d"}\n', r"half.jsonl:1: character 1 .* half a surrogate pair"),
        ("field.csv", b"id,body\n1,hello\n", r"field.csv:1: no field 'text'.*id, body"),
        ("short.csv", b"id,text\n1\n", r"short.csv:1: field 'text' holds None"),
        ("open.csv", b'text,b\n"foo,1\nbar,2\n', r"open.csv: line 1 is not CSV \(unexpected end of data"),
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
        ("here/**.txt", "'here/.*' given, but Invalid pattern"),
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
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "a\\ud83d"}')
    texts = pyarrow.StringArray.from_buffers(1, pyarrow.py_buffer(b"\0\0\0\0\4\0\0\0"), pyarrow.py_buffer(b"caf\xe9"))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "c.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": texts.dictionary_encode()}), tmp_path / "d.parquet")
    texts = [document.text for document in read(tmp_path, encoding_errors="replace")]
    assert texts == ["caf\ufffd", "a\ufffd", "caf\ufffd", "caf\ufffd"]
    for name in ("c.parquet", "d.parquet"):
        with pytest.raises(InputError, match=f"{name}: a text is not UTF-8; .*encoding_errors to replace"):
            read(tmp_path / name)


def test_files_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\nbad\n')
    documents = read_documents(str(tmp_path))
    assert next(documents).text == "good"
    with pytest.raises(InputError, match=r"a.jsonl:2"):
        next(documents)
