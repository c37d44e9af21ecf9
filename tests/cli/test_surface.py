import pytest

from multilin.cli.arguments import flags
from multilin.cli.main import VERBS, main
from multilin.settings import field_help
from tests.cli.surface import FILE, surface


def test_the_command_line_is_what_was_promised() -> None:
    """A changed flag breaks somebody's script: regenerate with `python -m tests.cli.surface` when it is meant."""
    assert surface() == FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_and_flag_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (VERBS[verb].__doc__ or "").splitlines()[0] in shown
    for flag in flags(VERBS[verb]):
        comment = field_help(flag.owner)[flag.field.name]
        assert comment, f"{flag.text} has no help"
        assert flag.text in shown
        assert comment.split()[0] in shown


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_lists_the_verbs(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert all(f"  {verb} " in shown for verb in VERBS)


def test_the_first_word_of_two_lists_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenizer", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all((f"  {verb} " in shown) == verb.startswith("tokenizer ") for verb in VERBS)
