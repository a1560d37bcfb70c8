# SPDX-License-Identifier: Apache-2.0
"""Without faults: an S3 server of another kind, which ignores `If-None-Match` and overwrites."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lab.servers.engines import ec_argument
from lab.servers.s3 import Rclone
from tests.conftest import LOGS, StartEngine
from tests.engines.chat import counts
from tests.faults.fleet import LOADED, Decoding, Fleet

pytestmark = pytest.mark.faults


def test_embeddings_pass_through_a_server_without_create_only_puts(
    engine: StartEngine, tmp_path: Path
) -> None:
    """Two encoders of different save modes, as on two hosts, store the same pictures at once."""
    with Rclone(LOGS, "rclone-faults") as server:

        def argument(role: str, host: str, save: str = "announced") -> str:
            return ec_argument(
                role,
                server.url,
                storage_options=server.storage_options,
                host_cache_dir=str(tmp_path / host),
                save=save,
            )

        fleet = Fleet(
            engine("plain"),
            engine("encoder", argument("producer", "one")),
            engine("consumer", argument("consumer", "three"), "--enable-mm-embeds"),
        )
        other = Fleet(
            fleet.plain, engine("other", argument("producer", "two", "durable")), fleet.consumer
        ).wait_ready()
        fleet.wait_ready()
        with Decoding(fleet), ThreadPoolExecutor() as asking:
            for _ in range(5):
                item = fleet.encode()
                again = asking.submit(other.encode, item.uuid, item.seed)
                assert fleet.is_right(item, fleet.without_pixels(item))
                assert again.result().content == item.content
        assert counts(fleet.consumer)[LOADED] == 5
        assert counts(fleet.encoder)["ecshare_items/encoded"] == 5
