"""All malformed inputs, or groups of them by name: `python -m tests.fuzz [GROUP ...]` prints what ended badly."""

import collections
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.cases import GROUPS
from tests.fuzz.material import write_material
from tests.fuzz.runner import Runner

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder))
        write_material(runner)
        kinds, count, begin = collections.Counter(), 0, time.monotonic()
        for name in sys.argv[1:] or GROUPS:
            start = time.monotonic()
            cases = list(GROUPS[name](runner.valid))
            for number, case in enumerate(cases):
                for fault in runner.faults(case):
                    kinds[fault.split(":")[0]] += 1
                    print(f"-- {name} {number}: {case}\n   {fault.strip()}", flush=True)
            count += len(cases)
            print(f"{name}: {len(cases)} in {time.monotonic() - start:.0f} s", flush=True)
        print(f"{count} malformed inputs in {time.monotonic() - begin:.0f} s; faults: {dict(kinds)}")
        sys.exit(bool(kinds))
