"""Both engines: the same logits, tokens, text and states, over the whole registry."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multilin import InputError
from multilin.data.files import Document
from multilin.data.packed_text import pack
from multilin.export.check import compare_export
from multilin.export.folder import export_run
from multilin.inference.generate import Sequence, continue_file, generate
from multilin.inference.generate_run import text_codec
from multilin.inference.manifest import MANIFEST
from multilin.inference.onnx_engine import OnnxEngine, OnnxState
from multilin.inference.settings import GenerationSettings
from multilin.inference.torch_engine import TorchEngine
from multilin.runs.load import Run
from tests.export.conftest import FAST, N_POSITIONS, Exports, make_run

Pair = tuple[Run, Path]
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture
def engines(pair: Pair) -> tuple[TorchEngine, OnnxEngine]:
    return TorchEngine(pair[0].model), OnnxEngine(pair[1], num_threads=1)


def texts(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(length).integers(0, 256, length).tolist() for length in lengths]


def test_logits_are_equal_for_rows_of_any_lengths(engines: tuple[TorchEngine, OnnxEngine]) -> None:
    """Prompts longer than a piece, no tokens at all, and windows that turn over."""
    torch_engine, onnx_engine = engines
    states = [engine.new_state(3) for engine in engines]
    for rows in (
        texts(150, 64, 1),
        texts(0, 3, 100),
        [[5], [6], [7]],
        [[8], [9], [1]],
        texts(2, 2, 2),
        texts(70, 0, 1),
    ):
        expected, given = (engine.read(state, rows) for engine, state in zip(engines, states, strict=True))
        np.testing.assert_allclose(given, expected, **CLOSE)
    assert torch_engine.num_read(states[0]) == onnx_engine.num_read(states[1])


def test_states_are_exchanged_and_forked(engines: tuple[TorchEngine, OnnxEngine]) -> None:
    states = []
    for engine in engines:
        state = engine.new_state(2)
        engine.read(state, texts(130, 20))
        states.append(state.select([1, 0, 1]))
    saved = [engine.save(state) for engine, state in zip(engines, states, strict=True)]
    for name, expected in saved[0].tensors.items():
        given = saved[1].tensors[name]
        assert (given.dtype, given.shape) == (expected.dtype, expected.shape), name
        if expected.dtype == np.int64:  # of the others, what stands where no token was read means nothing
            np.testing.assert_array_equal(given, expected, err_msg=name)
    crossed = [engine.restore(contents) for engine, contents in zip(engines, reversed(saved), strict=True)]
    rows = texts(5, 1, 9)
    expected = engines[0].read(states[0], rows)
    for engine, state in zip(engines, crossed, strict=True):
        np.testing.assert_allclose(engine.read(state, rows), expected, **CLOSE)


def test_a_state_file_of_one_engine_is_continued_by_the_other(pair: Pair, tmp_path: Path) -> None:
    run, folder = pair
    codec = text_codec(run.tokenizer)
    engines = {"torch": TorchEngine(run.model), "onnx": OnnxEngine(folder, num_threads=1)}
    settings = GenerationSettings(max_new_tokens=40, temperature=0.9, top_k=20, seed=5, stop_at_end=False)
    onward = GenerationSettings(max_new_tokens=40, temperature=0.9, top_k=20, stop_at_end=False)

    def go_on(name: str, prompt: str, given: GenerationSettings, state: str | None, save: str) -> list[int]:
        return continue_file(
            engines[name], codec, prompt, given,
            state=state, save_state=save, echo=False, write=lambda _: None,
        ).token_ids  # fmt: skip

    at_once = GenerationSettings(80, 0.9, 20, seed=5, stop_at_end=False)
    whole = generate(engines["torch"], codec, "once", at_once).token_ids
    for first, second in (("torch", "onnx"), ("onnx", "torch"), ("onnx", "onnx")):
        begin = go_on(first, "once", settings, None, str(tmp_path / f"{first}.state"))
        end = go_on(second, "", onward, str(tmp_path / f"{first}.state"), str(tmp_path / "after.state"))
        assert begin + end == whole


def test_what_is_too_long_is_refused_before_work(exports: Exports) -> None:
    run, folder = exports(FAST)
    engine, codec = OnnxEngine(folder), text_codec(run.tokenizer)
    with pytest.raises(InputError, match=f"prompt: the text has {N_POSITIONS + 1} tokens"):
        generate(engine, codec, "x" * N_POSITIONS)
    with pytest.raises(InputError, match=r"at most 2 can follow|at most 3 can follow"):
        generate(engine, codec, "x" * (N_POSITIONS - 3), GenerationSettings(max_new_tokens=200))
    state = engine.new_state()
    with pytest.raises(InputError, match="n_positions"):
        engine.read(state, [[1] * (N_POSITIONS + 1)])
    sequence = Sequence(engine.new_state())
    engine.read(sequence.state, [[1]])
    with pytest.raises(InputError, match="has already read all tokens of the state"):
        generate(engine, codec, "", sequence=sequence)


DAMAGES = {
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "holds no exported model"),
    "other version": (lambda folder: change(folder, format="multilin-onnx-9"), "has format 'multilin-onnx-9'"),
    "missing field": (lambda folder: change(folder, state=None), "is damaged"),
    "no JSON": (lambda folder: (folder / MANIFEST).write_text("{"), "JSON"),
    "no graph": (lambda folder: (folder / "step.onnx").unlink(), "damaged or files beside it are missing"),
    "other tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "does not match its checksum"),
    "other weights": (lambda folder: (folder / "weights.bin").write_bytes(b"x"), "does not match its checksum"),
    "state of another model": (lambda folder: change(folder, state=[]), "does not fit"),
}


def change(folder: Path, **fields: object) -> None:
    values = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(values | fields))


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_export_is_refused_in_one_sentence(exports: Exports, tmp_path: Path, kind: str) -> None:
    damage, words = DAMAGES[kind]
    folder = tmp_path / "export"
    shutil.copytree(exports(FAST)[1], folder)
    damage(folder)
    with pytest.raises(InputError, match=words) as refusal:
        OnnxEngine(folder)
    assert "\n" not in str(refusal.value)


def test_an_open_engine_does_not_read_the_graphs_of_another_export(exports: Exports, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    shutil.copytree(exports(FAST)[1], folder)
    engine = OnnxEngine(folder, num_threads=1)
    change(folder, model_hash="of another model")
    with pytest.raises(OSError, match="was replaced by another export; open it again"):
        engine.read(engine.new_state(), [list(range(1, 13))])  # by the other graph, which was not loaded yet


def test_a_model_that_reads_one_token_is_compared(tmp_path: Path) -> None:
    """Where the text has a token to predict."""
    run, export = make_run(FAST, tmp_path / "run", n_positions=1), tmp_path / "export"
    empty, text = (pack([Document("0", text)], run.tokenizer, tmp_path / f"text{text}") for text in ("", "a text"))
    export_run(run, export)
    with pytest.raises(InputError, match="the validation text has fewer than two tokens"):
        compare_export(run, export, empty)
    comparison = compare_export(run, export, text)
    assert comparison.equal_tokens == comparison.num_greedy == 1
    assert comparison.num_tokens == 3


@pytest.mark.parametrize("name", [FAST, pytest.param("hybrid", marks=pytest.mark.slow)])
def test_the_engine_needs_no_pytorch_and_the_readme_neither(exports: Exports, name: str) -> None:
    """What answers quickly imports little; and the program in the export's README generates the same tokens."""
    folder = exports(name)[1]
    script = f"""
import sys
sys.argv[0] = "multilin"  # the command line, which imports what it needs
from multilin.inference.generate import generate
from multilin.inference.onnx_engine import OnnxEngine
from multilin.inference.settings import GenerationSettings
engine = OnnxEngine({str(folder)!r}, 1)
settings = GenerationSettings(max_new_tokens=100, temperature=0)
print(generate(engine, engine.codec, "Once upon a time", settings).token_ids)
assert not {{"torch", "transformers"}} & set(sys.modules), "slow imports"
"""
    ours = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    readme = (folder / "README.md").read_text()
    program = readme.split("```python\n")[1].split("```")[0] + "print(ids)"
    theirs = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    expected = json.loads(ours)
    after = json.loads(theirs.stdout.splitlines()[-1])[1 + len("Once upon a time") :][: len(expected)]
    padding = json.loads((folder / MANIFEST).read_text())["pad_id"]
    same = after.index(padding) if padding in after else len(after)  # our engine never writes padding
    assert after[:same] == expected[:same]
    assert same > 50
    assert len(set(expected[:same])) > 2


