# SPDX-License-Identifier: Apache-2.0
"""A package index on loopback, and wheels of a few lines to put into it."""

import functools
import http.server
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def make_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, str], *requires: str
) -> None:
    """Put a wheel into `folder`/`name`, where pip's simple interface looks for it."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    everything = {
        **files,
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {each}\n" for each in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*everything, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / name / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**everything, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


class Index:
    """A running index: its address, and the requested paths."""

    def __init__(self, url: str, asked: list[str]) -> None:
        self.url = url
        self.asked = asked


@contextmanager
def serve(folder: Path) -> Iterator[Index]:
    """Serve `folder` as a package index while the block runs."""
    folder.mkdir(parents=True, exist_ok=True)
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, _: str, *args: object) -> None:
            asked.append(str(args[0]))

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Index(f"http://127.0.0.1:{server.server_port}/", asked)
        finally:
            server.shutdown()
            thread.join()
