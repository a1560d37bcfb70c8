# SPDX-License-Identifier: Apache-2.0
"""The GPU kit: its checks on a CPU, and its output without a GPU."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from lab.gpu_kit import embeddings, kv, memory, staging, steps
from lab.gpu_kit.driver import Pinned
from lab.gpu_kit.kit import Bench, Check, Result, Skipped, play
from lab.gpu_kit.layouts import DTYPES, LAYOUTS, SMALL, make_cache
from lab.gpu_stand_in import Gpu, stand_in
from tests.docs.pages import ROOT
from tests.nightly import gate_tries, gate_tries_only

CHECKS = [check for part in (staging, kv, embeddings, memory, steps) for check in part.CHECKS]


def run(*arguments: str, without: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run the kit in a new Python process without a GPU and without some packages."""
    program = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({list(without)})); "
        f"sys.argv[1:] = {list(arguments)}; runpy.run_module('lab.gpu_kit', run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("without", gate_tries([], ["torch"], ["blake3", "vllm"]))
def test_kit_without_a_gpu_skips_all_with_one_line(without: list[str]) -> None:
    ran = run(without=without)
    assert ran.returncode == 0, ran.stderr
    (line,) = ran.stdout.splitlines()
    assert "all is skipped" in line
    assert ("torch is not installed" if "torch" in without else "no CUDA device") in line


def test_missing_packages_are_named() -> None:
    ran = run("--device", "cpu", without=["blake3", "msgspec"])
    assert ran.returncode == 2
    assert "pip install msgspec blake3`" in ran.stderr


def test_missing_packages_of_the_router_are_named_before_engines_start() -> None:
    ran = run("--device", "cpu", "--only", "engines", without=["pycares"])
    assert ran.returncode == 2
    assert "pip install pycares`" in ran.stderr


@pytest.mark.nightly
def test_kit_runs_without_vllm() -> None:
    ran = run("--device", "cpu", without=["vllm", "pytest", "transformers"])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " 0 FAILED" in ran.stdout
    played = [line for line in ran.stdout.splitlines() if line.startswith("ok ")]
    assert len(played) > 10
    skipped = [line for line in ran.stdout.splitlines() if line.startswith("skipped")]
    assert all("needs a GPU" in line or "needs vLLM" in line for line in skipped), skipped


class StandInBench(Bench):
    """A bench whose device is always busy."""

    def __init__(self, gpu: Gpu, root: Path) -> None:
        super().__init__(torch.device("cpu"), root)
        self._gpu = gpu

    def finish(self) -> None:
        self._gpu.finish()


# The test above plays all of them on a plain CPU. The order of the device's work shows only here.
GATE = [CHECKS[0], kv.kv_saves_do_not_wait_for_the_device]


@pytest.mark.parametrize("check", gate_tries_only(GATE, CHECKS))
def test_checks_pass_on_a_cpu_standing_in_for_a_gpu(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = play(check, StandInBench(stand_in(monkeypatch, is_busy=True), tmp_path))
    if result.verdict == "skipped":
        pytest.skip(result.said)
    assert result.verdict == "ok", result.said


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_layouts_equal_vllms(dtype: torch.dtype) -> None:
    assert [each.name for each in KVCacheLayout] == list(LAYOUTS)
    spec = FullAttentionSpec(
        block_size=SMALL.block_tokens,
        num_kv_heads=SMALL.heads,
        head_size=SMALL.content // 2,
        dtype=dtype,
    )
    num_bytes = spec.page_size_bytes * SMALL.blocks * SMALL.layers
    names = [str(number) for number in range(SMALL.layers)]
    for layout in KVCacheLayout:
        strides = compute_layout_strides(spec, SMALL.blocks, SMALL.layers, layout)
        tensor = KVCacheTensor(
            size=num_bytes, layers=names, layer_stride=strides[0], block_stride=strides[1]
        )
        memory_ = torch.zeros(num_bytes, dtype=torch.int8)
        theirs = create_kv_cache_views(memory_, spec, SMALL.blocks, layout, tensor, None)
        ours = make_cache(SMALL, layout.name, dtype, torch.device("cpu"))
        for layer, view in zip(ours, theirs, strict=True):
            assert (layer.shape, layer.stride()) == (view.shape, view.stride()), layout.name
            assert layer.dtype == view.dtype
        distances = {one.storage_offset() - ours[0].storage_offset() for one in ours}
        assert distances == {each.storage_offset() - theirs[0].storage_offset() for each in theirs}


# --- features of a GPU, with a simulated driver ---


class Cuda:
    """The part of torch.cuda that the kit uses; the device works until a call waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_working = False
        self.mode = "default"
        monkeypatch.setattr(torch.cuda, "_sleep", lambda _: self.work(True))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: self.work(False))
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set_mode)
        event = SimpleNamespace(record=lambda: None, query=lambda: not self.is_working)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)

    def work(self, is_working: bool) -> None:
        self.is_working = is_working

    def set_mode(self, mode: str) -> None:
        self.mode = mode


def test_hook_that_waits_for_the_device_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cuda = Cuda(monkeypatch)
    bench = Bench(torch.device("cuda:0"), tmp_path)
    warm_up, watched = bench.rounds()
    with warm_up:
        assert cuda.mode == "default"
    with watched:
        assert (cuda.mode, cuda.is_working) == ("error", True)
    assert (cuda.mode, cuda.is_working) == ("default", False)
    with pytest.raises(AssertionError, match="waited"), bench.without_waits():
        torch.cuda.synchronize()
    with bench.without_waits(unjudged="no other way"):
        torch.cuda.synchronize()
    assert bench.notes == ["a hook has waited for the device: no other way"]
    with pytest.raises(RuntimeError), bench.without_waits():
        raise RuntimeError("called a synchronizing CUDA operation")
    assert (cuda.mode, cuda.is_working) == ("default", False)


def test_pinned_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = 3
    runtime: Any = SimpleNamespace(
        cudaHostRegister=lambda address, *_: int(address == refused),
        cudaHostUnregister=lambda _: 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with Pinned().watching() as pinned:
        for address in (1, 2, refused):
            runtime.cudaHostRegister(address, 100, 0)
        runtime.cudaHostUnregister(1)
        assert (pinned.num_bytes, pinned.most_bytes) == (100, 200)
    runtime.cudaHostRegister(4, 100, 0)
    assert pinned.num_bytes == 100


def test_result_describes_the_outcome_of_a_check(tmp_path: Path) -> None:
    def fails(bench: Bench) -> None:
        bench.notes.append("seen")
        raise ValueError("why")

    def cannot(bench: Bench) -> None:
        raise Skipped("needs more")

    bench = Bench(torch.device("cpu"), tmp_path)
    failed, skipped = play(fails, bench), play(cannot, bench)
    assert (failed.verdict, failed.notes) == ("FAILED", ("seen",))
    assert "ValueError: why" in failed.line()
    assert (skipped.verdict, skipped.said, skipped.notes) == ("skipped", "needs more", ())
    assert Result("it", "ok", seconds=1.25).line() == "ok       it (1.2 s)"
