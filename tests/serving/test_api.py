"""Fields, shapes and refusals of the endpoints, and OpenAI's own client."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from multilin.inference.generate_run import text_codec
from multilin.inference.torch_engine import TorchEngine
from multilin.runs.load import Run
from multilin.serving.api import requests
from multilin.serving.api.requests import ChatRequest, CompletionRequest
from tests.serving.conftest import LONGEST, Server, Start
from tests.serving.engines import Script

DOCS = Path(__file__).parents[2] / "docs" / "serve.md"
GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openais_client(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    given = {"model": "tiny", "messages": messages, "max_tokens": 12, "seed": 4, "temperature": 0.7}
    whole = client.chat.completions.create(**given, n=2)
    streamed = client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True})
    *pieces, last = list(streamed)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert whole.choices[1].message.content != whole.choices[0].message.content
    assert whole.choices[0].finish_reason == pieces[-1].choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == 12
    text = client.completions.create(model="tiny", prompt="abc", max_tokens=5, temperature=0).choices[0].text
    assert len(text) == 5
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
    talk = [{"role": "user", "content": "hi"}, answer.choices[0].message, {"role": "user", "content": "and"}]
    client.chat.completions.create(model="tiny", messages=talk, max_tokens=3)
    with pytest.raises(openai.BadRequestError, match="nonsense: unknown"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi", "nonsense": 1}])
    with pytest.raises(openai.BadRequestError, match="suffix") as refusal:
        client.completions.create(model="tiny", prompt="abc", suffix="x")
    assert refusal.value.param == "suffix"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="large", prompt="abc")


def test_logprobs_tell_of_tokens_that_make_no_character(start: Start, run: Run) -> None:
    """Of those in the middle of the text and of those at its end; offsets are those of the text."""
    codec = text_codec(run.tokenizer)
    (broken, _), letters = codec.encode("é"), codec.encode("abc")
    ids = [letters[0], broken, *letters[1:], broken]
    server = start(Script(TorchEngine(run.model), ids))
    body = {"prompt": [*ids, ids[0]], "max_tokens": 5, "temperature": 0, "logprobs": 0, "echo": True}
    whole = server.post("/v1/completions", **body)["choices"][0]
    part = r"bytes:\xc3"
    assert whole["text"] == "a\ufffdbc\ufffda" + "a\ufffdbc"
    assert whole["logprobs"]["tokens"] == ["a", part, "b", "c", part, "a", "a", part, "b", "c", part]
    assert whole["logprobs"]["text_offset"] == list(range(11))
    pieces = [event["choices"][0]["logprobs"] for event in server.stream("/v1/completions", **body)]
    assert [offset for piece in pieces for offset in piece["text_offset"]] == list(range(11))


def reported(server: Server, path: str, body: dict[str, Any], *, is_streamed: bool) -> tuple[list[Any], int]:
    """The choices of an answer, each with its text and its entries of tokens; and the number of tokens generated."""
    name = "text" if path == "/v1/completions" else "delta" if is_streamed else "message"
    if is_streamed:
        events = server.stream(path, **body, stream_options={"include_usage": True})
    else:
        events = [server.post(path, **body)]
    found: dict[int, tuple[str, list[Any]]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text, entries = found.get(choice["index"], ("", []))
        text += choice[name] if name == "text" else choice[name].get("content", "")
        logprobs = choice["logprobs"] or {}
        new = logprobs.get("content") or [
            {"token": token, "logprob": value, "top": top, "offset": offset}
            for token, value, top, offset in zip(*(logprobs.get(key, []) for key in KEYS), strict=True)
        ]
        found[choice["index"]] = text, entries + new
    return [found[index] for index in sorted(found)], events[-1]["usage"]["completion_tokens"]


KEYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
ENDS: dict[str, dict[str, Any]] = {
    "length": {"max_tokens": 5},
    "one token": {"max_tokens": 1},
    "end of text": {"max_tokens": 9, "logit_bias": {"0": 1e6}},
    "end of text after some": {"max_tokens": 400, "logit_bias": {"0": 1e4}, "seed": 3},
    "end of text that is ignored": {"max_tokens": 5, "logit_bias": {"0": 1e6}, "ignore_eos": True},
    "stop string": {"max_tokens": 30, "stop": ["e", "a", "o"], "seed": 1},
    "stop string of two tokens": {"max_tokens": 9, "logit_bias": {"99": 1e6}, "stop": "aa"},
    "part of a stop string": {"max_tokens": 3, "logit_bias": {"99": 1e6}, "stop": "aaaaa"},
    "part of a character": {"max_tokens": 3, "logit_bias": {"197": 1e6}},
}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("end", ENDS)
def test_every_token_that_is_counted_has_its_probability(
    server: Server, path: str, end: str, is_streamed: bool
) -> None:
    """Those of the end of text and of a stop string too, wherever an answer ends; and each is among its likeliest."""
    assert server.service.codec.end_id == 0
    body = {"prompt": "The", "logprobs": 2, "n": 2}
    if path == "/v1/chat/completions":
        body = {"messages": [{"role": "user", "content": "The"}], "logprobs": True, "top_logprobs": 2, "n": 2}
    choices, num_tokens = reported(server, path, body | ENDS[end], is_streamed=is_streamed)
    assert sum(len(entries) for _, entries in choices) == num_tokens
    for text, entries in choices:
        assert all(entry["logprob"] < 0 for entry in entries)
        if end.startswith("end of text") and "ignored" not in end:
            assert entries[-1]["token"] == server.service.codec.tokenizer.id_to_token(0)
        if path == "/v1/completions":
            assert all(entry["top"][entry["token"]] == entry["logprob"] for entry in entries)
            assert all(2 <= len(entry["top"]) <= 3 for entry in entries)
            offsets = [entry["offset"] for entry in entries]
            assert offsets == sorted(offsets)
            assert offsets[-1] <= len(text)
        else:
            assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_a_harness_that_leaves_the_last_entry_out_scores_the_whole_text(server: Server) -> None:
    """It asks for the prompt and one token, and drops the one, also where the model ends the text there."""
    ids = server.service.codec.encode("The value of the list", is_start=True)
    body = {"prompt": [ids], "temperature": 0, "logprobs": 1, "echo": True}
    alone = server.post("/v1/completions", **body, max_tokens=0)["choices"][0]["logprobs"]["token_logprobs"]
    for bias in ({}, {"0": 1e6}):
        answer = server.post("/v1/completions", **body, max_tokens=1, logit_bias=bias)
        values = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert values[:-1] == pytest.approx(alone, abs=1e-4)
        assert len(values) == answer["usage"]["total_tokens"] == len(ids) + 1


@pytest.mark.parametrize("end", [{}, {"stop": "\x00"}])
def test_a_session_reports_the_tokens_of_its_new_prompt_alone(server: Server, end: dict[str, str]) -> None:
    """Also where tokens of the answer before are read with it."""
    session = server.post("/v1/sessions")["id"]
    server.post("/v1/completions", prompt="Hello", session=session, max_tokens=3, temperature=0, ignore_eos=True, **end)
    body = {"prompt": " wor", "echo": True, "max_tokens": 2, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    logprobs = server.post("/v1/completions", session=session, **body)["choices"][0]["logprobs"]
    assert logprobs["tokens"][:4] == list(" wor")
    assert logprobs["text_offset"][:5] == [0, 1, 2, 3, 4]
    assert all(value < 0 for value in logprobs["token_logprobs"])


def test_logprobs_echo_and_bias(server: Server) -> None:
    body = {"prompt": "abc", **GREEDY, "logprobs": 3}
    choice = server.post("/v1/completions", **body)["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(6))
    for token, value, top in zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert max(top, key=top.get) == token
        assert top[token] == value < 0
        assert len(top) == 3
    echoed = server.post("/v1/completions", **body, echo=True)["choices"][0]
    assert echoed["text"] == "abc" + choice["text"]
    assert "".join(echoed["logprobs"]["tokens"]) == echoed["text"]
    assert echoed["logprobs"]["token_logprobs"][3:] == pytest.approx(logprobs["token_logprobs"], abs=1e-4)
    scored = server.post("/v1/completions", **body | {"prompt": echoed["text"], "echo": True, "max_tokens": 0})
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
        echoed["logprobs"]["token_logprobs"], abs=1e-4
    )
    ids = server.post("/tokenize", prompt="abc")["tokens"]
    first = server.post("/v1/completions", **body | {"prompt": ids, "echo": True, "max_tokens": 0})["choices"][0]
    assert first["logprobs"]["token_logprobs"][0] is None
    assert first["text"] == "abc"
    whole = server.post("/v1/completions", **body | {"prompt": ids, "echo": True})["choices"][0]["logprobs"]
    pieces = server.stream("/v1/completions", **body | {"prompt": ids, "echo": True})
    found = [piece["choices"][0]["logprobs"] for piece in pieces if piece["choices"][0]["logprobs"]]
    for name, values in whole.items():
        assert [value for piece in found for value in piece[name]] == values
    begun = [server.service.codec.end_id, *ids]  # as clients that score texts ask
    given = server.post("/v1/completions", **body | {"prompt": begun, "echo": True, "max_tokens": 0})["choices"][0]
    assert given["logprobs"]["token_logprobs"][0] is None
    assert given["logprobs"]["token_logprobs"][1:] == pytest.approx(
        scored["choices"][0]["logprobs"]["token_logprobs"][:3], abs=1e-4
    )
    special = [ids[0], server.service.codec.pad_id, *ids[1:]]
    scored = server.post("/v1/completions", **body | {"prompt": special, "echo": True, "max_tokens": 0})["choices"][0]
    assert scored["logprobs"]["text_offset"] == [0, 1, 1, 2]  # padding is no text
    assert scored["logprobs"]["token_logprobs"][1] == -9999.0  # and never comes

    chat = {"messages": [{"role": "user", "content": "x"}], **GREEDY, "logprobs": True, "top_logprobs": 2}
    whole = server.post("/v1/chat/completions", **chat)["choices"][0]
    entries = whole["logprobs"]["content"]
    assert "".join(bytes(entry["bytes"]).decode() for entry in entries) == whole["message"]["content"]
    assert all(math.exp(entry["logprob"]) <= 1 and len(entry["top_logprobs"]) == 2 for entry in entries)
    pieces = server.stream("/v1/chat/completions", **chat)
    assert entries == [entry for p in pieces for entry in ((p["choices"][0]["logprobs"] or {}).get("content") or [])]

    letter = ids[0]
    biased = server.post("/v1/completions", prompt="x", **GREEDY, logit_bias={str(letter): 1e5})
    assert biased["choices"][0]["text"] == "aaaaaa"
    once = server.post("/v1/completions", prompt="x", **GREEDY, presence_penalty=2, logit_bias={str(letter): 1})
    assert once["choices"][0]["finish_reason"] == "length"
    end = server.post("/v1/completions", prompt="x", **GREEDY, logit_bias={str(server.service.codec.end_id): 1e6})
    assert (end["choices"][0]["text"], end["choices"][0]["finish_reason"]) == ("", "stop")
    assert end["usage"]["completion_tokens"] == 1


def test_lists_of_prompts(server: Server) -> None:
    ids = [server.service.codec.end_id, *server.post("/tokenize", prompt="def")["tokens"]]
    answer = server.post("/v1/completions", prompt=["abc", "def"], **GREEDY, n=2)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert choices[0]["text"] == choices[1]["text"] != choices[2]["text"]
    same = server.post("/v1/completions", prompt=[ids, ids], **GREEDY)["choices"]
    assert [choice["text"] for choice in same] == [choices[2]["text"]] * 2
    assert server.post("/detokenize", tokens=ids)["prompt"] == "def"
    # As many tokens are read for a prompt with several answers as for one.
    assert answer["usage"]["prompt_tokens"] == 8


def test_fields_that_ask_for_what_happens_anyway_are_taken(server: Server) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": []}]
    idle = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}}
    plain = server.post("/v1/chat/completions", messages=messages, **GREEDY)
    same = server.post("/v1/chat/completions", messages=messages, **GREEDY, **idle, service_tier="auto")
    assert same["choices"][0]["message"] == plain["choices"][0]["message"]
    assert server.post("/v1/completions", prompt="a", **GREEDY, n=2, best_of=2, suffix="")["choices"][1]["text"]
    server.post("/v1/completions", prompt=None, **GREEDY)
    server.stream("/v1/completions", prompt="a", **GREEDY, stream_options={"include_usage": None})
    assert httpx.head(f"{server.url}/health").status_code == 200  # as uptime probes ask


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}
MODELS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}


@pytest.mark.parametrize("path", BODIES)
def test_a_field_is_passed_over_where_it_asks_for_what_happens_anyway(server: Server, path: str) -> None:
    """Also the nulls of all fields of OpenAI's reference; what is not done is refused by the name of the field."""
    reference = {
        "/v1/completions": openai.types.completion_create_params.CompletionCreateParamsBase,
        "/v1/chat/completions": openai.types.chat.completion_create_params.CompletionCreateParamsBase,
    }[path]
    server.post(path, **dict.fromkeys(reference.__annotations__) | BODIES[path])
    server.post(path, **BODIES[path], user="u", safety_identifier="u", prompt_cache_key="k", stop=None, store=False)
    model = MODELS[path]
    for name, values in requests.IDLE.items():
        if name not in model.model_fields:
            parts = [{key: None} for one in values if isinstance(one, dict) for key in one]
            for value in [*values, *parts]:
                model.model_validate(BODIES[path] | {name: value})
            for value in (["x"], {"x": 1}, "x", 3):
                with pytest.raises(ValidationError, match=name):
                    model.model_validate(BODIES[path] | {name: value})


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "user", "content": None}, "messages[0].content: null given, but it should be a valid string or "),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0].content: null given"),
        ({"role": "assistant"}, "messages[0].content: missing"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages[0].content[0].text: null given"),
        ({"role": "user", "content": 5}, "messages[0].content: 5 given"),
        ({"role": "user", "content": "a", "name": 5}, "messages[0].name: 5 given, but it should be a valid string"),
        ({"role": "robot", "content": "a"}, "messages[0].role: 'robot' given, but it should be 'system', "),
        (None, "messages: null given"),
    ],
)
def test_a_mistake_in_a_message_is_named(server: Server, message: Any, sentence: str) -> None:
    error = server.call("POST", "/v1/chat/completions", {"messages": [message]}, status=400)["error"]
    assert error["message"].startswith(sentence)
    assert error["param"] == "messages"


