# SPDX-License-Identifier: Apache-2.0
"""The conformance kit finds the faults of vLLM's own example and of connectors broken here.

Each connector below breaks ours in one way, so that a check which no longer sees it is noticed.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector

from ecshare.connector import ECShareConnector
from lab import conformance
from lab.conformance import RULES, Effect, Result, Verdict, __main__, report
from lab.vllm_loop import RunnerName

EXAMPLE = "vllm.distributed.ec_transfer.ec_connector.example_connector"


class Raises(ECShareConnector):
    def has_cache_item(self, identifier: str) -> bool:
        raise OSError("the disk is gone")


class PromisesTooMuch(ECShareConnector):
    def has_cache_item(self, identifier: str) -> bool:
        return True


class WaitsForEver(ECShareConnector):
    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return False


class DelaysTheEnd(ECShareConnector):
    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        return True, super().request_finished(request)[1]


class SpoilsRows(ECShareConnector):
    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        before = set(encoder_cache)
        super().start_load_caches(encoder_cache, **kwargs)
        for identifier in set(encoder_cache) - before:
            encoder_cache[identifier][0, 0] += 1


class NeverRests(ECShareConnector):
    def has_pending_push_work(self) -> bool:
        return True


class Unpicklable(ECShareConnector):
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        orders = super().build_connector_meta(scheduler_output)
        object.__setattr__(orders, "saves", (lambda: None,))
        return orders


class LooksIntoTheStore(ECShareConnector):
    def has_cache_item(self, identifier: str) -> bool:
        os.path.exists("/tmp/somewhere")  # noqa: PTH110, S108
        return super().has_cache_item(identifier)


class Forgets(ECShareConnector):
    def save_caches(self, *args: Any, **kwargs: Any) -> None:
        """Save nothing."""


def play(
    vlm: Path, rule: str, connector: type, runner: RunnerName = "v1", **options: Any
) -> Result:
    options = options or {"url": "{folder}", "host_cache_dir": "{host}", "wait_s": 1}
    subject = conformance.Subject(
        connector.__module__, connector.__name__, options, vlm, patience_s=2
    )
    return conformance.play(subject, RULES[rule], runner, "apart")


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    ("connector", "rule", "effect"),
    [
        (Raises, "removes_finished_requests", Effect.ENGINE_DIES),
        (PromisesTooMuch, "consumers_write_nothing", Effect.ENGINE_DIES),
        (WaitsForEver, "ends_the_wait_for_a_false_announcement", Effect.HANGS),
        (DelaysTheEnd, "removes_finished_requests", Effect.HANGS),
        (SpoilsRows, "loads_without_pixels", Effect.WRONG_ROWS),
        (NeverRests, "ignores_requests_without_media", Effect.HANGS),
        (Unpicklable, "ignores_requests_without_media", Effect.ENGINE_DIES),
        (LooksIntoTheStore, "does_no_io_on_the_scheduler_thread", Effect.EVERYONE_WAITS),
        (Forgets, "loads_without_pixels", Effect.REQUEST_FAILS),
    ],
)
def test_kit_finds_each_broken_connector(
    vlm: Path, connector: type, rule: str, effect: Effect, runner: RunnerName
) -> None:
    found = play(vlm, rule, connector, runner)
    assert (found.verdict, found.effect) == (Verdict.BROKEN, effect), found.said


@pytest.mark.parametrize(
    ("rule", "effect"),
    [
        ("writes_only_inside_its_folder", Effect.ESCAPES),
        ("fails_only_the_request_of_a_lost_item", Effect.ENGINE_DIES),
        ("survives_objects_with_a_bit_flipped", Effect.WRONG_ROWS),
        ("distinguishes_identifiers", Effect.WRONG_ROWS),
        ("distinguishes_lengths", Effect.WRONG_ROWS),
        ("loads_promised_items", Effect.ENGINE_DIES),
        ("saves_on_one_rank", Effect.NO_USE),
        ("does_no_io_on_the_scheduler_thread", Effect.EVERYONE_WAITS),
    ],
)
def test_kit_finds_the_example_connectors_faults(vlm: Path, rule: str, effect: Effect) -> None:
    found = play(vlm, rule, ECExampleConnector, shared_storage_path="{folder}")
    assert (found.verdict, found.effect) == (Verdict.BROKEN, effect), found.said


def test_kit_passes_rules_that_the_example_connector_keeps(vlm: Path) -> None:
    for rule in ("loads_without_pixels", "handles_chunked_prefill", "loads_on_every_rank"):
        found = play(vlm, rule, ECExampleConnector, shared_storage_path="{folder}")
        assert found.verdict is Verdict.HOLDS, found.said


def test_command_writes_a_report_and_fails_for_a_broken_rule(
    vlm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.md"
    command = [
        f"--connector={EXAMPLE}:ECExampleConnector",
        '--extra-config={"shared_storage_path": "{folder}"}',
        *("--runner=v1", "--roles=apart", f"--model={vlm}", f"--report={page}"),
        *("--rule=writes_only_inside_its_folder", "--rule=ignores_requests_without_media"),
    ]
    assert __main__.main(command) == 1
    assert "2 rules, 1 broken" in capsys.readouterr().out
    assert "| `writes_only_inside_its_folder` | a client writes outside" in page.read_text()
    assert __main__.main([*command[:-2], "--rule=ignores_requests_without_media"]) == 0


@pytest.mark.parametrize("wrong", ["--connector=no.such:Class", "--connector=os:Nothing"])
def test_missing_connector_is_named(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        __main__.main([wrong])
    assert wrong.partition("=")[2].partition(":")[2] in capsys.readouterr().err


def test_report_page_escapes_text_for_its_table() -> None:
    rule = RULES["writes_only_inside_its_folder"]
    broken = Result(rule, "v1", "apart", Verdict.BROKEN, "a | b\nc", Effect.ESCAPES, ("a note",))
    written = report.page("Theirs", "0.0", [broken])
    assert "a \\| b c" in written
    assert rule.sentence in written
    assert "- a note" in written


def test_published_page_contains_every_rule() -> None:
    written = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    assert RULES
    for name, rule in RULES.items():
        assert f"| {rule.sentence} {rule.why} `{name}` |" in written
