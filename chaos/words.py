"""Values that come from outside: turned into what they should be, or into words about what is wrong."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_WHERE = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)
_NAME = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)
_TYPES = {
    "string": "a text",
    "number": "a number",
    "integer": "a whole number",
    "boolean": "true or false",
    "object": "values with names",
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


def convert(raw: Any, shape: type[T], *, strict: bool = True) -> T:
    """Return JSON's values as a struct of type `shape`; unless `strict`, texts that say a number are one.

    Raises ValueError that names the field and says what it may be; where a name is not known, those that are.
    """
    try:
        return msgspec.convert(raw, shape, strict=strict)
    except msgspec.ValidationError as error:
        found = _WHERE.fullmatch(str(error))
        assert found is not None, "matches any text"
        raise ValueError(_words(found[1], found[2] or "", raw, shape)) from None


def _words(said: str, path: str, raw: Any, shape: type[Any]) -> str:
    document = msgspec.json.schema(shape)
    here = _resolved(document, document)
    for name in re.findall(r"\w+|\[\.\.\.\]", path):
        field = here.get("properties", {}).get(name) or here.get("additionalProperties")
        here = _resolved(field or {}, document)
        raw = raw.get(name) if isinstance(raw, dict) else None
    place = f"each of {path[:-5]}" if path.endswith("[...]") else path
    if (name := _NAME.fullmatch(said)) is not None:
        lacks = name[1].startswith("missing")
        known, asked = ", ".join(here.get("properties", ())), name[2][:_SHOWN]
        told = f"{asked!r} is missing" if lacks else f"there is no {asked!r}; the names are {known}"
        return f"{place}: {told}" if place else told
    if not said.startswith(("Expected", "Invalid")):
        return f"{place}: {said}" if place else said
    value = "" if raw is None or isinstance(raw, dict | list) else f", not {_shown(raw)}"
    return f"{place or 'it'} has to be {allowed(here)}{value}"


def _resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema:
        return schema
    found: dict[str, Any] = document["$defs"][schema["$ref"].rpartition("/")[2]]
    return found


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def allowed(schema: dict[str, Any]) -> str:
    """Say what a field of a JSON schema may be."""
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
