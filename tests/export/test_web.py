"""The page that runs an exported model: in a real Chromium, with its files from a server on this machine."""

import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from multilin.data.tokenizers import train_tokenizer
from multilin.errors import InputError
from multilin.export import web
from multilin.inference.onnx_engine import OnnxEngine
from multilin.model.factory import create_model
from multilin.runs.load import Run

PROMPT = "A prompt – with more than one piece of tokens, and characters of two and more bytes: größer, 漢字, 😀.\n"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        files = web.fetch_runtime()
    except InputError as error:
        pytest.skip(str(error))
    parent = tmp_path_factory.mktemp("web")
    (parent / "runtime").mkdir()
    for name, content in files.items():
        (parent / "runtime" / name).write_bytes(content)
    torch.manual_seed(1)
    layers = [{"architecture": name} for name in ("additive", "tscale", "threelin", "elita")]  # every kind of operator
    sizes = {"hidden_size": 32, "vocab_size": 258, "n_positions": 512, "match": {"window": 100, "longest": 4}}
    model = create_model("additive", layers=layers, **sizes).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter)  # large, so that the tokens vary with what was read
    tokenizer = train_tokenizer([], "byte", None)
    tokenizer.save_pretrained(parent / "run")
    web.export_web(Run(parent / "run", model, tokenizer), parent / "page", parent / "runtime")
    return parent / "page"


def open_page(context: Any, address: str) -> Any:
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(address)
    page.wait_for_selector("#controls:enabled")
    page.click("summary")
    page.fill("#temperature", "0")
    return page


def generate(page: Any, num_tokens: int, prompt: str = "") -> list[int]:
    """All tokens of the active text after so many more."""
    page.fill("#maxNewTokens", str(num_tokens))
    page.fill("#prompt", prompt)
    page.click("#generate")
    page.wait_for_selector("#branches:not(:has(.running))")
    ids: list[int] = page.evaluate("multilin.active.ids")
    return ids


def expanding() -> onnxruntime.SessionOptions:
    """As the page does it: elsewhere the runtime also rounds what is multiplied with 8-bit matrices."""
    options = make_options()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return options


make_options = onnxruntime.SessionOptions


