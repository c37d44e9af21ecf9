"""The malformed inputs, in groups: from what the command line says of its flags, and from damage to valid files."""

import gzip
import json
import math
import os
import pickle
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any, get_type_hints

import pyarrow
import pyarrow.parquet
import torch
import yaml
import zstandard
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from multilin.analysis.compare.sweep import Sweep
from multilin.architectures.base import architectures
from multilin.cli.arguments import Flag, flags
from multilin.cli.main import VERBS
from multilin.files import checksum
from multilin.inference import state_file
from multilin.model import config
from multilin.model.factory import BaselineOptions
from multilin.runs import checkpoints
from multilin.settings import without_empty
from multilin.settings.bounds import Width
from multilin.training.recipe import Recipe
from tests.fuzz import damage as d
from tests.fuzz.material import LINES, RECIPE, RUNS, SWEEP, TASK, TEXT, checkpoint_of
from tests.fuzz.runner import Case

NOWHERE = ["nowhere"]
VALID = {
    "prepare": ["rows.jsonl", "--output=new", "--kind=byte", "--validation-fraction=0.3", "--workers=1"],
    "plan": NOWHERE,
    "train": ["recipe.yaml"],
    "generate": ["run", "--prompt=a", "--max-new-tokens=2"],
    "chat": ["run"],
    "serve": NOWHERE,
    "merge": NOWHERE,
    "publish": ["run", "someone/name"],
    "rollout": ["mixer", "--prompt=the", "--num-steps=2"],
    "evaluate": ["run", "--source=text.txt", "--max-tokens=64"],
    "compare": ["sweep.yaml"],
    "explain": ["run", "--text=the cat"],
    "quantize": ["run", "--source=text.txt", "--max-tokens=64", "--output=new"],
    "info": ["additive", "--hidden-size=8", "--num-layers=1"],
    "check": ["elita", "--hidden-size=8"],
    "tokenizer train": ["text.txt", "new", "--vocab-size=280"],
    "tokenizer show": ["run"],
    "convert": ["fastformer", "theirs", "new"],
    "doctor": [],
}
"""Words that are right, those given by place first; NOWHERE for verbs that would serve for ever, change the
run, or do not look at what is named."""

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
NAMES = ("architecture", "tasks", "task", "text_field")
TEXTS = {
    "prepare": "prepare {} --output new --kind=byte --validation-fraction=0.3 --workers=1",
    "train": "train recipe.yaml --data.source {}",
    "evaluate": "evaluate run --source {}",
    "quantize": "quantize run --output new --source {}",
    "tokenizer train": "tokenizer train --vocab-size=280 {} new",
    "tokenizer show": "tokenizer show run --source {}",
    "compare": "compare sweep.yaml --data.source {}",
}
ANY_VALUES = [..., None, -1, 0, d.HUGE, "x", [], {}, True, 1.5, [[]], "x" * 10**4]
WRONG = yaml.safe_load(Path(__file__).with_name("wrong.yaml").read_text())
Damages = Iterable[tuple[str, d.Damage]]


def generate(run: str) -> str:
    return f"generate {run} --prompt=a --max-new-tokens=2"


def damaged(line: str, file: str, damages: Damages, names: str = "", may_pass: str = "") -> Iterator[Case]:
    """A command, with each kind of damage to a file that it reads.

    Its name, or one of `names`, should be in the message (none where they are "-"); the kinds in `may_pass` may be no
    damage. Both are separated by "|".
    """
    asked = () if names == "-" else (Path(file).name, *filter(None, names.split("|")))
    for kind, damage in damages:
        passes = may_pass == "all" or (kind != "" and kind in may_pass.split("|"))
        yield Case(line.split(), asked, lambda folder, do=damage: do(folder / file), passes)


def fields(line: str, file: str, hints: dict[str, Any], number: int) -> Iterator[Case]:
    """A command, with values of wrong types in the fields of a JSON file."""
    for name, hint in hints.items():
        values = [value for value in d.bad_values(hint) if value is not None]
        damages = [("", d.with_field((name,), value)) for value in d.some(values, number, file + name)]
        yield from damaged(line, file, damages, f"{name}|{name.split('_')[0]}")


