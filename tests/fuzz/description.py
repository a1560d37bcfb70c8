# SPDX-License-Identifier: Apache-2.0
"""The router's requests and answers in OpenAPI 3.1, from which the tests generate bodies.

It says what the router itself checks. All else in a request is the engines' business, and is passed
on.
"""

from functools import cache
from typing import Any

from ecshare.router.api.chat import CHAT
from ecshare.router.api.client_request import SAVE_OPTIONS, TRANSFER_FIELDS
from ecshare.router.api.endpoints import (
    COMPLETIONS_ENDPOINT,
    MESSAGES_ENDPOINT,
    PASSED_ON,
    RESPONSES_ENDPOINT,
)
from ecshare.router.fleet.client import MODELS

Json = dict[str, Any]

_BASE64_URL = "^[dD][aA][tT][aA]:[^,]*;base64,[A-Za-z0-9+/]+={0,2}$"
_HTTP_URL = "^https?://[^/]+"
_STATUS_KEY: list[Json] = [{"status_key": []}]


def _object(required: tuple[str, ...], **properties: Json) -> Json:
    return {"type": "object", "required": list(required), "properties": properties}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _url_part(kind: str) -> Json:
    url = {"type": "string", "anyOf": [{"pattern": _BASE64_URL}, {"pattern": _HTTP_URL}]}
    return _object(("type", kind), type={"const": kind}, **{kind: _object(("url",), url=url)})


_COMMON: Json = {
    "model": {"type": ["string", "null"]},
    "stream": {"type": ["boolean", "null"]},
    **{name: {"type": "null", "description": "The router sets it."} for name in TRANSFER_FIELDS},
}
_STORED = _COMMON | {
    name: {
        "anyOf": [
            {"type": "null"},
            _object((option,), **{option: {"type": "boolean"}}) | {"additionalProperties": False},
        ],
        "description": "Whether engines store what they compute. The router sets all else.",
    }
    for name, option in SAVE_OPTIONS.items()
}
_TEXT_PART = _object(("type", "text"), type={"const": "text"}, text={"type": "string"})
_SOUND_PART = _object(
    ("type", "input_audio"),
    type={"const": "input_audio"},
    input_audio=_object(
        ("data", "format"),
        data={"type": "string", "pattern": "^[A-Za-z0-9+/]+={0,2}$"},
        format={"type": "string", "pattern": "^[A-Za-z0-9.+-]{1,32}$"},
    ),
)
_SCHEMAS: dict[str, Json] = {
    "Part": {
        "anyOf": [
            {"type": "string"},
            _TEXT_PART,
            *(_url_part(kind) for kind in ("image_url", "video_url", "audio_url")),
            _SOUND_PART,
        ]
    },
    "Message": _object(
        ("role",),
        role={"type": "string"},
        content={"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": _ref("Part")}]},
    ),
    "ChatCompletion": _object(
        ("messages",),
        **_STORED,
        messages={"type": "array", "minItems": 1, "items": _ref("Message")},
    ),
    "Completion": _object(
        ("prompt",), **_STORED, prompt={"anyOf": [{"type": "string"}, {"type": "array"}]}
    ),
    "Response": _object(
        ("input",),
        **_STORED,
        input={"anyOf": [{"type": "string"}, {"type": "array"}]},
        previous_response_id={"type": "null", "description": "Responses are not kept."},
        background={"enum": [None, False]},
    ),
    "Conversation": _object(
        ("messages",),
        **_STORED,
        messages={
            "type": "array",
            "minItems": 1,
            "items": _object(("role", "content"), role={"type": "string"}, content={}),
        },
    ),
    "Work": _object((), **_COMMON),
    "Error": _object(
        ("error",),
        error=_object(
            ("message",),  # the router's own errors have all four
            message={"type": "string"},
            type={"type": "string"},
            param={"type": ["string", "null"], "description": "The field at fault."},
            code={"type": ["string", "integer", "null"]},
        ),
    ),
}
_ERRORS = {
    400: "The request is wrong; `param` names the field at fault.",
    401: "The status key is missing or wrong.",
    404: "There is no such model.",
    408: "The body came too slowly.",
    413: "The body or its media are too large.",
    415: "The body is compressed.",
    422: "Media cannot be fetched, also if it is tried again.",
    429: "The router or the engines have too much to do; see Retry-After.",
    500: "The router failed.",
    502: "An engine failed, and no other one could answer; or media cannot be fetched now.",
    503: "No engine can be reached, or the router is shutting down.",
    504: "The request took too long.",
}
_DOOR_ERRORS = (400, 404, 408, 413, 415, 422, 429, 500, 502, 503, 504)
_OBJECT: Json = {"type": "object"}
_ENGINES_OWN = {
    "description": "An engine's own answer, passed on.",
    "content": {"application/json": {"schema": {}}},
}


