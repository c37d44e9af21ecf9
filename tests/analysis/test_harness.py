"""lm-eval's scores of a local task are those of `multilin evaluate`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from multilin.analysis.evaluate.run import break_down_run
from multilin.analysis.settings import EvaluationSettings
from multilin.cli.main import main
from multilin.data.tokenizers import train_tokenizer
from multilin.errors import InputError
from multilin.model.factory import create_model
from multilin.runs.load import Run, load_run

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval and what it imports warn about themselves

BLOCK = 32

TASKS = {
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]
""",
    "choice": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_target: 0
doc_to_choice: [" a", " bb"]
metric_list: [{metric: acc}]
""",
}


@pytest.fixture(scope="module", params=["elita", "additive", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = train_tokenizer([], "byte", None)
    torch.manual_seed(0)
    model = create_model(
        request.param, hidden_size=16, num_layers=2, vocab_size=len(tokenizer), n_positions=BLOCK,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "recipe.yaml").write_text(
        f"model: {{architecture: {request.param}, n_positions: {BLOCK}}}\noutput: {folder}\n"
    )
    return folder


@pytest.fixture
def task_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """task_folder(text): a folder with the tasks, on that one text."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def make(text: str) -> Path:
        (tmp_path / "data.jsonl").write_text(json.dumps({"text": text}) + "\n")
        for name, task in TASKS.items():
            (tmp_path / f"{name}.yaml").write_text(
                f"task: local_{name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
                f"    test: {tmp_path / 'data.jsonl'}\ntest_split: test\n{task.strip()}\n"
            )
        return tmp_path

    return make


def score(run: Run, task: str, folder: Path) -> dict[str, dict[str, float | None]]:
    """The scores of a task: metric to value and standard error."""
    from multilin.analysis.evaluate.tasks import evaluate_tasks

    return evaluate_tasks(run, [task], folder=str(folder), trust_task_code=True)[task]


@pytest.mark.parametrize("length", [BLOCK - 1, 5 * (BLOCK - 1)], ids=["one window", "five windows"])
def test_bits_per_byte_are_those_of_evaluate(folder: Path, task_folder: Callable[[str], Path], length: int) -> None:
    """A text of whole windows, special tokens spelled out in it: the same tokens, given the same ones before."""
    text = ("The naïve <|endoftext|> cat 世 " * 20).encode()[:length].decode(errors="ignore")
    text += "." * (length - len(text.encode()))
    tasks, run = task_folder(text), load_run(folder)
    (tasks / "text.txt").write_text(text)
    ours = break_down_run(run, EvaluationSettings(source=str(tasks / "text.txt"))).evaluation
    theirs = score(run, "local_rolling", tasks)
    assert ours.tokens == ours.bytes == length
    assert theirs["bits_per_byte"]["value"] == pytest.approx(ours.bits_per_byte, rel=1e-6)
    assert theirs["byte_perplexity"]["value"] == pytest.approx(2**ours.bits_per_byte, rel=1e-6)


def test_a_last_window_that_is_not_full_reads_further_back(folder: Path, task_folder: Callable[[str], Path]) -> None:
    text = "the cat sat on the mat. " * 3
    tasks, run = task_folder(text), load_run(folder)
    (tasks / "text.txt").write_text(text)
    ours = break_down_run(run, EvaluationSettings(source=str(tasks / "text.txt"))).evaluation
    theirs = score(run, "local_rolling", tasks)["bits_per_byte"]["value"]
    assert theirs != pytest.approx(ours.bits_per_byte, rel=1e-6)
    # The tokens of the two whole windows, and of the last those that lm-eval scores after all it can read.
    ids = torch.tensor([[run.tokenizer.eos_token_id, *run.tokenizer.encode(text, add_special_tokens=False)]])
    window, nats = BLOCK - 1, 0.0
    for first, last in ((0, window), (window, 2 * window), (len(text) - window, len(text))):
        with torch.no_grad():
            losses = -run.model(ids[:, first:last]).logits[0].double().log_softmax(-1)
        scored = losses.gather(1, ids[0, first + 1 : last + 1, None])
        nats += float(scored[2 * window - first if first > window else 0 :].sum())
    assert theirs * len(text) * 0.6931471805599453 == pytest.approx(nats, rel=1e-5)


