"""What is released works where it is installed: the source archive and the wheel, in an environment of its own."""

import os
import shutil
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

import multilin
from multilin.export.web import RUNTIME_FILES, RUNTIME_VERSION
from tests.cli.test_demo import SMALL
from tests.processes import PYTHON, ROOT, run

CONTENT = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and the wheel made from it, of a copy of the sources."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("archives")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in CONTENT:
        shutil.copy(ROOT / name, source)
    run([*PYTHON, "-m", "build", "--no-isolation", "--outdir", str(output), str(source)])
    return output


@pytest.fixture(scope="module")
def installed(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a program of an environment with the wheel; the tests lend it theirs, but not the checkout."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    programs, (wheel,) = folder / "bin", archives.glob("*.whl")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    pip = [*PYTHON, "-m", "pip", "--python", str(programs / "python"), "install", "--no-deps", "--no-index", "--quiet"]
    run([*pip, str(wheel)], environment=environment)
    # Folders that are named in a .pth file have their own .pth files unread, an editable installation's among them.
    own = sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    Path(own, "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return lambda program, *arguments: run([str(programs / program), *map(str, arguments)], environment=environment)


def files_of_the_package() -> set[str]:
    paths = (ROOT / "src" / "multilin").rglob("*")
    return {
        str(path.relative_to(ROOT / "src")) for path in paths if path.is_file() and path.parent.name != "__pycache__"
    }


@pytest.mark.slow
def test_the_archives_hold_the_package_and_nothing_else(archives: Path) -> None:
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
    described = f"multilin-{multilin.__version__}.dist-info"
    assert {name for name in names if not name.startswith(f"{described}/")} == files_of_the_package()
    with tarfile.open(next(archives.glob("*.tar.gz"))) as archive:
        paths = [PurePosixPath(member.name) for member in archive.getmembers() if member.isfile()]
    names = {str(PurePosixPath(*path.parts[1:])) for path in paths if "multilin.egg-info" not in path.parts}
    assert names == {f"src/{name}" for name in files_of_the_package()} | {*CONTENT, "PKG-INFO", "setup.cfg"}


@pytest.mark.slow
def test_an_installed_wheel_trains_generates_and_exports(
    installed: Callable[..., str], text_file: Path, tmp_path: Path
) -> None:
    where = "import multilin, sys; print(multilin.__file__.startswith(sys.prefix))"
    assert installed("python", "-W", "ignore", "-c", where) == "True\n"
    assert installed("multilin", "--version") == f"multilin {multilin.__version__}\n"
    output, runtime = tmp_path / "demo", tmp_path / "runtime"
    assert "bits per byte" in installed("multilin", "demo", "--output", output, "--data.source", text_file, *SMALL)
    assert installed("multilin", "generate", output, "--prompt", "The", "--max-new-tokens", 5, "--engine", "torch")
    runtime.mkdir()
    for name in RUNTIME_FILES:  # what the npm registry would send; a browser is not part of this test
        (runtime / name).write_text(f"/* v{RUNTIME_VERSION}\n */")
    installed("multilin", "export", output, "--format", "web", "--output", tmp_path / "page", "--runtime", runtime)
    assets = ROOT / "src" / "multilin" / "export" / "assets" / "web"
    assert {path.name for path in assets.iterdir()} <= {path.name for path in (tmp_path / "page").iterdir()}


def test_the_version_is_that_of_the_newest_entry_of_the_changelog() -> None:
    heading = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert heading.split()[1] == multilin.__version__
