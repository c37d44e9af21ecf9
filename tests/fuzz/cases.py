"""The malformed inputs, in groups: from what the command line says of its flags, and from damage to valid files."""

import gzip
import json
import math
import pickle
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pyarrow
import pyarrow.parquet
import torch
import zstandard
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from multilin.analysis.compare.sweep import Sweep
from multilin.architectures.base import architectures
from multilin.cli.arguments import Flag, flags
from multilin.cli.main import VERBS
from multilin.inference import convert, snapshot
from multilin.model import config
from multilin.model.factory import BaselineOptions
from multilin.training import checkpoints
from multilin.training.recipe import Recipe
from tests.fuzz import damage as d
from tests.fuzz.material import LINES, RECIPE, RUNS, SWEEP, TASK, TEXT, checkpoint_of
from tests.fuzz.runner import Case

VALID = {
    "demo": [],
    "train": ["recipe.yaml"],
    "generate": ["run", "--prompt=a", "--max-new-tokens=2"],
    "rollout": ["mixer", "--prompt=the", "--num-steps=2"],
    "evaluate": ["run", "--source=text.txt", "--max-tokens=64"],
    "compare": ["sweep.yaml"],
    "explain": ["run", "--text=the cat"],
    "quantize": ["run", "--source=text.txt", "--max-tokens=64", "--output=new"],
    "info": ["additive", "--hidden-size=8", "--num-layers=1"],
    "tokenizer train": ["text.txt", "new", "--vocab-size=280"],
    "tokenizer show": ["run"],
    "convert": ["fastformer", "theirs", "new"],
    "doctor": [],
}
"""Words that are right, those given by place first."""

INPUTS = [
    "missing",
    "",
    "x" * 300,
    "a\0b",
    "\udcff",
    "fifo",
    "loop",
    "/dev/zero",
    "/proc/self/mem",
    "text.txt/x",
    "empty",
]
OUTPUTS = ["/proc/new", "/sys/new", "fifo", "loop", "text.txt/x", "x" * 300, "a\0b", "", "/dev/full", "\udcff"]
ONE_FILE = {"generate", "evaluate"}  # verbs whose output is a file; that of others is a folder
NAMES = ("architecture", "kind", "tasks", "task", "text_field")
TEXTS = {
    "train": "train recipe.yaml --data.source {}",
    "evaluate": "evaluate run --source {}",
    "quantize": "quantize run --output new --source {}",
    "tokenizer train": "tokenizer train {} new",
    "tokenizer show": "tokenizer show run --source {}",
    "compare": "compare sweep.yaml --data.source {}",
}
FIELD_VALUES = [..., None, -1, 0, d.HUGE, "x", [], {}, True, 1.5, [[]], "x" * 10**4]
Damage = Callable[[Path], object]


def damaged(
    line: str, file: str, damages: Iterable[tuple[str, Damage]], *named: str, may_pass: Iterable[str] | bool = ()
) -> Iterator[Case]:
    """A command, with each kind of damage to a file that it reads; `may_pass` are those that may be none."""
    for kind, damage in damages:
        passes = may_pass if isinstance(may_pass, bool) else kind in may_pass
        yield Case(line.split(), (Path(file).name, *named), lambda folder, do=damage: do(folder / file), passes)


def fields(line: str, file: str, hints: dict[str, Any], number: int) -> Iterator[Case]:
    """A command, with values of wrong types in the fields of a JSON file."""
    for name, hint in hints.items():
        values = [value for value in d.some(d.bad_values(hint), number, file + name) if value is not None]
        for value in values:
            yield Case(
                line.split(),
                (name, name.split("_")[0], Path(file).name),
                lambda folder, n=name, v=value: d.with_field((n,), v)(folder / file),
            )


def anywhere(folder: Path, line: str, file: str, number: int) -> Iterator[Case]:
    """A command, with other values anywhere in a JSON file; some may be right."""
    choices = [(place, value) for place in d.places(json.loads((folder / file).read_text())) for value in FIELD_VALUES]
    damages = [("", d.with_field(place, value)) for place, value in d.some(choices, number, line + file)]
    return (Case(case.words, (), case.damage, True) for case in damaged(line, file, damages))


