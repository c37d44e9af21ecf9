"""The verb that writes a model for the Hugging Face hub."""

import re
from pathlib import Path

from multilin.cli.messages import load, loading, say_next
from multilin.errors import InputError
from multilin.files import beside, check_folder
from multilin.runs.files import check_run_files
from multilin.settings import settings
from multilin.settings.bounds import PathText

_NAME = re.compile(r"[a-z0-9][\w.-]*/[a-z0-9][\w.-]{0,95}", re.ASCII | re.IGNORECASE)
_REFUSED = re.compile(r"--|\.\.|\.git$|[.-](/|$)")  # in a name, by the hub


@settings
class PublishArguments:
    """What to publish."""

    run: PathText  # folder of a trained model
    name: str  # repository on the hub: OWNER/NAME
    folder: PathText | None = None  # folder to write; RUN-hub if not given
    upload: bool = False  # send the folder to the hub
    private: bool = False  # make the new repository on the hub private


def publish(arguments: PublishArguments) -> None:
    """Write a run as a folder for the Hugging Face hub, and upload it if asked; the model loads without multilin."""
    if _NAME.fullmatch(arguments.name) is None or _REFUSED.search(arguments.name):
        raise InputError(f"name: {arguments.name!r:.60} given, but the hub accepts only names such as OWNER/NAME")
    if arguments.private and not arguments.upload:
        raise InputError("private: given, but nothing is uploaded; give --upload too, or leave out --private")
    check_run_files(arguments.run)
    folder = Path(arguments.folder or beside(arguments.run, "-hub"))
    check_folder("--folder", folder, must_be_new=True)
    run = load(arguments.run)
    from multilin.export.publish import publish_run, upload

    publish_run(run, arguments.name, folder)
    if arguments.upload:
        with loading(f"the hub: uploading {folder}"):
            print(upload(folder, arguments.name, private=arguments.private))
    else:
        print(f"Saved in {folder}: weights, tokenizer, model card, and the model's code")
        say_next(["less", folder / "README.md"], ["hf", "upload", arguments.name, folder])
