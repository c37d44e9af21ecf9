"""Settings for all tests."""

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# Tiny tensors gain nothing from threads, and the test processes would fight for the cores.
torch.set_num_threads(1)

CHROMIUM_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]

if not torch.cuda.is_available():
    # Triton looks at it when it is first imported: its kernels then run in Python, on tensors of the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """Take what was imported out of the garbage collector's sight: Trainer and others collect at every turn."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Undo it: at the end of the process libraries report what was never collected as leaked."""
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="the contract for two architectures, and tests marked quick")


def _is_quick(item: pytest.Item) -> bool:
    if item.get_closest_marker("slow"):
        return False
    names = ("[additive-default", "[tscale-default")
    is_contract = item.path.parent.name == "contract" and item.path.stem not in ("test_int8", "test_cuda_graphs")
    return item.get_closest_marker("quick") is not None or (is_contract and any(name in item.name for name in names))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow, skip what needs a card where there is none, and leave out what is not quick if asked to.

    Of tests marked `slow_for_variants`, those of each architecture's default are fast.
    """
    for item in items:
        if item.get_closest_marker("slow_for_variants") and "-default" not in item.name:
            item.add_marker(pytest.mark.slow)
    if config.getoption("--quick"):
        items[:] = filter(_is_quick, items)
    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device that compiles kernels"))


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Forget what earlier tests compiled: PyTorch compiles a function a few times only."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()
