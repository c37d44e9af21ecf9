import dataclasses
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from multilin.cli.main import main
from multilin.inference.generate_run import generate_text
from multilin.inference.settings import GenerationSettings
from multilin.runs.load import Run
from tests.cli.conftest import N_POSITIONS

SAMPLED = ["--temperature", "1.0", "--top-k", "20", "--seed", "7"]
Call = Callable[..., str]


@pytest.mark.quick
@pytest.mark.parametrize(
    "how", [["--temperature", "0"], SAMPLED, ["--top-p", "0.9", "--seed", "3"]], ids=["greedy", "k", "p"]
)
def test_a_text_written_in_two_sittings_is_that_of_one(
    additive: Path, cli: Call, tmp_path: Path, how: list[str]
) -> None:
    whole = cli("generate", additive, "--prompt", "the cat", "--max-new-tokens", 40, *how)
    state = tmp_path / "text.state"
    first = cli("generate", additive, "--prompt", "the cat", "--max-new-tokens", 15, "--save-state", state, *how)
    without_seed = how[: how.index("--seed")] if "--seed" in how else how
    torch.manual_seed(99)  # whatever happens in between
    second = cli("generate", additive, "--prompt", "", "--max-new-tokens", 25, "--state", state, *without_seed)
    assert len(whole) == 7 + 40
    assert first + second == whole


def test_a_continued_text_reads_an_added_prompt(additive: Path, cli: Call, tmp_path: Path) -> None:
    state, greedy = tmp_path / "text.state", ("generate", additive, "--temperature", 0, "--max-new-tokens")
    first = cli(*greedy, 5, "--prompt", "the", "--save-state", state)
    second = cli(*greedy, 9, "--prompt", " old", "--state", state, "--save-state", state)
    assert second.startswith(" old")
    assert first + second == cli(*greedy, 9, "--prompt", first + " old")
    third = cli(*greedy, 3, "--prompt", "", "--state", state, "--no-echo")
    longer = cli(*greedy, 12, "--prompt", first + " old")
    assert first + second + third == longer


def test_a_stop_string_needs_no_list(additive: Path, cli: Call) -> None:
    generate = ("generate", additive, "--prompt", "the cat", "--max-new-tokens", 40, "--seed", 7, "--no-echo")
    whole = cli(*generate)
    stop = whole[20:22]
    assert cli(*generate, "--stop", stop) == cli(*generate, "--stop", json.dumps([stop])) == whole[: whole.find(stop)]


def test_the_seed_decides_what_is_written(additive: Path, cli: Call) -> None:
    one, same, other, another = (
        cli("generate", additive, "--prompt", "a", "--max-new-tokens", 30, *seed)
        for seed in (["--seed", 1], ["--seed", 1], ["--seed", 2], [])
    )
    assert one == same
    assert len({one, other, another}) == 3


def test_beams_find_a_text_at_least_as_likely(loaded: Run) -> None:
    def log_likelihood(new: list[int]) -> float:
        prompt = loaded.tokenizer.encode("the", add_special_tokens=False)
        ids = torch.tensor([[0, *prompt, *new]], device=loaded.model.device)
        return -float(loaded.model.token_losses(ids)[0, -len(new) :].sum())

    greedy, beams = (
        generate_text(loaded, "the", GenerationSettings(max_new_tokens=12, **how))
        for how in ({"temperature": 0}, {"num_beams": 4})
    )
    assert log_likelihood(beams.token_ids) >= log_likelihood(greedy.token_ids)
    assert beams.text == loaded.tokenizer.decode(beams.token_ids)


def test_a_text_stops_where_the_model_ends_it(loaded: Run) -> None:
    end = loaded.tokenizer.eos_token_id
    before = loaded.model.lm_head.bias.detach().clone()
    with torch.no_grad():
        loaded.model.lm_head.bias[end] = 1e4
    try:
        stopped = generate_text(loaded, "the", GenerationSettings(max_new_tokens=8))
        went_on = generate_text(loaded, "the", GenerationSettings(max_new_tokens=8, stop_at_end=False))
    finally:
        with torch.no_grad():
            loaded.model.lm_head.bias.copy_(before)
    assert stopped.token_ids == [end]
    assert stopped.text == ""
    assert went_on.token_ids == [end] * 8
    assert went_on.text == "<|endoftext|>" * 8