def test_a_long_window_is_a_text_read_whole(folder: Path, task_folder: Callable[[str], Path]) -> None:
    from multilin.analysis.evaluate.tasks import MultilinLM

    run = load_run(folder)
    if run.longest_text is not None:
        with pytest.raises(InputError, match=r"^long: this model reads at most 32 tokens"):
            break_down_run(run, long=True)
        return
    text = "the cat sat on the mat. " * 9
    tasks = task_folder(text)
    (tasks / "text.txt").write_text(text)
    ours = break_down_run(run, EvaluationSettings(source=str(tasks / "text.txt")), long=True).evaluation
    model = MultilinLM(str(folder), max_length=1000)
    request = type("Request", (), {"args": (text,)})()
    assert -model.loglikelihood_rolling([request])[0] == pytest.approx(ours.loss * ours.tokens, rel=1e-6)
    assert score(run, "local_choice", tasks)["acc"]["value"] in (0.0, 1.0)


def test_lm_eval_finds_the_model_by_name(folder: Path, task_folder: Callable[[str], Path], tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from multilin.analysis.evaluate.tasks import MultilinLM

    assert MultilinLM.__module__ == "multilin.analysis.evaluate.tasks"
    found = simple_evaluate(
        model="multilin", model_args=f"pretrained={folder}", device="cuda:0", tasks=["local_rolling"],
        task_manager=TaskManager(include_path=str(task_folder("the cat")), include_defaults=False), bootstrap_iters=0,
    )  # fmt: skip
    run = load_run(folder)
    (tmp_path / "text.txt").write_text("the cat")
    ours = break_down_run(run, EvaluationSettings(source=str(tmp_path / "text.txt"))).evaluation
    theirs = found["results"]["local_rolling"]["bits_per_byte,none"]
    assert theirs == pytest.approx(ours.bits_per_byte, rel=1e-6)


def test_bad_requests_are_refused(
    folder: Path, task_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    from multilin.analysis.evaluate.tasks import MultilinLM

    # Of lm-eval's own tasks the list alone would take seconds.
    monkeypatch.setattr(
        "multilin.analysis.evaluate.tasks.TaskManager",
        lambda include_path, **_: TaskManager(include_path=include_path, include_defaults=False),
    )
    with pytest.raises(InputError, match=r"^tasks: 'local_roling' is not known to lm-eval; did you mean"):
        score(load_run(folder), "local_roling", task_folder("x"))
    with pytest.raises(InputError, match=r"^trust_remote_code: True given"):
        MultilinLM(str(folder), trust_remote_code=True)
    with pytest.raises(InputError, match=r"^max_lenght: not an argument of lm-eval"):
        MultilinLM(str(folder), max_lenght=3)


@pytest.mark.parametrize("folder", ["elita"], indirect=True)
def test_code_of_a_task_folder_runs_only_where_it_is_trusted(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Python that `!function` names, and a template that reaches for the operating system."""
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\ndef same(doc): return doc\n")
    (tmp_path / "data.jsonl").write_text('{"text": "the cat"}\n')
    escape = f"{{{{ cycler.__init__.__globals__.os.mkdir('{tmp_path / 'escaped'}') }}}}"
    (tmp_path / "task.yaml").write_text(
        "task: with_code\ndataset_path: json\ntest_split: test\noutput_type: loglikelihood_rolling\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'data.jsonl'}}}}}\n"
        f'process_results: !function code.same\ndoc_to_text: ""\ndoc_to_target: "{escape}"\n'
    )
    asked = ["evaluate", str(folder), "--tasks", "with_code", "--task-folder", str(tmp_path)]
    assert main(asked) == 2
    assert "--trust-task-code" in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "escaped").exists()


def test_a_metric_with_several_filters_has_a_score_for_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from multilin.analysis.evaluate import tasks

    scores = {"alias": "sums", "match,strict": 0.1, "match_stderr,strict": 0.01, "match,flexible": 0.4, "acc,none": 0.5}
    monkeypatch.setattr(tasks, "simple_evaluate", lambda **_: {"results": {"sums": scores}})
    monkeypatch.setattr(tasks, "_find_tasks", lambda *_: None)
    assert tasks.evaluate_tasks(load_run(folder), ["sums"])["sums"] == {
        "match,strict": {"value": 0.1, "standard_error": 0.01},
        "match,flexible": {"value": 0.4, "standard_error": None},
        "acc": {"value": 0.5, "standard_error": None},
    }
