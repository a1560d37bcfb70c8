# SPDX-License-Identifier: Apache-2.0
"""Encode, prefill and decode engines whose store loses all that they are about to read.

Each engine has a budget and cleans the store itself; then a program removes everything, again and
again. The tokens stay those of a single engine.
"""

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest

from lab.servers import engines as engine_module
from lab.servers.engines import EngineProcess, ModelRunner, ec_argument, kv_argument
from lab.servers.router import RouterProcess
from tests.conftest import LOGS, StartEngine
from tests.engines import cleaning_often
from tests.engines.chat import QUESTION, Answer, ask, picture, text
from tests.engines.runners import on_each_runner
from tests.expiry import expire
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.nightly, on_each_runner]

BLOCK = 32
MOST_BYTES = {"ec": 100_000, "kv": 500_000}
STORY = "Tell me a story about the sea, the wind and the stars. " * 8
MOST_ROUNDS = 10
_numbers = itertools.count()


class Fleet(NamedTuple):
    plain: EngineProcess
    engines: tuple[EngineProcess, ...]
    router: RouterProcess
    store: Path

    def check(self, number: int = -1) -> Answer:
        """Ask about this picture, or a new one; the tokens are those of the plain engine."""
        number = next(_numbers) if number < 0 else number
        content = [text(f"{number}: {STORY}"), picture(number), QUESTION]
        answer = ask(self.router, self.plain.model, content)
        assert answer.tokens == ask(self.plain, self.plain.model, content).tokens, number
        return answer

    def sizes(self, kind: str) -> dict[Path, int]:
        """Return the objects of a kind, and their sizes."""
        found = {}
        for path in self.store.glob(f"{kind}/2/*/??/*"):
            try:
                found[path] = path.stat().st_size
            except FileNotFoundError:
                continue
        return found


@pytest.fixture(scope="module")
def fleet(
    engine: StartEngine,
    plain: EngineProcess,
    tmp_path_factory: pytest.TempPathFactory,
    runner: ModelRunner,
) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("expiry")
    store = f"file://{root}/store"

    def ec(role: str, name: str) -> str:
        return ec_argument(role, store, host_cache_dir=f"{root}/{name}-host")

    def stage(name: str) -> EngineProcess:
        host = f"{root}/{name}-host"
        most = MOST_BYTES["kv"]
        kv = kv_argument("both", store, host_cache_dir=host, chunk_tokens=2 * BLOCK, max_bytes=most)
        return engine(name, f"--block-size={BLOCK}", kv, ec("consumer", name), runner=runner)

    e_argument = ec_argument(
        "producer", store, host_cache_dir=f"{root}/e-host", max_bytes=MOST_BYTES["ec"]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "MODULE", cleaning_often.__name__)
        e, p, d = engine("e", e_argument), stage("p"), stage("d")
    for each in (plain, e, p, d):
        each.wait_ready()
    by_stage = {"encoder": [e], "prefiller": [p], "decoder": [d]}
    with RouterProcess("router", LOGS / __name__, by_stage) as router:
        router.wait_ready()
        yield Fleet(plain, (e, p, d), router, root / "store")


def test_engines_keep_their_store_within_the_budget_themselves(fleet: Fleet) -> None:
    seen: dict[str, dict[Path, int]] = {kind: {} for kind in MOST_BYTES}

    def is_enough() -> bool:
        for kind, of_kind in seen.items():
            of_kind |= fleet.sizes(kind)
        return all(sum(seen[kind].values()) > 3 * most for kind, most in MOST_BYTES.items())

    while not is_enough():
        fleet.check()
        fleet.check(0)

    def is_within(kind: str) -> bool:
        return sum(fleet.sizes(kind).values()) <= MOST_BYTES[kind]

    wait_until(lambda: all(map(is_within, MOST_BYTES)))
    e, p, d = ("cleaned the store" in each.log_path.read_text() for each in fleet.engines)
    assert e
    assert p or d
    fleet.check(0)
    fleet.check()


def test_expiry_of_everything_under_a_running_fleet_changes_no_token(fleet: Fleet) -> None:
    fleet.check()
    # Once: engines renew their manifests within hours.
    expire(fleet.store)
    clean = [sys.executable, "-m", "ecshare", "gc", str(fleet.store), "--max-bytes", "0"]
    cleaner = subprocess.Popen([*clean, "--every=0.001", "--json"], stdout=subprocess.PIPE)
    assert cleaner.stdout is not None
    removed: Counter[str] = Counter()

    def read(lines: Iterable[bytes]) -> None:
        for line in lines:
            rows = json.loads(line)["rows"]
            removed.update({row["kind"]: row["num_removed"] for row in rows})

    reader = Thread(target=read, args=(cleaner.stdout,))
    reader.start()
    try:
        for _turn in range(MOST_ROUNDS):
            asked = [next(_numbers) for _ in range(6)]
            with ThreadPoolExecutor(3) as clients:
                assert len([*clients.map(fleet.check, [*asked, *asked, *asked[:3]])]) == 15
            if removed["ec"] > 3 and removed["kv"] > 10:
                break
    finally:
        cleaner.terminate()
        reader.join()
        cleaner.stdout.close()
        cleaner.wait()
    assert removed["ec"] > 3
    assert removed["kv"] > 10

    def is_stored_again() -> bool:
        fleet.check()
        return all(fleet.sizes(kind) for kind in MOST_BYTES)

    wait_until(is_stored_again)