def anywhere(folder: Path, line: str, file: str, number: int) -> Iterator[Case]:
    """A command, with other values anywhere in a JSON file, of which some may be right."""
    choices = [(place, value) for place in d.places(json.loads((folder / file).read_text())) for value in ANY_VALUES]
    damages = [("", d.with_field(place, value)) for place, value in d.some(choices, number, line + file)]
    return damaged(line, file, damages, "-", "all")


def flags_of(verb: str) -> Iterator[Case]:
    """Every flag with words that its type does not allow, flags that do not exist, and words that are missing."""
    known, words = list(flags(VERBS[verb])), VALID.get(verb, ["run"] if verb == "export" else [])
    for place, flag in enumerate(known):
        number = {"train": 1, "demo": 1, "compare": 1, "plan": 1}.get(verb, 3) if flag.section else 3
        for word in d.some(_bad_words(verb, flag), number, verb + flag.key):
            names = (
                ()
                if "\udcff" in word or words == NOWHERE
                else ("nonsense", flag.key, flag.text, flag.field.name, *word[:9].split())
            )
            given = [word if index == place else other for index, other in enumerate(words)]
            yield Case([*verb.split(), *(given if flag.is_positional else [*words, f"{flag.text}={word}"])], names)
    for more in (["--nonsense"], ["--nonsense=1"], ["-x"], ["\udcff"], ["--=3"], ["-" * 5000], ["--", *"abcd"]):
        yield Case([*verb.split(), *words, *more])
    for flag in [flag for flag in known if flag.takes][:3]:
        yield Case([*verb.split(), *words, flag.text], (flag.text,))
    for end in range(sum(flag.is_positional and flag.default is MISSING for flag in known)):
        yield Case([*verb.split(), *words[:end]])


def _bad_words(verb: str, flag: Flag) -> list[str]:
    name, hint = flag.field.name, get_type_hints(flag.owner, include_extras=True)[flag.field.name]
    if not flag.takes and not flag.is_positional:
        return ["maybe", "", "1"]
    if verb == "publish" and name == "name":
        return ["x" * 5000, "", "a/b/c", "../a", "\udcff"]
    if name in ("prompt", "text", "system"):
        return ["x" * (2**20 + 1), "\udcff"]
    if name in ("output", "save_state", "folder"):
        return [*OUTPUTS, *(["missing/new", "empty"] if verb in ("generate", "evaluate") else ["text.txt"])]
    if name in NAMES:
        return ["x" * 5000, "\udcff", *(["nonsense", "", ","] if name != "text_field" else [])]
    if flag.is_positional or flag.hint in (str, str | None):
        return INPUTS if name != "task_folder" else []
    more = ["{", d.BOMB, "{a: " * 60, "{nonsense: 1}", "x: y: z", "\udcff", "9" * 9000, "[" * 100_000]
    words = [*map(d.plain, d.bad_values(hint)), *more]
    if flag.is_text_or_list:  # any text is right that does not begin a list
        return [word for word in words if word.startswith(("[", "\udcff"))]
    return words


def options(folder: Path) -> Iterator[Case]:
    """Options of every architecture, as `info` and recipes take them."""
    kinds = {name: architecture.preset_options for name, architecture in architectures().items()}
    for name, owner in (kinds | {"gpt2": BaselineOptions}).items():
        for field, hint in get_type_hints(owner, include_extras=True).items():
            first, *others = [d.plain(value) for value in d.some(d.bad_values(hint), 2, name + field)]
            yield Case(["info", name, f"--options.{field}", first], (field, "options"))
            for text in others:
                words = ["train", "recipe.yaml", f"--model.architecture={name}", "--model.options={}"]
                yield Case([*words, f"--model.options.{field}", text], (field, "options"))


def commands(folder: Path) -> Iterator[Case]:
    """Words that contradict each other, or do not fit the files."""
    for begin, ends in WRONG["commands"].items():
        yield from (Case(shlex.split(f"{begin} {end}")) for end in ends.split("|"))
    yield from (Case(words) for words in (["\udcff"], ["x" * 10**5], ["a\nb"], ["\0"], ["tokenizer", "\udcff"]))


