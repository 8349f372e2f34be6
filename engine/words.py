"""Values that come from outside: turned into what they should be, or into words about what is wrong."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_WHERE = re.compile(r"(.*?)(?: - at `(?:key in )?\$\.?(.*)`)?", re.DOTALL)
_NAME = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)
_STEP = re.compile(r"[^.\[\]]+|\[\d+\]|\[\.\.\.\]")
_TYPES = {
    "string": "a text",
    "number": "a number",
    "integer": "a whole number",
    "boolean": "true or false",
    "object": "an object",
    "array": "a list",
}
_BOUNDS = {
    "minimum": "of at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "of at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "of at least {}",
    "maxLength": "of at most {} characters",
}
_SHOWN = 60  # characters of a wrong value


class ShapeError(ValueError):
    """A value is not what it should be. `path` leads to the field ("": the whole), which may be `missing`."""

    def __init__(self, message: str, path: str, missing: bool) -> None:
        super().__init__(message)
        self.path = path
        self.missing = missing


def convert(raw: Any, shape: type[T], *, strict: bool = True) -> T:
    """Return JSON's values as a struct of type `shape`; unless `strict`, texts that say a number are one.

    Raises ShapeError that names the field and says what it may be; where a name is not known, those that are.
    """
    try:
        return msgspec.convert(raw, shape, strict=strict)
    except msgspec.ValidationError as error:
        raise in_words(error, raw, shape) from None


def in_words(error: msgspec.ValidationError, raw: Any, shape: type[Any]) -> ShapeError:
    """Return what the decoder says of `raw` in words for whoever sent it."""
    found = _WHERE.fullmatch(str(error))
    assert found is not None, "matches any text"
    said, path = found[1], found[2] or ""
    document = msgspec.json.schema(shape)
    here = _resolved(document, document)
    for step in _STEP.findall(path):
        here = _inside(here, step, document)
        raw = _value(raw, step)
    place = f"each of {path[:-5]}" if path.endswith("[...]") else path
    if (name := _NAME.fullmatch(said)) is not None:
        asked = name[2][:_SHOWN]
        missing = name[1].startswith("missing")
        known = ", ".join(here.get("properties", ()))
        told = f"{asked!r} is missing" if missing else f"there is no {asked!r}; the names are {known}"
        return ShapeError(f"{place}: {told}" if place else told, f"{path}.{asked}".lstrip("."), missing)
    if not said.startswith(("Expected", "Invalid")):
        return ShapeError(f"{place}: {said}" if place else said, path, False)
    value = "" if raw is None or isinstance(raw, dict | list) else f", not {_shown(raw)}"
    return ShapeError(f"{place or 'it'} has to be {allowed(here)}{value}", path, False)


def _resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema:
        return schema
    found: dict[str, Any] = document["$defs"][schema["$ref"].rpartition("/")[2]]
    return found


def _inside(schema: dict[str, Any], step: str, document: dict[str, Any]) -> dict[str, Any]:
    """The schema of what a step of a path leads to: a name, a place in a list, or any value of a map."""
    for option in schema.get("anyOf", [schema]):
        whole = _resolved(option, document)
        found = whole.get("items") if step.startswith("[") else None
        found = found or whole.get("properties", {}).get(step) or whole.get("additionalProperties")
        if found:
            return _resolved(found, document)
    return {}


def _value(raw: Any, step: str) -> Any:
    if isinstance(raw, list) and step[1:-1].isdecimal():
        return raw[int(step[1:-1])]
    return raw.get(step) if isinstance(raw, dict) else None


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def allowed(schema: dict[str, Any]) -> str:
    """Say what a field of a JSON schema may be."""
    if "$ref" in schema:  # to a struct
        return _TYPES["object"]
    if "enum" in schema:
        return "one of " + ", ".join(str(word) for word in schema["enum"] if word != "")
    if "anyOf" in schema:
        types = {one.get("type") for one in schema["anyOf"]}
        spare = {"null", "integer"} if "number" in types else {"null"}
        return " or ".join(allowed(one) for one in schema["anyOf"] if one.get("type") not in spare)
    if "pattern" in schema and "description" in schema:
        return str(schema["description"])
    bounds = [words.format(schema[name]) for name, words in _BOUNDS.items() if name in schema]
    return " ".join([_TYPES.get(schema.get("type", ""), "something else"), " and ".join(bounds)]).rstrip()
