"""`check_layer`: all checks of a layer, as a report; and the checks that need a model."""

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from multilin.architectures.base import Architecture, adopt
from multilin.architectures.own_file import resolve, short_name
from multilin.architectures.plain_module import PlainBlock, plain_architecture
from multilin.data.progress import Progress, no_progress
from multilin.errors import InputError, listed
from multilin.inference.snapshot import state_tensors
from multilin.inference.state_file import GROWS
from multilin.model import MultilinConfig, MultilinForCausalLM
from multilin.testing import laws
from multilin.testing.cost import LENGTHS, MOST_BYTES, Meter, cost
from multilin.testing.laws import Finding, Subject, brief, noise

MakeModel = Callable[[], MultilinForCausalLM]
TASKS = {"64 tokens by heart": 0.1, "to copy the token before": 0.5}  # the loss that solves each; chance is 2.6 and 1.4
IDS = torch.arange(12)[None] % 7 + 2


def learns(make_model: MakeModel, seconds: float = 8.0) -> Finding:
    """Whether a small model learns 64 tokens by heart, and to name the token before the current one."""
    results = {task: _train(make_model(), task, seconds / 2) for task in TASKS}
    told = "; ".join(f"{task}: loss {loss:.2f} after {steps} steps" for task, (loss, steps) in results.items())
    if failed := [task for task, (loss, _) in results.items() if not loss < TASKS[task]]:
        what = f"It does not learn {' or '.join(failed)} in {seconds / 2:.0f} s or 500 steps ({told})"
        cause = "vanishing gradients, a scale that is too small, or no way to tell which token came before"
        return Finding("learns", "warning", f"{what}. Likely cause: {cause}.")
    return Finding("learns", "ok", f"It learns {told}.")


