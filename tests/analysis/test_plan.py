"""What `plan` counts is what small runs count."""

import json
import shlex
from pathlib import Path

import pytest
import torch

from multilin.analysis.costs import training_flops_per_token
from multilin.analysis.minutes import Candidate, Pick, Size
from multilin.analysis.plan import TrainingPlan, describe_plan, find_vocab_size, plan_training
from multilin.analysis.settings import PlanSettings
from multilin.cli.main import VERBS, main
from multilin.cli.parser import parse
from multilin.data.settings import ShardSettings
from multilin.data.sharding import prepare_shards
from multilin.data.tokenizers import train_tokenizer
from multilin.errors import InputError, duration
from multilin.model.factory import create_model, model_names
from multilin.training.optimizers import OPTIMIZERS, build_optimizer
from multilin.training.recipe import Recipe, load_recipe
from multilin.training.resolve import resolve_recipe
from tests.processes import run, torchrun

SIZES = {"hidden_size": 32, "num_layers": 2, "n_positions": 16}


def recipe(architecture: str = "additive", **changes: object) -> Recipe:
    sizes = {f"model.{name}": value for name, value in SIZES.items()}
    given = {"model.architecture": architecture, "training.precision": "float32"}
    return load_recipe(None, sizes | given | changes, {"tokenizer.kind": "byte"})


def plan(recipe: Recipe, **settings: object) -> TrainingPlan:
    return plan_training(recipe, PlanSettings(**({"kind": "h200"} | settings)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", model_names())
def test_the_work_is_that_of_the_model_with_its_weights(name: str) -> None:
    model = create_model(name, vocab_size=258, **SIZES)
    found = plan(recipe(name))
    assert found.flops_per_token == training_flops_per_token(model, SIZES["n_positions"])
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_int8_without_bf16_keeps_activations_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multilin.training.precision.has_bf16", lambda: False)
    single, int8 = (plan(recipe(**{"training.precision": name}), kind="cpu") for name in ("float32", "int8"))
    assert int8.activation_bytes == single.activation_bytes


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_gradients_and_optimizer_take_what_is_planned(optimizer: str) -> None:
    given = recipe(**{"optimizer.name": optimizer})
    model = create_model("additive", vocab_size=258, **SIZES)
    decayed = [name for name, _ in model.named_parameters()]
    steps = build_optimizer(resolve_recipe(given).optimizer, model, decayed=decayed)
    ids = torch.zeros((2, SIZES["n_positions"]), dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    steps.step()
    tensors = [value for state in steps.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    found = plan(given)
    assert found.weight_bytes == sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert found.gradient_bytes == sum(parameter.grad.nbytes for parameter in model.parameters())
    assert sum(tensor.nbytes for tensor in tensors) == pytest.approx(found.optimizer_bytes, rel=0.1, abs=2000)


def test_a_checkpoint_has_the_planned_size(tmp_path: Path) -> None:
    from multilin.training.loop import train

    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"the cat {number} sat"}) + "\n" for number in range(60)))
    wide = {"model.hidden_size": 64, "data.source": str(text), "training.max_steps": 2, "output": str(tmp_path / "run")}
    given = recipe(**wide, **{"training.batch_size": 2, "schedule.warmup_steps": 1})
    train(given)
    (checkpoint,) = (tmp_path / "run.checkpoints").iterdir()
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors") if "random" not in path.name)
    assert size == pytest.approx(plan(given).checkpoint_bytes, rel=0.03)


def test_adapters_alone_have_gradients_and_are_saved(tmp_path: Path) -> None:
    model, tokenizer = create_model("additive", vocab_size=258, **SIZES), train_tokenizer([], "byte", None)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    given = {"model.start": str(tmp_path), "training.precision": "float32"}
    whole, part = (
        plan(load_recipe(None, {**given, **lora}), devices=2) for lora in ({}, {"training.lora": {"rank": 2}})
    )
    adapters = part.weight_bytes - whole.weight_bytes
    assert part.gradient_bytes == adapters < 0.2 * whole.gradient_bytes
    assert part.checkpoint_bytes < 0.2 * whole.checkpoint_bytes
    for one, other in zip(part.ways, whole.ways[:2], strict=True):  # without fsdp, which takes no adapters
        assert one.sent_bytes < 0.2 * other.sent_bytes
        assert one.memory - part.activation_bytes < 0.6 * (other.memory - whole.activation_bytes)