def test_the_prompt_may_come_from_a_file_or_a_pipe(
    additive: Path, cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("the big dog\n")
    how = ["--temperature", 0, "--max-new-tokens", 5]
    expected = cli("generate", additive, "--prompt", "the big dog", *how)
    assert cli("generate", additive, "--prompt-file", file, *how) == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the big dog\n")))
    assert cli("generate", additive, *how) == expected


def test_an_empty_prompt_begins_a_text(additive: Path, cli: Call) -> None:
    assert len(cli("generate", additive, "--prompt", "", "--max-new-tokens", 12, "--temperature", 0)) == 12


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_baselines_write_but_keep_no_state(
    run_folder: Callable[[str], Path], cli: Call, refusal: Call, tmp_path: Path, architecture: str
) -> None:
    folder = run_folder(architecture)
    written = cli("generate", folder, "--prompt", "the", "--max-new-tokens", 8, "--seed", 1)
    assert written.startswith("the")
    assert written == cli("generate", folder, "--prompt", "the", "--max-new-tokens", 8, "--seed", 1)
    state = tmp_path / "text.state"
    message = refusal("generate", folder, "--prompt", "the", "--save-state", state)
    assert message.startswith(f"--save-state: a {architecture} model keeps no state")
    assert not state.exists()


@pytest.mark.parametrize("architecture", ["additive", "gpt2", "llama"])
def test_a_text_longer_than_the_model_reads_is_refused(
    run_folder: Callable[[str], Path], cli: Call, refusal: Call, architecture: str
) -> None:
    folder = run_folder(architecture)
    message = refusal("generate", folder, "--prompt", "x" * N_POSITIONS, "--max-new-tokens", 1)
    assert (
        message
        == f"prompt: the text has {N_POSITIONS + 1} tokens, but this model reads at most {N_POSITIONS} (n_positions)"
    )
    message = refusal("generate", folder, "--prompt", "x" * 10, "--max-new-tokens", N_POSITIONS)
    assert message.endswith(f"reads at most {N_POSITIONS} (n_positions), so at most {N_POSITIONS - 10} can follow")
    cli("generate", folder, "--prompt", "x" * 10, "--max-new-tokens", N_POSITIONS - 10, "--seed", 0, "--no-stop-at-end")


def test_without_a_number_as_many_tokens_come_as_the_model_can_read(loaded: Run) -> None:
    settings = GenerationSettings(stop_at_end=False)
    full = generate_text(loaded, "x" * 10, settings)
    assert (len(full.token_ids), full.has_room) == (N_POSITIONS - 10, False)
    assert generate_text(loaded, "x" * 10, dataclasses.replace(settings, max_new_tokens=3)).has_room
    assert len(generate_text(loaded, "x" * (N_POSITIONS - 1), settings).token_ids) == 1


def test_a_continued_text_is_bounded_too(additive: Path, cli: Call, refusal: Call, tmp_path: Path) -> None:
    state = tmp_path / "text.state"
    cli("generate", additive, "--prompt", "", "--max-new-tokens", N_POSITIONS - 4, "--save-state", state)
    message = refusal("generate", additive, "--prompt", "", "--max-new-tokens", 6, "--state", state)
    assert message.startswith(f"max_new_tokens: 6 given after a text of {N_POSITIONS - 3} tokens")


def test_a_state_goes_with_its_own_model(
    additive: Path, run_folder: Callable[[str], Path], cli: Call, refusal: Call, tmp_path: Path
) -> None:
    state = tmp_path / "text.state"
    cli("generate", additive, "--prompt", "the", "--max-new-tokens", 4, "--save-state", state)
    assert "keeps no state" in refusal("generate", run_folder("gpt2"), "--prompt", "", "--state", state)
    state.write_bytes(state.read_bytes()[:-20])
    assert f"{state} is damaged" in refusal("generate", additive, "--prompt", "", "--state", state)
    said = refusal("generate", additive, "--prompt", "", "--state", tmp_path / "other.state")
    assert said.startswith("--state: ")
    assert "cannot be read (No such file or directory)" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--save-state", "missing/text.state"], "--save-state: the folder missing does not exist"),
        (["--temperature", "-1"], "--temperature: -1 given, but it should be at least 0"),
        (["--temperature", "true"], "--temperature: True given, but it should be a number"),
        (
            ["--temperature", "0", "--seed", "3"],
            "seed: 3 given together with temperature: 0, which ignores seed; leave one out",
        ),
        (
            ["--num-beams", "2", "--top-k", "3"],
            "top_k: 3 given together with num_beams: 2, which ignores top_k; leave one out",
        ),
        (
            ["--num-beams", "2", "--repetition-penalty", "2"],
            "repetition_penalty: 2.0 given together with num_beams: 2, which ignores repetition_penalty; leave one out",
        ),
        (["--top-p", "1.5"], "--top-p: 1.5 given, but it should be at most 1"),
        (["--max-new-tokens", "many"], "--max-new-tokens: 'many' given, but it should be an integer or null"),
        (["--prompt-file", "nowhere.txt"], "--prompt-file: given together with --prompt; give one of them"),
        (
            ["--num-beams", "2", "--save-state", "x"],
            "--save-state: given, but beam search (--num-beams 2) keeps no state; use --num-beams 1",
        ),
        (["--tenperature"], "--tenperature: unknown flag; did you mean '--temperature'?"),
    ],
)
def test_bad_settings_are_refused(additive: Path, refusal: Call, arguments: list[str], message: str) -> None:
    assert refusal("generate", additive, "--prompt", "x", *arguments) == message


def test_a_prompt_file_that_is_not_utf8_is_refused(additive: Path, refusal: Call, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"caf\xe9")
    message = refusal("generate", additive, "--prompt-file", file)
    assert message == f"--prompt-file: {file} is not UTF-8: byte 3 is 0xe9"


@pytest.mark.parametrize("architecture", ["additive", "gpt2"])
def test_what_is_proposed_next_fits_the_model(
    run_folder: Callable[[str], Path], capfd: pytest.CaptureFixture[str], architecture: str
) -> None:
    assert main(["generate", str(run_folder(architecture)), "--prompt", "the", "--max-new-tokens", "2"]) == 0
    _, following = capfd.readouterr().err.split("\nNext:\n")
    assert ("--save-state" in following and "multilin serve" in following) == (architecture == "additive")
    assert "multilin evaluate" not in following  # neither exports nor runs that learned a task can be evaluated so
