"""The checks name each fault of the zoo, and clear the layers that are right."""

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from multilin.architectures.base import get_architecture
from multilin.errors import InputError
from multilin.testing import ROWS, Finding, Report, check_layer
from tests.testing.faulty import FAULTS, Ema, MeanOverTime
from tests.testing.right import MAY_WARN, QUADRATIC, RIGHT, EncoderLayer

SLOW = ("cost", "learns", "exports", "compiles")
QUICK = [row for row in ROWS if row not in SLOW]


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files are not trusted for long, and no warning or random number gets out of a check."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    state = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), state)


def finding_of(report: Report, check: str) -> Finding:
    return next(finding for finding in report.findings if finding.name == check)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_every_fault_is_named(fault: type[nn.Module]) -> None:
    check, result, words = FAULTS[fault]
    report = check_layer(fault, rows=[check] if check in ROWS else ["causal"], raises=False)
    finding = finding_of(report, check)
    assert finding.result == result, finding
    assert re.search(words, finding.sentence), finding.sentence


@pytest.mark.parametrize("layer", RIGHT, ids=lambda layer: layer.__name__)
def test_right_layers_are_cleared(layer: type[nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = check_layer(layer, rows=QUICK)
    assert {finding.result for finding in report.findings} <= {"ok", "says"}, report
    assert [finding.name for finding in report.findings] == QUICK


@pytest.mark.slow
@pytest.mark.parametrize("layer", RIGHT, ids=lambda layer: layer.__name__)
def test_right_layers_learn_and_run_everywhere(layer: type[nn.Module]) -> None:
    report = check_layer(layer, rows=SLOW)
    warned = {finding.name for finding in report.findings if finding.result not in ("ok", "says")}
    assert warned == MAY_WARN.get(layer, set()), report
    sentence = finding_of(report, "cost").sentence
    word = "too few" if layer is EncoderLayer else "work is quadratic" if layer in QUADRATIC else "work is linear in"
    assert word in sentence, sentence


def test_a_failure_is_an_assertion_that_names_the_cause() -> None:
    with pytest.raises(AssertionError, match=r"MeanOverTime fails 2 of the checks:\n  causal: Output 34 .*mean, norm"):
        check_layer(MeanOverTime, rows=["causal", "pieces"])
    report = check_layer(MeanOverTime, rows=["causal", "padding"], raises=False)
    assert [finding.name for finding in report.failures] == ["causal"]
    assert [finding.name for finding in report.findings] == ["causal", "padding"]


def test_options_names_and_architectures_are_taken(tmp_path: Path) -> None:
    assert check_layer(Ema, hidden_size=8, options={"decay": 0.5}, rows=["state"]).findings[0].numbers["bytes"] == 32
    (tmp_path / "own.py").write_text("from tests.testing.faulty import Ema as Base\n\n\nclass Own(Base):\n    pass\n")
    assert check_layer(f"{tmp_path}/own.py:Own", rows=["causal"]).layer == "own.py:Own"
    with pytest.raises(InputError, match="decya: unknown field; did you mean 'decay'"):
        check_layer(Ema, options={"decya": 0.5})
    with pytest.raises(InputError, match="rows: 'casual' given, but known are causal, rows"):
        check_layer(Ema, rows=["casual"])
    mine = replace(get_architecture("mingru"), name="mine")
    assert check_layer(mine, rows=["causal", "pieces", "padding"]).layer == "mine"


@pytest.mark.parametrize("name", ["mingru", "gated_deltanet"])
def test_built_in_layers_are_right(name: str) -> None:
    assert not check_layer(name, rows=QUICK).failures