def greedy(folder: Path, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(onnxruntime, "SessionOptions", expanding)
    engine = OnnxEngine(folder / "model", 1)
    ids = [engine.codec.end_id, *engine.codec.encode(PROMPT)]
    state, fresh = engine.new_state(), list(ids)
    for _ in range(num_tokens):
        logits = engine.read(state, [fresh])[0]
        logits[engine.codec.pad_id] = -np.inf
        fresh = [int(logits.argmax())]
        ids += fresh
    return ids


@pytest.mark.slow
def test_page_generates_forks_and_restores_as_python_does_also_without_a_server(
    folder: Path, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = greedy(folder, 60, monkeypatch)
    num_prompt = len(expected) - 60
    assert len(set(expected[num_prompt:])) > 5, "a model that repeats itself shows little"
    context = browser.new_context()
    with served(folder) as address:
        page = open_page(context, address)
        assert "without network" in page.inner_text("#about")
        assert generate(page, 30, PROMPT) == expected[:-30]
        page.click("#save")
        page.wait_for_selector("text=Saved")
        page.click("#fork")
        assert generate(page, 30) == expected
        page.check("input[type=radio] >> nth=0")
        assert page.evaluate("multilin.active.ids") == expected[:-30], "the fork changed the first text"
        assert generate(page, 30) == expected
        text = page.inner_text(".text >> nth=0")
        page.close()
    page = open_page(context, address)  # by the service worker alone
    page.click("#restore")
    page.wait_for_selector("text=Restored")
    assert generate(page, 30) == expected
    assert page.inner_text(".text >> nth=0") == text
    assert text.startswith(PROMPT)
    message = "The text is full"
    generate(page, 1000)
    assert message in page.inner_text("#message")


@pytest.mark.slow
def test_a_prompt_whose_reading_failed_in_its_middle_is_read_on(
    folder: Path, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = greedy(folder, 20, monkeypatch)
    with served(folder) as address:
        page = open_page(browser.new_context(), address)
        page.evaluate("""() => {
            const {prompt} = multilin.engine, run = prompt.run.bind(prompt);
            let number = 0;
            prompt.run = async feed => {
                if (++number === 2) throw new Error("no memory left");
                return run(feed);
            };
        }""")
        assert generate(page, 20, PROMPT) == expected[:-20]
        assert page.inner_text("#message") == "no memory left"
        assert generate(page, 20) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "failing",
    ["this.add(1, 1); return this.add(2, 1);", "throw new Error('not enough memory')"],
    ids=["aborted", "refused"],
)
def test_a_save_that_fails_is_said_and_leaves_no_database_open(folder: Path, browser: Any, failing: str) -> None:
    with served(folder) as address:
        page = open_page(browser.new_context(), address)
        page.evaluate(f"() => {{ IDBObjectStore.prototype.put = function () {{ {failing} }} }}")
        page.click("#save")
        page.wait_for_selector("#message.error")
        deleting = """() => new Promise(resolve => {
            const request = indexedDB.deleteDatabase("multilin");
            request.onblocked = () => resolve("blocked");
            request.onsuccess = () => resolve("deleted");
        })"""
        assert page.evaluate(deleting) == "deleted"


@pytest.mark.slow
def test_page_fits_a_phone_and_works_by_keyboard(folder: Path, browser: Any) -> None:
    with served(folder) as address:
        page = open_page(browser.new_context(viewport={"width": 320, "height": 640}, color_scheme="dark"), address)
        page.fill("#maxNewTokens", "400")
        page.focus("#prompt")
        page.keyboard.type("abc")
        page.keyboard.press("Control+Enter")
        page.keyboard.press("Escape")
        page.wait_for_selector("#branches:not(:has(.running))")
        assert 5 <= page.evaluate("multilin.active.ids.length") < 400
        page.click("#fork")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.keyboard.press("Shift+Tab")  # the settings come after the buttons, the texts before them
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"


def test_matrices_in_bytes_give_nearly_the_same_products() -> None:
    numbers = np.random.default_rng(0)
    weights = {"w": numbers.normal(size=(64, 96)), "table": numbers.normal(size=(50, 64)), "gain": np.ones(64)}
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["x"]),
            helper.make_node("Mul", ["x", "gain"], ["scaled"]),
            helper.make_node("MatMul", ["scaled", "w"], ["y"]),
        ],
        "products",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 96])],
        [numpy_helper.from_array(values.astype(np.float32), name) for name, values in weights.items()],
    )
    whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    model = web.stored_in_bytes(whole, "8bit")
    onnx.checker.check_model(model)
    assert len(model.SerializeToString()) < 0.35 * sum(values.size * 4 for values in weights.values())
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"ids": np.array([0, 7, 49])})
    expected = weights["table"][[0, 7, 49]] @ weights["w"]
    assert np.abs(result - expected).max() < 0.02 * np.abs(expected).max()


def test_runtime_that_is_missing_of_another_version_or_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"--runtime: .* holds no ort.wasm.bundle.min.mjs"):
        web.read_runtime(tmp_path)
    for name in web.RUNTIME_FILES:
        (tmp_path / name).write_text("/*!\n * ONNX Runtime Web v1.2.3\n */\n")
    with pytest.raises(InputError, match=f"does not hold onnxruntime-web {web.RUNTIME_VERSION}"):
        web.read_runtime(tmp_path)
    package = tmp_path / "onnxruntime-web" / "-" / f"onnxruntime-web-{web.RUNTIME_VERSION}.tgz"
    package.parent.mkdir(parents=True)
    package.write_bytes(b"something else")
    with served(tmp_path) as address:
        monkeypatch.setattr(web, "_registry", lambda: address)
        with pytest.raises(InputError, match="another checksum"):
            web.fetch_runtime()
    with pytest.raises(InputError, match="cannot be fetched"):
        web.fetch_runtime()


def test_npm_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\nexec sleep 600\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(web, "TIMEOUT", 0.1)
    with pytest.raises(InputError, match=r"--runtime: none given, and npm does not name its registry \(.*timed out"):
        web.fetch_runtime()
