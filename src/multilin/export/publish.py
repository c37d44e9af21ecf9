"""Publish a run on the Hugging Face hub: write a folder with code that needs PyTorch and transformers only; upload it.

transformers loads the code of a model on the hub from files in one folder. So `multilin.ops.tile_norm.reference`
becomes `ops_tile_norm_reference.py`, which differs from the package's file only in its imports: they are relative.
Compiled kernels, checks of settings, and packages that only annotations need are left out; names imported from them
come from `export_publish_stand_ins.py`.
"""

import ast
import os
import re
from collections.abc import Iterable
from pathlib import Path

import yaml

import multilin
from multilin.architectures import architectures
from multilin.data.tokenizers import save_tokenizer
from multilin.errors import InputError, plural
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
        InputError: a model of another kind, or with an architecture of another package.
        OSError: the folder cannot be written.
    """
    if not isinstance(run.model, MultilinForCausalLM):
        kind = run.model.config.model_type
        is_ours = kind.startswith("multilin_")
        advice = "lacks; train it without output_bias and unit_variance" if is_ours else "loads; upload its folder"
        raise InputError(f"run: a {kind} model given, which transformers {advice}")
    names = {entry["architecture"] for entry in run.model.config.layers}
    if others := sorted(names - {*own_architectures()}):
        raise InputError(
            f"run: a model of {others[0]} given, an architecture of another package, whose code cannot be published; "
            "upload the run's folder itself"
        )
    with atomic_folder(folder) as partial:
        run.model.save_pretrained(partial)
        save_tokenizer(run.tokenizer, partial)
        for file, text in model_files(names).items():
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
    return f"{before.rstrip()}\n{_USE.replace('NAME', name)}{rest}"


def _plain_card(run: Run) -> str:
    names = sorted({entry["architecture"] for entry in run.model.config.layers})
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
    """The text of every code file by name, for a model with layers of these architectures of the package.

    `AUTO_MAP` names the first file. It imports all other files, because transformers copies only files that it imports.
    """
    files: dict[str, str] = {}
    own = [f"{_PACKAGE}.architectures.{name}" for name in sorted(names)]
    for module in (_STAND_INS, f"{_PACKAGE}.model.language_model", *own):
        _add(module, files)
    lines = [f"from .{name.removesuffix('.py')} import __name__ as _" for name in sorted(files)]
    lines += [f"from .{_flat(module)} import architecture as _{_flat(module)}" for module in own]
    lines += ["from .architectures_base import register", "from .model_language_model import *", ""]
    lines += [f"register(_{_flat(module)})" for module in own]
    # transformers saves the file of a class, and all that it imports, with a model.
    lines += [f"{path.rpartition('.')[2]}.__module__ = __name__" for path in AUTO_MAP.values()]
    return {AUTO_FILE: "\n".join([_HEAD, *lines, ""]), **files}


def own_architectures() -> list[str]:
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
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    nodes = sorted(
        (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)), key=lambda n: n.lineno
    )
    for node in reversed(nodes):
        if relative := _relative(node, files):
            lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + line for line in relative]
    files[name] = "\n".join(lines) + "\n"


def _relative(node: ast.ImportFrom, files: dict[str, str]) -> list[str]:
    """Add the modules of an import; return the lines that replace the import, or none if no change is needed."""
    package = (node.module or "").partition(".")[0]
    if package not in (_PACKAGE, *_ONLY_FOR_CHECKS):
        return []
    lines = []
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
