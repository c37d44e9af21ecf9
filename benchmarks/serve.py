"""Speed, waiting times and memory of `multilin serve`, in its own process, with streaming clients.

Our models have random weights and run in ONNX Runtime as `multilin export` writes them. Every request streams --tokens
tokens after its own prompt. --tasks chooses the tasks.

Task streams: tokens per second of all streams, from the first request to the last answer, in turns with the engine
alone in this process, which reads and generates as many tokens greedily in one batch.

Task texts: the texts of many streams, half greedy and half drawn with a seed, against the same requests alone.

Task first-token: seconds to the first text of single requests, with no other stream, and with half of the slots busy.

Task sessions: seconds until the oldest and the newest of many sessions continue. All are on disk, the last ones also in
memory.

Task memory: memory of the server after each tenth of many requests, a tenth of them cancelled by the client.

Task peer: `transformers serve` with GPT-2 of the same sizes, with and without continuous batching, in turns with ours.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import _results, _servers
from benchmarks._engines import check_installed
from benchmarks._memory import resident_bytes
from benchmarks._models import add_sizes, build
from benchmarks._servers import Body, Server
from benchmarks._turns import results_in_turns
from multilin.data.corpora import BUILT_IN
from multilin.data.tokenizers import train_tokenizer
from multilin.export.folder import export_run
from multilin.inference.engine import Engine
from multilin.runs.load import Run

SLOTS = 64
CLIENTS = 32  # for the tasks sessions and memory
Row = dict[str, Any]


def main(argv: list[str]) -> None:
    arguments = _results.parse(_parser(), argv)
    check_installed(["onnx"])
    torch.manual_seed(0)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prompts = _prepare(folder, arguments)
        for name in arguments.models:
            for task, measure in _MEASURES.items():
                if task in arguments.tasks:
                    for row in measure(folder / name, prompts, arguments):
                        rows.append({"task": task, "model": name, **row})
                        _print(rows[-1])
    _results.save("serve", arguments, rows)


def _prepare(folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Export the models with a tokenizer; return prompts of --prompt-tokens tokens."""
    documents = [document.text for document in itertools.islice(BUILT_IN["python-docs"](), arguments.documents)]
    tokenizer = train_tokenizer(documents, "bpe", arguments.vocab_size)
    ids = tokenizer("".join(documents), add_special_tokens=False)["input_ids"]
    length = arguments.prompt_tokens
    prompts = [tokenizer.decode(ids[first : first + length]) for first in range(0, len(ids) - length, length)]
    for name in [*arguments.models, *(["gpt2"] if "peer" in arguments.tasks else [])]:
        model = build(name, arguments, arguments.n_positions).eval()
        source = folder / "tokenizer"
        if name == "gpt2":
            source = folder / name
            model.generation_config.eos_token_id = None  # texts of the same length for all
            model.save_pretrained(source)
        tokenizer.save_pretrained(source)
        if name != "gpt2":
            export_run(Run(source, model, tokenizer), folder / name)
    return prompts


def _serve(folder: Path, *flags: str) -> AbstractContextManager[Server]:
    return _servers.multilin(folder, "--slots", str(SLOTS), "--queue", "1024", *flags)


def _request(prompt: str, number: int, num_tokens: int) -> Body:
    """A request: greedy if its number is even, else drawn with a seed."""
    settings = {"temperature": 0} if number % 2 == 0 else {"temperature": 1.0, "seed": number}
    return {"prompt": prompt, "max_tokens": num_tokens, **settings}


def _requests(prompts: list[str], count: int, num_tokens: int) -> list[Body]:
    return [_request(prompts[number % len(prompts)], number, num_tokens) for number in range(count)]


def _streams(folder: Path, prompts: list[str], arguments: argparse.Namespace) -> list[Row]:
    """Tokens per second of --streams streams, and of the engine alone."""
    engine = _engine(folder)
    tasks: dict[tuple[str, int], Callable[[], float]] = {}
    with _serve(folder) as server:
        for count in arguments.streams:
            requests = _requests(prompts, count, arguments.tokens)
            tasks["engine", count] = partial(_engine_speed, engine, count, arguments.prompt_tokens, arguments.tokens)
            tasks["server", count] = partial(_server_speed, server, requests)
        speeds = results_in_turns(tasks, arguments.turns)
    rows = []
    for count in arguments.streams:
        own, alone = (statistics.median(speeds["server", number]) for number in (count, min(arguments.streams)))
        engine_speed = statistics.median(speeds["engine", count])
        rows.append({"streams": count, "tokens_per_second": own, "slowest": min(speeds["server", count]),
                     "fastest": max(speeds["server", count]), "engine_tokens_per_second": engine_speed,
                     "over_engine": own / engine_speed, "over_fewest_streams": own / alone})  # fmt: skip
    return rows


