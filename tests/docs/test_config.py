# SPDX-License-Identifier: Apache-2.0
"""docs/config.md is generated from the types."""

import runpy
from typing import Annotated

import msgspec
import pytest

from ecshare.encoder.config import EncoderConfig
from kvshare.config import KVConfig, TierConfig
from tests.docs.pages import ROOT

PROGRAM = runpy.run_path(str(ROOT / "scripts" / "write_config_docs.py"))


def test_page_is_generated_from_the_types() -> None:
    written = (ROOT / "docs" / "config.md").read_text()
    assert written == PROGRAM["page"](), "run `make docs`"


@pytest.mark.parametrize("page", ["config", "tier"])
def test_pages_name_the_common_options_that_the_tier_refuses(page: str) -> None:
    text = " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
    encoder, kv, tier = (
        set(each.__struct_fields__) for each in (EncoderConfig, KVConfig, TierConfig)
    )
    refused = ", ".join(f"`{name}`" for name in sorted((encoder & kv) - tier))
    assert f", except {refused}, and" in text


class Example(msgspec.Struct):
    size_bytes: Annotated[int, msgspec.Meta(gt=0)] = 3 << 20
    """One | two
    three."""
    silent: str | None = None


def test_options_are_described_by_their_docstrings() -> None:
    assert PROGRAM["attribute_docs"](Example) == {"size_bytes": "One | two three."}


@pytest.mark.parametrize(
    ("index", "kind", "default"),
    [(0, "whole number, above 0", "`3145728` (3 MiB)"), (1, "text", "none")],
)
def test_types_and_defaults_are_described_in_words(index: int, kind: str, default: str) -> None:
    field = msgspec.inspect.type_info(Example).fields[index]  # type: ignore[attr-defined]
    assert (PROGRAM["type_words"](field.type), PROGRAM["default_words"](field)) == (kind, default)
