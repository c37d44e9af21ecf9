"""`check_layer`: all checks of a layer, as a report."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from multilin.architectures.base import Architecture, adopt
from multilin.architectures.own_file import resolve, short_name
from multilin.architectures.plain_module import PlainBlock, plain_architecture
from multilin.data.progress import Progress, no_progress
from multilin.errors import InputError, listed
from multilin.model import MultilinConfig, MultilinForCausalLM
from multilin.testing import abilities, laws
from multilin.testing.cost import cost
from multilin.testing.laws import Finding, brief
from multilin.testing.subject import LayerSubject

EXACT: dict[str, Callable[[LayerSubject], Finding]] = {
    "causal": laws.causal, "rows": laws.rows_independent, "deterministic": laws.deterministic,
    "train = eval": laws.training_is_evaluation, "pieces": laws.pieces_are_whole,
}  # fmt: skip
MEASURED: dict[str, Callable[[LayerSubject], Finding]] = {"state": laws.state_size, "finite": laws.finite, "cost": cost}
ABILITIES: dict[str, Callable[[abilities.MakeModel], Finding]] = {
    "learns": abilities.learns, "exports": abilities.exports, "compiles": abilities.compiles, "packs": abilities.packs,
    "padding": abilities.left_padding,
}  # fmt: skip
ROWS = (*EXACT, "gradients", *MEASURED, *ABILITIES)


@dataclass(frozen=True)
class Report:
    """The findings about a layer, in the order of `ROWS`.

    layer: its name.
    findings: one for each check.
    """

    layer: str
    findings: list[Finding]

    @property
    def failures(self) -> list[Finding]:
        """The findings that mean wrong results."""
        return [finding for finding in self.findings if finding.result == "failure"]

    def __getitem__(self, name: str) -> Finding:
        """The finding of this name."""
        return next(finding for finding in self.findings if finding.name == name)

    def raise_for_failures(self) -> None:
        """Raise an AssertionError with a line for each failure, if there is one."""
        if self.failures:
            lines = (f"  {finding.name}: {finding.sentence}" for finding in self.failures)
            raise AssertionError("\n".join([f"{self.layer} fails {len(self.failures)} checks:", *lines]))


def check_layer(
    layer: str | type[nn.Module] | Architecture,
    *,
    hidden_size: int = 32,
    options: Mapping[str, Any] | None = None,
    rows: Collection[str] | None = None,
    raises: bool = True,
    progress: Progress = no_progress,
) -> Report:
    """Check a layer: is it right, what does it cost, what can it do. See docs/own-layer.md for the checks.

    Args:
        layer: class of a plain module, FILE.py:Class, the name of a registered architecture, or an `Architecture`.
        hidden_size: D.
        options: options of the layer.
        rows: names of the checks, from `ROWS`; all if not given.
        raises: raise an AssertionError if a check fails. Otherwise only the report says it.
        progress: called for each check.

    Raises:
        AssertionError: a check failed; the message has a line for each.
        InputError: there is no such layer, or it does not take these options.
    """
    if unknown := sorted(set(rows or ()) - set(ROWS)):
        raise InputError(f"rows: {unknown[0]!r} given, but known are {listed(ROWS)}")
    name = _name(layer)

    def make_model() -> MultilinForCausalLM:
        torch.manual_seed(0)
        config = MultilinConfig.from_architecture(
            name, hidden_size=hidden_size, num_layers=2, vocab_size=16, n_positions=1024, options=options,
            eos_token_id=0, pad_token_id=1,
        )  # fmt: skip
        return MultilinForCausalLM(config)

    with torch.random.fork_rng(devices=[]):
        findings = list(_findings(make_model, [row for row in ROWS if rows is None or row in rows], progress))
    report = Report(short_name(name), findings)
    if raises:
        report.raise_for_failures()
    return report


def _name(layer: str | type[nn.Module] | Architecture) -> str:
    """The name under which models find the layer."""
    if isinstance(layer, str):
        return resolve(layer, is_typed=True)
    architecture = layer if isinstance(layer, Architecture) else plain_architecture(layer, layer.__name__)
    adopt(architecture)
    return architecture.name


def _findings(make_model: abilities.MakeModel, rows: Collection[str], progress: Progress) -> Any:
    """The findings one by one; a layer that cannot be called at all has only one."""
    model = make_model()
    plain = _subject(model)
    try:
        with torch.no_grad():
            plain.read_pieces(plain.draw(2, 8), [4])
    except Exception as error:
        yield Finding("runs", "failure", f"The layer cannot be called on (2, 8, {plain.width}) vectors: {brief(error)}.")
        return
    exact = laws.widened(plain)
    try:
        exact = exact.cast(torch.float64)
    except RuntimeError:  # the layer computes in float32 only
        exact.tolerance = 1e-4
    for index, row in enumerate(rows):
        progress(row, index, len(rows))
        try:
            if row in ABILITIES:
                yield ABILITIES[row](make_model)
            else:
                yield MEASURED[row](plain) if row in MEASURED else (EXACT | {"gradients": laws.gradients})[row](exact)
        except Exception as error:
            result = "failure" if row in (*EXACT, "finite") else "warning"
            yield Finding(row, result, f"The layer raises an error here: {brief(error)}.")


def _subject(model: MultilinForCausalLM) -> LayerSubject:
    """The module of a user in the first layer, without the norm and the feed-forward; for others all layers."""
    layers = list(model.eval().model.layers)
    if isinstance(layers[0], PlainBlock):
        return LayerSubject(layers[0].attention, width=model.config.hidden_size)
    return LayerSubject(*layers, width=model.config.hidden_size, longest=model.config.n_positions)