def _train(model: MultilinForCausalLM, task: str, seconds: float) -> tuple[float, int]:
    """The last loss and the number of steps."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0)
    end, draw = time.perf_counter() + seconds, torch.Generator().manual_seed(2)
    ids = torch.randint(2, 16, (1, 65), generator=draw)
    given, targets = ids[:, :-1], ids[:, 1:]
    for step in range(501):  # noqa: B007
        if "copy" in task:
            given = torch.randint(2, 6, (16, 12), generator=draw)
            targets = given[:, :-1]
        logits = model(given, use_cache=False).logits[:, given.shape[1] - targets.shape[1] :]
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        if loss < TASKS[task] or time.perf_counter() > end:
            break
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return float(loss.detach()), step


@torch.no_grad()
def exports(make_model: MakeModel) -> Finding:
    """Whether `multilin export` will work."""
    try:
        from multilin.export.folder import OWN_PROMPT_COLUMNS
        from multilin.export.graph import make_graph

        model = make_model().eval()
        if any(GROWS in about.shape for about in state_tensors(model)):
            return Finding("exports", "says", "`multilin export` refuses a state that grows; generate and serve work.")
        for columns in (1, OWN_PROMPT_COLUMNS):
            make_graph(model, columns)
    except Exception as error:
        return Finding("exports", "says", f"`multilin export` will not work ({brief(error)}); generate and serve will.")
    return Finding("exports", "says", "`multilin export` will work.")


@torch.no_grad()
def compiles(make_model: MakeModel) -> Finding:
    """Whether `training.compile` will work."""
    model = make_model().eval()
    try:
        torch.compiler.reset()  # it compiles a function a few times only
        compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
        found = compiled(IDS, use_cache=False).logits
    except Exception as error:
        return Finding("compiles", "says", f"`--training.compile true` will not work ({brief(error)}).")
    expected, good = model(IDS, use_cache=False).logits, "`--training.compile true` will work."
    return _compared("compiles", found, expected, good, "Compiled, logits differ")


@torch.no_grad()
def packs(make_model: MakeModel) -> Finding:
    """Whether texts in one row are read as if each stood alone."""
    model = make_model().double().eval()
    try:
        found = model(IDS, document_ids=(IDS * 0).index_fill(1, torch.arange(5), 1)).logits
    except InputError:
        return Finding("packs", "says", "In training, layers read across the borders of documents: see `starts`.")
    alone, good = [model(part).logits for part in (IDS[:, :5], IDS[:, 5:])], "Texts in one row do not read each other."
    return _compared("packs", found, torch.cat(alone, dim=1), good, "Despite `starts`, texts in a row differ")


@torch.no_grad()
def left_padding(make_model: MakeModel) -> Finding:
    """Whether a batch of prompts of different lengths gives what each gives alone."""
    model = make_model().double().eval()
    found = model(pad(IDS, (4, 0)), attention_mask=pad(torch.ones_like(IDS), (4, 0))).logits[:, 4:]
    good, bad = "Prompts of different lengths can be read together.", "A prompt beside a longer one differs"
    return _compared("padding", found, model(IDS).logits, good, bad)


def _compared(name: str, found: Tensor, expected: Tensor, good: str, bad: str) -> Finding:
    change = float((found - expected).abs().max() / expected.abs().max())
    return Finding(name, "says", good) if change <= 1e-4 else Finding(name, "warning", f"{bad} by {change:.1e}.")


EXACT: dict[str, Callable[[Subject], Finding]] = {
    "causal": laws.causal, "rows": laws.rows_independent, "deterministic": laws.deterministic,
    "train = eval": laws.training_is_evaluation, "pieces": laws.pieces_are_whole, "gradients": laws.gradients,
}  # fmt: skip
MEASURED: dict[str, Callable[[Subject], Finding]] = {"finite": laws.finite, "state": laws.state_size, "cost": cost}
ABILITIES: dict[str, Callable[[MakeModel], Finding]] = {
    "learns": learns, "exports": exports, "compiles": compiles, "packs": packs, "padding": left_padding,
}  # fmt: skip
ROWS = (*EXACT, *MEASURED, *ABILITIES)  # the names of the checks


@dataclass(frozen=True)
class Report:
    """The findings about a layer, in the order of `ROWS`."""

    layer: str
    findings: list[Finding]

    @property
    def failures(self) -> list[Finding]:
        """The findings that mean wrong results."""
        return [finding for finding in self.findings if finding.result == "failure"]


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

    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")  # the findings say what they say
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)  # more gain nothing on small tensors, and wait for each other on a busy machine
        report = Report(short_name(name), list(_findings(make_model, [row for row in ROWS if row in rows], progress)))
    if raises and report.failures:
        lines = (f"  {finding.name}: {finding.sentence}" for finding in report.failures)
        raise AssertionError("\n".join([f"{report.layer} fails {len(report.failures)} of the checks:", *lines]))
    return report


def _findings(make_model: MakeModel, rows: list[str], progress: Progress) -> Iterator[Finding]:
    """The findings one by one; a layer that cannot be called at all has only one."""
    plain = _subject(make_model())
    try:
        with torch.no_grad():
            plain.read_pieces(plain.draw(2, 8), [4])
    except Exception as error:
        yield Finding("runs", "failure", f"A call on vectors of shape (2, 8, {plain.width}) fails: {brief(error)}.")
        return
    exact = _exact(plain)
    for index, row in enumerate(rows):
        progress(row, index, len(rows))
        try:
            if row in ABILITIES:
                yield ABILITIES[row](make_model)
            else:
                yield EXACT[row](exact) if row in EXACT else MEASURED[row](plain)
        except Exception as error:
            is_wrong = row in (*EXACT, "finite", "state") and row != "gradients"
            yield Finding(row, "failure" if is_wrong else "warning", f"The layer raises an error here: {brief(error)}.")


def _subject(model: MultilinForCausalLM) -> Subject:
    """The module of a user in the first layer, without the norm and the feed-forward; for others all layers."""
    layers = list(model.eval().model.layers)
    if not isinstance(layers[0], PlainBlock):
        return Subject(*layers, width=model.config.hidden_size, longest=model.config.n_positions)
    subject = Subject(layers[0].attention, width=model.config.hidden_size)
    for shorter, length in itertools.pairwise((laws.LENGTH, *LENGTHS)):
        try:
            with torch.no_grad(), Meter() as meter:
                subject.read(subject.draw(1, length))
        except Exception:
            subject.longest = shorter
        if subject.longest or meter.peak > MOST_BYTES:
            break
    return subject


def _exact(subject: Subject) -> Subject:
    """A copy in float64; parameters that are entirely zero are drawn, since they might hide other parts."""
    exact = subject.copy()
    for parameter in exact.module.parameters():
        if not parameter.any():
            parameter.data = 0.3 * noise(parameter, seed=4)
    single = exact.copy()
    exact.module.double()
    try:
        with torch.no_grad(), Meter() as watch:
            exact.read(exact.draw(1, 3))
    except RuntimeError:
        return single  # it computes in float32 only
    exact.rounds_to = watch.lowest
    return exact