def values(folder: Path) -> Iterator[Case]:
    """Values that single fields of files do not take."""
    for line, files in WRONG["fields"].items():
        for file, wrong in files.items():
            damages = [("", d.with_field((name,), value)) for name, listed in wrong.items() for value in listed]
            yield from damaged(line, file, damages, "-")


def recipes(folder: Path) -> Iterator[Case]:
    line, file = "train recipe.yaml", "recipe.yaml"
    kinds = [(kind, damage) for kind, damage in d.YAML.items() if kind != "empty"]  # which is the default recipe
    yield from damaged(line, file, kinds, "recipe|nonsense|model|training")
    for section, owner in get_type_hints(Recipe).items():
        hints = get_type_hints(owner, include_extras=True) if section != "output" else {}
        for field, hint in hints.items():
            for value in d.some(d.bad_values(hint), 1, section + field):
                changed = {**RECIPE, section: {**RECIPE.get(section, {}), field: value}}
                yield from damaged(line, file, [("", d.replaced(d.plain(changed)))], field)


def sweeps(folder: Path) -> Iterator[Case]:
    line, file = "compare sweep.yaml", "sweep.yaml"
    yield from damaged(line, file, d.YAML.items(), "ROWS|rows|nonsense|model|training|output")
    for field, hint in get_type_hints(Sweep, include_extras=True).items():
        contents = [d.plain(SWEEP | {field: value}) for value in d.some(_bad_values(hint, field), 5, field)]
        yield from damaged(line, file, [("", d.replaced(content)) for content in contents], field)


def _bad_values(hint: Any, field: str) -> list[Any]:
    """Values that a field of a sweep refuses; a section or a list that is null is an empty one."""
    return [value for value in d.bad_values(hint) if without_empty(Sweep, {field: value})]


def timings(folder: Path) -> Iterator[Case]:
    """The speeds that a comparison measured before."""
    kinds = [(kind, damage) for kind, damage in d.JSON.items() if kind not in ("missing", "a folder")]
    return damaged("compare timed.yaml", "compared/speed.json", kinds)


def configs(folder: Path) -> Iterator[Case]:
    """config.json of runs."""
    ids = get_type_hints(config.TokenIds, include_extras=True)
    hints = {name: config._HINTS[name] for name in config.FIELDS} | ids
    yield from damaged("info run", "run/config.json", d.JSON.items())
    yield from fields("info run", "run/config.json", hints, 3)
    for run in RUNS:
        yield from anywhere(folder, generate(run), f"{run}/config.json", 12)


def tokenizers(folder: Path) -> Iterator[Case]:
    for line in ("tokenizer show run", generate("run"), "train recipe.yaml --tokenizer.path run"):
        yield from damaged(line, "run/tokenizer.json", d.JSON.items(), "tokenizer")
        for file in ("run/tokenizer.json", "run/tokenizer_config.json"):
            yield from anywhere(folder, line, file, 10)
    yield from damaged("tokenizer show run", "run/tokenizer_config.json", d.JSON.items(), "tokenizer", "missing|a loop")


def weights(folder: Path) -> Iterator[Case]:
    for run in RUNS:
        file, damages = f"{run}/model.safetensors", list(d.TENSORS.items())
        yield from damaged(generate(run), file, damages if run == "run" else d.some(damages, 9, run), run)
        yield from damaged(generate(run), file, [("a bit", d.flipped)], run, "a bit")
        for line in (generate(run), f"evaluate {run} --source text.txt", f"explain {run} --text a", f"info {run}"):
            yield from damaged(line, file, [("", d.filled(math.nan))], run)
    line = "rollout mixer --prompt a --num-steps 2"
    yield from damaged(line, "mixer/model.safetensors", [("", d.filled(math.inf))], "mixer")


