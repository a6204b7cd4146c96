"""The ``mok.*`` options of the backend.

An option given to `torch.compile(options=...)` wins over its environment variable ``MOK_<NAME>``, which wins over the
default. Everything else in `options` is Inductor's.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

PREFIX = "mok."
log = logging.getLogger("mok_compile")


@dataclass(frozen=True)
class Options:
    """Settings of one compile.

    enabled: look for MoE blocks at all; off, the graph goes to Inductor untouched.
    strict: raise `StrictError` when a recognisable MoE block is left unfused.
    verify: compare each fused block with the graph it replaces, outputs and gradients, on the inputs of the compile.
    engine: "auto", or the name of the engine to use where it can.
    router: fuse the router with its experts where it is understood.
    capture: keep ops whose output shape only the data tells in the graph where the block that they belong to is fused.
    dump: folder for the graphs before and after and the report; empty for none.
    """

    enabled: bool = True
    strict: bool = False
    verify: bool = False
    engine: str = "auto"
    router: bool = True
    capture: bool = False
    dump: str = ""

    def __post_init__(self) -> None:
        from mok_compile.engines import ENGINES

        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, type(field.default)):
                wanted = type(field.default).__name__
                raise TypeError(f"option {PREFIX}{field.name} must be a {wanted}, got {value!r}")
        if self.engine != "auto" and self.engine not in ENGINES:
            raise ValueError(f"option {PREFIX}engine must be one of auto, {', '.join(ENGINES)}, got {self.engine!r}")

    def to_dict(self) -> dict[str, Any]:
        return {PREFIX + name: value for name, value in asdict(self).items()}


def split(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Our options and the rest. ValueError for an unknown ``mok.`` key, one of ours without it, or an environment
    variable with a wrong value, TypeError for a value of the wrong type."""
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a dict, got {type(options).__name__}; inputs go into explain(model)(inputs)")
    known = {field.name: field for field in fields(Options)}
    given = {name: _from_environment(field) for name, field in known.items() if _variable(name) in os.environ}
    for variable in os.environ:
        if variable.startswith("MOK_") and variable not in (*map(_variable, known), *_OTHER_VARIABLES):
            _warn_of(variable)
    if "MOK_CPU_ISA" in os.environ:
        from mok_compile.engines.cpu import wanted_level

        wanted_level()
    rest = {}
    for key, value in (options or {}).items():
        name = key.removeprefix(PREFIX)
        if key in known:
            raise ValueError(f"unknown option {key!r}; this backend's own is {PREFIX + key!r}")
        if not key.startswith(PREFIX):
            rest[key] = value
        elif name in known:
            given[name] = value
        else:
            valid = ", ".join(PREFIX + n for n in known)
            raise ValueError(f"unknown option {key!r}; valid options are {valid}")
    return Options(**given), rest


# Read elsewhere: by mok_compile.build, the cpu engine and setup.py.
_OTHER_VARIABLES = ("MOK_CACHE_DIR", "MOK_CPU_ISA", "MOK_CXXFLAGS", "MOK_PREBUILT")


@functools.cache
def _warn_of(variable: str) -> None:
    known = ", ".join(_variable(field.name) for field in fields(Options))
    log.warning("mok-compile: the environment variable %s is none of ours (%s) and has no effect", variable, known)


def _variable(name: str) -> str:
    return f"MOK_{name.upper()}"


def _from_environment(field) -> Any:
    text = os.environ[_variable(field.name)]
    if not isinstance(field.default, bool):
        try:
            Options(**{field.name: text})
        except ValueError as error:
            raise ValueError(f"environment variable {_variable(field.name)}: {error}") from None
        return text
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"environment variable {_variable(field.name)} must be 0 or 1, got {text!r}")