def flags_of(verb: str) -> Iterator[Case]:
    """Every flag with words that its type does not allow, flags that do not exist, and words that are missing."""
    known, words = list(flags(VERBS[verb])), VALID[verb]
    for place, flag in enumerate(known):
        few = {"train": 3, "demo": 1, "compare": 1}.get(verb, 6) if flag.section else 7
        for word in d.some(_bad_words(verb, flag), few, verb + flag.key):
            named = () if "\udcff" in word else ("nonsense", flag.key, flag.text, flag.field.name, *word[:9].split())
            given = (
                [*words[:place], word, *words[place + 1 :]] if flag.is_positional else [*words, f"{flag.text}={word}"]
            )
            yield Case([*verb.split(), *given], named)
    for more in (
        ["--nonsense"],
        ["--nonsense=1"],
        ["-x"],
        ["\udcff"],
        ["--=3"],
        ["-" * 5000],
        ["--", "a", "b", "c", "d"],
    ):
        yield Case([*verb.split(), *words, *more])
    for flag in [flag for flag in known if flag.takes][:3]:
        yield Case([*verb.split(), *words, flag.text], (flag.text,))
    for end in range(sum(flag.is_positional and verb not in ("train", "compare") for flag in known)):
        yield Case([*verb.split(), *words[:end]])


def _bad_words(verb: str, flag: Flag) -> list[str]:
    name, hint = flag.field.name, get_type_hints(flag.owner, include_extras=True)[flag.field.name]
    if not flag.takes and not flag.is_positional:
        return ["maybe", "", "1"]
    if name in ("prompt", "text"):
        return ["x" * (2**20 + 1), "\udcff"]
    if name in ("output", "save_state"):
        return [*OUTPUTS, "missing/new", "empty"] if verb in ONE_FILE else [*OUTPUTS, "text.txt"]
    if name in NAMES:
        return ["x" * 5000, "\udcff", *(["nonsense", "", ","] if name != "text_field" else [])]
    if name == "task_folder" or "PathText" in str(hint) or flag.is_positional or flag.hint in (str, str | None):
        return INPUTS if name != "task_folder" else []
    more = ["{", d.BOMB, "{a: " * 60, "{nonsense: 1}", "x: y: z", "\udcff", "9" * 9000, "[" * 100_000]
    return [*map(d.plain, d.bad_values(hint)), *more]


def options(folder: Path) -> Iterator[Case]:
    """Options of every architecture, as `info` and recipes take them."""
    kinds = {name: architecture.preset_options for name, architecture in architectures().items()}
    for name, owner in (kinds | {"gpt2": BaselineOptions}).items():
        for field, hint in get_type_hints(owner, include_extras=True).items():
            first, *others = [d.plain(value) for value in d.some(d.bad_values(hint), 3, name + field)]
            yield Case(["info", name, f"--options.{field}", first], (field, "options"))
            for text in others:
                words = ["train", "recipe.yaml", f"--model.architecture={name}", "--model.options={}"]
                yield Case([*words, f"--model.options.{field}", text], (field, "options"))


def commands(folder: Path) -> Iterator[Case]:
    """Words that contradict each other, or do not fit the files."""
    for line in Path(__file__).with_name("commands.txt").read_text().splitlines():
        yield Case(shlex.split(line))
    yield from (Case(words) for words in (["\udcff"], ["x" * 10**5], ["a\nb"], ["\0"], ["tokenizer", "\udcff"]))


def recipes(folder: Path) -> Iterator[Case]:
    yield from damaged(
        "train recipe.yaml", "recipe.yaml", d.YAML.items(), "nonsense", "model", "training", may_pass=["cut", "empty"]
    )
    for section, owner in get_type_hints(Recipe).items():
        for field, hint in (
            get_type_hints(owner, include_extras=True).items() if section in RECIPE and section != "output" else ()
        ):
            for value in d.some(d.bad_values(hint), 2, section + field):
                values = {**RECIPE, section: {**RECIPE[section], field: value}}
                yield from damaged("train recipe.yaml", "recipe.yaml", [("", d.replaced(d.plain(values)))], field)


