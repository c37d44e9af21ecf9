"""`python -m tests.golden FILE...` prints the largest relative error of every array and fails above its tolerance."""

import sys
from pathlib import Path

from tests.golden.families import TOLERANCE, NotRead, compare


def main(paths: list[str]) -> int:
    failed = not_read = 0
    for path in map(Path, paths):
        try:
            comparisons = compare(path)
        except NotRead as error:
            not_read += 1
            print(f"{error}; not read")
            continue
        if not comparisons:
            print(f"{path.stem:28s} no array of this file is checked")
        for comparison in comparisons:
            verdict = "ok" if comparison.error <= TOLERANCE else "OFF"
            failed += verdict != "ok"
            print(f"{path.stem:28s} {comparison.array:60s} {comparison.error:10.2e}  {verdict}")
    ending = f"; {not_read} files were not read" if not_read else ""
    print(f"{f'{failed} arrays are off' if failed else 'all arrays within their tolerance'}{ending}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
