"""A folder with a valid file of every kind that the command line reads; cases damage copies of it."""

import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
from safetensors.torch import save_file

from multilin.training.run_folder import RunFolder
from tests.fuzz.runner import Case, Runner
from tests.inference.test_convert import CONFIG, make_weights

RUNS = {"run": "additive", "mixer": "linear_mixer", "peer": "gpt2"}
ROWS = [f"the cat {number} sat under the green tree and saw a big dog\n" * 3 for number in range(40)]
TEXT, LINES = "".join(ROWS), "".join(json.dumps({"text": row}) + "\n" for row in ROWS)
RECIPE = {
    "model": {"hidden_size": 8, "num_layers": 1, "n_positions": 16, "options": {"num_heads": 2}},
    "data": {"source": "text.txt"},
    "tokenizer": {"kind": "byte"},
    "schedule": {"warmup_steps": 1},
    "training": {"max_steps": 3, "batch_size": 2, "save_every_steps": 2, "eval_max_tokens": 64, "precision": "float32"},
    "output": "new",
}
SWEEP = {
    "base": {"recipe": "recipe.yaml"},
    "rows": {"one": {}, "two": {"optimizer.learning_rate": 0.01}},
    "seeds": [0],
    "budget": {"tokens": 96},
    "output": "compared",
}
TASK = """task: local
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""


def write_material(runner: Runner) -> None:
    """Write the files, and train the runs; `half` is one that stopped before its end, with a single checkpoint."""
    folder = runner.valid
    for name in ("tasks", "theirs", "compared"):
        (folder / name).mkdir(parents=True)
    (folder / "text.txt").write_text(TEXT)
    (folder / "rows.jsonl").write_text(LINES)
    pyarrow.parquet.write_table(pyarrow.table({"text": ROWS}), folder / "rows.parquet")
    for name, values in (("recipe", RECIPE), ("sweep", SWEEP), ("timed", SWEEP | {"budget": {"seconds": 1}})):
        (folder / f"{name}.yaml").write_text(json.dumps(values))
    (folder / "tasks" / "local.yaml").write_text(TASK)
    (folder / "theirs" / "config.json").write_text(json.dumps(CONFIG))
    save_file(make_weights(), folder / "theirs" / "model.safetensors")
    (folder / "compared" / "speed.json").write_text('{"one": 0.1, "two": 0.1}')
    for name, architecture in RUNS.items():
        options = [] if architecture != "linear_mixer" else ["--model.options={}"]
        words = ["train", "recipe.yaml", "--output", name, "--model.architecture", architecture, *options]
        _succeed(runner, words)
    for name in ("run", "mixer"):
        _succeed(runner, ["generate", name, "--prompt=a", "--max-new-tokens=3", f"--save-state={name}.state"])
    _succeed(runner, ["tokenizer", "train", "text.txt", "tokenizer", "--vocab-size", "280"])
    words = ["rows.jsonl", "--output=prepared", "--kind=byte", "--validation-fraction=0.3", "--workers=1"]
    _succeed(runner, ["prepare", *words])
    _succeed(runner, ["train", "recipe.yaml", "--output", "half"])
    shutil.rmtree(checkpoint_of(folder))
    lines = (folder / "half/metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "half/metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 2))


def checkpoint_of(folder: Path) -> Path:
    """The newest checkpoint of `half`."""
    checkpoint = RunFolder(folder / "half").last_checkpoint()
    assert checkpoint is not None
    return checkpoint


def _succeed(runner: Runner, words: list[str]) -> None:
    status, stdout, stderr, _ = runner.call(Case(words), runner.valid)
    assert status == 0, f"{words}: {stdout}{stderr}"
