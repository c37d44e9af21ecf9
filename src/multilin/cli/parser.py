"""From the words of a command line to the values of a verb's parameters; every mistake is one sentence."""

import argparse
import dataclasses
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from jsonargparse import SUPPRESS, ActionYesNo, ArgumentParser, DefaultHelpFormatter

from multilin.cli.arguments import Flag, flags, flags_of, parameters
from multilin.errors import InputError, nearest
from multilin.settings import field_help, load_settings


def parse(verb: str, function: Callable[..., Any], arguments: Sequence[str]) -> list[Any]:
    """The values of a verb's parameters.

    Raises:
        InputError: an unknown flag, a missing or wrong value.
        SystemExit: after printing the help that was asked for.
    """
    parser = build_parser(verb, function)
    try:
        found = parser.parse_args(list(arguments))
    except argparse.ArgumentError as error:
        raise InputError(_sentence(str(error), verb, function)) from None
    flat = vars(found.as_flat())
    return [_value(hint, flat, arguments) for hint in parameters(function)]


def build_parser(verb: str, function: Callable[..., Any]) -> ArgumentParser:
    """The parser of one verb."""
    all_flags = list(flags(function))
    places = " ".join(_place(flag) for flag in all_flags if flag.is_positional)
    parser = ArgumentParser(
        prog=f"multilin {verb}",
        usage=" ".join(part for part in (f"multilin {verb}", places, "[--flag value ...]") if part),
        description=_paragraphs(function.__doc__ or ""),
        formatter_class=_Help,
        exit_on_error=False,
        allow_abbrev=False,
    )
    groups: dict[str, Any] = {"": parser}
    for flag in all_flags:
        if flag.section not in groups:
            groups[flag.section] = parser.add_argument_group(flag.section, (flag.owner.__doc__ or "").splitlines()[0])
        _add(groups[flag.section], flag)
    return parser


def _add(group: Any, flag: Flag) -> None:
    description = field_help(flag.owner)[flag.field.name]
    if flag.is_list:
        group.add_argument(flag.field.name, type=str, nargs="*", metavar=flag.text, help=description)
    elif flag.is_positional:
        optional = {} if flag.default is dataclasses.MISSING else {"nargs": "?"}
        group.add_argument(flag.field.name, type=flag.given_type, metavar=flag.text, help=description, **optional)
    elif flag.hint is bool and not flag.is_change and flag.default:
        group.add_argument(
            flag.text, action=ActionYesNo(no_prefix="no-"), default=True, help=f"{description} (default: yes)"
        )
    elif flag.hint is bool and not flag.is_change:
        group.add_argument(flag.text, action="store_true", help=description)
    else:
        shown = "" if flag.default in (None, {}) else f" (default: {_plain(flag.default)})"
        group.add_argument(
            flag.text,
            type=flag.given_type,
            default=SUPPRESS if flag.is_change else flag.default,
            metavar=flag.takes,
            help=f"{description}{shown}",
        )


def _value(hint: Any, flat: Mapping[str, Any], arguments: Sequence[str]) -> Any:
    if get_origin(hint) is Annotated:
        return _changes(hint, flat, arguments)
    values = {flag.key: flat[flag.key] for flag in flags_of(hint)}
    try:
        return load_settings(hint, values)
    except InputError as error:
        raise InputError(_as_written(str(error), hint)) from None


def _changes(hint: Any, flat: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """Dotted field to value; of a dictionary, single entries where they were given so."""
    changes: dict[str, Any] = {}
    for flag in flags_of(hint):
        given_whole = any(argument.split("=")[0] == flag.text for argument in arguments)
        value = flat.get(flag.key, SUPPRESS)
        if isinstance(value, dict) and not given_whole:
            changes |= {f"{flag.key}.{name}": entry for name, entry in value.items()}
        elif value is not SUPPRESS:
            changes[flag.key] = value
    return changes


def _as_written(message: str, owner: type) -> str:
    """A message about a field, with the field as the flag that the user wrote."""
    for flag in flags_of(owner):
        if message.startswith(f"{flag.field.name}:"):
            return flag.text + message.removeprefix(flag.field.name)
    return message


def _sentence(message: str, verb: str, function: Callable[..., Any]) -> str:
    """A complaint of the parser as one sentence that says what would be accepted."""
    known = {flag.text: flag for flag in flags(function)}
    if found := re.match(r'Parser key "(\S+)":', message):
        flag = next((flag for flag in known.values() if flag.key == found[1]), None)
        value = re.search(r"(?:Got value|Given value): (.*)\Z", message, re.DOTALL)
        if flag is not None and value is not None:
            return f"{flag.text}: {value[1]!r} given, but it should be {_accepted(flag.given_type)}"
    if found := re.match(r"(?i)unrecognized arguments: (.*)", message):
        first = next((word for word in found[1].split() if word.startswith("-")), found[1].split()[0])
        name = first.split("=")[0]
        hint = nearest(name, known) or f"; `multilin {verb} --help` lists what there is"
        return f"{name}: unknown {'flag' if name.startswith('-') else 'argument'}{hint}"
    if found := re.search(r"(?:arguments? (?:are|is) required: |Key )\W?([\w, ]+)", message):
        return f"{found[1].upper()}: missing; `multilin {verb} --help` shows what to give"
    if found := re.match(r"argument (\S+?)[:/ ].*expected", message):
        flag = known.get(found[1])
        accepted = f"; give {_accepted(flag.given_type)}" if flag else ""
        return f"{found[1]}: a value is missing{accepted}"
    return " ".join(message.split())


def _accepted(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_accepted(part) for part in parts)
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin is tuple:
        return f"a list such as [{', '.join('0.9' for _ in parts)}]"
    words = {int: "an integer", float: "a number", bool: "true or false", types.NoneType: "null", str: "a text"}
    return words.get(hint, 'a JSON object such as {"num_heads": 8}' if origin is dict else str(hint))


def _plain(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _place(flag: Flag) -> str:
    if flag.is_list:
        return f"[{flag.text} ...]"
    return flag.text if flag.default is dataclasses.MISSING else f"[{flag.text}]"


def _paragraphs(docstring: str) -> str:
    return "\n".join(line.strip() for line in docstring.strip().splitlines())


class _Help(DefaultHelpFormatter):
    """Descriptions as they are written, and help without types and defaults added: ours says them."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return action.help or ""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(f"{indent}{line}" for line in text.splitlines())
