"""A run as a folder for the Hugging Face hub, and its upload."""

import os
import re
from pathlib import Path

import yaml

from multilin.data.tokenizers import save_tokenizer
from multilin.errors import InputError, plural
from multilin.export.publish_code import model_files, own_architectures
from multilin.files import atomic_folder, write_whole
from multilin.model import MultilinForCausalLM
from multilin.runs.load import Run

CARD = "README.md"
_PLOT = "loss.png"


def publish_run(run: Run, name: str, folder: Path) -> None:
    """Write a folder that transformers loads without this package.

    It has the weights, config.json, generation_config.json, the tokenizer, the model's code, and the model
    card of the run with the figures of its training.

    Args:
        run: a model of this package.
        name: on the hub, OWNER/NAME.
        folder: to write, complete or not at all.

    Raises:
        InputError: a model of another kind, which needs no code of its own.
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
            f"run: a model of {others[0]} given, an architecture of another package, whose code would be missing; "
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
    """Upload a folder to a repository on the hub, which is made if there is none, and return its address.

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
    """The run's own card under its new name, with how to load it from the hub."""
    path = run.folder / CARD
    text = path.read_text(encoding="utf-8") if path.is_file() else _plain_card(run)
    text = re.sub(r"^# .*$", lambda _: f"# {name.rpartition('/')[2]}", text, count=1, flags=re.MULTILINE)
    # Paths of this machine: the folder of the run, and those of texts, tokenizers and models but for the last name.
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
inputs = tokenizer(tokenizer.eos_token + "The", add_special_tokens=False, return_tensors="pt")  # it begins every text
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50, do_sample=True)[0]))
```

`trust_remote_code` runs the Python files of this repository, plain PyTorch. With the package
[multilin](https://pypi.org/project/multilin) (`pip install multilin`, then `import multilin`) no code of the repository
is run, compiled kernels are, and states can be saved, exported and served.
"""
