# SPDX-License-Identifier: Apache-2.0
"""Checks: clients choose identifiers and `ec_transfer_params`, which may have any value."""

from typing import Any

from lab.conformance.hand_over import hand_over, must_answer
from lab.conformance.harness import Place
from lab.conformance.pictures import picture
from lab.conformance.rules import rule
from lab.conformance.violations import Effect, require

IDENTIFIERS = (
    "",
    ".",
    "..",
    "../../../evil",
    "a/../../../../evil",
    "a/b/c",
    "/",
    "~/evil",
    "evil\x00",
    "line\nbreak",
    "a" * 300,
    "a/" * 3000,
    "e\u0301vil " * 50,
    "\udcff",
    "x" * 1_000_000,
    'con: <evil>|*?"',
    "%2e%2e%2fevil",
    "{folder}",
)

PARAMS: tuple[Any, ...] = (
    {},
    [],
    "text",
    0,
    -1,
    1e308,
    True,
    {"picture-1": None},
    {"picture-1": []},
    {"picture-1": "text"},
    {"picture-1": {"metadata": None}},
    {"picture-1": {"metadata": {"image_grid_thw": "text"}, "item_indices": "text"}},
    {
        "picture-1": {
            "metadata": {"image_grid_thw": [-1, 2**64 - 1, -(2**63)]},
            "item_indices": [-1],
        }
    },
    {"picture-1": {key: "../../../evil" for key in ("key", "url", "path", "host", "bucket")}},
    {"": {}, "../../evil": {"metadata": {}}, "x" * 100_000: {"metadata": {}}},
    {"picture-1": {"metadata": {"deep": [[[[[[[[[[]]]]]]]]]]}}},
    {f"other-{number}": {"metadata": {}} for number in range(10_000)},
)


@rule(
    why="The `uuid` of a chat request becomes the identifier unchanged, whatever it contains.",
)
def accepts_any_identifier(place: Place) -> None:
    """No identifier that a client can choose kills an engine or lets its request hang."""
    encoder, decoder = place.encoder(), place.decoder()
    for identifier in (*IDENTIFIERS, str(place.root / "evil" / "x")):
        must_answer(encoder.ask(picture(1, identifier)))
        must_answer(decoder.ask(picture(1, identifier)))


@rule(
    why="A client that chooses where a file is written can take over the machine.",
)
def writes_only_inside_its_folder(place: Place) -> None:
    """No identifier makes the connector write outside of its folder."""
    encoder, decoder = place.encoder(), place.decoder()
    for identifier in ("../../../evil", "a/../../../../evil", str(place.root / "evil" / "x")):
        encoder.ask(picture(1, identifier))
        decoder.ask(picture(1, identifier))
    place.stop(encoder)
    found = [str(each.relative_to(place.root)) for each in place.outsiders()]
    require(not found, Effect.ESCAPES, f"written outside of the folder: {found}")


@rule(
    why="If two identifiers lead to one file, a client gets another client's embedding.",
)
def distinguishes_identifiers(place: Place) -> None:
    """Different identifiers are different items, however similar they are."""
    encoder, decoder = place.encoder(), place.decoder()
    alike = ("a/b", "a//b", "a/./b", "a/x/../b", "A/b", "a/b ", "a/b\n", "a%2fb", "/a/b")
    for number, identifier in enumerate(alike):
        hand_over(encoder, decoder, picture(number + 1, identifier))


@rule(
    why="They come unchecked from the JSON of a client's request.",
)
def accepts_any_params(place: Place) -> None:
    """`ec_transfer_params` of any form kill no engine and change no answer."""
    encoder, decoder = place.encoder(), place.decoder()
    place.stored(encoder, encoder.ask(picture(1)))
    for number, params in enumerate(PARAMS):
        must_answer(decoder.ask(picture(1), picture(100 + number), params=params))
        must_answer(encoder.ask(picture(1), params=params))
    found = [str(each.relative_to(place.root)) for each in place.outsiders()]
    require(not found, Effect.ESCAPES, f"written outside of the folder: {found}")


@rule(
    why="A client can announce an item that does not exist. Waiting for it must end.",
)
def ends_the_wait_for_a_false_announcement(place: Place) -> None:
    """An announced item that is never stored delays its request, and has no other effect."""
    decoder = place.decoder()
    lie = {"lie": {"metadata": {"image_grid_thw": [1, 2, 32]}, "item_indices": [0]}}
    must_answer(decoder.ask(picture(1, "lie"), params=lie))
