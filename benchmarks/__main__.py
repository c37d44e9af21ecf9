"""`python -m benchmarks NAME [arguments]` runs one benchmark; without NAME all but the longest, in turn."""

import importlib
import pkgutil
import sys
from pathlib import Path

from benchmarks import machine

_NO_BENCHMARK = {"machine"}
_BY_NAME_ONLY = {"optimizer_learning"}  # trains many models
_NEEDS_A_GPU = {"gpu"}


def names() -> list[str]:
    """The benchmarks of this folder: every module with a `main`, found by its file."""
    found = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return sorted(name for name in found if not name.startswith("_") and name not in _NO_BENCHMARK)


def main(argv: list[str]) -> int:
    """Run what `argv` names and return the exit status."""
    if argv and argv[0] not in names():
        print(f"no benchmark {argv[0]!r}; there are {', '.join(names())}", file=sys.stderr)
        return 2
    machine.main()
    left_out = _BY_NAME_ONLY if machine.accelerator() != "none" else _BY_NAME_ONLY | _NEEDS_A_GPU
    status = 0
    for name in argv[:1] or [name for name in names() if name not in left_out]:
        print(f"\n== {name}", flush=True)
        status = max(status, importlib.import_module(f"benchmarks.{name}").main(argv[1:]) or 0)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
