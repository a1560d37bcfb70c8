# SPDX-License-Identifier: Apache-2.0
"""Options: of the command line, the environment and files."""

from collections.abc import Callable, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from ecshare.router.options.arguments import parse_arguments
from ecshare.router.options.config import RouterConfig

D = "--decoder=http://d:3"
OPTION = "ECSHARE_ROUTER_OPTION_"
Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Return what is said of options that are wrong."""

    def said(arguments: Sequence[str], **environment: str) -> str:
        with pytest.raises(SystemExit) as ended:
            parse_arguments(arguments, environment=environment)
        assert ended.value.code == 2
        return capsys.readouterr().err

    return said


def test_every_option_arrives() -> None:
    line = (
        "--encoder http://e1:1 --encoder http://e2:1/ --prefiller https://p/base "
        "--decoder http://d:3 --allow-media-domain Example.org --allow-media-network 10.0.0.0/8 "
        "--allow-media-network fd00::1 --max-body-mb 0.5 --max-media-mb 2 --max-in-flight-mb 9 "
        "--max-index-mb 2 --access-log"
    )
    same: dict[str, Any] = {  # under the field's own name
        "host": "0.0.0.0", "port": 9, "max_items": 3, "max_connections": 7, "timeout_s": 30.0,
        "client_timeout_s": 1.5, "first_byte_timeout_s": 9.0, "stage_timeout_s": 4.5,
        "media_timeout_s": 2.0, "cool_down_s": 1.0, "drain_s": 0.5, "hand_over": "after",
        "prefill": "always", "max_new_tokens": 0, "when_overloaded": "decode", "retry_share": 0.0,
        "max_encodes": 1, "max_prefills": 2, "max_decodes": 3, "balance": "load",
        "adapter_encoders": "base",
    }  # fmt: skip
    words = [f"--{name.replace('_', '-')}={value}" for name, value in same.items()]
    assert parse_arguments([*line.split(), *words]) == RouterConfig(
        encoders=("http://e1:1", "http://e2:1"),
        prefillers=("https://p/base",),
        decoders=("http://d:3",),
        allow_media_domains=("example.org",),
        allow_media_networks=(ip_network("10.0.0.0/8"), ip_network("fd00::1/128")),
        max_body_bytes=512 * 1024,
        max_media_bytes=2 * 1024 * 1024,
        max_in_flight_bytes=9 * 1024 * 1024,
        max_index_bytes=2 * 1024 * 1024,
        access_log=True,
        **same,
    )


def test_the_defaults_are_the_structs() -> None:
    assert parse_arguments([D]) == RouterConfig(decoders=("http://d:3",))


LOOKS = "must look like http://host:port"
TWICE = "name each engine once"


LINES = [
    ("", "--decoder"),
    ("--decoder d:3", f"--decoder: 'd:3' {LOOKS}"),
    ("--decoder ftp://d", LOOKS),
    ("--decoder http://", LOOKS),
    ("--decoder http://d:99999", "'http://d:99999' is not a url"),
    ("--decoder http://u:p@d", "takes no user"),
    ("--decoder http://d?x=1", "takes no user, query"),
    ("--decoder http://d\\e:80", LOOKS),
    ("--decoder http://a..b:80", LOOKS),
    (f"--decoder http://{'d' * 64}", LOOKS),
    ("--decoder dns+http://.d", LOOKS),
    ("--decoder http://d --encode http://e", "unrecognized arguments"),
    (
        "--decoder http://d --decoder http://d/",
        f"argument --decoder: http://d is already in --decoder; {TWICE}",
    ),
    ("--encoder http://d --decoder http://D:80/v1", "http://d is already in --encoder"),
    (
        "--encoder http://e --prefiller http://e --decoder http://d",
        f"argument --prefiller: http://e is already in --encoder; {TWICE}",
    ),
]
VALUES = [
    ("port", ("0", "x", "65536"), "be a whole number from 1 to 65535"),
    ("timeout-s", ("0", "nan", "x"), "be a number above 0 and below 1e9"),
    ("max-items", ("0", "x"), "be a whole number of at least 1"),
    ("max-decodes", ("-1", "x"), "be a whole number of at least 0"),
    ("retry-share", ("2", "nan", "x"), "be a number from 0 to 1"),
    ("hand-over", ("never",), "be one of streamed, after, direct"),
    (
        "allow-media-network",
        ("x", "10.0.0.1/8"),
        "be a network like 10.0.0.0/8 or fd00::/8, or",
    ),
    (
        "forward-header",
        ("Host", "content-length", "X-ECShare-Router", "Connection", "a b", "a:b", "a:", ""),
        "be the name of a header that does not belong to the connection",
    ),
    (
        "allow-origin",
        ("chat.example", "https://a/b", "https://", "https://a, *"),
        "look like https://chat.example",
    ),
    ("otlp-traces-endpoint", ("collector.example:4317",), "look like http:"),
]
VARIABLES = [
    ("MAX_ITEMS", "x", "MAX_ITEMS: 'x' must be a whole number of at least 1"),
    ("MAX_ITEM", "1", "MAX_ITEM: the router has no option 'max-item'; did you mean max-items?"),
    ("BALANCE", "luck", "BALANCE: 'luck' must be one of affinity, load"),
    ("ACCESS_LOG", "yes", "ACCESS_LOG: 'yes' must be true or false"),
    ("STATUS_KEY", "the key itself", "STATUS_KEY: a key is given as env:NAME or file:"),
    ("CONFIG", "/router.toml", "CONFIG: the router has no option 'config'"),
    ("ENCODER", "http://d:3", "http://d:3 is already in --encoder"),
]


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        *((line.split(), {}, message) for line, message in LINES),
        *(
            ([D, f"--{name}={value}"], {}, f"argument --{name}: {value!r} must {reason}")
            for name, values, reason in VALUES
            for value in values
        ),
        *(([D], {OPTION + name: value}, message) for name, value, message in VARIABLES),
    ],
)
def test_what_is_wrong_is_refused_with_the_reason(
    arguments: list[str], environment: dict[str, str], message: str, refused: Refused
) -> None:
    said = refused(arguments, **environment)
    assert message in said
    assert "the key itself" not in said


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        ("http://h:8003/v1", "http://h:8003"),
        ("http://h:8003/v1/", "http://h:8003"),
        ("http://h:8003/prefix/v1", "http://h:8003/prefix"),
        ("http://h:8003/prefix//v1//", "http://h:8003/prefix"),
        ("http://h:8003/prä fix%20/v1", "http://h:8003/pr%C3%A4%20fix%20"),
        ("http://h:8003/v1beta", "http://h:8003/v1beta"),
        ("HTTP://Host.Example:80/", "http://host.example"),
        ("https://h:443", "https://h"),
        ("https://h:80", "https://h:80"),
        ("http://[FD00::1]:8003/v1", "http://[fd00::1]:8003"),
    ],
)
def test_an_engines_url_is_its_base(given: str, understood: str) -> None:
    assert parse_arguments(["--decoder", given]).decoders == (understood,)


def test_help_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    said = capsys.readouterr().out
    assert "--stage-timeout-s SECONDS" in said
    assert "(default: all public hosts)" in said
    assert "[]" not in said


def test_engines_come_from_a_file(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "engines.json"
    path.write_text('{"decoders": ["http://D:3/", "dns+http://All/v1"], "encoders": ["http://e"]}')
    given = ["--engines", str(path)]
    assert parse_arguments(given) == RouterConfig(
        encoders=("http://e",), decoders=("http://d:3", "dns+http://all"), engines_file=path
    )
    for stage in ("--decoder", "--encoder"):
        message = "--engines: the file names all engines; give no others"
        assert message in refused([*given, stage, "http://d"])
    path.write_text('{"decoders": [{"url": "http://D:3/", "models": ["m"]}]}')
    assert parse_arguments(given).decoders == ("http://d:3",)
    said = refused(["--engines", str(tmp_path)])
    assert f"argument --engines: {tmp_path} cannot be read: Is a directory" in said


def test_options_come_from_a_file_the_environment_and_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text(
        'decoder = ["http://D:3/", "http://e"]\nmax-items = 3\nmax-body-mb = 0.5\n'
        'access-log = true\nport = 1\nallow-media-domain = "a.example"\nbalance = "load"\n'
    )
    environment = {
        f"{OPTION}PORT": "2",
        f"{OPTION}MAX_ITEMS": "4",
        f"{OPTION}ALLOW_MEDIA_NETWORK": "10.0.0.0/8 fd00::/8",
        f"{OPTION}MEDIA_PROXY_RESOLVES": "true",
        "ECSHARE_ROUTER_PORT": "tcp://10.0.0.1:8000",  # from Kubernetes
    }
    given = ["--config", str(path), "--port", "3"]
    assert parse_arguments(given, environment=environment) == RouterConfig(
        decoders=("http://d:3", "http://e"),
        max_items=4,
        max_body_bytes=512 * 1024,
        access_log=True,
        port=3,
        allow_media_domains=("a.example",),
        allow_media_networks=(ip_network("10.0.0.0/8"), ip_network("fd00::/8")),
        media_proxy_resolves=True,
        balance="load",
    )


def test_values_given_once_replace_those_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text('decoder = ["http://a", "http://b"]\naccess-log = true\n')
    given = [D, "--config", str(path)]
    environment = {f"{OPTION}ACCESS_LOG": "false"}
    parsed = parse_arguments(given, environment=environment)
    assert (parsed.decoders, parsed.access_log) == (("http://d:3",), False)


OF_OPTIONS = [
    (b"max-items = 0", "file: max-items: '0' must be a whole number of at least 1"),
    (b"max-items = [1, 2]", "file: max-items: it can be given once only"),
    (b"max-items = []", "file: max-items: it can be given once only"),
    (b"max_items = 1", "file: max_items: the router has no option 'max_items'; did you mean"),
    (b"port = 2026-11-27", "file: port: it must be a text, a number, true or false"),
    (b"[router]\nport = 1", "file: router: it must be a text, a number, true or false"),
    (b"port = ", "file is no TOML: "),
    (b"\xff", "file is no TOML: "),
    (b"a = " + b"[" * 5000, "file is no TOML: "),
    (b"#" * (1 << 20) + b"#", "file: it is larger than 1048576 bytes"),
    (None, "file cannot be read: No such file or directory"),
]
OF_ENGINES = [
    (b"", "file: Input data was truncated"),
    (b"[]", "file: Expected `object`, got `array`"),
    (b'{"decoders": ["http://d"], "decoder": []}', "unknown field `decoder`"),
    (b'{"encoders": ["http://e"]}', "missing required field `decoders`"),
    (b'{"decoders": []}', "decoders: name at least one engine"),
    (b'{"decoders": [5]}', "Expected `str | object`, got `int` - at `$.decoders[0]`"),
    (b'{"decoders": ["d:3"]}', f"'d:3' {LOOKS}"),
    (b'{"decoders": ["dns+https://d"]}', f"'https://d' {LOOKS}"),
    (b'{"decoders": [{"models": ["m"]}]}', "missing required field `url` - at `$.decoders[0]`"),
    (b'{"decoders": [{"url": "http://d", "models": []}]}', "of length >= 1 - at `$.decoders[0]"),
    (b'{"decoders": [{"url": "http://d", "model": "m"}]}', "unknown field `model` - at `$.dec"),
    (
        b'{"decoders": ["http://d"], "encoders": [{"url": "http://d/v1"}]}',
        "decoders: http://d is already in encoders",
    ),
    (b'{"decoders": ["' + b"x" * 1024 * 1024 + b'"]}', "it is larger than 1048576 bytes"),
    (b"[" * 100_000, "file: "),
    (b'{"decoders": ["\xff"]}', "file: "),
]


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [*(("config", *each) for each in OF_OPTIONS), *(("engines", *each) for each in OF_ENGINES)],
    ids=range(26),
)
def test_a_wrong_file_is_refused_with_the_reason(
    option: str, content: bytes | None, message: str, tmp_path: Path, refused: Refused
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    said = refused([f"--{option}", str(path), *([D] if option == "config" else [])])
    assert str(path) in said
    assert message in said
