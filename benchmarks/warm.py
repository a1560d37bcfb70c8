# SPDX-License-Identifier: Apache-2.0
"""Measure how busy `ecshare warm` keeps an encode engine.

A real engine on this CPU encodes as many new pictures, in turn, for the command and for a client
that sends ready bytes over as many connections. Medians.
"""

import asyncio
import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from benchmarks.measure import Readings, in_turn
from benchmarks.report import Report, Table, arguments, command_line
from ecshare.router.media.identity import identity
from lab.http_load import Client, by_clients, post
from lab.models import make_qwen25_vl
from lab.servers.engines import SMALL_ENGINE, EngineProcess, ec_argument
from lab.servers.openai_client import picture

MODULE = "benchmarks.warm"
PICTURE_PIXELS = 448
CLIENTS = 16
READY, WARM = "ready bytes", "ecshare warm"

# Never the same picture twice.
_numbers = count()


def main(words: Sequence[str]) -> None:
    """Measure, print, write the result files."""
    options = arguments(__doc__ or "", MODULE).parse_args(words)
    rounds = options.rounds or (1 if options.quick else 5)
    num_pictures = CLIENTS if options.quick else 160
    settings = {"rounds": rounds, "pictures a round": num_pictures, "clients": CLIENTS}
    report = Report("warm", command_line(MODULE, options), settings)
    readings: Readings[str] = Readings()
    with tempfile.TemporaryDirectory(dir=options.disk) as text:
        folder = Path(text)
        connector = ec_argument("producer", f"{folder}/store", host_cache_dir=f"{folder}/host")
        model = make_qwen25_vl(folder / "model")
        with EngineProcess("e", model, folder, (*SMALL_ENGINE, connector)) as engine:
            engine.wait_ready()
            _send(engine, CLIENTS)  # warms up
            for turn in range(rounds):
                for name in in_turn((READY, WARM), turn):
                    if name == READY:
                        readings.add(name, num_pictures / _send(engine, num_pictures))
                    else:
                        readings.add(name, _warm(engine, folder / f"{turn}", num_pictures))
    report.add(_table(readings))
    print(f"\nwritten: {report.write(options.results).name}")


def _table(readings: Readings[str]) -> Table:
    note = (
        f"Pictures of {PICTURE_PIXELS} x {PICTURE_PIXELS} that are nowhere stored, {CLIENTS} "
        "requests in flight. The command runs on the engine's two cores, and reads, names and "
        "encodes the files; the other client has nothing to do but to send. Without the half "
        "second that the command takes to start."
    )
    columns = ("the client", "pictures a second", "share of ready bytes")
    table = Table("An encode engine that is filled ahead", columns, note)
    base = readings.median(READY)
    for name in (READY, WARM):
        table.add(name, readings.median(name), readings.median(name) / base)
    return table


def _send(engine: EngineProcess, num_pictures: int) -> float:
    """Send new pictures as ready bytes; return the seconds."""
    messages = [_message(engine.model, _picture()) for _ in range(num_pictures)]

    async def send() -> float:
        loop = asyncio.get_running_loop()
        client, began_s = Client(engine.port.number), loop.time()
        replies = await by_clients(client.ask, messages, CLIENTS)
        client.close()
        assert all(reply.status == 200 for reply in replies)
        return loop.time() - began_s

    return asyncio.run(send())


def _picture() -> str:
    return picture(next(_numbers), PICTURE_PIXELS)


def _message(model: str, url: str) -> list[bytes]:
    part = {"type": "image_url", "image_url": {"url": url}, "uuid": identity("image", url)}
    body = {
        "model": model,
        "messages": [{"role": "user", "content": [part]}],
        "max_tokens": 1,
        "ec_transfer_params": {"ecshare_save": True},
    }
    return post("/v1/chat/completions", json.dumps(body).encode())


def _warm(engine: EngineProcess, folder: Path, num_pictures: int) -> float:
    """Have the command send a folder of new pictures; return how many a second."""
    folder.mkdir()
    for number in range(num_pictures):
        body = base64.b64decode(_picture().partition(",")[2])
        (folder / f"{number}.png").write_bytes(body)
    command = [sys.executable, "-m", "ecshare", "warm", str(folder), "--json"]
    command += [f"--encoder={engine.base_url}", f"--concurrency={CLIENTS}"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    told = json.loads(ended.stdout)
    assert told["samples"]["new"] == num_pictures, told
    return float(told["new_a_second"])


if __name__ == "__main__":
    main(sys.argv[1:])
