# SPDX-License-Identifier: Apache-2.0
"""What is wrong in a file of engines is named."""

from pathlib import Path

import pytest

from ecshare.router.options.engines import read_engines
from ecshare.store.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "engines.json: Input data was truncated"),
        ("[]", "engines.json: Expected `object`, got `array`"),
        ('{"decoders": ["http://d"], "decoder": []}', "unknown field `decoder`"),
        ('{"encoders": ["http://e"]}', "missing required field `decoders`"),
        ('{"decoders": [5]}', "Expected `str | object`, got `int` - at `$.decoders[0]`"),
        ('{"decoders": ["d:3"]}', "'d:3' must look like http://host:port"),
        ('{"decoders": ["dns+https://d"]}', "'https://d' must look like http://host:port"),
        ('{"decoders": [{"models": ["m"]}]}', "missing required field `url` - at `$.decoders[0]`"),
        (
            '{"decoders": [{"url": "http://d", "models": []}]}',
            "Expected `array` of length >= 1 - at `$.decoders[0].models`",
        ),
        (
            '{"decoders": [{"url": "http://d", "model": "m"}]}',
            "unknown field `model` - at `$.decoders[0]`",
        ),
        (
            '{"decoders": ["http://d"], "encoders": [{"url": "http://d/v1"}]}',
            "decoders: http://d is already in encoders",
        ),
        ('{"decoders": ["' + "x" * 1024 * 1024 + '"]}', "it is larger than 1048576 bytes"),
        ("[" * 100_000, "engines.json: "),
        ('{"decoders": ["\udcff"]}', "engines.json: "),
    ],
)
def test_the_message_names_what_is_wrong(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as error:
        read_engines(path)
    assert message in str(error.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_engines(tmp_path)
