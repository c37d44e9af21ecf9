"""One script per question. `python -m benchmarks NAME` runs it and prints the machine, the versions and the commit."""
