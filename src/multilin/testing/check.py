"""`check_layer`: all checks of a layer, as a report."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from multilin.architectures.base import Architecture, adopt
from multilin.architectures.own_file import resolve, short_name
from multilin.architectures.plain_module import PlainBlock, plain_architecture
from multilin.data.progress import Progress, no_progress
from multilin.errors import InputError, listed
from multilin.model import MultilinConfig, MultilinForCausalLM
from multilin.testing import abilities, laws
from multilin.testing.cost import cost
from multilin.testing.laws import Finding, Subject, brief, noise

EXACT: dict[str, Callable[[Subject], Finding]] = {
    "causal": laws.causal, "rows": laws.rows_independent, "deterministic": laws.deterministic,
    "train = eval": laws.training_is_evaluation, "pieces": laws.pieces_are_whole, "gradients": laws.gradients,
}  # fmt: skip
MEASURED: dict[str, Callable[[Subject], Finding]] = {"finite": laws.finite, "state": laws.state_size, "cost": cost}
ABILITIES: dict[str, Callable[[abilities.MakeModel], Finding]] = {
    "learns": abilities.learns, "exports": abilities.exports, "compiles": abilities.compiles, "packs": abilities.packs,
    "padding": abilities.left_padding,
}  # fmt: skip
ROWS = (*EXACT, *MEASURED, *ABILITIES)
"""The names of the checks."""


@dataclass(frozen=True)
class Report:
    """The findings about a layer, in the order of `ROWS`."""

    layer: str
    findings: list[Finding]

    @property
    def failures(self) -> list[Finding]:
        """The findings that mean wrong results."""
        return [finding for finding in self.findings if finding.result == "failure"]

    def __getitem__(self, name: str) -> Finding:
        """The finding of this name."""
        return next(finding for finding in self.findings if finding.name == name)


def check_layer(
    layer: str | type[nn.Module] | Architecture,
    *,
    hidden_size: int = 32,
    options: Mapping[str, Any] | None = None,
    rows: Collection[str] = ROWS,
    raises: bool = True,
    progress: Progress = no_progress,
) -> Report:
    """Check whether a layer is right, what it costs, and what it can do; docs/own-layer.md lists the checks.

    Args:
        layer: class of a plain module, FILE.py:Class, the name of a registered architecture, or an `Architecture`.
        hidden_size, options: D, and options of the layer.
        rows: names of the checks, from `ROWS`.
        raises: whether a failure raises an AssertionError; otherwise only the report has it.
        progress: called for each check.

    Raises:
        AssertionError: a check failed; the message has a line for each failure.
        InputError: there is no such layer, or it does not take these options.
    """
    if unknown := sorted(set(rows) - set(ROWS)):
        raise InputError(f"rows: {unknown[0]!r} given, but known are {listed(ROWS)}")
    if isinstance(layer, str):
        name = resolve(layer, is_typed=True)
    else:
        architecture = layer if isinstance(layer, Architecture) else plain_architecture(layer, layer.__name__)
        name = architecture.name
        adopt(architecture)

    def make_model() -> MultilinForCausalLM:
        torch.manual_seed(0)
        config = MultilinConfig.from_architecture(
            name, hidden_size=hidden_size, num_layers=2, vocab_size=16, n_positions=1024, options=options,
            eos_token_id=0, pad_token_id=1,
        )  # fmt: skip
        return MultilinForCausalLM(config)

    with torch.random.fork_rng(devices=[]):
        report = Report(short_name(name), list(_findings(make_model, [row for row in ROWS if row in rows], progress)))
    if raises and report.failures:
        lines = (f"  {finding.name}: {finding.sentence}" for finding in report.failures)
        raise AssertionError("\n".join([f"{report.layer} fails {len(report.failures)} of the checks:", *lines]))
    return report


def _findings(make_model: abilities.MakeModel, rows: list[str], progress: Progress) -> Iterator[Finding]:
    """The findings one by one; a layer that cannot be called at all has only one."""
    plain = _subject(make_model())
    try:
        with torch.no_grad():
            plain.read_pieces(plain.draw(2, 8), [4])
    except Exception as error:
        yield Finding(
            "runs", "failure", f"The layer cannot be called on (2, 8, {plain.width}) vectors: {brief(error)}."
        )
        return
    exact = _exact(plain)
    for index, row in enumerate(rows):
        progress(row, index, len(rows))
        try:
            found = ABILITIES[row](make_model) if row in ABILITIES else (EXACT | MEASURED)[row](
                exact if row in EXACT else plain
            )  # fmt: skip
        except Exception as error:
            result = "warning" if row in ABILITIES or row in ("gradients", "cost") else "failure"
            found = Finding(row, result, f"The layer raises an error here: {brief(error)}.")
        yield found


def _subject(model: MultilinForCausalLM) -> Subject:
    """The module of a user in the first layer, without the norm and the feed-forward; for others all layers."""
    layers = list(model.eval().model.layers)
    if isinstance(layers[0], PlainBlock):
        return Subject(layers[0].attention, width=model.config.hidden_size)
    return Subject(*layers, width=model.config.hidden_size, longest=model.config.n_positions)


def _exact(subject: Subject) -> Subject:
    """A copy in float64; parameters that are entirely zero are drawn, since they might hide other parts."""
    exact = subject.copy()
    for parameter in exact.module.parameters():
        if not parameter.any():
            parameter.data = 0.3 * noise(parameter, seed=4)
    single = exact.copy()
    exact.module.double()
    try:
        with torch.no_grad(), _LowestPrecision() as watch:
            exact.read(exact.draw(1, 3))
    except RuntimeError:
        return single  # it computes in float32 only
    exact.rounds_to = watch.lowest
    return exact


class _LowestPrecision(TorchDispatchMode):
    """The lowest precision that a more precise tensor is rounded to."""

    lowest = torch.float64

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if all(isinstance(part, Tensor) and part.is_floating_point() for part in (*args[:1], result)):
            if torch.finfo(result.dtype).eps > max(torch.finfo(part.dtype).eps for part in (*args[:1],)):
                self.lowest = max(self.lowest, result.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result
