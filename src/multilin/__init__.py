"""Small language models with linear-time and multilinear layers: train, run, explain and compare them.

Importing the package makes transformers' AutoConfig and AutoModelForCausalLM know its models.
"""

from multilin.architectures import architectures, get_architecture
from multilin.errors import InputError
from multilin.model import MultilinConfig, MultilinForCausalLM, MultilinModel, TextState

__version__ = "0.1.0"
__all__ = [
    "InputError",
    "MultilinConfig",
    "MultilinForCausalLM",
    "MultilinModel",
    "TextState",
    "architectures",
    "get_architecture",
]
