# SPDX-License-Identifier: Apache-2.0
"""Bodies made from the router's description, and whether an answer is one that it describes."""

import json
from typing import Any

from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.fuzz.description import description
from tests.fuzz.values import values

SCHEMAS: dict[str, Any] = description()["components"]["schemas"]
_REFERENCE = "#/components/schemas/"
_SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "null": st.none(),
    "boolean": st.booleans(),
    "string": st.text(max_size=20),
}
_extras = st.dictionaries(
    st.sampled_from(["n", "tools", "seed", "max_tokens", "uuid", "cache_salt", "vllm_xargs"]),
    values,
    max_size=2,
)


def validator(name: str) -> Draft202012Validator:
    """Return a validator of one of the schemas."""
    return _validator_of({"$ref": _REFERENCE + name})


def _validator_of(schema: Any) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": {"schemas": SCHEMAS}})


def fitting(schema: Any) -> st.SearchStrategy[Any]:
    """Values that match a schema of ours; objects have extra fields now and then."""
    if not schema:
        return values
    match schema:
        case {"$ref": reference}:
            return fitting(SCHEMAS[reference.removeprefix(_REFERENCE)])
        case {"const": value}:
            return st.just(value)
        case {"enum": each}:
            return st.sampled_from(each)
        case {"pattern": pattern}:
            return st.from_regex(pattern, fullmatch=True)
        case {"anyOf": each}:
            return st.one_of([fitting(one) for one in each])
        case {"type": "object"}:
            whole = _objects(schema.get("properties", {}), set(schema.get("required", ())))
            return whole if schema.get("additionalProperties") is False else _with_extras(whole)
        case {"type": "array"}:
            items = fitting(schema.get("items"))
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=4)
        case {"type": kinds}:
            named = kinds if isinstance(kinds, list) else [kinds]
            return st.one_of([_SCALARS[kind] for kind in named])
    raise NotImplementedError(schema)


def _objects(properties: dict[str, Any], required: set[str]) -> st.SearchStrategy[Any]:
    each = {name: fitting(schema) for name, schema in properties.items()}
    optional = {name: value for name, value in each.items() if name not in required}
    return st.fixed_dictionaries({name: each[name] for name in required}, optional=optional)


def _with_extras(whole: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(lambda extra, own: extra | own, _extras, whole)


def schema_of(path: str) -> str:
    """The name of the schema of request bodies for a path."""
    body = description()["paths"][path]["post"]["requestBody"]
    reference: str = body["content"]["application/json"]["schema"]["$ref"]
    return reference.removeprefix(_REFERENCE)


def check_answer(path: str, method: str, status: int, content_type: str, body: bytes) -> None:
    """Check that the description of this path allows the answer."""
    answers = description()["paths"][path][method]["responses"]
    described = answers.get(str(status)) or answers.get(f"{status // 100}XX")
    assert described is not None, f"{method} {path} answers {status}"
    assert content_type in described["content"], f"{status} is {content_type}"
    if content_type == "application/json":
        _validator_of(described["content"][content_type]["schema"]).validate(json.loads(body))
