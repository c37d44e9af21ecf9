"""`python -m benchmarks [NAME] [--save FOLDER] [arguments]` runs one benchmark, or all in turn without NAME.

With --save, every benchmark writes FOLDER/NAME.json and, if it draws, FOLDER/NAME.png. A benchmark that fails does not
stop the others. A module with BY_NAME_ONLY, a sentence that says why, runs only if it is named.
"""

import argparse
import importlib
import pkgutil
import sys
import traceback
from pathlib import Path

from benchmarks import _machine, _results
from multilin.errors import InputError


def names() -> list[str]:
    """Every module of this folder whose name begins with a letter."""
    names = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return sorted(name for name in names if not name.startswith("_"))


def main(argv: list[str]) -> int:
    """Run the benchmark that `argv` names, or all; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks", add_help=False, allow_abbrev=False)
    parser.add_argument("--save", type=Path)
    chosen, rest = parser.parse_known_args(argv)
    if rest[:1] in (["-h"], ["--help"]):
        print(f"{__doc__}\nBenchmarks: {', '.join(names())}")
        return 0
    if rest and rest[0] not in names():
        print(f"no benchmark {rest[0]!r}; there are {', '.join(names())}", file=sys.stderr)
        return 2
    if chosen.save:
        chosen.save.mkdir(parents=True, exist_ok=True)
    for name, value in _machine.description().items():
        print(f"{name:9}{value}")
    return max(_run(name, rest[1:], chosen.save, is_named=bool(rest)) for name in rest[:1] or names())


def _run(name: str, argv: list[str], folder: Path | None, *, is_named: bool) -> int:
    """The exit status of one benchmark; 1 if it failed."""
    print(f"\n== {name}", flush=True)
    try:
        module = importlib.import_module(f"benchmarks.{name}")
        if not is_named and (reason := getattr(module, "BY_NAME_ONLY", None)):
            print(f"runs by name only: {reason}")
            return 0
        files = ["--json", str(folder / f"{name}.json")] if folder else []
        if folder and hasattr(module, "draw"):
            files += ["--plot", str(folder / f"{name}.png")]
        return module.main([*files, *argv]) or 0
    except Exception as failure:
        sentence = str(failure) if isinstance(failure, InputError) else f"{type(failure).__name__}: {failure}"
        if not isinstance(failure, InputError):
            traceback.print_exc()
        print(f"{name} failed: {sentence}", file=sys.stderr, flush=True)
        if folder:
            _results.save_json(folder / f"{name}.json", {"name": name, "arguments": argv}, {"failure": sentence})
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
