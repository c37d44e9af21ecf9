"""Trains models of several sizes on several texts for so many tokens: the runs behind `multilin train --minutes`.

Every combination of the arguments is a run with a schedule of its own, which falls to 0 at its last token. A finished
run is a line of the file, and is not trained again when the script is started again; the fewest operations come first.
With --fit nothing is trained: the law is fitted to the runs of the file, and its errors are printed, the runs on each
text predicted from those on the others. From the runs in the package its law is written anew.
"""

import argparse
import dataclasses
import itertools
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import _machine, _results
from benchmarks._law import RUNS, MeasuredRun, expected_of, fit_law, load_runs, prediction_errors
from multilin.analysis.budget.law import LAW, Law, by_heart
from multilin.analysis.budget.measure import candidate, measure_text
from multilin.analysis.budget.pick import VALIDATIONS
from multilin.analysis.budget.rule import SHORT_RUN, Size, recipe_values
from multilin.files import write_whole
from multilin.settings.inputs import to_json
from multilin.training.assemble import read_text
from multilin.training.loop import train
from multilin.training.recipe import Recipe, load_recipe
from multilin.training.run_folder import RunFolder

BY_NAME_ONLY = "trains for hours"
CLOSE = 0.03  # bits per byte


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks minutes", description=__doc__)
    parser.add_argument("--texts", nargs="+", default=["python-docs"], help="source, or NAME=SOURCE[:VALIDATION]")
    parser.add_argument("--architectures", nargs="+", default=["tscale"])
    parser.add_argument("--sizes", nargs="+", default=["128x4"], help="WIDTHxLAYERS")
    parser.add_argument("--vocab-sizes", nargs="+", type=int, default=[2048])
    parser.add_argument("--rates", nargs="+", type=float, default=[None], help="learning rates; else the rule's")
    parser.add_argument("--tokens", nargs="+", type=float, default=[2e5], help="training tokens of a run")
    parser.add_argument("--runs", type=Path, default=RUNS, help="file of finished runs, to which new ones are added")
    parser.add_argument("--fit", action="store_true", help="train nothing, fit the law")
    arguments = _results.parse(parser, argv)
    arguments.runs.touch()
    if arguments.fit:
        law = _print_fit(load_runs(arguments.runs))
        if arguments.runs.resolve() == RUNS.resolve():
            write_whole(LAW, to_json(dataclasses.asdict(law), indent=1) + "\n")
    else:
        _train_all(arguments)
    _results.save("minutes", arguments, [dataclasses.asdict(run) for run in load_runs(arguments.runs)])


def _print_fit(runs: list[MeasuredRun]) -> Law:
    law = fit_law(runs)
    for field in dataclasses.fields(law):
        print(f"{field.name:12}{getattr(law, field.name)}")
    heads = f"{'vocabulary':>10}{'tokens':>12}{'rate':>8}{'measured':>10}{'law':>8}{'from others':>12}"
    print(f"\n{'text':14}{'width x layers':14}{heads}")
    errors = prediction_errors(runs)
    for run, error in errors[0.0]:
        print(
            f"{run.text:14}{run.hidden_size:>10}x{run.num_layers:<3}{run.vocab_size:>10,}{run.tokens:>12,}"
            f"{run.learning_rate:>8g}{run.bits_per_byte:>10.3f}{expected_of(law, run):>8.3f}"
            f"{run.bits_per_byte * math.exp(error):>12.3f}"
        )
    print(f"\n{'predicted':16}{'error':>8}{f'within {CLOSE:g}':>14}")
    for share, found in sorted(errors.items()):
        root = math.sqrt(sum(error**2 for _, error in found) / len(found))
        close = sum(abs(math.exp(error) - 1) * run.bits_per_byte <= CLOSE for run, error in found)
        name = f"after {100 * share:.0f} %" if share else "before the run"
        print(f"{name:16}{100 * root:>6.1f} %{close:>7} of {len(found)}")
    return law


def _train_all(arguments: argparse.Namespace) -> None:
    commit = _machine.commit()
    done = [dataclasses.asdict(run).items() for run in load_runs(arguments.runs)]
    points = []
    for text, architecture, size, vocab_size, rate, tokens in itertools.product(
        arguments.texts, arguments.architectures, arguments.sizes, arguments.vocab_sizes, arguments.rates,
        arguments.tokens,
    ):  # fmt: skip
        name, _, source = text.rpartition("=")
        chosen = Size(*map(int, size.split("x")), vocab_size)
        recipe = _recipe(source, architecture, chosen, rate, tokens)
        points.append((name or source, recipe, candidate(recipe, chosen)))
    for name, recipe, model in sorted(points, key=lambda point: point[2].flops_per_token * _tokens(point[1])):
        about: dict[str, Any] = {"text": name, **_described(recipe)}
        if not any(about.items() <= run for run in done):
            about |= {"flops_per_token": model.flops_per_token, "parameters": model.parameters}
            about |= _trained(recipe) | {"commit": commit}
            write_whole(arguments.runs, arguments.runs.read_text() + to_json(about) + "\n")
            print(to_json(about), flush=True)


def _recipe(source: str, architecture: str, size: Size, rate: float | None, tokens: float) -> Recipe:
    steps = round(tokens / math.prod(SHORT_RUN))
    first, _, validation = source.partition(":")
    text = {"data.source": first, "data.validation": validation or None}
    plain = load_recipe(None, recipe_values(architecture, size, steps, SHORT_RUN) | text)
    train = read_text(plain).train
    known = by_heart(candidate(plain, size).parameters, train.num_bytes, tokens / train.num_tokens)
    values = recipe_values(architecture, size, steps, SHORT_RUN, known) | {
        **text,
        "training.max_steps": steps,
        "training.eval_every_steps": max(1, round(steps / (VALIDATIONS + 1))),
        "training.save_every_steps": 0,
        "output": tempfile.mkdtemp(prefix="multilin-minutes-"),
    }
    return load_recipe(None, values | ({} if rate is None else {"optimizer.learning_rate": rate}))


def _tokens(recipe: Recipe) -> int:
    return recipe.training.max_steps * recipe.training.batch_size * recipe.model.n_positions


def _described(recipe: Recipe) -> dict[str, Any]:
    model = recipe.model
    return {
        "architecture": model.architecture, "hidden_size": model.hidden_size, "num_layers": model.num_layers,
        "vocab_size": recipe.tokenizer.vocab_size, "n_positions": model.n_positions,
        "batch_size": recipe.training.batch_size, "learning_rate": recipe.optimizer.learning_rate,
        "weight_decay": recipe.optimizer.weight_decay, "tokens": _tokens(recipe),
    }  # fmt: skip


def _trained(recipe: Recipe) -> dict[str, Any]:
    result = train(recipe, overwrite=True)
    lines = RunFolder(recipe.output).read_metrics()
    found = [(line["step"], line["validation_bits_per_byte"]) for line in lines if "validation_bits_per_byte" in line]
    steps = recipe.training.max_steps
    validations = [(round(step / steps, 3), round(bits, 4)) for step, bits in found if step < 0.95 * steps]
    shutil.rmtree(recipe.output)
    shutil.rmtree(RunFolder(recipe.output).checkpoints)
    text = dataclasses.asdict(measure_text(read_text(recipe)))
    return {**text, "bits_per_byte": round(result.validation_bits_per_byte, 4), "validations": validations}
