"""`python -m tests.golden FILE...` prints the largest relative error of every array and fails above 1e-9."""

import sys
from pathlib import Path

from tests.golden.families import compare

TOLERANCE = 1e-9


def main(paths: list[str]) -> int:
    failed = 0
    for path in map(Path, paths):
        comparisons = compare(path)
        if not comparisons:
            print(f"{path.stem:28s} no array of this file is checked")
        for comparison in comparisons:
            verdict = "ok" if comparison.error <= TOLERANCE else "OFF"
            failed += verdict != "ok"
            print(f"{path.stem:28s} {comparison.array:60s} {comparison.error:10.2e}  {verdict}")
    print(f"{failed} arrays are off by more than {TOLERANCE:g}" if failed else f"all arrays within {TOLERANCE:g}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