def sweeps(folder: Path) -> Iterator[Case]:
    yield from damaged(
        "compare sweep.yaml", "sweep.yaml", d.YAML.items(), "ROWS", "rows", "nonsense", "model", "training", "output"
    )
    rows = [
        {},
        {"../x": {}},
        {"a/b": {}},
        {"": {}},
        {"one": 3},
        {"one": {"nonsense": 1}},
        {"one": {"recipe": "missing"}},
    ]
    rows += [
        {"one": {"recipe": 3}},
        {"one": {"training.seed": 3}},
        {"one": {"": 1}},
        {"one": {"output": "x"}},
        {"x" * 101: {}},
    ]
    rows += [{"one": {name: 3}} for name in ("model", "model.architecture", "model.hidden_size")]
    grids = [
        {"training.seed": [1]},
        {"optimizer.nonsense": [1]},
        {"optimizer.learning_rate": []},
        {"optimizer": [1, 2]},
    ]
    grids += [{"optimizer.learning_rate": [value]} for value in ("x", -1, [1], None)] + [{"optimizer.betas": [3]}]
    budgets = [{}, {"tokens": 1, "seconds": 1}, {"tokens": 0}, {"nonsense": 1}, {"tokens": 1e40}, {"seconds": -1}]
    bases = [
        {"recipe": "missing"},
        {"nonsense": 1},
        {"model.nonsense": 1},
        {"recipe": ["a"]},
        {"model": {"options": 3}},
    ]
    values = {
        "rows": rows,
        "grid": grids,
        "budget": budgets,
        "base": bases,
        "seeds": [[], [0, 0], [-1], [2**32], ["x"]],
    }
    values |= {"extend_grid": [1, -1], "task": ["nonsense", "mqar?nonsense=1", "mqar?num_pairs=0"]}
    for field, hint in get_type_hints(Sweep, include_extras=True).items():
        for value in [*values.get(field, []), *d.some(d.bad_values(hint), 5, field)]:
            yield from damaged(
                "compare sweep.yaml", "sweep.yaml", [("", d.replaced(d.plain(SWEEP | {field: value})))], field, *values
            )


def timings(folder: Path) -> Iterator[Case]:
    """The speeds that a comparison measured before."""
    texts = [
        '{"one": %s, "two": 0.1}' % text for text in ("-1", "0", '"x"', "null", "true", "1e40", "1e400", "[]", "{}")
    ]
    damages = {text: d.replaced(text) for text in texts} | {
        k: v for k, v in d.JSON.items() if k not in ("missing", "a folder")
    }
    yield from damaged("compare timed.yaml", "compared/speed.json", damages.items())


def configs(folder: Path) -> Iterator[Case]:
    """config.json and generation_config.json of runs."""
    yield from damaged("info run", "run/config.json", d.JSON.items())
    yield from damaged(generate("run"), "run/generation_config.json", d.JSON.items(), may_pass=["missing"])
    ids = get_type_hints(config.TokenIds, include_extras=True)
    yield from fields(
        "info run", "run/config.json", {**{name: config._HINTS[name] for name in config.FIELDS}, **ids}, 3
    )
    yield from fields(generate("run"), "run/generation_config.json", ids, 3)
    sizes = [-1, 0, d.HUGE, "x", [], 1.5, 3, 10**9]
    theirs = dict.fromkeys(("n_embd", "n_layer", "vocab_size", "n_positions"), sizes) | {
        "n_head": [0, -1, 3, "x", None]
    }
    theirs |= {
        "model_type": ["nonsense", 3, None, ...],
        "activation_function": ["nonsense", 3],
        "tokenizer_hash": ["x", 3],
    }
    for field, values in theirs.items():
        for _, case in zip(
            values, damaged(generate("peer"), "peer/config.json", [("", d.with_field((field,), v)) for v in values])
        ):
            yield Case(case.words, (), case.damage)
    for run in RUNS:
        yield from anywhere(folder, generate(run), f"{run}/config.json", 12)
    yield from anywhere(folder, generate("run"), "run/generation_config.json", 20)


def generate(run: str) -> str:
    return f"generate {run} --prompt=a --max-new-tokens=2"


