"""Text in the exported page: tokens of texts, and text of tokens, as in Python."""

import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from multilin.data.added_text import plain_tokenizer
from multilin.errors import InputError
from multilin.export.web import check_tokenizer
from multilin.inference.text import TextCodec, TextStream
from tests.tokenizer_kinds import KINDS, random_ids, random_texts, tokenizer

PROGRAM = """
import fs from "fs";
import {TextCodec, TextStream} from "./tokenizer.js";
const answers = [];
for (const {content, texts, parts} of JSON.parse(fs.readFileSync(0))) {
  const codec = new TextCodec(content);
  answers.push({
    first: texts.map(text => codec.encode(text)), following: texts.map(text => codec.encode(text, true)),
    decoded: parts.map(([ids]) => codec.decode(ids)),
    streamed: parts.map(([ids, place]) => {
      const stream = new TextStream(codec, ids.slice(0, place));
      return [...ids.slice(place).map(id => stream.put(id)), stream.end()];
    }),
  });
}
process.stdout.write(JSON.stringify(answers));
"""


def in_node(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What the page makes of texts and tokens."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    for name in ("tokenizer.js", "tokenizers.min.mjs"):
        (folder / name).write_bytes(resources.files("multilin.export").joinpath(f"assets/web/{name}").read_bytes())
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "run.js").write_text(PROGRAM)
    ran = subprocess.run(
        ["node", "run.js"], input=json.dumps(cases), cwd=folder, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    answers: list[dict[str, Any]] = json.loads(ran.stdout)
    return answers


def without_names(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with names of special tokens that no text has: text never becomes one, whatever it spells."""
    content = json.loads(tokenizer.to_str())
    names = {token["content"]: f"\ue000{token['id']}" for token in content["added_tokens"] if token["special"]}
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model, renamed = content["model"], lambda name: names.get(name, name)
    is_list = isinstance(model["vocab"], list)
    vocabulary = [(renamed(name), value) for name, value in (model["vocab"] if is_list else model["vocab"].items())]
    model |= {"vocab": vocabulary if is_list else dict(vocabulary)}
    if "unk_token" in model:
        model["unk_token"] = renamed(model["unk_token"])
    return plain_tokenizer(json.dumps(content))


def test_the_page_reads_and_writes_text_as_python_does(tmp_path: Path) -> None:
    cases, expected = [], []
    for seed, name in enumerate(KINDS):
        codec, reader = (TextCodec(each, 0, 0) for each in (tokenizer(name), without_names(tokenizer(name))))
        texts = random_texts(seed, 300)
        parts = [
            (ids, len(ids) * (number % 3) // 4) for number, ids in enumerate(random_ids(codec.tokenizer, seed, 300))
        ]
        streamed = []
        for ids, place in parts:
            stream = TextStream(codec, ids[:place], True)
            streamed.append([*map(stream.put, ids[place:]), stream.end()])
        cases.append({"content": json.loads(codec.tokenizer.to_str()), "texts": texts, "parts": parts})
        expected.append(
            {
                "first": [reader.encode(text) for text in texts],
                "following": [reader.encode_more(text) for text in texts],
                "decoded": [codec.tokenizer.decode(ids) for ids, _ in parts],
                "streamed": streamed,
            }
        )
    for name, case, right, page in zip(KINDS, cases, expected, in_node(cases, tmp_path), strict=True):
        for way, answers in right.items():
            given = case["texts"] if way in ("first", "following") else case["parts"]
            wrong = [ascii((x, a, b)) for x, a, b in zip(given, answers, page[way], strict=True) if a != b]
            assert not wrong, f"{name}, {way}: {len(wrong)} of {len(given)} differ, as {min(wrong, key=len)}"


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_that_the_page_follows_is_taken(name: str) -> None:
    check_tokenizer(tokenizer(name))


def with_part(**parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(parts.pop("model", None) or models.BPE())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def with_added_token(**options: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_tokens([AddedToken("<tool>", **options)])
    return tokenizer


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (with_part(normalizer=normalizers.NFKC()), "its normalizer has NFKC"),
        (with_part(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])), "normalizer has Strip"),
        (with_part(normalizer=normalizers.BertNormalizer()), "its normalizer has BertNormalizer"),
        (with_part(normalizer=normalizers.Replace("a", "")), "its normalizer has Replace with nothing"),
        (with_part(pre_tokenizer=pre_tokenizers.Punctuation()), "its pre_tokenizer has Punctuation"),
        (with_part(pre_tokenizer=pre_tokenizers.Whitespace()), "its pre_tokenizer has Whitespace"),
        *(
            (with_part(pre_tokenizer=pre_tokenizers.Split(Regex(pattern), "isolated")), "pre_tokenizer has the pattern")
            for pattern in (r"\w+", r"\d", "a*", "(?i:ss)", r"\p{Han}", "a++", "^a", "[a&&b]", "(?<=a)b")
        ),
        (with_part(model=models.WordPiece(unk_token="x")), "its model has WordPiece"),
        (with_part(model=models.BPE(dropout=0.1)), "its model has dropout of BPE"),
        (with_part(model=models.BPE(end_of_word_suffix="</w>")), "its model has end_of_word_suffix of BPE"),
        (with_part(decoder=decoders.CTC()), "its decoder has CTC"),
        (with_part(decoder=decoders.Strip(" ", 0, 1)), "its decoder has stop of Strip"),
        (with_added_token(lstrip=True), "its vocabulary has lstrip of AddedToken"),
        (with_added_token(single_word=True), "its vocabulary has single_word of AddedToken"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_the_page_would_not_follow_exactly_is_refused(refused: Tokenizer, named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        check_tokenizer(refused)
