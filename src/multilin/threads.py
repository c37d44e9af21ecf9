"""Threads that share a computation wait for the slowest of them: what other programs do to that."""

import os
import warnings

import torch


def contention() -> str | None:
    """One sentence where other programs keep busy the cores that PyTorch's threads want; None where they do not.

    Threads that wait keep their core busy, so with one of two cores taken a training step was measured to take 4 to 90
    times as long; with OMP_WAIT_POLICY=passive 1.8 times, but as long on a quiet machine too.
    """
    threads, cores = torch.get_num_threads(), available_cores()
    if threads == 1 or os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive" or not hasattr(os, "getloadavg"):
        return None
    load = os.getloadavg()[0]
    if load + threads <= cores + 0.7:
        return None
    return (
        f"other programs keep this machine busy (load {load:.1f}, {cores} cores), and {threads} threads that wait for "
        "each other can be many times slower then; OMP_WAIT_POLICY=passive in the environment bounds the loss"
    )


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def warn_of_contention() -> None:
    """Warn where `contention` has something to say."""
    if sentence := contention():
        warnings.warn(sentence, stacklevel=3)