def tokenizers(folder: Path) -> Iterator[Case]:
    for line in ("tokenizer show run", generate("run"), "train recipe.yaml --tokenizer.path run"):
        yield from damaged(line, "run/tokenizer.json", d.JSON.items(), "tokenizer")
        for file in ("run/tokenizer.json", "run/tokenizer_config.json"):
            yield from anywhere(folder, line, file, 10)
    yield from damaged(
        "tokenizer show run", "run/tokenizer_config.json", d.JSON.items(), "tokenizer", may_pass=["missing", "a loop"]
    )


def weights(folder: Path) -> Iterator[Case]:
    for run in RUNS:
        damages = d.TENSORS if run == "run" else dict(d.some(d.TENSORS.items(), 9, run))
        yield from damaged(generate(run), f"{run}/model.safetensors", damages.items(), run)
        yield from damaged(generate(run), f"{run}/model.safetensors", [("", d.flipped)], may_pass=True)
        for line in (
            generate(run),
            f"evaluate {run} --source text.txt",
            f"explain {run} --text a",
            f"quantize {run} --source text.txt",
        ):
            yield from damaged(line, f"{run}/model.safetensors", [("", _filled(math.nan))], run)
    yield from damaged(
        "rollout mixer --prompt a --num-steps 2", "mixer/model.safetensors", [("", _filled(math.inf))], "mixer"
    )


def _filled(value: float) -> Damage:
    def fill(path: Path) -> None:
        save_file(
            {name: torch.full_like(tensor, value) for name, tensor in load_file(path).items()}, path, {"format": "pt"}
        )

    return fill


def states(folder: Path) -> Iterator[Case]:
    """State files: damaged, and with other content under a checksum that is right."""
    ids = [
        "x",
        "3",
        "[[-1]]",
        "[[999]]",
        "[[1.5]]",
        "[[true]]",
        "[]",
        "[[1], [2]]",
        "[" * 10**5,
        "[[null]]",
        '[["1"]]',
        "[[NaN]]",
    ]
    metadata = [("unread_ids", text) for text in [*ids, "[[" + "9" * 5000 + "]]"]]
    metadata += [("format", "x"), ("format", "multilin-state-1"), ("model", "x"), ("model", ""), ("nonsense", "x")]
    for run in ("run", "mixer"):
        names = load_file(folder / f"{run}.state")
        damages = [*d.TENSORS.items(), ("", d.flipped), *[("", _resealed({field: text})) for field, text in metadata]]
        damages += [
            ("", _resealed({}, name, change))
            for name in names
            for change in d.some(CHANGES[name == "rng_state" :], 4, run + name)
        ]
        yield from damaged(f"generate {run} --max-new-tokens=2 --state {run}.state", f"{run}.state", damages)


CHANGES: list[Callable[[torch.Tensor], torch.Tensor | None]] = [
    lambda tensor: None,
    lambda tensor: tensor[..., :0],
    lambda tensor: torch.cat([tensor, tensor]),
    lambda tensor: tensor[None],
    lambda tensor: tensor.to(torch.float16 if tensor.dtype != torch.float16 else torch.int8),
    lambda tensor: torch.full_like(tensor, math.nan) if tensor.is_floating_point() else tensor.double(),
    lambda tensor: torch.full_like(tensor, math.inf) if tensor.is_floating_point() else tensor.bool(),
    lambda tensor: tensor.new_zeros(2**20),
]


def _resealed(
    fields: dict[str, str], name: str = "", change: Callable[[torch.Tensor], torch.Tensor | None] | None = None
) -> Damage:
    def damage(path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            metadata = {key: text for key, text in file.metadata().items() if key != "sha256"} | fields
        tensors = load_file(path)
        if change is not None and (tensor := change(tensors.pop(name))) is not None:
            tensors[name] = tensor.contiguous()
        save_file(tensors, path, metadata | {"sha256": snapshot._checksum(metadata, tensors)})

    return damage


def checkpoint_files(folder: Path) -> Iterator[Case]:
    """The only checkpoint of a run that is resumed: damaged, or with other content under checksums that are right."""
    line = "train half --resume"
    for path in sorted(checkpoint_of(folder).iterdir()):
        file = str(path.relative_to(folder))
        kinds = (d.TENSORS if path.suffix == ".safetensors" else d.JSON).items()
        yield from damaged(line, file, d.some(kinds, 4, path.name), checkpoints.CHECKSUMS)
        if path.name != checkpoints.CHECKSUMS:
            cases = [*damaged(line, file, d.some(kinds, 4, file))]
            cases += anywhere(folder, line, file, 9) if path.suffix == ".json" else []
            yield from (Case(case.words, (), _sealed(case.damage), may_pass=True) for case in cases)
    for name in ("metrics.jsonl", "data.json", "config.json", "recipe.yaml"):
        yield from damaged(line, f"half/{name}", d.some(d.JSON.items(), 5, name), "half", may_pass=True)


def _sealed(damage: Damage) -> Damage:
    def sealed(folder: Path) -> None:
        damage(folder)
        checkpoint = checkpoint_of(folder)
        files = [path for path in checkpoint.iterdir() if path.is_file() and not path.is_symlink()]
        sums = {path.name: checkpoints._checksum(path) for path in files if path.name != checkpoints.CHECKSUMS}
        checkpoints.write_json(checkpoint / checkpoints.CHECKSUMS, sums)

    return sealed


def _parquet(**columns: Any) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())