SENT = """
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard

from multilin.model.factory import create_model
from multilin.training.communication import average

sent = 0


def counted(name, whole):
    collective = getattr(dist, name)

    def call(output, input, *arguments, **options):
        global sent
        sent += (output, input)[whole].nbytes // 2  # the other half stays on this device
        return collective(output, input, *arguments, **options)

    setattr(dist, name, call)


names = {"all_to_all_single": 0, "all_gather_single": 0, "all_gather_into_tensor": 0, "reduce_scatter_single": 1,
         "reduce_scatter_tensor": 1}
for name, whole in names.items():
    if hasattr(dist, name):
        counted(name, whole)


def counted_hook(state, bucket):
    global sent
    sent += bucket.buffer().nbytes  # a ring of two devices sends half of it twice
    return allreduce_hook(None, bucket)


dist.init_process_group("gloo")
found = {}
for way in ("ddp", "int8", "fsdp"):
    torch.manual_seed(0)
    model = create_model("additive", vocab_size=258, **json.loads(sys.argv[1]))
    if way == "fsdp":
        for layer in next(child for child in model.base_model.children() if isinstance(child, torch.nn.ModuleList)):
            fully_shard(layer)
        fully_shard(model)
        wrapped = model
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        wrapped.register_comm_hook(None, counted_hook if way == "ddp" else average)
    sent = 0
    ids = torch.zeros((2, 16), dtype=torch.long)
    wrapped(input_ids=ids, labels=ids).loss.backward()
    found[way] = sent
if dist.get_rank() == 0:
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_devices_send_what_is_planned(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SENT)
    run(torchrun(2, str(tmp_path / "script.py"), json.dumps(SIZES), str(tmp_path / "sent.json")))
    sent = json.loads((tmp_path / "sent.json").read_text())
    planned = {way.way: way.sent_bytes for way in plan(recipe(), devices=2).ways}
    assert sent["ddp"] == planned["ddp"]
    assert sent["fsdp"] == pytest.approx(planned["fsdp"], rel=0.02)  # tensors of an odd number of rows are padded
    assert sent["int8"] == pytest.approx(planned["int8"], rel=0.02)  # so are blocks of 128


@pytest.mark.parametrize("devices", [1, 2, 7, 64])
def test_times_costs_and_bytes_agree(devices: int) -> None:
    blocks = 3 * devices * recipe().training.batch_size  # three passes on each device
    found = plan(recipe(**{"training.global_batch_size": blocks}), devices=devices, price=2.0)
    for way in found.ways:
        assert way.hours * 3600 * way.tokens_per_second == pytest.approx(found.tokens)
        assert way.cost == pytest.approx(2.0 * devices * way.hours)
        assert way.tokens_per_second <= found.tokens_per_step / found.seconds_per_step * (1 + 1e-9)
        assert (way.sent_bytes == 0) == (devices == 1)
        assert way.fits
    ddp, int8, fsdp = found.ways
    assert int8.sent_bytes == pytest.approx(ddp.sent_bytes * 0.258, rel=0.001)
    assert devices == 1 or fsdp.memory < ddp.memory


def test_what_does_not_fit_is_said() -> None:
    large = recipe(**{"model.hidden_size": 8192, "model.num_layers": 80, "training.batch_size": 1})
    ddp, _, fsdp = plan(large, devices=64).ways
    assert not ddp.fits
    assert fsdp.fits
    assert ddp.memory > 141e9


@pytest.fixture
def steps_measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Blocks and device of the steps that are measured; each takes a fifth of a second."""
    measured: list[tuple[int, str]] = []

    def step_seconds(recipe: Recipe, vocab_size: int, until: float, device: torch.device) -> float:
        measured.append((recipe.training.batch_size, device.type))
        return 0.2

    monkeypatch.setattr("multilin.analysis.plan.step_seconds", step_seconds)
    return measured