def states(folder: Path) -> Iterator[Case]:
    """State files: damaged, and with other content under a checksum that is right."""
    ids = ["x", "3", "[[-1]]", "[[999]]", "[[1.5]]", "[[true]]", "[]", "[[1], [2]]", "[[null]]", '[["1"]]', "[[NaN]]"]
    metadata = [("unread_ids", text) for text in [*ids, "[" * 10**5, "[[" + "9" * 5000 + "]]"]]
    metadata += [("format", "x"), ("format", "multilin-state-1"), ("model", "x"), ("model", ""), ("nonsense", "x")]
    for run in ("run", "mixer"):
        damages = [*d.TENSORS.items(), ("", d.flipped), *[("", _resealed({field: text})) for field, text in metadata]]
        for name in load_file(folder / f"{run}.state"):
            changes = d.some(CHANGES[name == state_file.RNG_STATE :], 3, run + name)  # a state may lack the first
            damages += [("", _resealed({}, name, change)) for change in changes]
        yield from damaged(f"generate {run} --max-new-tokens=2 --state {run}.state", f"{run}.state", damages)


Change = Callable[[torch.Tensor], torch.Tensor | None]
CHANGES: list[Change] = [
    lambda tensor: None,
    lambda tensor: tensor[..., :0],
    lambda tensor: torch.cat([tensor, tensor]),
    lambda tensor: tensor[None],
    lambda tensor: tensor.to(torch.float16 if tensor.dtype != torch.float16 else torch.int8),
    lambda tensor: torch.full_like(tensor, math.nan) if tensor.is_floating_point() else tensor.double(),
    lambda tensor: torch.full_like(tensor, math.inf) if tensor.is_floating_point() else tensor.bool(),
    lambda tensor: tensor.new_zeros(2**20),
]


def _resealed(metadata: dict[str, str], name: str = "", change: Change = lambda tensor: None) -> d.Damage:
    def damage(path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            texts = {key: text for key, text in file.metadata().items() if key != "sha256"} | metadata
        tensors = load_file(path)
        if name and (tensor := change(tensors.pop(name))) is not None:
            tensors[name] = tensor.contiguous()
        save_file(
            tensors,
            path,
            texts
            | {
                "sha256": state_file.checksum(
                    texts,
                    {name: (x.float() if x.dtype == torch.bfloat16 else x).numpy() for name, x in tensors.items()},
                )
            },
        )

    return damage


def checkpoint_files(folder: Path) -> Iterator[Case]:
    """The only checkpoint of a run that is resumed: damaged, or with other content under checksums that are right."""
    line = "train half --resume"
    for path in sorted(checkpoint_of(folder).iterdir()):
        file, kinds = str(path.relative_to(folder)), (d.TENSORS if path.suffix == ".safetensors" else d.JSON).items()
        yield from damaged(line, file, d.some(kinds, 3, path.name), checkpoints.CHECKSUMS)
        if path.name != checkpoints.CHECKSUMS:
            cases = [*damaged(line, file, d.some(kinds, 3, file))]
            cases += anywhere(folder, line, file, 7) if path.suffix == ".json" else []
            yield from (Case(case.words, (), _sealed(case.damage), may_pass=True) for case in cases)
    for name in ("metrics.jsonl", "data.json", "config.json", "recipe.yaml"):
        yield from damaged(line, f"half/{name}", d.some(d.JSON.items(), 4, name), "half", "all")


def _sealed(damage: d.Damage) -> d.Damage:
    def sealed(folder: Path) -> None:
        damage(folder)
        checkpoint = checkpoint_of(folder)
        files = [path for path in checkpoint.iterdir() if path.is_file() and not path.is_symlink()]
        sums = {path.name: checksum(path) for path in files if path.name != checkpoints.CHECKSUMS}
        checkpoints.write_json(checkpoint / checkpoints.CHECKSUMS, sums)

    return sealed


def _parquet(**columns: Any) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())


