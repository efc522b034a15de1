"""Reads the `flexfloor:` section of a YAML file and says in which line it is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from flexfloor.config.model import ContradictionError, FlexFloorConfig
from flexfloor.errors import InputError

SECTION = "flexfloor"
_SKIPPED_LOC = {"int", "float", "[key]", "constrained-int"}


def load_config(path: str | Path) -> FlexFloorConfig:
    """Reads a YAML file with a top-level `flexfloor:` section; verl's whole configuration is one such file.

    Raises:
        InputError: the file is missing, no YAML, without the section, or the section is wrong; names file, line
            and field.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(f"cannot be read ({reason}); name a YAML file", file=path) from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else None
        raise InputError(f"is no YAML ({getattr(error, 'problem', error)})", file=path, line=line) from error
    if not isinstance(root, yaml.MappingNode):
        raise InputError(f"must be a mapping with a `{SECTION}:` section", file=path)
    section = next((value for key, value in root.value if key.value == SECTION), None)
    if section is None:
        raise InputError(f"has no `{SECTION}:` section; add it at the top level", file=path)
    for line, name in _duplicate_keys(section, SECTION):
        raise InputError("stands twice; keep one", file=path, line=line, field=name)
    try:
        data = yaml.SafeLoader("").construct_document(section)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else None
        raise InputError(f"is no YAML ({getattr(error, 'problem', error)})", file=path, line=line) from error
    return config_from_mapping(data, file=path, node=section)


def config_from_mapping(data: Any, *, file: str | Path | None = None, node: yaml.Node | None = None) -> FlexFloorConfig:
    """Builds the configuration from the content of a `flexfloor:` section.

    Args:
        data: the section as plain data.
        file: where it came from, for messages.
        node: its YAML node, for line numbers.

    Raises:
        InputError: names file, line (with ``node``) and field.
    """
    if not isinstance(data, Mapping):
        line = node.start_mark.line + 1 if node is not None else None
        raise InputError("must be a mapping of settings", file=file, line=line, field=SECTION)
    try:
        return FlexFloorConfig.model_validate(dict(data))
    except ValidationError as error:
        where, what = _first_fault(error)
        line = _line_of(node, where) if node is not None else None
        raise InputError(what, file=file, line=line, field=".".join([SECTION, *where])) from error


def _first_fault(error: ValidationError) -> tuple[list[str], str]:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part not in _SKIPPED_LOC]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ContradictionError):
        return [*where, *cause.field.split(".")], cause.what
    if first["type"] == "extra_forbidden":
        return where, f"unknown key; known here: {', '.join(_known_keys(where[:-1]))}"
    if first["type"] == "missing":
        return where, "is missing; add it"
    if cause is not None:
        return where, str(cause)
    got = first["input"]
    return where, f"{first['msg'][0].lower()}{first['msg'][1:]}, got {got!r}"


def _known_keys(where: Sequence[str]) -> list[str]:
    model: Any = FlexFloorConfig
    for part in where:
        model = model.model_fields[part].annotation
    return sorted(model.model_fields)


def _line_of(node: yaml.Node, where: Sequence[str]) -> int:
    """1-based line of a field; the nearest enclosing mapping's for a key that is missing."""
    line: int = node.start_mark.line + 1
    for part in where:
        if isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
        elif isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if str(key.value) == part), None)
            if pair is None:
                return line
            line, node = pair[0].start_mark.line + 1, pair[1]
            continue
        else:
            return line
        line = node.start_mark.line + 1
    return line


def _duplicate_keys(node: yaml.Node, prefix: str) -> Iterator[tuple[int, str]]:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        name = f"{prefix}.{key.value}"
        if str(key.value) in seen:
            yield key.start_mark.line + 1, name
        seen.add(str(key.value))
        yield from _duplicate_keys(value, name)