def _engine(folder: Path) -> Engine:
    """The engine as in the server."""
    from multilin.inference.onnx_engine import OnnxEngine

    return OnnxEngine(folder, spins=False)


def _engine_speed(engine: Engine, batch_size: int, num_prompt: int, num_tokens: int) -> float:
    state, begin = engine.new_state(batch_size), time.perf_counter()
    logits = engine.read(state, [list(range(2, 2 + num_prompt))] * batch_size)
    for _ in range(num_tokens):
        logits = engine.read(state, logits.argmax(-1)[:, None].tolist())
    return batch_size * num_tokens / (time.perf_counter() - begin)


def _server_speed(server: Server, requests: list[Body]) -> float:
    begin = time.perf_counter()
    replies = server.call(*requests)
    seconds = time.perf_counter() - begin
    return sum(reply.num_tokens for reply in replies) / seconds


def _texts(folder: Path, prompts: list[str], arguments: argparse.Namespace) -> list[Row]:
    """The number of texts that equal the text of the same request alone."""
    requests = _requests(prompts, max(arguments.streams), arguments.tokens)
    with _serve(folder) as server:
        together = [reply.text for reply in server.call(*requests)]
        alone = [server.call(request)[0].text for request in requests]
    equal = [one == other for one, other in zip(together, alone, strict=True)]
    return [{"streams": len(requests), "different_texts": len(set(alone)), "equal_greedy": sum(equal[::2]),
             "equal_seeded": sum(equal[1::2]), "greedy": len(equal[::2]), "seeded": len(equal[1::2])}]  # fmt: skip


