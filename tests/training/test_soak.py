"""Long runs beside a bad network and a full disk: nothing is lost, and no process's memory grows.

MULTILIN_SOAK_MINUTES shortens it.
"""

import itertools
import json
import os
from pathlib import Path

import pytest

from tests.processes import PYTHON, run, torchrun
from tests.training.conftest import WORDS

MINUTES = float(os.environ.get("MULTILIN_SOAK_MINUTES", "30"))
SOAK = """
import errno
import json
import os
import signal
import sys
import time
from array import array
from pathlib import Path

import fsspec
import torch.distributed as dist
from fsspec.implementations.dirfs import DirFileSystem

from multilin.runs import checkpoints
from multilin.training.outcomes import TrainingFailed, TrainingInterrupted
from multilin.training.recipe import load_recipe
from multilin.training.loop import train

folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
rank = os.environ["RANK"]


class Flaky(DirFileSystem):
    protocol = "flaky"
    calls = 0

    def __init__(self, **options):
        super().__init__(path=str(folder / "store"), fs=fsspec.filesystem("file"))

    def _fail(self):
        Flaky.calls += 1
        if Flaky.calls % 3 == 1:
            raise ConnectionError("the network is away")

    def cat_file(self, *arguments, **options):
        self._fail()
        return super().cat_file(*arguments, **options)

    def get_file(self, *arguments, **options):
        self._fail()
        return super().get_file(*arguments, **options)


fsspec.register_implementation("flaky", Flaky)


class Watch:
    begin = time.monotonic()
    lines = array("d")  # four numbers for a step, so that what is written down hardly counts as memory
    is_ended = False

    def __call__(self, step, model):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        kept = len(checkpoints.checkpoints(folder / "run.checkpoints"))
        self.lines.extend((time.monotonic() - self.begin, step - 1, pages * os.sysconf("SC_PAGE_SIZE"), kept))
        if rank == "0" and not self.is_ended and time.monotonic() - self.begin > seconds:
            Watch.is_ended = True
            signal.raise_signal(signal.SIGTERM)


write, fails = checkpoints.write_json, [os.environ["WORLD_SIZE"] == "1"]


def fill_disk(path, content):
    if fails[0] and Watch.lines and Watch.lines[-4] > seconds / 2:
        fails[0] = False
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    write(path, content)


checkpoints.write_json = fill_disk
given = json.loads((folder / "recipe.json").read_text())
failures = []
for resume in (False, True):
    try:
        train(load_recipe(None, given), resume=resume, before_step=Watch())
    except TrainingFailed as failure:
        failures.append(str(failure))
    except TrainingInterrupted:
        break
lines = [(seen, *map(int, rest)) for seen, *rest in zip(*[iter(Watch.lines)] * 4, strict=True)]
found = {"lines": lines, "failures": failures, "calls": Flaky.calls}
(folder / f"watch{rank}.json").write_text(json.dumps(found))
if dist.is_initialized():
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_long_run_loses_nothing_and_grows_nowhere(tmp_path: Path, devices: int) -> None:
    """Of one device the disk is full once, in the middle; the run is resumed then."""
    from multilin.data.settings import ShardSettings
    from multilin.data.sharding import prepare_shards

    text = tmp_path / "text.jsonl"
    rows = ({"text": f"{n} {WORDS[n % len(WORDS)]} {WORDS[n % 7]} {WORDS[n % 11]}"} for n in range(3000))
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare_shards(ShardSettings(str(text), str(tmp_path / "store" / "text"), kind="byte"))
    recipe = {
        "model.hidden_size": 32, "model.num_layers": 2, "model.n_positions": 32, "data.source": "flaky://text",
        "training.max_steps": 10**7, "training.batch_size": 4,
        "training.eval_every_steps": 200, "training.eval_max_tokens": 2000, "training.save_every_steps": 100,
        "training.precision": "float32", "training.keep_checkpoints": 2, "output": str(tmp_path / "run"),
    }  # fmt: skip
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    (tmp_path / "script.py").write_text(SOAK)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    if devices == 1:
        environment |= {"RANK": "0", "WORLD_SIZE": "1"}
    words = [str(tmp_path / "script.py"), str(tmp_path), str(30 * MINUTES)]
    run([*(PYTHON if devices == 1 else torchrun(devices)), *words], environment=environment, limit=60 * MINUTES + 600)
    watched = [json.loads((tmp_path / f"watch{rank}.json").read_text()) for rank in range(devices)]
    assert sum(found["calls"] for found in watched) > 3, "the network never failed"
    for found in watched:
        steps = [step for _, step, _, _ in found["lines"]]
        again = [place for place in range(1, len(steps)) if steps[place] <= steps[place - 1]]
        assert len(again) == len(found["failures"]) == (devices == 1)
        assert all("No space left on device" in failure for failure in found["failures"])
        for begin, end in itertools.pairwise([0, *again, len(steps)]):
            assert steps[begin:end] == list(range(steps[begin], steps[begin] + end - begin)), "a step was left out"
            assert begin == 0 or steps[begin - 1] - steps[begin] < 100, "more than one checkpoint was lost"
            lines = found["lines"][begin:end]
            early, late = (max(held for _, _, held, _ in part) for part in (lines[: len(lines) // 3], lines))
            assert late <= 1.02 * early, "memory grows"
        assert max(kept for *_, kept in found["lines"]) <= 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
