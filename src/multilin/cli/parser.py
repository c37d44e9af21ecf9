"""Turn the words of a command line into the values of a verb's parameters; each mistake becomes one sentence."""

import argparse
import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from multilin.cli.arguments import Flag, flags, flags_of, parameters
from multilin.errors import InputError, nearest, shorten, shown
from multilin.settings import field_help, load_settings
from multilin.settings.inputs import parse_yaml


def parse(verb: str, function: Callable[..., Any], arguments: Sequence[str]) -> list[Any]:
    """The values of a verb's parameters.

    Raises:
        InputError: a flag is unknown, or a value is missing or wrong.
        SystemExit: after printing the help that was asked for.
    """
    known = {flag.text: flag for flag in flags(function)}
    words, entries = _take_entries(arguments, list(known.values()))
    try:
        given = vars(build_parser(verb, function).parse_args(words))
    except argparse.ArgumentError as error:
        raise InputError(_sentence(str(error), verb, known)) from None
    values = {flag.key: _read(flag, given[flag.key]) for flag in known.values() if flag.key in given}
    return [_value(hint, values, entries) for hint in parameters(function)]


def build_parser(verb: str, function: Callable[..., Any]) -> argparse.ArgumentParser:
    """The parser of one verb. Parsed values are texts; flags that were not given have no value."""
    all_flags = list(flags(function))
    places = [_place(flag) for flag in all_flags if flag.is_positional]
    parser = _Parser(
        prog=f"multilin {verb}",
        usage=" ".join([f"multilin {verb}", *places, "[--flag value ...]"]),
        description=inspect.getdoc(function),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups: dict[str, Any] = {"": parser}
    for flag in all_flags:
        if flag.section not in groups:
            groups[flag.section] = parser.add_argument_group(flag.section, (flag.owner.__doc__ or "").splitlines()[0])
        _add(groups[flag.section], flag)
    return parser


def _add(group: Any, flag: Flag) -> None:
    description = field_help(flag.owner)[flag.field.name].replace("%", "%%")
    if flag.is_positional:
        number = "*" if flag.is_list else None if flag.default is dataclasses.MISSING else "?"
        group.add_argument(flag.field.name, metavar=flag.text, help=description, nargs=number)
    elif flag.hint is bool and not flag.is_change and flag.default:
        group.add_argument(flag.text, action=argparse.BooleanOptionalAction, help=f"{description} (default: yes)")
    elif flag.hint is bool and not flag.is_change:
        group.add_argument(flag.text, action="store_true", help=description)
    else:
        shown_default = str(flag.default).lower() if isinstance(flag.default, bool) else flag.default
        default = "" if flag.default in (None, {}, (), []) else f" (default: {shown_default})"
        group.add_argument(flag.text, metavar=flag.takes, help=f"{description}{default}", action=_Once)


def _take_entries(arguments: Sequence[str], all_flags: Sequence[Flag]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Separate flags for single entries of a dictionary (`--model.options.window 4`) from the other words."""
    rest: list[str] = []
    entries: dict[str, dict[str, Any]] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        flag = next((flag for flag in all_flags if flag.takes == "JSON" and name.startswith(f"{flag.text}.")), None)
        if flag is None:
            rest.append(word)
            continue
        text = value if equals else next(words, None)
        if text is None:
            raise InputError(f"{name}: a value is missing")
        entry, value = name.removeprefix(f"{flag.text}."), parse_yaml(text, name)
        _check_once(name, entries.setdefault(flag.key, {}).setdefault(entry, value), value)
    return rest, entries


def _read(flag: Flag, given: Any) -> Any:
    """Turn the text of a flag into its value; numbers, lists and objects have the YAML syntax of a recipe."""
    is_union = get_origin(flag.given_type) in (Union, types.UnionType)
    accepted = get_args(flag.given_type) if is_union else (flag.given_type,)
    if not isinstance(given, str) or str in accepted:
        return None if given == "null" and types.NoneType in accepted else given
    if flag.is_text_or_list and not given.lstrip().startswith("["):
        return [given]
    value = parse_yaml(given, flag.text)
    try:
        TypeAdapter(flag.given_type).validate_python(value)
    except ValidationError:
        raise InputError(f"{flag.text}: {shown(given)} given, but it should be {_accepted(flag.given_type)}") from None
    return value  # not pydantic's result, which takes true for a number; the settings refuse it


def _value(hint: Any, values: Mapping[str, Any], entries: Mapping[str, dict[str, Any]]) -> Any:
    """The value of a parameter, given its type: a settings object, or a dictionary from dotted fields to values."""
    own = {flag.key: values[flag.key] for flag in flags_of(hint) if flag.key in values}
    parts = {flag.key: entries[flag.key] for flag in flags_of(hint) if flag.key in entries}
    if get_origin(hint) is Annotated:
        return own | {f"{key}.{name}": value for key, part in parts.items() for name, value in part.items()}
    try:
        return load_settings(hint, own | {key: own.get(key, {}) | part for key, part in parts.items()})
    except InputError as error:
        raise InputError(_as_written(str(error), hint)) from None


def _as_written(message: str, owner: type) -> str:
    """A message about a field, with the name of the flag in place of the name of the field."""
    for flag in flags_of(owner):
        if message.startswith(f"{flag.field.name}:"):
            return flag.text + message.removeprefix(flag.field.name)
    return message


def _sentence(message: str, verb: str, known: Mapping[str, Flag]) -> str:
    """An error message of argparse as one sentence that says what would be accepted."""
    if match := re.match(r"(?i)unrecognized arguments: (.*)", message):
        words = match[1].split()
        name = shorten(next((word for word in words if word.startswith("-")), words[0]).split("=")[0])
        if Path(name).exists() and "--data.source" in known:
            return f"{name}: unknown argument; give text with --data.source: one file, folder or quoted glob"
        hint = nearest(name, known) or f"; `multilin {verb} --help` lists the arguments"
        return f"{name}: unknown {'flag' if name.startswith('-') else 'argument'}{hint}"
    if match := re.search(r"arguments are required: ([\w, ]+)", message):
        return f"{match[1]}: missing; `multilin {verb} --help` shows the arguments"
    if match := re.match(r"argument (\S+?)[:/ ].*expected", message):
        name, given_type = match[1], known[match[1]].given_type if match[1] in known else None
        accepted = "" if given_type is None else f"; give {_accepted(given_type)}"
        hyphen = f"; write {name}=... if the value begins with a hyphen" if given_type is str else ""
        return f"{name}: a value is missing{accepted}{hyphen}"
    return " ".join(message.split())


def _accepted(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_accepted(part) for part in parts)
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin is tuple:
        if parts[0] is str:
            return 'a text, or a list such as ["END"]'
        return f"a list such as [{', '.join('0.9' for _ in parts)}]"
    if origin is list:
        return f"a list of {_accepted(parts[0])}"
    if origin is dict and parts[1] is not Any:
        return f"a JSON object that maps names to {_accepted(parts[1])}"
    words = {int: "an integer", float: "a number", bool: "true or false", types.NoneType: "null", str: "a text"}
    return words.get(hint, 'a JSON object such as {"num_heads": 8}')


def _place(flag: Flag) -> str:
    if flag.is_list:
        return f"[{flag.text} ...]"
    return flag.text if flag.default is dataclasses.MISSING else f"[{flag.text}]"


class _Once(argparse.Action):
    """Keeps the value of a flag, and refuses a second, different value."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        """Argparse calls this each time that the flag is given."""
        _check_once(self.option_strings[0], getattr(namespace, self.dest, values), values)
        setattr(namespace, self.dest, values)


def _check_once(name: str, first: Any, second: Any) -> None:
    if first != second:
        raise InputError(f"{name}: {shown(first)} and {shown(second)} given, but {name} takes one value; give it once")


class _Parser(argparse.ArgumentParser):
    """A parser that raises errors instead of printing them and exiting."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)