def _first_token(folder: Path, prompts: list[str], arguments: argparse.Namespace) -> list[Row]:
    """Seconds to the first token, unloaded and with half of the slots generating."""
    with _serve(folder) as server:
        server.call(_request(prompts[0], 0, 2))
        probes = _requests(prompts[SLOTS:], arguments.probes, 2)
        unloaded = asyncio.run(_probe(server, probes, []))
        others = [{**body, "max_tokens": max(arguments.tokens * (number % 13 + 4) // 16, 1)}
                  for number, body in enumerate(_requests(prompts, SLOTS // 2, 0))]  # fmt: skip
        loaded = asyncio.run(_probe(server, probes, others))
    rows = [{"load": load, "p50_ms": 1000 * statistics.median(seconds),
             "p95_ms": 1000 * statistics.quantiles(seconds, n=20)[-1]}
            for load, seconds in (("none", unloaded), ("half", loaded))]  # fmt: skip
    for key in ("p50", "p95"):
        rows[1][f"{key}_over_unloaded"] = rows[1][f"{key}_ms"] / rows[0][f"{key}_ms"]
    return rows


async def _probe(server: Server, probes: list[Body], others: list[Body]) -> list[float]:
    """Seconds to the first token of one request after another, while other requests repeat."""
    is_over = False

    async def repeat(body: Body) -> None:
        while not is_over:
            (await server.send(body)).body  # noqa: B018 - raises if the request failed

    tasks = [asyncio.create_task(repeat(body)) for body in others]
    await asyncio.sleep(3 if others else 0)
    seconds = []
    for body in probes:
        await asyncio.sleep(random.Random(len(seconds)).random() / 20)  # out of step with the server
        seconds.append((await server.send(body)).first_seconds)
    is_over = True
    await asyncio.gather(*tasks)
    return seconds


def _sessions(folder: Path, prompts: list[str], arguments: argparse.Namespace) -> list[Row]:
    """Seconds until the oldest and the newest of many sessions continue."""
    with tempfile.TemporaryDirectory() as store:
        with _serve(folder, "--sessions", store, *_memory_flags(folder, arguments)) as server:
            begin = time.perf_counter()
            ids = asyncio.run(_fill_sessions(server, prompts, arguments.sessions))
            seconds_each = (time.perf_counter() - begin) / len(ids)
            chosen = min(arguments.probes, len(ids) // 4)
            first_bytes = resident_bytes(server.pid)
            oldest, newest = [], []
            for old, new in zip(ids[:chosen], ids[-chosen:], strict=True):
                for session, seconds in ((old, oldest), (new, newest)):
                    reply = server.call({"session": session, "prompt": " and", "max_tokens": 1})[0]
                    assert reply.num_tokens == 1
                    seconds.append(reply.first_seconds)
        num_bytes = [path.stat().st_size for path in Path(store).rglob("*.safetensors")]
    old_ms, new_ms = (1000 * statistics.median(seconds) for seconds in (oldest, newest))
    return [{"sessions": len(ids), "ms_per_session": 1000 * seconds_each, "oldest_ms": old_ms, "newest_ms": new_ms,
             "more_ms": old_ms - new_ms, "state_bytes": statistics.mean(num_bytes),
             "resident_bytes": first_bytes}]  # fmt: skip


def _memory_flags(folder: Path, arguments: argparse.Namespace) -> tuple[str, str]:
    """The flag for memory of about --kept-turns turns."""
    engine = _engine(folder)
    tensors = engine.save(engine.new_state()).tensors.values()
    num_bytes = sum(tensor.nbytes for tensor in tensors) + 2000  # names in the state file, tokens and text
    return "--memory", f"{arguments.kept_turns * num_bytes // 1000}KB"


async def _fill_sessions(server: Server, prompts: list[str], count: int) -> list[str]:
    """Ids of sessions with one turn each, in the order in which they were kept."""
    ids: list[str] = []
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            made = json.loads((await server.send({}, "/v1/sessions")).body)
            body = {"session": made["id"], "prompt": prompts[number % len(prompts)], "max_tokens": 4}
            (await server.send(body)).body  # noqa: B018
            ids.append(made["id"])

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return ids


def _memory(folder: Path, prompts: list[str], arguments: argparse.Namespace) -> list[Row]:
    """Memory of the server in bytes after each tenth of the requests."""
    with _serve(folder, *_memory_flags(folder, arguments)) as server:
        held = []
        for _ in range(10):
            asyncio.run(_ask_many(server, prompts, arguments.requests // 10))
            held.append(resident_bytes(server.pid))
    return [{"requests": arguments.requests, "resident_bytes": held, "last_over_second": held[-1] / held[1]}]


async def _ask_many(server: Server, prompts: list[str], count: int) -> None:
    """Send requests; every tenth client hangs up before the end."""
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            is_cancelled = number % 10 == 0
            body = _request(random.choice(prompts), number, 64 if is_cancelled else 4)
            reply = await server.send(body, most_bytes=300 if is_cancelled else None)
            if not is_cancelled:
                reply.body  # noqa: B018

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


def _peer(folder: Path, prompts: list[str], arguments: argparse.Namespace) -> list[Row]:
    """Tokens per second of 16 streams, for our model and for GPT-2 in `transformers serve`."""
    count = 16
    requests = _requests(prompts, count, arguments.tokens)
    with ExitStack() as stack:
        servers = {"multilin": stack.enter_context(_serve(folder))}
        for label, flags in (("gpt2", ()), ("gpt2, continuous batching", ("--continuous-batching",))):
            try:
                server = stack.enter_context(_servers.transformers(folder.with_name("gpt2"), *flags))
                _server_speed(server, requests[:1])
                servers[label] = server
            except RuntimeError as error:
                print(f"{label} is left out: {str(error)[-500:]}")
        tasks = {label: partial(_server_speed, server, requests) for label, server in servers.items()}
        speeds = results_in_turns(tasks, arguments.turns)
    medians = {label: statistics.median(values) for label, values in speeds.items()}
    return [{"server": label, "streams": count, "tokens_per_second": speed, "ours_over_it": medians["multilin"] / speed}
            for label, speed in medians.items()]  # fmt: skip


_MEASURES = {
    "streams": _streams, "texts": _texts, "first-token": _first_token, "sessions": _sessions, "memory": _memory,
    "peer": _peer,
}  # fmt: skip


def _print(row: Row) -> None:
    def shown(value: Any) -> str:
        if isinstance(value, list):
            return " ".join(map(shown, value))
        return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)

    print("  ".join(f"{key} {shown(value)}" for key, value in row.items()), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks serve", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["additive", "elita"], help="architectures")
    parser.add_argument("--tasks", nargs="+", default=list(_MEASURES), choices=_MEASURES, help="tasks to measure")
    add_sizes(parser, hidden_size=256, num_layers=6, num_heads=4, vocab_size=4096, n_positions=1024)
    parser.add_argument(
        "--documents", type=int, default=300, help="documents of python-docs, for vocabulary and prompts"
    )
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="tokens generated by each stream")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64], help="numbers of concurrent streams")
    parser.add_argument("--turns", type=int, default=3, help="turns in streams and peer; the table shows medians")
    parser.add_argument("--probes", type=int, default=100, help="timed requests in first-token")
    parser.add_argument("--sessions", type=int, default=10_000, help="number of kept sessions")
    parser.add_argument("--requests", type=int, default=10_000, help="number of requests in memory")
    parser.add_argument("--kept-turns", type=int, default=500, help="turns kept in memory in sessions and memory")
    return parser