def bad_texts() -> dict[str, bytes]:
    """Content of files, by name, that is no text of their format."""
    lines, text, parquet = LINES.encode(), TEXT.encode(), _parquet(text=["the cat"] * 40)
    rows = [b"{", b"[1]", b'{"o": "x"}', b'{"text": 3}', b'"x"', b"x\xe9", b"[" * 10**5]
    bad = {f"bad{number}.jsonl": lines + row + b"\n" for number, row in enumerate([*rows, b'{"text": "\\ud800"}'])}
    bad |= {"latin.txt": text + b"caf\xe9", "utf16.txt": TEXT.encode("utf-16"), "text.pdf": b"%PDF", "none": b"x"}
    bad |= {"o.csv": b"o\nx\n", "latin.csv": b"text\ncaf\xe9\n", "head.csv": b"text\n", "short.csv": b"id,text\n1\n"}
    bad |= {f"empty.{ending}": b"" for ending in ("txt", "jsonl", "csv", "parquet", "txt.gz", "txt.zst")}
    bad |= {f"cut{share}.parquet": parquet[: int(share * len(parquet))] for share in (0.3, 0.99)}
    bad |= {"no.parquet": b"PAR1" + bytes(99) + b"PAR1", "flipped.parquet": parquet[:60] + bytes(40) + parquet[100:]}
    columns: dict[str, Any] = {"int": [1], "list": [["a"]], "zero": pyarrow.array([], "string")}
    bad |= {f"{name}.parquet": _parquet(text=column) for name, column in columns.items()}
    bad |= {"o.parquet": _parquet(o=["a"])}
    for ending, content in (("gz", gzip.compress(lines)), ("zst", zstandard.compress(lines))):
        bad |= {f"cut.jsonl.{ending}": content[:-9], f"plain.txt.{ending}": text}
        bad |= {f"wrong.jsonl.{ending}": content[:40] + bytes(8) + content[48:]}
    bad |= {"bomb.txt.gz": gzip.compress(bytes(10**8), 1), "bomb.jsonl.zst": zstandard.compress(b" " * 10**8)}
    return bad


def texts(verb: str) -> Iterator[Case]:
    for name, content in d.some(bad_texts().items(), 60 if verb in ("train", "tokenizer train") else 14, verb):
        yield from damaged(TEXTS[verb].format(name), name, [("", d.replaced(content))], "source")
    kinds = [(kind, damage) for kind, damage in d.ANY.items() if kind != "empty"]
    yield from damaged(TEXTS[verb].format("text.txt"), "text.txt", kinds, "source", "cut|nearly whole")


def prompts(folder: Path) -> Iterator[Case]:
    """Prompts from files and stdin, and a stdout that is full."""
    kinds = {kind: damage for kind, damage in d.ANY.items() if kind not in ("empty", "cut", "nearly whole")}
    kinds |= {"Latin-1": d.replaced(b"caf\xe9"), "huge": lambda path: os.truncate(path, 2**34)}
    for verb in ("generate run --prompt-file", "rollout mixer --prompt-file", "explain run --file"):
        line = f"{verb} text.txt"
        yield from damaged(line, "text.txt", kinds.items())
        yield from (Case(line.split()[:2], ("stdin",), stdin=path) for path in ("/dev/zero", "/proc/self/exe"))
    for line in (generate("run"), "info run", "doctor", "evaluate run --source text.txt", "tokenizer show run"):
        yield Case(line.split(), ("stdout",), stdout="/dev/full")


class _Program:
    def __reduce__(self) -> Any:
        return print, ("Traceback: a pickle was run",)


def conversions(folder: Path) -> Iterator[Case]:
    line, file = "convert fastformer theirs new", "theirs/model.safetensors"
    yield from damaged(line, "theirs/config.json", d.JSON.items(), "source")
    yield from damaged(line, file, d.TENSORS.items(), "weights")
    sizes = ("hidden_size", "vocab_size", "n_layer", "n_heads", "n_positions")
    yield from fields(line, "theirs/config.json", dict.fromkeys(sizes, Width), 3)
    for content in [*map(pickle.dumps, (_Program(), {"a": 1}, torch.zeros(1))), b"", b"x", b"PK\x03\x04"]:
        yield from damaged(line, file, [("", _pickle(content))], "weights")


def _pickle(content: bytes) -> d.Damage:
    return lambda path: path.rename(path.with_name("pytorch_model.bin")).write_bytes(content)