def bad_texts() -> dict[str, bytes]:
    """Content of files, by name, that is no text of their format."""
    lines, parquet = LINES.encode(), _parquet(text=["the cat"] * 40)
    rows = [b"{", b"[1]", b'{"other": "x"}', b'{"text": 3}', b'{"text": null}', b'"x"', b"x\xe9", b"[" * 10**5]
    found = {f"bad{number}.jsonl": lines + row + b"\n" for number, row in enumerate([*rows, b'{"text": "\\ud800"}'])}
    found |= {
        "latin.txt": TEXT.encode() + b"caf\xe9",
        "utf16.txt": TEXT.encode("utf-16"),
        "text.pdf": b"%PDF",
        "none": b"x",
    }
    found |= {
        "other.csv": b"other\nx\n",
        "latin.csv": b"text\ncaf\xe9\n",
        "head.csv": b"text\n",
        "short.csv": b"id,text\n1\n",
    }
    found |= {f"empty.{ending}": b"" for ending in ("txt", "jsonl", "csv", "parquet", "txt.gz", "txt.zst")}
    found |= {f"cut{share}.parquet": parquet[: int(share * len(parquet))] for share in (0.3, 0.99)}
    found |= {
        "garbage.parquet": b"PAR1" + bytes(99) + b"PAR1",
        "flipped.parquet": parquet[:60] + bytes(40) + parquet[100:],
    }
    columns: dict[str, Any] = {
        "int": [1, 2],
        "null": ["a", None],
        "list": [["a"]],
        "none": pyarrow.array([], pyarrow.string()),
    }
    found |= {f"{name}.parquet": _parquet(text=column) for name, column in columns.items()} | {
        "o.parquet": _parquet(o=["a"])
    }
    for ending, content in (("gz", gzip.compress(lines)), ("zst", zstandard.compress(lines))):
        found |= {
            f"cut.jsonl.{ending}": content[:-9],
            f"plain.txt.{ending}": TEXT.encode(),
            f"twice.jsonl.{ending}": b"",
        }
        found |= {f"wrong.jsonl.{ending}": content[:40] + bytes(8) + content[48:]}
    return found | {"bomb.txt.gz": gzip.compress(bytes(10**8), 1), "bomb.jsonl.zst": zstandard.compress(b" " * 10**8)}


def texts(verb: str) -> Iterator[Case]:
    for name, content in d.some(bad_texts().items(), 60 if verb in ("train", "tokenizer train") else 14, verb):
        yield from damaged(TEXTS[verb].format(name), name, [("", d.replaced(content))], "source")
    kinds = [(kind, damage) for kind, damage in d.ANY.items() if kind != "empty"]
    yield from damaged(TEXTS[verb].format("text.txt"), "text.txt", kinds, "source", may_pass=["cut", "nearly whole"])