def test_rows_join_and_leave_a_batch_at_any_token(engines: tuple[TorchEngine, OnnxEngine]) -> None:
    """A batch in which rows come and go gives each row the logits that it gets alone."""
    draw = np.random.default_rng(0)
    for engine in engines:
        batch, alone = engine.new_state(0), list[Any]()
        for step in range(120):
            if step % 9 == 0 and len(alone) < 6:
                prompt = draw.integers(0, 256, int(draw.integers(1, 140))).tolist()
                state = engine.new_state()
                engine.read(state, [prompt])
                alone.append(state.select([0]))
                batch.join(state)
            if step % 14 == 13 and alone:
                row = int(draw.integers(len(alone)))
                left, expected = batch.leave(row), alone[row]
                alone[row] = alone[-1]
                alone.pop()
                np.testing.assert_allclose(engine.read(left, [[3, 4]]), engine.read(expected, [[3, 4]]), **CLOSE)
            if alone:
                ids = draw.integers(0, 256, (len(alone), 1)).tolist()
                given = engine.read(batch, ids)
                expected = np.concatenate([engine.read(state, [row]) for state, row in zip(alone, ids, strict=True)])
                np.testing.assert_allclose(given, expected, **CLOSE)
            assert engine.num_read(batch) == [count for state in alone for count in engine.num_read(state)]
        while alone:
            batch.leave(0)
            alone.pop()
        assert engine.num_read(batch) == []