def tasks(folder: Path) -> Iterator[Case]:
    """Tasks of one's own for lm-eval."""
    line = "evaluate run --tasks local --trust-task-code --task-folder {}"
    changes = {
        "output_type: loglikelihood_rolling": "output_type: nonsense", "{{text}}": "{{text",
        "metric: bits": "metric: nonsense", "test_split: test": "test_split: nonsense", '""': "!function nonsense.f",
        "dataset_path: json": "dataset_path: nonsense", "[{metric: bits_per_byte}]": "3", "rows.jsonl": "missing.jsonl",
    }  # fmt: skip
    damages = [(old, d.replaced(TASK.replace(old, new))) for old, new in changes.items()]
    yield from damaged(line.format("tasks"), "tasks/local.yaml", damages, "-")
    kinds = [(kind, d.ANY[kind]) for kind in ("a pipe", "a loop", "a device", "the memory")]
    yield from damaged(line.format("tasks"), "tasks/local.yaml", kinds, "local")
    yield from (Case([*line.split()[:-1], path]) for path in INPUTS if path != "empty")


def caches(folder: Path) -> Iterator[Case]:
    """Prepared text, as an earlier run left it."""
    for path in sorted(path for path in (folder / "cache/multilin").rglob("*/*") if path.is_file()):
        may_pass = "all" if path.name == "tokenizer_config.json" else ""
        kinds = d.some(d.ANY.items(), 4, path.name)
        yield from damaged("train recipe.yaml", str(path.relative_to(folder)), kinds, "-", may_pass)


def shards(folder: Path) -> Iterator[Case]:
    """Prepared text, in training and when it is prepared again."""
    again = " ".join(["prepare", *VALID["prepare"]]).replace("=new", "=prepared")
    for path in sorted(path for path in (folder / "prepared").rglob("*") if path.is_file()):
        for line in ("train recipe.yaml --data.source prepared", again):
            kinds = d.some(d.ANY.items(), 3, line + path.name)
            yield from damaged(line, str(path.relative_to(folder)), kinds, "-")
    for words in ("nowhere://x", "memory://nowhere", "file:///dev", "text.txt/x://y"):
        yield Case(["train", "recipe.yaml", f"--data.source={words}"])
    for mix in ('{"prepared": 0}', '{"prepared": "x"}', "{}", '{"nowhere": 1}', '{"": 1}', "[prepared]", "prepared"):
        yield Case(["train", "recipe.yaml", "--data.mix", mix])
    yield from anywhere(folder, "train recipe.yaml --data.source prepared", "prepared/manifest.json", 20)


def valid(folder: Path) -> Iterator[Case]:
    """Nothing is wrong with these, which shows that the others are refused for their fault."""
    lines = [f"{verb} {shlex.join(words)}" for verb, words in VALID.items() if words != NOWHERE] + [
        *map(generate, RUNS)
    ]
    lines += ["plan recipe.yaml --devices 2", "train recipe.yaml --data.source prepared"]
    lines += [
        "train recipe.yaml --data.mix.prepared 2",
        "train half --resume",
        "compare timed.yaml",
        "train recipe.yaml --tokenizer.path run",
    ]
    lines += [f"generate {run} --max-new-tokens 2 --state {run}.state" for run in ("run", "mixer")]
    lines += ["evaluate run --tasks local --trust-task-code --task-folder tasks"]
    lines += [line.format("rows.parquet") for line in TEXTS.values()]
    yield from (Case(shlex.split(line), must_pass=True) for line in lines)


_OTHERS = (options, commands, values, recipes, sweeps, timings, configs, tokenizers, weights, states, checkpoint_files)
GROUPS: dict[str, Callable[[Path], Iterator[Case]]] = {
    **{f"flags of {verb}": lambda folder, verb=verb: flags_of(verb) for verb in VERBS},
    **{f"texts of {verb}": lambda folder, verb=verb: texts(verb) for verb in TEXTS},
    **{group.__name__: group for group in (*_OTHERS, prompts, conversions, tasks, caches, shards, valid)},
}
