# SPDX-License-Identifier: Apache-2.0
"""`ecshare cost`: models, price lists, months, and wrong arguments. docs/costs.md has its sums."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ecshare.cli import main
from ecshare.commands.costing import Prices, dollars, month, prompt, times

Cost = Callable[..., tuple[int, str]]
ALWAYS = ("--tokens", "1000", "--prefill-rate", "1000")


@pytest.fixture
def cost(capsys: pytest.CaptureFixture[str]) -> Cost:
    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["cost", *arguments])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out + printed.err

    return run


def write(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


PLAIN = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}
MODELS = [
    (PLAIN, 4 * 2 * 8 * 8 * 2),
    (PLAIN | {"num_key_value_heads": 2, "head_dim": 16, "dtype": "float32"}, 4 * 2 * 2 * 16 * 4),
    ({"thinker_config": {"text_config": PLAIN}, "torch_dtype": "float16"}, 4 * 2 * 8 * 8 * 2),
    (PLAIN | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 4 * 576 * 2),
    (PLAIN | {"full_attention_interval": 4}, 2 * 8 * 8 * 2),
    (PLAIN | {"layer_types": ["linear_attention", "full_attention", "sliding_attention", "conv"]},
     2 * 2 * 8 * 8 * 2),
]  # fmt: skip


@pytest.mark.parametrize(("config", "token_bytes"), MODELS)
def test_bytes_of_a_token_follow_from_the_models_configuration(
    cost: Cost, tmp_path: Path, config: dict[str, Any], token_bytes: int
) -> None:
    for path in (write(tmp_path, **config), f"{tmp_path}/config.json"):
        status, text = cost("--model", path, *ALWAYS, "--json")
        assert status == 0, text
        assert json.loads(text)["bytes"] == 1000 * token_bytes


def test_options_override_the_models_configuration(cost: Cost, tmp_path: Path) -> None:
    model = write(tmp_path, **PLAIN)
    status, text = cost("--model", model, *ALWAYS, "--layers", "2", "--kv-heads", "1", "--json")
    assert status == 0
    assert json.loads(text)["bytes"] == 1000 * 2 * 2 * 1 * 8 * 2
    assert json.loads(cost("--token-bytes", "7", *ALWAYS, "--json")[1])["bytes"] == 7000


def test_deepstack_embeddings_are_counted(cost: Cost, tmp_path: Path) -> None:
    vision = {"deepstack_visual_indexes": [8, 16, 24]}
    model = write(tmp_path, text_config=PLAIN, vision_config=vision)
    pictures = ("--pictures", "2", "--picture-tokens", "100", "--encode-ms", "10")
    status, text = cost("--model", model, *pictures, "--json")
    assert status == 0
    assert json.loads(text)["bytes"] == 100 * 64 * 4 * 2


def test_month_counts_uses_of_prompts_and_of_pictures(cost: Cost) -> None:
    arguments = ("--token-bytes", "1000", "--chunk-tokens", "500", "--hidden-size", "500",
                 "--pictures", "2", "--picture-tokens", "10", "--encode-ms", "10",
                 "--requests-a-day", "100", "--hit-rate", "25", "--hours", "12")  # fmt: skip
    status, text = cost(*ALWAYS, *arguments, "--json")
    assert status == 0
    kv, picture = (json.loads(line)["month"] for line in text.splitlines())
    assert kv["num_puts"] == 3000 * 0.75 * 2
    assert kv["num_gets"] == 3000 * 32 + 3000 * 0.25 * 2
    assert kv["stored_gb"] == pytest.approx(75 * 0.5 * 1e-3)
    assert kv["written_gb"] == pytest.approx(2250 * 1e-3)
    assert kv["read_gb"] == pytest.approx(750 * 1e-3)
    assert picture["num_puts"] == 6000 * 0.75
    status, text = cost(*ALWAYS, *arguments)
    assert status == 0
    assert re.search(r"^a month +puts +gets", text, re.MULTILINE)


def test_hit_rate_that_pays_balances_cost_and_savings() -> None:
    prices = Prices(put=5, get=0.4, gb_month=0.023, gb_read=0.01)
    unit = prompt(4096, 131072, 3000)
    once = dollars(unit, prices, 24, 20)
    found = month(unit, once, 24, 1000, once.hit_rate_that_pays)
    assert 0 < once.hit_rate_that_pays < 1
    assert found.store_dollars == pytest.approx(found.saved_dollars)


def test_prefix_that_pays_is_loaded_as_fast_as_computed() -> None:
    unit = prompt(4096, 131072, 3000)
    share = times(unit, 1e9, 0.03).pays_from_share
    part = times(prompt(1, 131072, 3000), 1e9, 0.03)
    tokens = share * 4096
    assert 0.03 + tokens * (part.load_s - 0.03) == pytest.approx(tokens * part.compute_s)


def test_loads_that_never_pay_are_reported(cost: Cost) -> None:
    status, text = cost("--token-bytes", "131072", *ALWAYS, "--gpu-hour", "0", "--gb-per-s", "0.1",
                        "--requests-a-day", "1", "--hit-rate", "0")  # fmt: skip
    assert status == 0
    assert text.count("never") == 2
    assert "computing is faster, however long the prefix" in text
    status, text = cost("--token-bytes", "131072", *ALWAYS, "--gpu-hour", "0", "--json")
    assert json.loads(text)["loads_that_pay"] is None


def test_prices_are_a_name_a_file_or_written_out(cost: Cost, tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    file.write_text('{"put": 10, "get": 1, "gb_month": 0, "gb_read": 0.5}')
    for prices in (str(file), "put=10,get=1,gb_month=0,gb_read=0.5"):
        _, text = cost("--token-bytes", "1000", *ALWAYS, "--prices", prices, "--json")
        found = json.loads(text)["dollars"]
        assert found["store"] == pytest.approx(4 * 10e-6)
        assert found["load"] == pytest.approx(36 * 1e-6 + 1e-3 * 0.5)
    _, text = cost("--token-bytes", "1000", *ALWAYS, "--prices", "folder", "--json")
    assert json.loads(text)["dollars"]["store"] == 0


BAD_PRICES = ["nothing", "put=1", "put=-1,get=1,gb_month=1", "put=nan,get=1,gb_month=1",
              "put=1,get=1,gb_month=1e400", "put=1,get=1,gb_month=1,puts=1",
              "put=9999999,get=1,gb_month=1"]  # fmt: skip
WRONG = [
    *((("--token-bytes", "1", *ALWAYS, "--prices", each), "'--prices': ") for each in BAD_PRICES),
    ((), "--tokens: missing"),
    (("--tokens", "10"), "--prefill-rate: missing"),
    (("--tokens", "10", "--prefill-rate", "5"), "--layers: missing"),
    (("--tokens", "10", "--prefill-rate", "5", "--layers", "2"), "--kv-heads: missing"),
    (("--tokens", "-10"), "'--tokens': '-10'"),
    (("--tokens", "nan"), "'--tokens': 'nan'"),
    (("--tokens", "9" * 30), "'--tokens'"),
    (("--prefill-rate", "0"), "'--prefill-rate': '0'"),
    (("--prefill-rate", "inf"), "'--prefill-rate': 'inf'"),
    (("--gb-per-s", "-1"), "'--gb-per-s': '-1'"),
    (("--hit-rate", "101"), "'--hit-rate': '101'"),
    (("--gpu-hour", "\x1b[2J"), "'--gpu-hour': '\\x1b[2J'"),
    ((*ALWAYS, "--token-bytes", "1", "--requests-a-day", "5"), "--hit-rate: missing"),
    (("--pictures", "1"), "--encode-ms: missing"),
    (("--pictures", "1", "--encode-ms", "5"), "--picture-tokens: missing"),
    (("--pictures", "1", "--encode-ms", "5", "--picture-tokens", "9"), "--hidden-size: missing"),
    (("--model", "/no/such/model", *ALWAYS), "--model: /no/such/model"),
    (("--dtype-bytes", "3"), "'--dtype-bytes': '3'"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_wrong_argument_is_named_with_status_2(
    cost: Cost, arguments: tuple[str, ...], words: str
) -> None:
    status, text = cost(*arguments)
    assert status == 2, text
    assert words in text
    assert "Traceback" not in text
    assert "\x1b" not in text


BAD_FILES = [b"", b"[]", b"{", b"[" * 100_000, b"\xff", b'{"put": 1e999}', b'{"put": NaN}',
             b" " * 100_000, b'{"put": "\x1b"}']  # fmt: skip
BAD_CONFIGS = [*BAD_FILES, b'{"num_hidden_layers": -1}', b'{"num_hidden_layers": 1e999}',
               b'{"num_hidden_layers": true}', b'{"num_hidden_layers": "\x1b[2J"}',
               b'{"layer_types": []}', b'{"mamba_d_state": 5, "num_hidden_layers": 5}',
               b'{"num_hidden_layers": 5, "num_attention_heads": 0}',
               b'{"num_hidden_layers": 99999999999}', b" " * (2 << 20)]  # fmt: skip


@pytest.mark.parametrize("text", BAD_FILES)
def test_damaged_price_list_is_named_with_status_2(cost: Cost, tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "prices"
    file.write_bytes(text)
    status, printed = cost("--token-bytes", "1", *ALWAYS, "--prices", str(file))
    assert (status, "'--prices': " in printed) == (2, True), printed
    assert "\x1b" not in printed


@pytest.mark.parametrize("text", BAD_CONFIGS)
def test_damaged_configuration_is_named_with_status_2(
    cost: Cost, tmp_path: Path, text: bytes
) -> None:
    (tmp_path / "config.json").write_bytes(text)
    status, printed = cost("--model", str(tmp_path), *ALWAYS)
    assert status == 2, printed
    assert re.search(r"error: --(?:model|layers|kv-heads): ", printed), printed
    assert "\x1b" not in printed