def test_a_long_row_that_has_left_costs_the_others_nothing(exports: Exports) -> None:
    """A short text is read again with rings as short as it needs, and the memory of longer ones is given back."""

    def num_bytes(state: OnnxState) -> int:
        return sum((tensor if tensor.base is None else tensor.base).nbytes for tensor in state.tensors.values())

    engine = OnnxEngine(exports(FAST)[1])
    batch, short, long = engine.new_state(0), engine.new_state(), engine.new_state()
    engine.read(short, texts(5))
    expected, before = engine.read(short.select([0]), [[7]]), short.contents(engine.manifest.state)
    engine.read(long, texts(200))
    fewest = num_bytes(short)
    batch.join(short)
    batch.join(long)
    assert num_bytes(batch) > 2 * fewest
    left = batch.leave(0)
    assert num_bytes(left) == fewest
    batch.join(left)
    batch.leave(0)
    assert num_bytes(batch) == fewest
    for name, tensor in batch.contents(engine.manifest.state).items():
        np.testing.assert_array_equal(tensor, before[name], err_msg=name)
    np.testing.assert_allclose(engine.read(batch, [[7]]), expected, **CLOSE)


def test_a_text_goes_on_with_fewer_threads_when_another_program_takes_a_core(
    exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [2]
    monkeypatch.setattr("multilin.inference.onnx_engine.available_cores", lambda: 2)
    monkeypatch.setattr("multilin.inference.onnx_engine.free_cores", lambda: free[0])
    engines = OnnxEngine(exports(FAST)[1]), OnnxEngine(exports(FAST)[1], num_threads=1)
    states = [engine.new_state() for engine in engines]
    used = []
    for free[0] in (2, 1, 2):
        given, expected = (engine.read(state, texts(9)) for engine, state in zip(engines, states, strict=True))
        np.testing.assert_allclose(given, expected, **CLOSE)
        used.append(engines[0]._graph("step.onnx").get_session_options().intra_op_num_threads)
    assert used == [0, 1, 0]  # 0 leaves the number to ONNX Runtime
