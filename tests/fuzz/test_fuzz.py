"""Malformed inputs end in one sentence: no traceback, no hang, nothing accepted in silence, nothing half written."""

import pytest

from tests.fuzz.cases import GROUPS
from tests.fuzz.material import write_material
from tests.fuzz.runner import Runner

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    runner = Runner(tmp_path_factory.mktemp("fuzz"))
    write_material(runner)
    return runner


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_malformed_is_refused_in_one_sentence(runner: Runner, group: str) -> None:
    faults = [f"{case}\n  {fault}" for case in GROUPS[group](runner.valid) for fault in runner.faults(case)]
    assert not faults, "\n".join(faults)
