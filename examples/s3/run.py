# SPDX-License-Identifier: Apache-2.0
"""The split of ../one_box with its store in S3: yours, or one that is started here.

    [STORE=s3://bucket/prefix] [MODEL=...] python -m examples.s3.run

Asks about a picture twice, shows the path of each answer and the objects in the bucket, and serves
until Ctrl-C.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ecshare.store.config import StoreConfig
from ecshare.store.keys import Kind, is_object_key
from ecshare.store.open import open_store
from lab import model_cache
from lab.servers import openai_client as client
from lab.servers.processes import Port, Server, ServerFailed
from lab.servers.s3 import SeaweedFS

ONE_BOX = Path(__file__).resolve().parents[1] / "one_box"
WORK = Path(__file__).resolve().parents[2] / ".cache" / "s3"
LOGS = WORK / "logs"


class Split(Server):
    """The engines and the router of one_box, by its own script; healthy when all of them are."""

    grace_s = 30.0
    ready_within_s = 900.0

    def __init__(self) -> None:
        super().__init__("split", LOGS)
        self._ports = {f"{stage}_PORT": Port() for stage in ("ENCODE", "PREFILL", "DECODE")}

    def command(self) -> list[str]:
        """Return the command of run.sh, whose settings are environment variables."""
        return ["bash", str(ONE_BOX / "run.sh")]

    def environment(self) -> Mapping[str, str]:
        """Return free ports, one folder for logs, and this Python as `python`."""
        free = {name: str(port.number) for name, port in self._ports.items()}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return free | {"ROUTER_PORT": str(self.port.number), "LOGS": str(LOGS), "PATH": path}


@contextmanager
def bucket() -> Iterator[None]:
    """Set STORE and the variables of AWS clients in the environment: the user's, or a server's."""
    if os.environ.get("STORE"):
        yield
        return
    with SeaweedFS(LOGS) as server:
        print(f"STORE is not set: SeaweedFS serves S3 at {server.base_url}")
        options = server.storage_options
        os.environ["STORE"] = server.url
        os.environ["AWS_ENDPOINT_URL"] = options["endpoint_url"]
        os.environ["AWS_ACCESS_KEY_ID"] = options["key"]
        os.environ["AWS_SECRET_ACCESS_KEY"] = options["secret"]
        yield


async def show_objects() -> None:
    """Print the number of objects of each kind in the bucket."""
    store = open_store(StoreConfig(url=os.environ["STORE"]), "STORE")
    try:
        for kind in Kind:
            found = [each async for each in store.list(f"{kind}/")]
            sizes = [each.num_bytes for each in found if is_object_key(each.key)]
            print(f"{os.environ['STORE']}/{kind}: {len(sizes)} objects, {sum(sizes)} bytes")
    finally:
        await store.close()


def show_answers(url: str) -> None:
    """Ask the same twice; the second time nothing is encoded, and only decode is asked."""
    body = client.question("Describe this picture.", [client.picture(1)])
    for _ in range(2):
        answer = client.ask(url, body)
        times = ", ".join(f"{stage} {ms:.0f} ms" for stage, ms in answer.stage_ms.items())
        print(f"answered by way of {', '.join(answer.path)}: {times}")


def main() -> int:
    """Start everything, show it, and serve until Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["MODEL"] = os.environ.get("MODEL") or str(model_cache.model(WORK.parent / "models"))
    try:
        with bucket():
            split = Split()
            print(f"Starting encode, prefill and decode engines; logs are in {LOGS}", flush=True)
            with split:
                show_answers(split.base_url)
                asyncio.run(show_objects())
                print(f"Serving at {split.base_url}/v1 until Ctrl-C", flush=True)
                signal.pause()
    except (ServerFailed, client.RequestFailed) as failure:
        print(f"{failure}\nAll logs are in {LOGS}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
