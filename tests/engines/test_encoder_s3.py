# SPDX-License-Identifier: Apache-2.0
"""Embeddings between two engines through a real S3 server, as if each were on a host of its own."""

from pathlib import Path

import pytest

from lab.servers.engines import EngineProcess, ec_argument
from lab.servers.s3 import SeaweedFS
from tests.conftest import StartEngine
from tests.engines.chat import announced, ask, counts, passed_on, picture, text
from tests.releases import HAS_ENCODER_METRICS

# The gate runs an example with a real S3 server.
pytestmark = [pytest.mark.engine, pytest.mark.models, pytest.mark.s3]


def test_consumer_without_pixels_gives_the_plain_tokens(
    engine: StartEngine, plain: EngineProcess, vlm: Path, seaweed: SeaweedFS, tmp_path: Path
) -> None:
    def option(role: str) -> str:
        return ec_argument(
            role,
            f"{seaweed.url}/two-engines",
            storage_options=seaweed.storage_options,
            host_cache_dir=str(tmp_path / role),
        )

    encoder = engine("encoder", option("producer"))
    consumer = engine("consumer", option("consumer"))
    for started in (plain, encoder, consumer):
        started.wait_ready()
    question = text("what is to be seen here?")
    encoded = ask(encoder, str(vlm), [picture(1, "one"), picture(2, "two")])
    content = [announced(encoded, "one"), announced(encoded, "two"), question]
    expected = ask(plain, str(vlm), [picture(1), picture(2), question])
    assert ask(consumer, str(vlm), content, **passed_on(encoded)).tokens == expected.tokens
    if HAS_ENCODER_METRICS:
        assert counts(consumer)["ecshare_items/loaded"] == 2
    assert ask(plain, str(vlm), [picture(2), picture(1), question]).tokens != expected.tokens