@pytest.mark.parametrize("kind", ["here", "cpu"])
def test_this_machine_is_measured(kind: str, steps_measured: list[tuple[int, str]]) -> None:
    blocks = {"training.batch_size": 4, "training.global_batch_size": 8, "training.max_steps": 90}
    found = plan(recipe(**blocks), kind=kind)
    assert (found.seconds_per_step, found.ways[0].hours) == (pytest.approx(0.4), pytest.approx(90 * 0.4 / 3600))
    assert {number for number, _ in steps_measured} == {4}  # twice in each step
    assert kind == "here" or {device for _, device in steps_measured} == {"cpu"}
    assert "measured on this machine" in describe_plan(found)["time per step, without waiting"]
    assert describe_plan(found)["time per step, without waiting"].startswith("400 ms: ")


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {"efficiency": 0.3}),
        ({"model.hidden_size": 4096, "model.num_layers": 8, "training.batch_size": 2**14}, {}),
        ({"model.hidden_size": 8192, "model.num_layers": 100}, {}),  # does not fit
    ],
)
def test_a_step_that_would_take_long_is_estimated(
    changes: dict[str, object], settings: dict[str, float], steps_measured: list[tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("multilin.analysis.plan._product_rate", lambda *_: 1e11)
    found = plan(recipe(**changes), kind="cpu", **settings)
    assert steps_measured == []
    efficiency = settings.get("efficiency", 0.4)
    assert found.basis == f"assumed to be {efficiency:.0%} of the speed of matrix products on this machine"
    assert found.seconds_per_step == pytest.approx(found.tokens_per_step * found.flops_per_token / 1e11 / efficiency)


@pytest.mark.parametrize(("most", "steps"), [(None, 300), (1000, 300), (7, 7)])
def test_a_run_by_the_clock_has_the_steps_that_fit(
    most: int | None, steps: int, steps_measured: list[tuple[int, str]]
) -> None:
    found = plan(recipe(**{"training.minutes": 1.0, "training.max_steps": most}), kind="cpu")
    assert found.steps == steps
    assert found.ways[0].hours == pytest.approx(steps * 0.2 / 3600)


def test_minutes_plan_what_train_picks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], steps_measured: list[tuple[int, str]]
) -> None:
    candidate = Candidate(Size(0, 32, 2, 258), 1000, 1000.0)
    given = recipe(**{"training.minutes": 3.0, "training.batch_size": 4})
    found = Pick(given, candidate, 64_000, 10**6, 3 * 10**6, 2.0, ["The run ends early."])
    asked = []
    monkeypatch.setattr("multilin.analysis.minutes.pick", lambda *words: asked.append(words[:3]) or found)
    fields = {"data.source": "my books"}
    assert main(["plan", "--minutes", "3", "--data.source", "my books"]) == 0
    shown = capsys.readouterr()
    assert asked == [(None, fields, 3.0)]
    assert "64,000: 1,000 steps of 64" in shown.out
    assert "The run ends early." in shown.out
    assert " 3.3 min" in shown.out
    assert shown.err.splitlines()[-1].strip() == "multilin train --minutes 3 --data.source 'my books'"
    assert main(["plan", "--minutes", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1000


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--kind", "h200"], "--minutes: 3 given, but --minutes picks a model for this machine alone; leave out"),
        (["--devices", "2"], "--minutes: 3 given, but --minutes picks a model for this machine alone; leave out"),
        (["--training.max_steps", "5"], "--training.max_steps: 5 given together with --minutes 3; give one of them"),
        (["--data.source", "task:mqar"], "data.source: task:mqar is a task, but --minutes needs a text"),
    ],
)  # fmt: skip
def test_what_minutes_cannot_plan(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--minutes", "3", *words]) == 2
    assert f"multilin: {sentence}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"), (1.73e-5, "17 µs"), (0.0621, "62 ms"), (0.9, "900 ms"), (1, "1.0 s"), (45.2, "45 s"),
        (90, "1.5 min"), (59.9 * 60, "60 min"), (3600, "1.0 h"), (40 * 3600, "1.7 days"), (5e8, "5,787 days"),
    ],
)  # fmt: skip
def test_a_time_has_a_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_what_training_refuses_is_not_planned() -> None:
    with pytest.raises(
        InputError, match=r"training\.communication: 'int8' given, but training\.shard 'fsdp' works with 'float' only"
    ):
        plan(recipe(**{"training.shard": "fsdp", "training.communication": "int8"}))
    with pytest.raises(InputError, match=r"training\.lora: given without model\.start"):
        recipe(**{"training.lora.rank": 8})


def test_the_command_to_type_next_trains_what_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    fields = ["--model.hidden_size", "32", "--model.options", '{"num_heads": 2}', "--data.source", "my books"]
    assert main(["plan", "--kind", "h200", "--devices", "3", *fields]) == 0
    command = capsys.readouterr().err.splitlines()[-1].strip()
    assert command.startswith("torchrun --standalone --nproc-per-node 3 -m multilin train --")
    assert parse("train", VERBS["train"], shlex.split(command)[6:])[1] == parse("plan", VERBS["plan"], fields)[2]
    assert main(["plan", *fields, "--optimizer.learning_rate", "0.00123456789"]) == 0
    command = capsys.readouterr().err.splitlines()[-1].strip()
    assert command.startswith("multilin train --model.hidden_size 32 ")
    assert command.endswith(" --optimizer.learning_rate 0.00123456789")


def test_the_vocabulary_is_found_without_the_text(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": f"{number} cats"}) + "\n" for number in range(99)))
    prepare_shards(ShardSettings(str(source), str(tmp_path / "out"), kind="bpe", vocab_size=270))
    bpe = recipe(**{"tokenizer.kind": "bpe", "tokenizer.vocab_size": 1000})
    assert find_vocab_size(resolve_recipe(bpe)) == 1000
    assert find_vocab_size(resolve_recipe(recipe(**{"data.source": "nowhere.txt"}))) == 258
    prepared = str(tmp_path / "out")
    assert find_vocab_size(recipe(**{"data.source": prepared})) == 270
    assert find_vocab_size(recipe(**{"data.mix": {prepared: 1.0}})) == 270
    with pytest.raises(InputError, match=r"data.source: 'memory://nowhere' holds no manifest.json"):
        plan(recipe(**{"data.source": "memory://nowhere"}))
    with pytest.raises(InputError, match=r"data.mix: 'memory://nowhere' holds no manifest.json"):
        plan(recipe(**{"data.mix": {"memory://nowhere": 1.0}}))
