"""What the model read of a turn; and turns that are stopped."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from multilin.analysis.explain.explanation import explain
from multilin.inference.torch_engine import TorchEngine
from multilin.runs.load import Run
from multilin.serving import readings
from multilin.serving.errors import ApiError
from tests.serving.conftest import Start, until
from tests.serving.engines import Watched


def test_reading_has_the_weights_of_explain(start: Start, run: Run) -> None:
    server = start(load_run=lambda: run)
    session = server.post("/v1/sessions")["id"]
    answer = server.post("/v1/completions", prompt="abcé", session=session, max_tokens=12, temperature=0, logprobs=0)
    turn = answer["choices"][0]["turn"]
    token_ids = server.service.turns.peek("0" * 16, turn).token_ids
    steps = explain(run.model, token_ids, remove=False).steps
    assert len(steps) > 1
    for number, step in enumerate(steps):
        reading = server.call("GET", f"/v1/sessions/{session}/reading?turn={turn}&step={number}")
        assert reading["steps"][number] == step.label
        assert reading["meaning"] == step.reading.meaning
        assert reading["num_left_out"] == 0
        assert "".join(reading["characters"][:5]) == "abcé"
        assert [len(row) for row in reading["weights"]] == list(range(1, len(reading["characters"]) + 1))
        # The fourth character has two tokens: its row is that of the second, its weight the larger of both.
        weights_TT = step.weights_HTS.mean(axis=0)
        largest = [*weights_TT[5, :4], max(weights_TT[5, 4:6], key=abs)]
        np.testing.assert_allclose(reading["weights"][4], largest, atol=1e-4)
    server.call("GET", f"/v1/sessions/{session}/reading?step=99", status=400)
    error = server.call("GET", f"/v1/sessions/{session}/reading?step=x", status=400)["error"]
    assert error["param"] == "step"
    server.call("GET", f"/v1/sessions/{session}/reading?turn=turn_x", status=404)


def test_reading_of_a_long_text_is_that_of_its_end(start: Start, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "MOST_TOKENS", 16)
    server = start(load_run=lambda: run)
    session = server.post("/v1/sessions")["id"]
    server.post("/v1/completions", prompt="x" * 30, session=session, max_tokens=1, temperature=0)
    reading = server.call("GET", f"/v1/sessions/{session}/reading")
    assert reading["num_left_out"] == 31 - 15
    assert reading["characters"][:3] == ["", "x", "x"]


def test_reading_of_an_export_is_refused(start: Start) -> None:
    server = start()  # without `load_run`, as for an export
    session = server.post("/v1/sessions")["id"]
    server.call("GET", f"/v1/sessions/{session}/reading", status=404)  # it has no turn
    server.post("/v1/completions", prompt="abc", session=session)
    error = server.call("GET", f"/v1/sessions/{session}/reading", status=400)["error"]
    assert "serve the folder of the run" in error["message"]


def test_readings_that_wait_are_few_so_that_threads_are_left_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def compute(self: readings.Readings, turn: Any) -> tuple[dict[str, Any], list[Any]]:
        begun.set()
        may_end.wait(60)
        return {"turn": turn.id, "meanings": ["a mean"]}, [np.ones((1, 1))]

    monkeypatch.setattr(readings, "MOST_WAITING", 1)
    monkeypatch.setattr(readings.Readings, "_explain", compute)
    asked, turn = readings.Readings(lambda: None), SimpleNamespace(id="turn")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(asked.get, turn, 0)
        try:
            assert begun.wait(60)
            with pytest.raises(ApiError) as refused:
                asked.get(turn, 0)
        finally:
            may_end.set()
        assert first.result()["weights"] == [[1.0]]
    assert refused.value.status == 429
    assert asked.get(turn, 0)["weights"] == [[1.0]]  # there is room again


def test_stopped_turn_is_kept_and_goes_on(start: Start, run: Run) -> None:
    server = start(Watched(TorchEngine(run.model), seconds=0.005))
    session = server.post("/v1/sessions")["id"]
    assert not server.post(f"/v1/sessions/{session}/stop")["stopped"]
    greedy = {"prompt": "abc", "temperature": 0, "ignore_eos": True, "session": session}
    answers = []
    asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", max_tokens=2000, **greedy)))
    asking.start()
    until(lambda: server.service.scheduler.counts.running > 0)
    time.sleep(0.2)
    assert server.post(f"/v1/sessions/{session}/stop")["stopped"]
    asking.join(60)
    (choice,), usage = answers[0]["choices"], answers[0]["usage"]
    assert choice["finish_reason"] == "length"
    num_tokens = usage["completion_tokens"]
    assert 1 <= num_tokens < 2000
    onward = server.post("/v1/completions", **greedy | {"prompt": "", "max_tokens": 5})["choices"][0]["text"]
    whole = server.post("/v1/completions", prompt="abc", temperature=0, ignore_eos=True, max_tokens=num_tokens + 5)
    assert whole["choices"][0]["text"] == choice["text"] + onward
