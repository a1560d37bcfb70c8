# SPDX-License-Identifier: Apache-2.0
"""The place of a check: its folder, its engines with the connector under test, and faults."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm.config import ECTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from lab.conformance.engine import Engine, Ticket
from lab.conformance.violations import Effect, NotApplicable, require
from lab.vllm_loop import RunnerName

Roles = Literal["apart", "both"]

# A picture may have as many embeddings as a step has tokens, so this is also the encoder's budget.
_MAX_TOKENS = 1024


@dataclass(frozen=True)
class Subject:
    """The connector under test.

    In `extra_config`, `{folder}` stands for the folder that all engines share, `{host}` for one
    that only engines of one host use.
    """

    module: str
    class_name: str
    extra_config: Mapping[str, Any]
    model: Path
    patience_s: float = 15.0
    """A request that takes longer counts as hanging."""


class Place:
    """One run of one check. It closes the engines that it started."""

    def __init__(self, subject: Subject, runner: RunnerName, roles: Roles) -> None:
        self.subject = subject
        self.runner = runner
        self.roles = roles
        self._scratch = tempfile.TemporaryDirectory(prefix="ec-conformance-")
        self.root = Path(self._scratch.name)
        # Deep enough that a path with a few ".." in it still ends inside `root`.
        self.folder = self.root / "deep" / "in" / "here" / "shared"
        self.folder.mkdir(parents=True)
        self.notes: list[str] = []
        self._engines: list[Engine] = []

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            for engine in self._engines:
                if kind is None:
                    engine.close()
                else:
                    with suppress(Exception):  # the check has failed already, and reports why
                        engine.close()
        finally:
            self._scratch.cleanup()

    # --- engines ---

    def encoder(self, name: str = "encoder", **settings: Any) -> Engine:
        """Start the engine that encodes first: a producer, or one that is both."""
        return self.engine("ec_producer" if self.roles == "apart" else "ec_both", name, **settings)

    def decoder(self, name: str = "decoder", **settings: Any) -> Engine:
        """Start an engine that answers: a consumer, or one that is both."""
        return self.engine("ec_consumer" if self.roles == "apart" else "ec_both", name, **settings)

    def engine(
        self,
        role: str,
        name: str,
        *,
        host: str = "",
        encoder_cache_embeds: int | None = None,
        **arguments: Any,
    ) -> Engine:
        """Start an engine on `host` (default: one of its own); `arguments` are EngineArgs'."""
        folders = {
            "{folder}": str(self.folder),
            "{host}": str(self.root / "hosts" / (host or name)),
        }
        extra_config = filled(dict(self.subject.extra_config), folders)
        config = self._config(role, extra_config, arguments)
        engine = Engine(name, config, self.runner, self.subject.patience_s, encoder_cache_embeds)
        self._engines.append(engine)
        return engine

    def stop(self, engine: Engine) -> None:
        """Shut an engine down before the check ends."""
        self._engines.remove(engine)
        engine.close()

    def _config(
        self, role: str, extra_config: dict[str, Any], arguments: dict[str, Any]
    ) -> VllmConfig:
        transfer = ECTransferConfig(
            ec_connector=self.subject.class_name,
            ec_connector_module_path=self.subject.module,
            ec_role=role,  # type: ignore[arg-type]
            ec_connector_extra_config=extra_config,
        )
        usual: dict[str, Any] = {
            "model": str(self.subject.model),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": _MAX_TOKENS,
            "max_num_seqs": 8,
            "max_num_batched_tokens": _MAX_TOKENS,
            "limit_mm_per_prompt": {"image": 4, "video": 1},
            "skip_mm_profiling": True,
            "enable_prefix_caching": False,
            "async_scheduling": self.runner == "v2",
        }
        ranks = arguments.pop("ranks", 1)
        config = EngineArgs(
            ec_transfer_config=transfer, **{**usual, **arguments}
        ).create_engine_config()
        config.parallel_config.tensor_parallel_size = ranks
        return config

    # --- files in the shared folder ---

    def files(self) -> dict[Path, tuple[int, int]]:
        """Return every file in the shared folder, with its size and time of modification."""
        found = {}
        for path in sorted(self.folder.rglob("*")):
            with suppress(FileNotFoundError):
                stat = path.stat()
                if path.is_file():
                    found[path] = (stat.st_size, stat.st_mtime_ns)
        return found

    def stored(self, engine: Engine, ticket: Ticket) -> list[Path]:
        """Wait until another engine can load what `engine` encoded; return all files in the folder.

        A witness on a host of its own loads the items of `ticket`, as behind a router.
        """
        witness = self.decoder(f"witness-{len(self._engines)}")
        pictures = [each.without_pixels() for each in ticket.pictures]
        loaded = witness.ask(*pictures, params=ticket.params)
        message = f"another engine cannot load what {ticket.request_id} encoded"
        require(loaded.is_ok, Effect.REQUEST_FAILS, message)
        self.stop(witness)
        engine.idle()
        return list(self.files())

    def stored_files(self, engine: Engine, ticket: Ticket) -> list[Path]:
        """Return the files as `stored` does, at least one.

        Raises:
            NotApplicable: there are none, so this connector stores no embeddings in the folder.
        """
        found = self.stored(engine, ticket)
        if not found:
            raise NotApplicable("it has no files in {folder} that could be lost or damaged")
        return found

    def note(self, message: str) -> None:
        """Add a note to the report, whether the rule holds or not."""
        self.notes.append(message)

    def damage(self, paths: list[Path], fault: Callable[[Path], None]) -> None:
        """Damage files as another process with access to the store could."""
        for path in paths:
            fault(path)

    def outsiders(self) -> list[Path]:
        """Return what was written outside of the folders that the connector was given."""
        given = (self.folder, self.root / "hosts")
        return [
            path
            for path in self.root.rglob("*")
            if not any(each in (path, *path.parents) or path in each.parents for each in given)
        ]


def filled(value: Any, folders: Mapping[str, str]) -> Any:
    """Return `value` with the placeholders in all its texts replaced."""
    if isinstance(value, str):
        for name, path in folders.items():
            value = value.replace(name, path)
        return value
    if isinstance(value, Mapping):
        return {key: filled(each, folders) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, folders) for each in value]
    return value


# --- faults: a new file replaces the old one, so that other hard links keep their bytes ---


def removed(path: Path) -> None:
    """Delete the file."""
    path.unlink()


def emptied(path: Path) -> None:
    """Leave the file empty, as a writer does that dies early."""
    _replace(path, b"")


def cut_in_half(path: Path) -> None:
    """Remove the second half of the file."""
    body = path.read_bytes()
    _replace(path, body[: len(body) // 2])


def with_a_bit_flipped(path: Path) -> None:
    """Flip one bit of the payload."""
    body = bytearray(path.read_bytes())
    if body:
        body[len(body) * 3 // 4] ^= 1
    _replace(path, bytes(body))


def with_other_contents(path: Path) -> None:
    """Replace the file by other bytes."""
    _replace(path, b"not an embedding at all\n" * 1000)


def replaced_by_a_folder(path: Path) -> None:
    """Replace the file by a folder."""
    path.unlink()
    path.mkdir()


def _replace(path: Path, body: bytes) -> None:
    other = path.with_name(f"{path.name}.damaged")
    other.write_bytes(body)
    shutil.copymode(path, other)
    other.replace(path)
