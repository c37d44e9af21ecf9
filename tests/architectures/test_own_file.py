"""Layers from a user's own file: they run like built-in ones, in folders of their own, and only if they are trusted."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from multilin import InputError, MultilinConfig, MultilinForCausalLM, TextState, trust_code
from multilin.inference.snapshot import Snapshot, load_snapshot, save_snapshot

LAYERS = '''
import torch
from torch import nn


class Loop(nn.Module):
    """The state is a dictionary; a buffer that is not saved is computed again on loading."""

    def __init__(self, hidden_size: int, decay: float = 0.9):
        super().__init__()
        self.value = nn.Linear(hidden_size, hidden_size)
        self.gate = nn.Parameter(torch.full((hidden_size,), decay).logit())
        self.register_buffer("scale", torch.arange(hidden_size) / hidden_size + 0.5, persistent=False)

    def forward(self, x, state=None):
        decay, outputs = torch.sigmoid(self.gate) * self.scale.clamp(max=1), []
        mean = torch.ones_like(x[:, 0]) if state is None else state["mean"][0]
        for value in self.value(x).unbind(1):
            mean = decay * mean + value
            outputs.append(mean)
        return torch.stack(outputs, 1), {"mean": [mean]}


class Gru(nn.Module):
    def __init__(self, hidden_size, depth=2):
        super().__init__()
        self.gru = nn.GRU(hidden_size, hidden_size, depth, batch_first=True)

    def forward(self, x, state=None):
        y, state = self.gru(x, None if state is None else state.transpose(0, 1).contiguous())
        return y, state.transpose(0, 1)


class Attention(nn.Module):
    """Without a state, with positions and starts."""

    def __init__(self, hidden_size):
        super().__init__()
        self.keys = nn.Linear(hidden_size, 2 * hidden_size)

    def forward(self, inputs, positions, starts=None):
        keys, values = self.keys(inputs + positions[..., None].to(inputs.dtype).sin()).chunk(2, -1)
        mask = torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool).tril()[None]
        if starts is not None:
            mask = mask & (starts.cumsum(1)[:, :, None] == starts.cumsum(1)[:, None])
        return nn.functional.scaled_dot_product_attention(keys, keys, values, attn_mask=mask)


class Cached(nn.Module):
    """The state grows."""

    def __init__(self, hidden_size):
        super().__init__()
        self.keys = nn.Linear(hidden_size, 2 * hidden_size)

    def forward(self, x, state=None):
        keys, values = self.keys(x).chunk(2, -1)
        queries, length = keys, 0 if state is None else state[0].shape[1]
        if state is not None:
            keys, values = torch.cat([state[0], keys], 1), torch.cat([state[1], values], 1)
        mask = torch.ones(x.shape[1], keys.shape[1], dtype=torch.bool).tril(length)
        return nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask), (keys, values)
'''
EXACT = {"rtol": 1e-10, "atol": 1e-10}
pytestmark = pytest.mark.filterwarnings("ignore:layer Attention has no state")
NAMES = ("Loop", "Gru", "Attention", "Cached")


@pytest.fixture(autouse=True)
def config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "layers.py"
    path.write_text(LAYERS)
    return path


def make(name: str, **sizes: object) -> MultilinForCausalLM:
    config = MultilinConfig.from_architecture(
        name, **{"hidden_size": 8, "num_layers": 2, "vocab_size": 31, "n_positions": 64, **sizes}
    )
    torch.manual_seed(0)
    return MultilinForCausalLM(config).double().eval()


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 31, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
def test_pieces_padding_and_rows_of_different_lengths(file: Path, name: str) -> None:
    model, ids = make(f"{file}:{name}"), draw(3, 20)
    whole, state = model(ids).logits, model.new_state()
    pieces = [model(ids[:, i:j], past_key_values=state).logits for i, j in ((0, 7), (7, 8), (8, 20))]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **EXACT)
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, :19] = 0, 0
    padded, token = model(ids, attention_mask=mask), draw(3, 1, seed=2)
    onward = model(token, past_key_values=padded.past_key_values).logits[:, 0]
    for row, length in enumerate((15, 1, 20)):
        alone = ids[row : row + 1, -length:]
        torch.testing.assert_close(padded.logits[row, -length:], model(alone).logits[0], **EXACT)
        after = model(torch.cat([alone, token[row : row + 1]], 1)).logits[0, -1]
        torch.testing.assert_close(onward[row], after, **EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_rows_join_fork_and_leave(file: Path, name: str) -> None:
    model = make(f"{file}:{name}")
    texts = [draw(1, length, seed=length) for length in (3, 9)]
    state = TextState(model.config.layer_kinds)
    for text in texts:
        state.join(model(text).past_key_values)
    state = state.fork(2)
    state.leave(0)
    token = draw(3, 1)
    logits = model(token, past_key_values=state).logits[:, 0]
    for row, text in enumerate((texts[1], texts[0], texts[1])):  # the last row took the place of the first
        alone = model(torch.cat([text, token[row : row + 1]], 1)).logits[0, -1]
        torch.testing.assert_close(logits[row], alone, **EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_models_and_states_are_saved_and_loaded(file: Path, tmp_path: Path, name: str) -> None:
    model, ids = make(f"{file}:{name}"), draw(2, 12)
    model.save_pretrained(tmp_path / "model")
    file.unlink()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").double().eval()
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, **EXACT)
    save_snapshot(Snapshot(model(ids).past_key_values), tmp_path / "text.state", model)
    state = load_snapshot(tmp_path / "text.state", loaded).state
    both = torch.cat([ids, ids[:, :1]], 1)
    torch.testing.assert_close(
        loaded(ids[:, :1], past_key_values=state).logits[:, 0], model(both).logits[:, -1], **EXACT
    )


def test_packed_texts_need_starts(file: Path) -> None:
    ids, document_ids = draw(1, 12), torch.tensor([[0] * 5 + [1] * 7])
    model = make(f"{file}:Attention")
    torch.testing.assert_close(model(ids, document_ids=document_ids).logits[:, 5:], model(ids[:, 5:]).logits, **EXACT)
    with pytest.raises(InputError, match="cannot keep them apart"):
        make(f"{file}:Gru")(ids, document_ids=document_ids)


def test_options_come_from_the_signature_and_weights_stay(file: Path) -> None:
    model = make(f"{file}:Loop", options={"decay": 0.5})
    assert model.config.layers[0]["decay"] == 0.5
    assert not model.model.layers[0].attention.module.gate.any()  # the logit of one half
    with pytest.raises(InputError, match=r"model\.options\.decya: unknown field; did you mean 'decay'"):
        make(f"{file}:Loop", options={"decya": 0.5})
    with pytest.raises(InputError, match=r"model\.options\.decay: 'much' given"):
        make(f"{file}:Loop", options={"decay": "much"})


def test_hybrids_and_two_versions_of_a_file(file: Path, tmp_path: Path) -> None:
    entries = [{"architecture": f"{file}:Gru"}, {"architecture": "mingru"}]
    first = make("mingru", num_layers=None, layers=entries)
    file.write_text(LAYERS.replace("depth=2", "depth=1"))
    entries.append({"architecture": f"{file}:Gru"})
    both = make("mingru", num_layers=None, layers=[*first.config.layers, entries[2]])
    kinds = [entry["architecture"] for entry in both.config.layers]
    assert kinds[0] != kinds[2]
    assert [both.model.layers[i].attention.module.gru.num_layers for i in (0, 2)] == [2, 1]
    both.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").double().eval()
    torch.testing.assert_close(loaded(draw(1, 9)).logits, both(draw(1, 9)).logits, **EXACT)


def test_bad_files_are_one_sentence(file: Path, tmp_path: Path) -> None:
    cases = {
        f"{tmp_path}/none.py": "there is no file",
        f"{file}:Grru": "has no class 'Grru'; it has Loop, Gru, Attention and Cached",
        str(file): "has 4 layers, Loop, Gru, Attention and Cached; name one, as in layers.py:Loop",
        "no.such.module:X": "there is no module",
    }
    for name, sentence in cases.items():
        with pytest.raises(InputError, match=sentence):
            make(name)
    file.write_text("import torch\n\nraise RuntimeError('no')\n")
    with pytest.raises(InputError, match=r"layers\.py, line 3, fails when it is run \(RuntimeError: no\)"):
        make(str(file))


def run(code: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CONFIG_HOME": str(home)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def test_a_foreign_folder_runs_no_code(file: Path, tmp_path: Path) -> None:
    make(f"{file}:Gru").save_pretrained(tmp_path / "model")
    config, witness = tmp_path / "model" / "config.json", tmp_path / "was-run"
    foreign = (tmp_path / "model" / "layers.py").read_text() + f"\nopen({str(witness)!r}, 'w').close()\n"
    (tmp_path / "foreign.py").write_text(foreign)
    shutil.rmtree(tmp_path / "config")
    make(f"{tmp_path}/foreign.py:Gru").save_pretrained(tmp_path / "model")
    assert witness.exists()
    assert "foreign.py" in config.read_text()
    witness.unlink()
    load = "from transformers import AutoModelForCausalLM as A; import multilin; "
    folder = str(tmp_path / "model")
    other = tmp_path / "other"
    for code in (
        f"{load}A.from_pretrained({folder!r}, trust_remote_code=False)",
        *(
            f"from multilin.cli.main import main; raise SystemExit(main([{verb!r}, {folder!r}]))"
            for verb in ("info", "generate", "serve")
        ),
    ):
        refused = run(code, other)
        assert refused.returncode != 0, code
        assert "is code that you have not run before; read it" in refused.stderr, code
        assert not witness.exists(), code
    trusting = f"{load}multilin.trust_code({folder + '/foreign.py'!r}); A.from_pretrained({folder!r})"
    assert run(trusting, other).returncode == 0
    assert witness.exists()


def test_a_changed_original_is_named(file: Path, tmp_path: Path) -> None:
    make(f"{file}:Gru").save_pretrained(tmp_path / "model")
    file.write_text(LAYERS + "\n# changed\n")
    code = f"import multilin; multilin.MultilinConfig.from_pretrained({str(tmp_path / 'model')!r})"
    loaded = run(code, tmp_path / "config")
    assert loaded.returncode == 0, loaded.stderr
    assert f"{file} has changed since this model was made" in loaded.stderr


def test_trust_code_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        trust_code(tmp_path / "none.py")