def _answers(*errors: int, **content: Json) -> Json:
    """Return the responses of an endpoint: 200 with its content, and what may go wrong."""
    types = {kind.replace("_", "/"): {"schema": schema} for kind, schema in content.items()}
    answers: Json = {"200": {"description": "The answer.", "content": types}}
    for status in errors:
        schema = {"schema": _ref("Error")}
        answers[str(status)] = {
            "description": _ERRORS[status],
            "content": {"application/json": schema},
        }
    return answers


def _endpoint(summary: str, schema: str) -> Json:
    kinds: Json = {"application_json": _OBJECT, "text_event-stream": {"type": "string"}}
    responses = _answers(*_DOOR_ERRORS, **kinds)
    content = {"application/json": {"schema": _ref(schema)}}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": {**responses, "4XX": _ENGINES_OWN, "5XX": _ENGINES_OWN},
        }
    }


def _page(summary: str, responses: Json, *, needs_key: bool = False) -> Json:
    security = {"security": _STATUS_KEY} if needs_key else {}
    return {"get": {"summary": summary, "responses": responses, **security}}


_STATE = _answers(application_json=_OBJECT)
_OR_NOT_READY: Json = {"503": {"description": "It is not.", "content": _STATE["200"]["content"]}}
_PATHS: dict[str, Json] = {
    CHAT: _endpoint("Answer a conversation, streamed or not.", "ChatCompletion"),
    COMPLETIONS_ENDPOINT.path: _endpoint("Continue a text.", "Completion"),
    RESPONSES_ENDPOINT.path: _endpoint("Answer, as OpenAI's Responses API does.", "Response"),
    MESSAGES_ENDPOINT.path: _endpoint("Answer, as Anthropic's Messages API does.", "Conversation"),
    **{path: _endpoint("Pass on to one engine.", "Work") for path in PASSED_ON},
    MODELS: _page(
        "List the models that decode serves.",
        {**_answers(502, 503, application_json=_OBJECT), "4XX": _ENGINES_OWN},
    ),
    "/live": _page("Tell whether the process serves.", _STATE),
    "/ready": _page("Tell whether a request could be answered now.", _STATE | _OR_NOT_READY),
    "/health": _page("Check all engines.", _STATE | _OR_NOT_READY),
    "/status": _page(
        "Tell what the router knows.", _answers(401, application_json=_OBJECT), needs_key=True
    ),
    "/metrics": _page(
        "Return Prometheus's metrics; only routers with a status key ask for it.",
        _answers(401, text_plain={"type": "string"}),
        needs_key=True,
    ),
    "/dashboard": _page("Show a page for operators.", _answers(text_html={"type": "string"})),
    "/dashboard/data": _page(
        "Return what that page shows.", _answers(401, application_json=_OBJECT), needs_key=True
    ),
}


@cache
def description() -> Json:
    """Return the whole description. It is shared: do not change it."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ecshare router",
            "version": "1",
            "description": "OpenAI's and Anthropic's APIs over encode, prefill and decode engines.",
        },
        "paths": _PATHS,
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"status_key": {"type": "http", "scheme": "bearer"}},
        },
    }
