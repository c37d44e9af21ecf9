"""The page at `/`: its files and their policy, and the page in a real Chromium."""

import re
import time
from typing import Any

import httpx
import pytest

from multilin.inference.torch_engine import TorchEngine
from multilin.runs.load import Run
from tests.serving.conftest import Server, Start
from tests.serving.engines import Watched

PROMPT = "<img src=x onerror=alert(1)> größer 漢字 😀 "


def test_page_and_its_files_come_without_a_key_and_hold_no_inline_script(start: Start) -> None:
    server = start(keys=["secret"])
    answer = httpx.get(server.url + "/")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert not re.search(r"<script(?![^>]*\ssrc=)|\sstyle=|\son\w+=|<style", answer.text)
    places = re.findall(r'(?:src|href)="(/[^"]*)"', answer.text)
    scripts = [place for place in places if place.endswith(".js")]
    assert scripts
    for place in scripts:  # and what they import
        imported = re.findall(r'from "\./([^"]+)"', httpx.get(server.url + place).text)
        places += [each for name in imported if (each := f"/assets/{name}") not in places]
    for place in places:
        answer = httpx.get(server.url + place)
        assert answer.status_code == 200, place
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "innerHTML" not in answer.text
    key = {"Authorization": "Bearer secret"}
    for name in ("nothing.js", "..%2F..%2Fapp.py", "%2Fetc%2Fpasswd"):
        assert httpx.get(f"{server.url}/assets/{name}", headers=key).status_code == 404


def open_page(context: Any, server: Server) -> Any:
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.goto(server.url)
    return page


def ready(page: Any) -> None:
    page.wait_for_selector("#controls:enabled")
    page.wait_for_selector("#sheet:not(.running)")


def until(page: Any, condition: str) -> None:
    """Wait; the page's policy forbids Playwright's own function for that."""
    end = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(20)


def generate(page: Any, prompt: str, num_tokens: int = 20) -> str:
    """The text of the sheet after so many more tokens, the likeliest ones."""
    ready(page)
    page.evaluate("document.getElementById('sampling').open = true")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", str(num_tokens))
    page.fill("#prompt", prompt)
    page.click("#generate")
    ready(page)
    return str(page.text_content("#text"))


@pytest.mark.slow
def test_page_streams_branches_switches_and_shows_what_was_read(start: Start, run: Run, browser: Any) -> None:
    server = start(load_run=lambda: run)
    page = open_page(browser.new_context(), server)

    def expected(prompt: str, num_tokens: int) -> str:
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "store": False}
        return str(server.post("/v1/completions", **body)["choices"][0]["text"])

    first = generate(page, PROMPT)
    assert first == PROMPT + expected(PROMPT, 20)
    assert page.locator("#text img").count() == 0
    facts = page.inner_text("#about-turn")
    assert re.fullmatch(r"Turn 1 · \d+ tokens · state [\d.]+ kB", facts), facts
    assert page.inner_text("#speed").endswith("tokens/s")
    onward = generate(page, "onward")
    assert onward.startswith(first + "onward")
    page.click(".branch")
    assert page.text_content("#text") == first
    other = generate(page, "another way")
    assert other.startswith(first + "another way")
    deeper = generate(page, "")
    assert deeper.startswith(other)

    # By keyboard through the tree, in which the branches lie below the first turn.
    items = page.locator("[role=treeitem]")
    assert [item.get_attribute("aria-level") for item in items.all()] == ["1", "2", "2", "3"]
    texts = [first, onward, other, deeper]
    page.focus("[role=treeitem][aria-selected=true]")
    for keys, index in (("Home", 0), ("ArrowDown", 1), ("ArrowDown", 2), ("ArrowRight", 3), ("ArrowLeft ArrowLeft", 0)):
        for key in keys.split():
            page.keyboard.press(key)
        assert page.text_content("#text") == texts[index]
        assert items.nth(index).get_attribute("aria-selected") == "true"
    sessions = server.call("GET", "/v1/sessions")["data"]
    assert sorted(session["num_turns"] for session in sessions) == [2, 3]

    page.keyboard.press("End")
    page.click("#read")
    page.wait_for_selector("#reading:visible")
    assert "".join(page.locator(".token:not(.mark)").all_text_contents()) == deeper
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("[aria-current]") == PROMPT[0]
    assert page.inner_text("#read-most").startswith(f'Largest weights after "{PROMPT[0]}": ')
    weights = page.eval_on_selector_all(".token", "all => all.map(e => +e.style.getPropertyValue('--weight'))")
    assert max(weights[:2]) == 1
    assert not any(weights[2:])
    page.select_option("#step", "1")
    until(page, "document.getElementById('step').value === '1' && !document.getElementById('read').disabled")
    assert page.inner_text("[aria-current]") == PROMPT[0]
    page.keyboard.press("Escape")
    assert page.text_content("#text") == deeper

    page.reload()  # all of it is the server's
    ready(page)
    assert page.text_content("#text") == ""
    page.click("[role=treeitem] >> nth=1")
    assert page.text_content("#text") == onward
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#delete")
    until(page, "document.querySelectorAll('[role=treeitem]').length === 3")
    assert page.text_content("#text") == first
    again = generate(page, "onward")
    assert again == onward
    page.click("#again")
    until(page, "document.querySelectorAll('[role=treeitem]').length === 5")
    ready(page)
    assert page.text_content("#text") == onward
    assert page.errors == []


