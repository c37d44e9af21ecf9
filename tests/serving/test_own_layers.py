"""Models with layers from a user's file on a server: two streams at once, and sessions."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from multilin import MultilinConfig, MultilinForCausalLM
from multilin.inference.torch_engine import TorchEngine
from multilin.runs.load import Run
from tests.architectures.test_own_file import LAYERS
from tests.letters import write_letters
from tests.serving.conftest import Server, Start

GREEDY = {"temperature": 0, "max_tokens": 8}
pytestmark = pytest.mark.filterwarnings("ignore:layer Attention has no state")


@pytest.mark.parametrize("form", ["Attention", "Loop", "Cached"])
def test_streams_and_sessions_give_the_same_text_as_alone(
    form: str, start: Start, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "layers.py").write_text(LAYERS)
    config = MultilinConfig.from_architecture(
        f"{tmp_path}/layers.py:{form}", hidden_size=16, num_layers=2, vocab_size=len(run.tokenizer), n_positions=256,
        output_bias="learned",
    )  # fmt: skip
    model = MultilinForCausalLM(config)
    write_letters(model, run.tokenizer)
    server: Server = start(TorchEngine(model), folder=tmp_path / "sessions")

    def ask(prompt: str) -> str:
        return "".join(
            event["choices"][0]["text"] for event in server.stream("/v1/completions", prompt=prompt, **GREEDY)
        )

    prompts = ["one", "a longer text, ", "two"]
    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, prompts)) == alone
    session = server.post("/v1/sessions")["id"]
    first = server.post("/v1/completions", prompt="one", session=session, **GREEDY)["choices"][0]["text"]
    second = server.post("/v1/completions", prompt=" more", session=session, **GREEDY)["choices"][0]["text"]
    assert first == alone[0]
    assert second == ask(f"one{first} more")
