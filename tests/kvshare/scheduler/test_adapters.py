# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: KV is shared between adapters of equal content, whatever their names."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

import kvshare.scheduler.adapters as module
from tests.kvshare.conftest import StartEngine, spin
from tests.kvshare.toy import (
    BLOCK,
    WEIGHTS,
    Answer,
    ToyEngine,
    expected_answer,
    make_request,
    objects,
    serve,
)
from tests.waiting import wait_until

PROMPT = list(range(100, 100 + 5 * BLOCK + 3))
OLD, NEW = b"old weights", b"new weights"


def adapter(folder: Path, weights: bytes, name: str = "tuned") -> LoRARequest:
    """Write an adapter to `folder`, replacing the former one."""
    folder.mkdir(exist_ok=True)
    scratch = folder / "scratch"
    scratch.write_bytes(weights)
    scratch.rename(folder / WEIGHTS)
    return LoRARequest(name, 1, str(folder))


def ask(
    engine: ToyEngine,
    lora: LoRARequest,
    flavour: bytes,
    prompt: Sequence[int] = PROMPT,
    name: str = "r",
) -> Answer:
    (answer,) = engine.run(make_request(name, prompt, 6, lora_request=lora))
    assert answer.tokens == expected_answer(prompt, 6, flavour=flavour)
    return answer


@pytest.mark.parametrize("kv_role", ["kv_both", "kv_producer"])
def test_engines_share_kv_of_the_same_adapter(
    start: StartEngine, tmp_path: Path, kv_role: str
) -> None:
    lora = adapter(tmp_path / "lora", OLD)
    announced = ask(start(kv_role), lora, OLD).kv_transfer_params
    assert announced is not None
    assert announced["kvshare"]["num_tokens"] == len(PROMPT) - 1
    assert ask(start(), lora, OLD).computed_prompt_tokens == 1


def test_retrained_adapter_does_not_load_kv_of_old_weights(
    start: StartEngine, tmp_path: Path
) -> None:
    folder = tmp_path / "lora"
    ask(start(), adapter(folder, OLD), OLD)
    num_old = len(objects(tmp_path))
    lora = adapter(folder, NEW)
    assert ask(start(), lora, NEW).computed_prompt_tokens == len(PROMPT)
    assert len(objects(tmp_path)) == 2 * num_old
    assert ask(start(), lora, NEW).computed_prompt_tokens == 1


def test_3d_lora_flag_changes_the_chunk_keys(start: StartEngine, tmp_path: Path) -> None:
    lora = adapter(tmp_path / "lora", OLD)
    if not hasattr(lora, "is_3d_lora_weight"):
        pytest.skip("this vLLM reads them in one way")
    ask(start(), lora, OLD)
    lora.is_3d_lora_weight = not lora.is_3d_lora_weight
    assert ask(start(), lora, OLD).computed_prompt_tokens == len(PROMPT)
    assert ask(start(), lora, OLD).computed_prompt_tokens == 1


def test_prompt_with_adapter_does_not_share_with_plain_prompt(
    start: StartEngine, tmp_path: Path
) -> None:
    serve(start(), PROMPT)
    lora = adapter(tmp_path / "lora", OLD)
    assert ask(start(), lora, OLD).computed_prompt_tokens == len(PROMPT)
    assert serve(start(), PROMPT).computed_prompt_tokens == 1


def test_kv_of_an_unreadable_adapter_is_not_shared(
    start: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = adapter(tmp_path / "lora", OLD)
    with monkeypatch.context() as patch:
        patch.setattr(module, "adapter_fingerprint", lambda folder: "")
        engine = start()
        assert ask(engine, lora, OLD).kv_transfer_params is None
    assert objects(tmp_path) == []
    assert engine.counts["misses/unidentified"] == 6
    assert "tokens/queried" not in engine.counts
    ask(start(), lora, OLD)
    with monkeypatch.context() as patch:
        patch.setattr(module, "adapter_fingerprint", lambda folder: "")
        assert ask(start(), lora, OLD).computed_prompt_tokens == len(PROMPT), "nor loaded"


def test_adapter_with_tensorizer_config_is_not_shared(start: StartEngine, tmp_path: Path) -> None:
    """vLLM 0.30 and 0.31 may load its weights from another folder than its path."""
    lora = adapter(tmp_path / "lora", OLD)
    if not hasattr(lora, "tensorizer_config_dict"):
        pytest.skip("this vLLM has no such adapters")
    lora.tensorizer_config_dict = {"tensorizer_dir": "/elsewhere"}
    engine = start()
    ask(engine, lora, OLD)
    assert objects(tmp_path) == []
    assert engine.counts["misses/unidentified"] == 6


def test_adapter_changed_after_its_first_read_is_not_shared(
    start: StartEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine may still hold the old weights in memory, and their KV in its local cache."""
    folder = tmp_path / "lora"
    engine = start()
    ask(engine, adapter(folder, OLD), OLD, name="old")
    known = objects(tmp_path)
    lora = adapter(folder, NEW)
    fresh = [7, *PROMPT]
    ask(engine, lora, NEW, fresh, "new")
    ask(engine, lora, NEW, fresh, "again")
    assert caplog.text.count("have changed since this engine first read them") == 1
    ask(engine, adapter(folder, OLD), OLD, [8, *PROMPT], "old again")
    assert objects(tmp_path) == known
    assert engine.counts["misses/unidentified"] == 18
    other = adapter(tmp_path / "elsewhere", NEW, "renamed")
    ask(engine, other, NEW, fresh, "from elsewhere")
    assert len(objects(tmp_path)) > len(known)


def test_adapter_change_stops_saves_of_running_requests(start: StartEngine, tmp_path: Path) -> None:
    folder = tmp_path / "lora"
    engine = start(store={"chunk_tokens": 8 * BLOCK})
    lora = adapter(folder, OLD)
    request = make_request("running", PROMPT, 40, lora_request=lora)
    engine.add(request)
    spin(engine, lambda: bool(engine.answers["running"].tokens), "no tokens")
    new = make_request("new", [7], 1, lora_request=adapter(folder, NEW))
    # Wait until the new files are read, before the running request goes on.
    wait_until(lambda: engine.connector.scheduler.num_loadable_tokens(new, 0) is not None)
    engine.add(new)
    engine.run_out()
    assert len(objects(tmp_path)) == 1, "the tail of the prompt, no more"


def test_request_waits_for_a_fingerprint_at_most_wait_s(
    start: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = threading.Event()
    monkeypatch.setattr(module, "adapter_fingerprint", lambda folder: may_read.wait() and "00" * 16)
    lora = adapter(tmp_path / "lora", OLD)
    engine = start(store={"wait_s": 0.2})
    try:
        assert ask(engine, lora, OLD).kv_transfer_params is None
    finally:
        may_read.set()
    assert objects(tmp_path) == []
    assert engine.counts["misses/unidentified"] == 6
    assert ask(engine, lora, OLD, name="later").kv_transfer_params is not None


def test_adapter_files_are_read_by_a_copy_thread(
    start: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: set[str] = set()

    def noted(folder: Path) -> str:
        readers.add(threading.current_thread().name)
        return "00" * 16

    monkeypatch.setattr(module, "adapter_fingerprint", noted)
    ask(start(), adapter(tmp_path / "lora", OLD), OLD)
    assert {name.partition("_")[0] for name in readers} == {"ecshare-copy"}