@pytest.mark.slow
def test_page_by_keyboard_on_a_dark_phone_and_a_stopped_turn_is_kept(start: Start, run: Run, browser: Any) -> None:
    server = start(Watched(TorchEngine(run.model), seconds=0.02))
    page = open_page(browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark"), server)
    ready(page)
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("abc")
    page.keyboard.press("Control+Enter")
    until(page, "document.querySelector('.generated')?.textContent.length > 3")
    assert page.inner_text("#generate") == "Stop"
    page.keyboard.press("Escape")
    ready(page)
    (session,) = server.call("GET", "/v1/sessions")["data"]
    (turn,) = server.call("GET", f"/v1/sessions/{session['id']}")["turns"]
    assert turn["prompt"] == "abc"
    assert 3 < len(turn["text"]) < 150
    assert page.text_content("#text") == "abc" + turn["text"]
    for _ in range(40):
        page.keyboard.press("Shift+Tab")
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        is_body = page.evaluate("document.activeElement === document.body")
        assert is_body or page.evaluate(outline) != "none", page.evaluate("document.activeElement.outerHTML")
    page.click("#history > summary")
    page.evaluate("document.getElementById('sampling').open = true")
    page.click("#read")  # this server was given no model to show
    page.wait_for_selector("#message.error")
    assert "an exported model cannot show the weights of its layers" in page.inner_text("#message")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(251, 250, 247)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(232, 230, 225)"


@pytest.mark.slow
def test_page_goes_on_after_a_server_that_was_away_for_a_moment(server: Server, browser: Any) -> None:
    page = open_page(browser.new_context(), server)
    ready(page)
    turns = re.compile(r"/v1/sessions/session_[\w-]+$")
    page.route(turns, lambda route: route.abort())
    generate(page, "abc", 5)
    assert page.inner_text("#message") == "The server does not answer."
    page.unroute(turns)
    assert len(generate(page, "abc", 5)) == 3 + 5
    assert page.inner_text("#message") == ""


@pytest.mark.slow
def test_page_asks_for_the_key_and_forgets_it_with_the_tab(start: Start, browser: Any) -> None:
    server = start(keys=["secret"])
    context = browser.new_context()
    page = open_page(context, server)
    for key in ("wrong", "secret"):
        page.wait_for_selector("#key-form:visible")
        page.fill("#key", key)
        page.keyboard.press("Enter")
    assert generate(page, "abc").startswith("abc")
    page.reload()
    ready(page)
    assert not page.is_visible("#key-form")
    second = open_page(context, server)
    second.wait_for_selector("#key-form:visible")
    assert second.is_disabled("#generate")
