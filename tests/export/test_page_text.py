"""Text in the exported page: tokens of texts, and text of tokens, as in Python."""

import json
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

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


def in_node(cases: list[dict], folder: Path) -> list[dict]:
    """What the page makes of texts and tokens."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    for name in ("tokenizer.js", "tokenizers.min.mjs"):
        (folder / name).write_bytes(resources.files("multilin.export").joinpath(f"assets/web/{name}").read_bytes())
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "run.js").write_text(PROGRAM)
    ran = subprocess.run(["node", "run.js"], input=json.dumps(cases), cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_page_reads_and_writes_text_as_python_does(tmp_path: Path) -> None:
    cases, expected = [], []
    for seed, name in enumerate(KINDS):
        codec = TextCodec(tokenizer(name), 0, 0)
        texts = random_texts(seed, 300)
        parts = [(ids, len(ids) * (number % 3) // 4) for number, ids in enumerate(random_ids(codec.tokenizer, seed, 300))]
        streamed = []
        for ids, place in parts:
            stream = TextStream(codec, ids[:place], True)
            streamed.append([*map(stream.put, ids[place:]), stream.end()])
        cases.append({"content": json.loads(codec.tokenizer.to_str()), "texts": texts, "parts": parts})
        expected.append({
            "first": [codec.encode(text) for text in texts], "following": [codec.encode_more(text) for text in texts],
            "decoded": [codec.tokenizer.decode(ids) for ids, _ in parts], "streamed": streamed,
        })
    for name, case, right, page in zip(KINDS, cases, expected, in_node(cases, tmp_path), strict=True):
        for way, answers in right.items():
            given = case["texts"] if way in ("first", "following") else case["parts"]
            wrong = [ascii((x, a, b)) for x, a, b in zip(given, answers, page[way], strict=True) if a != b]
            assert not wrong, f"{name}, {way}: {len(wrong)} of {len(given)} differ, as {min(wrong, key=len)}"