REFUSED = {
    "tools": ({"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
    "unknown field": ({"prompt": "a", "best_of": 2}, "best_of"),
    "type": ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
    "true is no number": ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    "bound": ({"prompt": "a", "temperature": -1}, "temperature"),
    "prompt of mixed types": ({"prompt": ["a", 1]}, "prompt"),
    "empty list": ({"prompt": []}, "prompt"),
    "token that there is not": ({"prompt": [99999]}, "prompt"),
    "negative token": ({"prompt": [-1]}, "prompt"),
    "bias of such a token": ({"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias"),
    "bias of no token": ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    "too many tokens": ({"prompt": "a", "max_tokens": 10**6}, "max_tokens"),
    "longer than the model reads": ({"prompt": "a" * LONGEST, "max_tokens": 9}, "prompt"),
    "together longer": ({"prompt": "a" * (LONGEST - 3), "max_tokens": 9}, "max_tokens"),
    "too many answers": ({"prompt": ["a"] * 60, "n": 2}, "n"),
    "empty stop": ({"prompt": "a", "stop": [""]}, "stop"),
    "half a character": ({"prompt": "a\ud800"}, "prompt"),
    "nothing": ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    "options without a stream": ({"prompt": "a", "stream_options": {}}, "stream_options"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_field(server: Server, name: str) -> None:
    body, param = REFUSED[name]
    content, header = json.dumps(body), {"Content-Type": "application/json"}
    error = server.call("POST", "/v1/completions", content=content, headers=header, status=400)["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize("number", [0, 10**6])
@pytest.mark.parametrize("param", ["max_tokens", "max_completion_tokens"])
def test_a_refused_number_of_tokens_has_the_name_that_it_was_given_by(server: Server, param: str, number: int) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], param: number}
    error = server.call("POST", "/v1/chat/completions", body, status=400)["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: {number} given")


def test_an_answer_ends_where_the_model_reads_no_further(server: Server) -> None:
    """Also without `max_tokens`, which is then as many as there is room for, and no more than usual."""
    body = {"prompt": "a" * (LONGEST - 5), "ignore_eos": True, "store": False}
    assert server.post("/v1/completions", **body)["usage"]["completion_tokens"] == 5
    assert server.post("/v1/completions", **body | {"prompt": "a"})["usage"]["completion_tokens"] == 16


def test_a_prompt_may_be_as_long_as_the_server_allows(start: Start) -> None:
    brief = start(max_prompt=8)
    brief.post("/v1/completions", prompt="abcdefg", max_tokens=2)  # with the token of its start
    for prompt in ("abcdefgh", "x" * 99):
        error = brief.call("POST", "/v1/completions", {"prompt": prompt}, status=400)["error"]
        assert error["message"] == f"prompt: {len(prompt) + 1} tokens to read, but a request may have at most 8"


def test_what_is_no_request_of_ours(server: Server, start: Start) -> None:
    header = {"Content-Type": "application/json"}
    for content in (b"", b"{", b"[]", b"null", b'{"prompt": "\xff"}', b"[" * 100_000, b'{"max_tokens": 1e999}'):
        assert "message" in server.call("POST", "/v1/completions", content=content, headers=header, status=400)["error"]
    assert server.call("GET", "/v1/nothing", status=404)["error"]["message"]
    assert server.call("GET", "/v1/completions", status=405)["error"]["message"]
    assert httpx.get(server.url + "/v1/completions").headers["allow"] == "POST"
    for content in (b"x" * (2**24 + 1), iter([b"x" * 2**23] * 3)):  # also one that does not say how long it is
        assert server.call("POST", "/v1/completions", content=content, headers=header, status=413)["error"]
    for kind, is_hinted in (("application/json", False), ("text/plain", True)):
        content, header = b"[]", {"Content-Type": kind}
        error = server.call("POST", "/v1/completions", content=content, headers=header, status=400)["error"]
        assert ("Content-Type" in error["message"]) is is_hinted
    strict = start(is_loopback=True)
    elsewhere = {"Host": "example.org"}
    assert strict.call("GET", "/v1/models", headers=elsewhere, status=400)["error"]["param"] == "host"
    for path in ("/v1/sessions/../../etc/passwd", "/v1/sessions/%2e%2e%2fx/state", "/v1/sessions/%00"):
        assert httpx.get(server.url + path).status_code in (404, 405)


def test_pages_elsewhere_are_let_in_only_where_they_are_named(server: Server, start: Start) -> None:
    origin = {"Origin": "https://example.org"}
    assert "access-control-allow-origin" not in httpx.get(f"{server.url}/v1/models", headers=origin).headers
    named = start(origins=["https://example.org"])
    allowed = httpx.get(f"{named.url}/v1/models", headers=origin).headers
    assert allowed["access-control-allow-origin"] == "https://example.org"
    strict = start(is_loopback=True)
    assert strict.call("POST", "/v1/sessions", headers=origin, status=403)["error"]["param"] == "origin"
    assert strict.call("GET", "/v1/sessions")["data"] == []
    strict.call("POST", "/v1/sessions", headers={"Origin": strict.url})
    start(is_loopback=True, origins=["https://example.org"]).call("POST", "/v1/sessions", headers=origin)


def test_the_examples_of_the_docs(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    blocks = re.findall("^```(bash|python)\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    for language, block in blocks[1:]:
        code = block.replace("http://127.0.0.1:8000", server.url).replace('model="demo"', 'model="tiny"')
        if language == "python":
            exec(compile(code, str(DOCS), "exec"), {})
            assert len(capsys.readouterr().out) == 50
        elif shutil.which("curl") and "curl" in block:
            ended = subprocess.run(["bash", "-ec", code], cwd=tmp_path, capture_output=True, text=True)
            assert ended.returncode == 0, ended.stderr
            assert '"error"' not in ended.stdout
    assert len(blocks) == 5


def test_figures(server: Server) -> None:
    server.post("/v1/completions", prompt="abc", **GREEDY)
    text = httpx.get(f"{server.url}/metrics").text
    for name in ("generated_tokens_total", "cached_tokens_total", "running_sequences 0.0", "first_token_seconds_count"):
        assert f"multilin_{name}" in text
    assert 'multilin_http_answers_total{path="/v1/completions",status="200"}' in text
