"""Publish a run on the Hugging Face hub: write a folder with code that needs PyTorch and transformers only; upload it.

transformers loads the code of a model on the hub from files in one folder. So `multilin.ops.tile_norm.reference`
becomes `ops_tile_norm_reference.py`, which differs from the package's file only in its imports: they are relative.
Compiled kernels, checks of settings, and packages that only annotations need are left out; names imported from them
come from `export_publish_stand_ins.py`. A layer from a user's file `ema.py` becomes `own_ema.py`. If the file imports
multilin, its original is in the folder `originals`, where multilin finds it by its hash.
"""

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

import multilin
from multilin.architectures import architectures
from multilin.architectures.own_file import Source, class_name, short_name, sources_of
from multilin.data.tokenizers import save_tokenizer
from multilin.errors import InputError, listed, plural
from multilin.files import atomic_folder, write_whole
from multilin.model import MultilinForCausalLM
from multilin.model.config import AUTO_FILE, AUTO_MAP
from multilin.runs.load import Run

CARD = "README.md"
_PLOT = "loss.png"
_PACKAGE = "multilin"
_ROOT = Path(multilin.__file__).parent
_STAND_INS = f"{_PACKAGE}.export.publish_stand_ins"
_LEFT_OUT = {f"{_PACKAGE}.{name}" for name in ("settings", "settings.bounds", "architectures.own_file")}
_OPEN_TO_LAYERS = ("architectures", "errors", "layers", "ops", "settings")  # rooms that a user's file may import from
_REGISTRY = f"{_PACKAGE}.architectures"
_ONLY_FOR_CHECKS = {"annotated_types", "jaxtyping", "pydantic", "pydantic_core"}
_HEAD = f'''"""multilin {multilin.__version__}: the model of this folder, in PyTorch alone.

Written by `multilin publish`. The files beside it come from the package multilin, without its compiled kernels.
"""
'''


def publish_run(run: Run, name: str, folder: Path) -> None:
    """Write a folder with a model that transformers loads without multilin.

    The folder has the weights, config.json, generation_config.json, the tokenizer, the model's code, and the model
    card of the run with the figures of its training.

    Args:
        run: a model of this package.
        name: the repository on the hub, OWNER/NAME.
        folder: the folder to write, complete or not at all.

    Raises:
        InputError: a model of another kind, with an architecture of another package, or with a layer whose file imports
            what the folder will not have.
        OSError: the folder cannot be written.
    """
    if not isinstance(run.model, MultilinForCausalLM):
        kind = run.model.config.model_type
        is_ours = kind.startswith("multilin_")
        advice = "lacks; train it without output_bias and unit_variance" if is_ours else "loads; upload its folder"
        raise InputError(f"run: a {kind} model given, which transformers {advice}")
    names = {entry["architecture"] for entry in run.model.config.layers}
    if others := sorted(name for name in names - {*builtin_architectures()} if not sources_of([name])):
        raise InputError(
            f"run: a model of {others[0]} given, an architecture of another package, whose code cannot be published; "
            "upload the run's folder itself"
        )
    with atomic_folder(folder) as partial:
        run.model.save_pretrained(partial)
        save_tokenizer(run.tokenizer, partial)
        for path in partial.glob("*.py"):  # code that needs multilin
            path.unlink()
        for file, text in model_files(names).items():
            (partial / file).parent.mkdir(exist_ok=True)
            write_whole(partial / file, text)
        if (run.folder / _PLOT).is_file():
            write_whole(partial / _PLOT, (run.folder / _PLOT).read_bytes())
        write_whole(partial / CARD, _card(run, name))


