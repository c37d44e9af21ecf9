"""Reads the rank of this process and the number of processes from launchers' variables. Quick to import."""

import os

from multilin.errors import InputError, listed, shown

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # each launcher sets all of these
_ONE = {  # the largest value that a single process has
    "RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "PMI_SIZE": 1, "OMPI_COMM_WORLD_SIZE": 1, "MV2_COMM_WORLD_SIZE": 1
}  # fmt: skip
_NUMBERS = (*_ONE, "MASTER_PORT", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")


def num_processes() -> int:
    """Number of processes that train together, started by torchrun, `accelerate launch` or Ray; else 1.

    Raises:
        InputError: only some of a launcher's variables are set, or a variable has a value that no launcher sets.
    """
    numbers = {name: _number(name) for name in _NUMBERS}
    if is_launched():
        if numbers["RANK"] >= numbers["WORLD_SIZE"]:
            raise InputError(f"RANK: {numbers['RANK']} in the environment, but WORLD_SIZE is {numbers['WORLD_SIZE']}")
        return numbers["WORLD_SIZE"]
    for name, most in _ONE.items():
        if numbers[name] > most:
            missing = [other for other in _LAUNCHER if not _is_given(other)]
            raise InputError(
                f"{name}: {numbers[name]} in the environment says that this is one of several processes, but "
                f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} not set; start all processes with "
                f"torchrun, or unset {name}"
            )
    return 1


def is_launched() -> bool:
    """Whether a launcher started this process, alone or with others."""
    return all(map(_is_given, _LAUNCHER))


def left_over() -> list[str]:
    """The launchers' variables that are set although no launcher started this process, or that are empty.

    Raises:
        InputError: see `num_processes`.
    """
    num_processes()
    return [name for name in {*_LAUNCHER, *_NUMBERS} & os.environ.keys() if not (is_launched() and _is_given(name))]


def drop_empty() -> None:
    """Remove empty launchers' variables from the environment, since transformers would fail to read them as numbers.

    Raises:
        InputError: a launcher's variable is neither empty nor a whole number.
    """
    for name in {*_LAUNCHER, *_NUMBERS} & os.environ.keys():
        if not _is_given(name):
            del os.environ[name]
        elif name in _NUMBERS:
            _number(name)


def _is_given(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "-1")  # older launchers set -1 for a single process


def _number(name: str) -> int:
    value = os.environ[name] if _is_given(name) else "0"
    if not (value.isascii() and value.isdecimal() and len(value) < 6 and int(value) < 2**16):
        raise InputError(f"{name}: {shown(value)} in the environment, but it should be a whole number; unset it")
    return int(value)