def prompts(folder: Path) -> Iterator[Case]:
    """Prompts from files and stdin, and a stdout that is full."""
    kinds = {k: v for k, v in d.ANY.items() if k not in ("empty", "cut", "nearly whole")} | {
        "Latin-1": d.replaced(b"caf\xe9")
    }
    kinds["huge"] = lambda path: path.open("ab").truncate(2**34)
    for line in (
        "generate run --prompt-file text.txt",
        "rollout mixer --prompt-file text.txt",
        "explain run --file text.txt",
    ):
        yield from damaged(line, "text.txt", kinds.items())
        yield from (Case(line.split()[:2], ("stdin",), stdin=path) for path in ("/dev/zero", "/proc/self/exe"))
    for line in (
        generate("run"),
        "info run",
        "doctor",
        "evaluate run --source text.txt --max-tokens 64",
        "tokenizer show run",
    ):
        yield Case(line.split(), ("stdout",), stdout="/dev/full")


class _Program:
    def __reduce__(self) -> Any:
        return print, ("Traceback: a pickle was run",)


def conversions(folder: Path) -> Iterator[Case]:
    line = "convert fastformer theirs new"
    yield from damaged(line, "theirs/config.json", d.JSON.items(), "source")
    yield from damaged(line, "theirs/model.safetensors", d.TENSORS.items(), "weights")
    yield from fields(line, "theirs/config.json", get_type_hints(convert._FastformerConfig, include_extras=True), 5)
    contents = [pickle.dumps(value) for value in (_Program(), {"a": 1}, torch.zeros(1))]
    for content in [*contents, b"", b"x", b"PK\x03\x04"]:
        replace = lambda path, content=content: path.rename(path.with_name("pytorch_model.bin")).write_bytes(content)  # noqa: E731
        yield from damaged(line, "theirs/model.safetensors", [("", replace)], "weights")


def tasks(folder: Path) -> Iterator[Case]:
    line = "evaluate run --tasks local --trust-task-code --task-folder {}"
    changed = {
        "output_type: loglikelihood_rolling": "output_type: nonsense", "rows.jsonl": "missing.jsonl", "{{text}}": "{{text",
        "metric: bits": "metric: nonsense", "test_split: test": "test_split: nonsense", '""': "!function nonsense.f",
        "task: local": "task: 3", "dataset_path: json": "dataset_path: nonsense", "[{metric: bits_per_byte}]": "3",
    }  # fmt: skip
    damages = {before: d.replaced(TASK.replace(before, after)) for before, after in changed.items()}
    for case in damaged(
        line.format("tasks"), "tasks/local.yaml", (damages | dict(d.some(d.YAML.items(), 15, "tasks"))).items()
    ):
        yield Case(case.words, (), case.damage)
    for path in INPUTS:
        yield Case([*line.split()[:-1], path])


def caches(folder: Path) -> Iterator[Case]:
    """Prepared text, as an earlier run left it."""
    entry = next(path for path in (folder / "cache/multilin").iterdir() if path.is_dir())
    for path in sorted(path for path in entry.rglob("*") if path.is_file()):
        for case in damaged("train recipe.yaml", str(path.relative_to(folder)), d.some(d.ANY.items(), 4, path.name)):
            yield Case(case.words, (), case.damage, may_pass=path.name == "tokenizer_config.json")


def valid(folder: Path) -> Iterator[Case]:
    """Nothing is wrong with these, which shows that the others are refused for their fault."""
    lines = [f"{verb} {shlex.join(words)}" for verb, words in VALID.items() if verb != "demo"]
    lines += [
        "train half --resume",
        "compare timed.yaml",
        *map(generate, RUNS),
        "train recipe.yaml --tokenizer.path run",
    ]
    lines += [f"generate {run} --max-new-tokens 2 --state {run}.state" for run in ("run", "mixer")]
    lines += [
        "evaluate run --tasks local --trust-task-code --task-folder tasks",
        *(TEXTS[verb].format("rows.parquet") for verb in TEXTS),
    ]
    yield from (Case(shlex.split(line), must_pass=True) for line in lines)


GROUPS: dict[str, Callable[[Path], Iterator[Case]]] = {
    **{f"flags of {verb}": lambda folder, verb=verb: flags_of(verb) for verb in VERBS},
    **{f"texts of {verb}": lambda folder, verb=verb: texts(verb) for verb in TEXTS},
    **{
        group.__name__: group
        for group in (options, commands, recipes, sweeps, timings, configs, tokenizers, weights, states)
    },
    **{group.__name__: group for group in (checkpoint_files, prompts, conversions, tasks, caches, valid)},
}