def upload(folder: Path, name: str, *, private: bool) -> str:
    """Upload a folder to a repository on the hub, created if it does not exist, and return the repository's address.

    Raises:
        InputError: no network, no login, or no right to write there.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        api = HfApi()
        address = str(api.create_repo(name, private=private, exist_ok=True))
        api.upload_folder(repo_id=name, folder_path=folder)
        return address
    except LocalTokenNotFoundError:
        reason = "no login; `hf auth login`, or HF_TOKEN in the environment"
    except (HfHubHTTPError, OSError) as error:  # a connection that fails is an OSError
        reason = " ".join(str(error).split())[:200]
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("httpx", "httpcore", "requests"):
            raise
        reason = f"{os.environ.get('HF_ENDPOINT', 'huggingface.co')} cannot be reached"
    raise InputError(f"name: {name} was not uploaded ({reason}); the folder is complete: hf upload {name} {folder}")


def _card(run: Run, name: str) -> str:
    """The run's model card under the new name, with the code that loads the model from the hub."""
    path = run.folder / CARD
    text = path.read_text(encoding="utf-8") if path.is_file() else _plain_card(run)
    text = re.sub(r"^# .*$", lambda _: f"# {name.rpartition('/')[2]}", text, count=1, flags=re.MULTILINE)
    # Remove paths of this machine: the run's folder; of texts, tokenizers and models, only the last name stays.
    text = re.sub(r"^output: .*\n(?: .*\n)*", "", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=[`'\"\s])(?:/|~/)(?:[^/\n`]*/)*(?=[^/\s`])", "./", text)
    before, _, after = text.partition("\n## Use\n")
    rest = after[after.find("\n## ") :] if "\n## " in after else ""
    use = _USE.replace("NAME", name) + _about_own_layers(run)
    return f"{before.rstrip()}\n{use}{rest}"


def _about_own_layers(run: Run) -> str:
    """What a reader must know about layers from users' files."""
    sources = sources_of(entry["architecture"] for entry in run.model.config.layers)
    if not sources:
        return ""
    imported = {name for source in sources.values() for name in _packages(ast.parse(source.code))}
    others = sorted(imported - sys.stdlib_module_names - {_PACKAGE, "numpy", "torch", "transformers"})
    needs = f"Install the package of {listed(others)} first: the model's own layers import it.\n" if others else ""
    return (
        f"\n{needs}With multilin, read the files of the own layers, then call `multilin.trust_code(FILE)` for each.\n"
    )


def _plain_card(run: Run) -> str:
    names = sorted({short_name(entry["architecture"]) for entry in run.model.config.layers})
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["multilin", *names]}
    size = f"{run.model.num_parameters():,} parameters"
    layers = plural(run.model.config.num_hidden_layers, "layer")
    described = f"A causal language model: {' + '.join(names)}, {layers}, {size}."
    return f"---\n{yaml.safe_dump(front)}---\n\n# Model\n\n{described}\n"


_USE = """
## Use

```python
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

model = AutoModelForCausalLM.from_pretrained("NAME", trust_remote_code=True)
tokenizer = PreTrainedTokenizerFast.from_pretrained("NAME")  # needs no code of this repository
inputs = tokenizer(tokenizer.eos_token + "The", add_special_tokens=False, return_tensors="pt")  # eos begins every text
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50, do_sample=True)[0]))
```

`trust_remote_code` runs the Python files of this repository, plain PyTorch. With the package
[multilin](https://pypi.org/project/multilin) (`pip install multilin`, then `import multilin`) the repository's code is
not run: the model uses compiled kernels, and states can be saved, exported and served.
"""


def model_files(names: Iterable[str]) -> dict[str, str]:
    """The text of every code file by name, for a model with layers of these architectures: built-in or users' files.

    `AUTO_MAP` names the first file. It imports all other files, because transformers copies only files that it imports.

    Raises:
        InputError: a user's file imports what the folder does not have.
    """
    files: dict[str, str] = {}
    own = {name: source for name in sorted(names) for source in sources_of([name]).values()}
    modules = [f"{_PACKAGE}.architectures.{name}" for name in sorted({*names} - {*own})]
    for module in (_STAND_INS, f"{_PACKAGE}.model.language_model", *modules):
        _add(module, files)
    adopted = []
    if own:
        _add(f"{_PACKAGE}.architectures.plain_module", files)
        added = {h: _add_own(source, files) for h, source in {one.hash: one for one in own.values()}.items()}
        adopted = [f"from .{added[own[name].hash]} import {class_name(name)} as _own_{i}" for i, name in enumerate(own)]
        adopted += ["from .architectures_plain_module import adopt_own", ""]
        adopted += [f"adopt_own(_own_{i}, {name!r})" for i, name in enumerate(own)]
    lines = [f"from .{name.removesuffix('.py')} import __name__ as _" for name in sorted(files) if "/" not in name]
    lines += [f"from .{_flat(module)} import architecture as _{_flat(module)}" for module in modules]
    lines += ["from .architectures_base import register", "from .model_language_model import *", *adopted, ""]
    lines += [f"register(_{_flat(module)})" for module in modules]
    # transformers saves the file of a class, and all that it imports, with a model.
    lines += [f"{path.rpartition('.')[2]}.__module__ = __name__" for path in AUTO_MAP.values()]
    return {AUTO_FILE: "\n".join([_HEAD, *lines, ""]), **files}


def builtin_architectures() -> list[str]:
    """The architectures that this package defines, each in the file of its name, without those of other packages."""
    package = f"{_PACKAGE}.architectures."
    return [name for name, one in architectures().items() if one.layer.__module__ == package + name]


def _add(module: str, files: dict[str, str]) -> None:
    """Add a module and all modules that it imports, unless it was added before."""
    name = f"{_flat(module)}.py"
    if name in files:
        return
    path = _path(module)
    assert path is not None, module
    files[name] = ""  # ends a circle of imports
    files[name] = _flatten(path.read_text(encoding="utf-8"), files, (_PACKAGE, *_ONLY_FOR_CHECKS))


def _add_own(source: Source, files: dict[str, str]) -> str:
    """Add a user's file and all modules of multilin that it imports; return the name of its module."""
    text = source.code.decode("utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) and (what := _unavailable(node)):
            raise InputError(f"run: {source.file} cannot be published, because line {node.lineno} imports {what}")
    module = f"own_{re.sub(r'[^A-Za-z0-9_]', '_', Path(source.file_name).stem)}"
    while f"{module}.py" in files:
        module += "_"
    files[f"{module}.py"] = flat = _flatten(text, files, (_PACKAGE,))
    if flat != text:
        files[f"originals/{module}.py"] = text
    return module


def _unavailable(node: ast.Import | ast.ImportFrom) -> str:
    """What an import of a user's file needs that a published folder cannot have; empty if there is nothing."""
    if isinstance(node, ast.ImportFrom) and node.level:
        return "another file of its package; move that code into the file"
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for name in names:
        room = name.split(".")[1:2]
        is_open = room and room[0] in _OPEN_TO_LAYERS and name != _REGISTRY and _path(name) is not None
        if name.split(".")[0] == _PACKAGE and not (is_open and isinstance(node, ast.ImportFrom)):
            rooms = listed([f"{_PACKAGE}.{room}" for room in _OPEN_TO_LAYERS])
            return f"{name}; write `from MODULE import NAME`, with modules of {rooms} only"
    return ""


def _packages(tree: ast.Module) -> Iterator[str]:
    """The top-level packages that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)


def _flatten(text: str, files: dict[str, str], packages: Iterable[str]) -> str:
    """The text of a file with relative imports in place of imports from these packages; add what it imports."""
    lines = text.split("\n")
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    for node in sorted(nodes, key=lambda node: -node.lineno):
        if (node.module or "").partition(".")[0] in packages:
            lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + line for line in _relative(node, files)]
    return "\n".join(lines)


def _relative(node: ast.ImportFrom, files: dict[str, str]) -> list[str]:
    """Add the modules of an import; return the lines that replace the import."""
    package, lines = (node.module or "").partition(".")[0], []
    for alias in node.names:
        inside = f"{node.module}.{alias.name}"
        is_module = package == _PACKAGE and _path(inside) is not None
        module, renamed = inside if is_module else str(node.module), f" as {alias.asname}" if alias.asname else ""
        if package != _PACKAGE or module in _LEFT_OUT or _is_compiled(module):
            lines.append(f"from .{_flat(_STAND_INS)} import {alias.name}{renamed}")
            continue
        _add(module, files)
        if is_module:
            lines.append(f"from . import {_flat(module)} as {alias.asname or alias.name}")
        else:
            lines.append(f"from .{_flat(module)} import {alias.name}{renamed}")
    return lines


def _path(module: str) -> Path | None:
    """The file of a module of the package; None if there is no such module."""
    base = _ROOT.joinpath(*module.split(".")[1:])
    candidates = base / "__init__.py", base.with_suffix(".py")
    return next((path for path in candidates if path.is_file()), None)


def _is_compiled(module: str) -> bool:
    """True for modules with kernels, and for the modules of `multilin.ops.kernels`."""
    parts = module.split(".")
    is_kernel = parts[-1] == "operator" or parts[-1].partition("_")[0] in ("cpu", "gpu")
    return parts[1:2] == ["ops"] and (is_kernel or parts[2:3] == ["kernels"])


def _flat(module: str) -> str:
    """The name of a module's file, without its ending."""
    return module.removeprefix(f"{_PACKAGE}.").replace(".", "_")
