"""One script per question; `python -m benchmarks NAME` answers it, with the machine it was asked on."""
