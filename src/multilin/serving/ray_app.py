"""The server on Ray Serve: replicas on one or several machines, each of which can continue every session.

    serve run multilin.serving.ray_app:app run=runs/demo-onnx sessions=/shared/sessions replicas=2

A replica has its own engine and batch; all replicas share the store of sessions. Keys come from MULTILIN_API_KEY in the
environment of the replicas.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multilin.errors import InputError
from multilin.runs.files import is_export
from multilin.serving.settings import KEY_VARIABLE, ServeLimits, split_keys
from multilin.settings import load_settings, settings
from multilin.settings.bounds import Count, Name, PathText

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.types import ASGIApp


@settings
class RayArguments:
    """The model, and the processes that serve it."""

    run: PathText  # folder of a trained or exported model, on every machine
    replicas: Count = 1  # number of processes that serve it
    cpus: Count = 1  # CPU cores of each replica
    name: Name | None = None  # name of the model for clients; by default the name of the folder
    insecure: bool = False  # accept requests without a key, from everybody who reaches Ray's proxy


def app(values: Mapping[str, Any]) -> "Application":
    """The application that Ray Serve deploys.

    Args:
        values: fields of `RayArguments` and of `ServeLimits`.

    Raises:
        InputError: a field that does not exist or has a wrong value, or several replicas without `sessions`.
    """
    own = {field.name for field in dataclasses.fields(RayArguments)}
    arguments = load_settings(RayArguments, {name: value for name, value in values.items() if name in own})
    limits = load_settings(ServeLimits, {name: value for name, value in values.items() if name not in own})
    if limits.sessions is None and arguments.replicas > 1:
        raise InputError(
            "sessions: none given, but several replicas need a folder or an address that all of them reach"
        )

    from ray import serve

    def build() -> "ASGIApp":  # Ray needs a function here
        return _build(arguments, limits)

    deployment = serve.deployment(serve.ingress(build)()).options(
        name="multilin", num_replicas=arguments.replicas, ray_actor_options={"num_cpus": arguments.cpus},
        max_ongoing_requests=limits.slots + limits.queue,
    )  # fmt: skip
    return deployment.bind()


def _build(arguments: RayArguments, limits: ServeLimits) -> "ASGIApp":
    """Make the application of one replica."""
    from multilin.export.cache import open_model
    from multilin.runs.load import load_run
    from multilin.serving.app import create_app
    from multilin.serving.service import Service

    keys = split_keys(None)
    if not (keys or arguments.insecure):
        raise InputError(f"{KEY_VARIABLE}: not set for the replicas; set it, or insecure=true to need no key")
    folder = Path(arguments.run)
    engine, codec = open_model(folder, num_threads=arguments.cpus)
    load = None if is_export(folder) else partial(load_run, folder)
    return create_app(Service(engine, codec, folder, arguments.name, limits), keys=keys, load_run=load)
