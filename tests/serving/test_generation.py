"""Text from the endpoints, whole and streamed."""

from tests.serving.conftest import Server


def test_a_text_is_continued_and_streamed(server: Server) -> None:
    whole = server.post("/v1/completions", prompt="once", max_tokens=20, seed=3)
    pieces = server.stream("/v1/completions", prompt="once", max_tokens=20, seed=3)
    assert whole["choices"][0]["text"] == "".join(piece["choices"][0]["text"] for piece in pieces)
    assert whole["usage"]["completion_tokens"] == 20
    print(whole)


def test_messages_are_answered(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "temperature": 0}
    whole = server.post("/v1/chat/completions", **body)
    pieces = server.stream("/v1/chat/completions", **body)
    assert whole["choices"][0]["message"]["content"] == "".join(
        piece["choices"][0]["delta"].get("content", "") for piece in pieces
    )
