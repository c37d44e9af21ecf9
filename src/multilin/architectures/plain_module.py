"""An architecture from a plain PyTorch module, `Module(hidden_size, **options)`."""

import dataclasses
import inspect
import typing
from functools import partial
from inspect import Parameter
from typing import Any, Literal

from torch import nn

from multilin.architectures.base import Architecture, LayerOptions, Preset, Sizes, TrainingDefaults, adopt
from multilin.errors import InputError, shown
from multilin.layers import GeluFeedForward, Layer, ResidualBlock
from multilin.layers.plain import PlainMixer, Signature
from multilin.settings import load_settings, settings

_PLAIN_DATA = (type(None), bool, int, float, str)
DEFAULTS = TrainingDefaults(learning_rate=1e-3, betas=(0.9, 0.99), weight_decay=0.1, schedule="cosine")


class PlainOptions(LayerOptions):
    """Options of a plain module: the arguments of its `__init__`, and the feed-forward after it."""

    @property
    def longest_text(self) -> int | None:
        """None: a plain module states no limit."""
        return None

    def count_heads(self, hidden_size: int) -> int:
        """The option `num_heads`, if there is one and it is a number; else 1."""
        heads = getattr(self, "num_heads", 1)
        return heads if isinstance(heads, int) else 1


def adopt_own(found: Any, name: str) -> None:
    """Make an `Architecture` or a module class from a user's file known by its permanent name."""
    adopt(dataclasses.replace(found, name=name) if isinstance(found, Architecture) else plain_architecture(found, name))


def plain_architecture(module: type[nn.Module], name: str) -> Architecture:
    """The architecture whose layers are x += module(norm(x)), then x += feed_forward(norm(x)), with LayerNorms.

    Args:
        module: class of the module, called with the hidden size D and the options by name. Its `forward` is described
            at `PlainMixer`. Arguments of `__init__` with plain data as a default, or without default, are options.
        name: the permanent name.

    Raises:
        InputError: an argument that clashes with an option of every plain layer, or of a type that no text can give.
    """
    signature = Signature.of(module)
    options = _options_of(module)

    def layer(hidden_size: int, chosen: Any) -> Layer:
        values = dict(vars(chosen))
        feed_forward = values.pop("feed_forward")
        return PlainBlock(PlainMixer(module, hidden_size, values), feed_forward)

    def preset(sizes: Sizes, chosen: Any) -> Preset:
        # Without a state, a text is read again for every token, up to the longest text of training.
        limit = None if signature.has_state else sizes.n_positions
        return Preset([chosen] * sizes.num_layers, {"n_positions": limit}, DEFAULTS)

    return Architecture(
        name, module.__name__, "a module of your own", layer, options, options, preset, packs=signature.takes_starts
    )


class PlainBlock(ResidualBlock):
    """x += module(LayerNorm(x)), then, if asked for, x += GELU feed-forward(LayerNorm(x))."""

    def __init__(self, mixer: PlainMixer, feed_forward: str) -> None:
        norm, width = partial(nn.LayerNorm, mixer.hidden_size), mixer.hidden_size
        super().__init__(norm, mixer, GeluFeedForward(width) if feed_forward == "gelu" else _Zero())
        if feed_forward != "gelu":
            self.feed_forward_norm = nn.Identity()


class _Zero(nn.Module):
    """No feed-forward."""

    def forward(self, x_BTD: Any) -> float:
        return 0.0


def _options_of(module: type[nn.Module]) -> type:
    """The settings class of a module's arguments, with their defaults and types."""
    parameters = list(inspect.signature(module).parameters.values())
    if not parameters or parameters[0].kind not in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
        raise InputError(f"model.architecture: the first argument of {module.__name__} must be the hidden size")
    try:
        hints = typing.get_type_hints(module.__init__)
    except Exception:  # names that exist only for type checkers
        hints = {}
    body: dict[str, Any] = {}
    for parameter in parameters[1:]:
        default = parameter.default
        is_required = default is parameter.empty
        is_open = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        if is_open or not (is_required or _is_plain(default)):
            continue
        if parameter.name == "feed_forward" or hasattr(PlainOptions, parameter.name):
            raise InputError(
                f"model.architecture: {module.__name__}.__init__ has the argument {parameter.name!r}, the name of an "
                "option of every layer; rename it"
            )
        body[parameter.name] = (_hint(parameter, hints), default)
    required = {name: hint for name, (hint, default) in body.items() if default is Parameter.empty}
    given = {name: pair for name, pair in body.items() if name not in required}
    hints = required | {name: hint for name, (hint, _) in given.items()} | {"feed_forward": Literal["gelu", "none"]}
    defaults = {name: _field(default) for name, (_, default) in given.items()} | {"feed_forward": "gelu"}
    about = {name: f"argument {name} of {module.__name__}" for name in hints}
    about["feed_forward"] = "after the module: gelu adds a GELU feed-forward of width 4 D, none adds nothing"
    space = {"__annotations__": hints, "__module__": __name__, "__doc__": f"Options of {module.__name__}.", **defaults}
    return settings(type(f"{module.__name__}Options", (PlainOptions,), space | {"HELP": about}))


def _field(default: Any) -> Any:
    if isinstance(default, list | dict | set):
        return dataclasses.field(default_factory=lambda: type(default)(default))
    return default


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    return type(value) in _PLAIN_DATA


def _hint(parameter: Parameter, hints: dict[str, Any]) -> Any:
    """The annotated type if texts can give it, else the type of the default; a number stays a number of either kind."""
    hint, default = hints.get(parameter.name, Any), parameter.default
    if hint is Any and default is not parameter.empty and default is not None:
        hint = int | float if type(default) is int else type(default)
    probe: Any = settings(type("Probe", (), {"__annotations__": {"value": hint}}))
    try:
        load_settings(probe, {} if default is parameter.empty else {"value": default})
    except InputError as error:
        if "missing" not in str(error):
            raise InputError(
                f"model.architecture: the argument {parameter.name} has the default {shown(default)}, which is not of "
                f"its type {hint}"
            ) from None
    except Exception:  # a type of another library
        return Any
    return hint
