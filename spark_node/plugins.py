"""A user's own code by name: `package.module:factory`, of this folder or of what is installed."""

import importlib
import os
import sys
from typing import Any

from spark_node.errors import ConfigError


def named(setting: str, name: str) -> Any:
    """What `name` stands for; ConfigError names the setting that says it.

    The current folder is looked through last, so that a file beside the user is found and none that is installed is
    hidden.
    """
    path, _, attribute = name.partition(":")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        found = importlib.import_module(path)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise ConfigError(f"{setting} = {name!r}: cannot be imported ({error}); is it on PYTHONPATH?") from None
    if not callable(found):
        raise ConfigError(f"{setting} = {name!r}: {type(found).__name__} cannot be called; give a class or a function")
    return found
