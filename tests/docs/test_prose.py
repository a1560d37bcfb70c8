# SPDX-License-Identifier: Apache-2.0
"""Links, commands and options on the pages exist, and the pages name no machine of ours."""

import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import msgspec
import pytest
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from ecshare.cli import main
from ecshare.commands.group import COMMANDS, Commands, ecshare
from ecshare.encoder.config import EncoderConfig
from ecshare.router.options.arguments import make_parser
from ecshare.store.config import parse
from ecshare.store.keys import Kind, object_key
from kvshare.config import KVConfig, parse_tier
from kvshare.tier.manager import KVShareTier
from lab.servers.stand_in import StandIn
from tests.docs.pages import PAGES, ROOT, commands, json_objects
from tests.ecshare.conftest import start
from tests.metrics_server import metrics_server

# Programs that the pages tell people to run, and the file that runs each in CI.
RUN_BY_TESTS = {
    "examples.shared_cache.two_engines": "tests/engines/test_examples.py",
    "examples.coordinator.ask": "tests/examples/test_coordinator.py",
    "examples.s3.run": "tests/engines/test_examples.py",
    "examples/one_box/run.sh": "examples/s3/run.py",
    "examples/one_box/engine.sh": "examples/one_box/run.sh",
}
# vLLM checks their own options; their JSON is checked below.
ENGINES = ("vllm", "vllm.entrypoints.openai.api_server")
VLLM_OPTIONS = {
    "--allow-credentials",
    "--allowed-origins",
    "--block-size",
    "--enable-expert-parallel",
    "--kv-cache-dtype",
    "--ec-transfer-config",
    "--enable-prompt-tokens-details",
    "--enable-tower-connector-lora",
    "--kv-events-config",
    "--kv-transfer-config",
    "--max-num-batched-tokens",
    "--middleware",
    "--mm-processor-cache-gb",
    "--model",
    "--sse-keep-alive-interval",
    "--tensor-parallel-size",
}
PIP_OPTIONS = {"--constraint"}
CONNECTORS: dict[str, type[Any]] = {"ec": EncoderConfig, "kv": KVConfig}
HOSTS = {
    "10.0.0.1",  # engines' addresses in examples
    "10.0.0.2",
    "10.0.0.3",
    "127.0.0.1",
    "arxiv.org",
    "docs.vllm.ai",
    "filesystem-spec.readthedocs.io",
    "github.com",
    "huggingface.co",
    "keepachangelog.com",
    "s3.example.com",
    "semver.org",
}
HOME = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]

every_page = pytest.mark.parametrize(
    "page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES]
)


def links(page: Path) -> list[str]:
    """Return the targets of all links of `page`, including reference definitions."""
    text = page.read_text()
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^]]+\]: (\S+)$", text, re.M)


@every_page
def test_links_have_a_target(page: Path) -> None:
    for target in links(page):
        ours = re.fullmatch(rf"{re.escape(HOME)}/(?:blob|tree)/main/(.+)", target)
        if ours is None and "://" in target:
            continue
        path, _, anchor = (ours[1] if ours else target).partition("#")
        goal = (ROOT if ours else page.parent) / path if path else page
        assert goal.exists(), target
        assert not anchor or anchor in anchors(goal), target


def test_readme_links_work_on_the_package_index() -> None:
    """The wheel contains it as its description, without other files beside it."""
    targets = links(ROOT / "README.md")
    assert len(targets) > 10
    assert [target for target in targets if not target.startswith("https://")] == []
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"\[([^]]+)\]\[\]|\]\[([^]]+)\]", text))
    defined = set(re.findall(r"^\[([^]]+)\]: ", text, re.M))
    assert {one or other for one, other in named} == defined


def test_readme_has_fewer_than_150_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


def anchors(page: Path) -> set[str]:
    """Return the names that a Markdown viewer gives to the headings of `page`."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in headings}


@every_page
def test_commands_on_pages_are_run_by_tests(page: Path) -> None:
    for words in commands(page):
        while "=" in words[0]:  # settings before a command
            words = words[1:]
        match words:
            case ["make", target, *_]:
                assert target in make_targets(), words
            case [python, "-m", module, *_] if Path(python).name == "python":
                assert module in (*ENGINES, *RUN_BY_TESTS, *modules_with_help()), words
            case [python, program, *_] if Path(python).name in ("python", "bash"):
                assert program in RUN_BY_TESTS, words
            case ["ecshare", command, *_]:
                assert command in COMMANDS, words
            case ["eval", script]:
                assert script == "$(ecshare completion bash)"
            case [program, *_]:
                known = program in ("git", "cd", "curl", "openssl", "pip", "export", "vllm")
                assert known or program in RUN_BY_TESTS, words


OUR_COMMANDS = [
    pytest.param(words[1:], id=f"{page.name}: {' '.join(words)[:60]}")
    for page in PAGES
    for words in commands(page)
    if words[0] == "ecshare" and words[1] != "router"
]


@pytest.mark.parametrize("words", OUR_COMMANDS)
def test_commands_of_ours_run_as_written_on_a_folder(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    servers: dict[str, StandIn],
) -> None:
    """The bucket of the pages is a folder here, and what goes on for ever ends."""
    monkeypatch.chdir(tmp_path)
    facts = {"model": "Qwen/Qwen2.5-VL-7B-Instruct", "tenant": "acme"}
    start(tmp_path, facts, "", object_key(Kind.EC, "0" * 32, "x"))
    if words[0] == "warm":
        words = warmed(words, tmp_path, servers)
    if "--every" in words:
        at = words.index("--every")
        words = words[:at] + words[at + 2 :]
    more = {"bench": ["--seconds", "0.1"], "top": ["--every", "0.1"]}.get(words[0], [])
    with metrics_server("vllm:num_requests_running 1\n") as server:
        here = {"s3://bucket/prefix": f"{tmp_path}/store"}
        if words[0] == "top":
            here |= {word: server.url for word in words if word.startswith("http://")}
        with pytest.raises(SystemExit) as ended:
            main([here.get(word, word) for word in words] + more)
    assert ended.value.code == 0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, StandIn]]:
    """What `ecshare warm` asks, by its option."""
    stages = {"--encoder": "encode", "--prefiller": "prefill", "--server": "decode"}
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        started = {
            option: StandIn(stage, folder, stage).start_in(stack)
            for option, stage in stages.items()
        }
        yield {option: server.wait_ready() for option, server in started.items()}


def warmed(
    words: list[str],
    folder: Path,
    servers: dict[str, StandIn],
) -> list[str]:
    """Return the words for servers that there are; make the corpora that the pages name."""
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.png").write_bytes(b"a picture")
    (folder / "urls.txt").write_text("https://a.example/picture.png")
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    (folder / "prompts.jsonl").write_text(json.dumps(chat))
    if "--start" in words:  # the servers run already
        at = words.index("--start")
        words = words[:at] + words[at + 2 :]
    return [
        servers[before].base_url if before in servers else word
        for before, word in pairwise(["", *words])
    ]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def modules_with_help() -> set[str]:
    """Return our modules that the pages run by `python -m`, without the benchmarks."""
    text = "\n".join(page.read_text() for page in PAGES)
    return set(re.findall(r"-m ((?:ecshare|lab)(?:\.\w+)*)", text))


@pytest.mark.parametrize("module", sorted(modules_with_help()))
def test_modules_named_on_pages_have_help(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs in this process, because importing vLLM again would take seconds."""
    program = importlib.import_module(f"{module}.__main__")
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert not ended.value.code
    assert f"usage: python -m {module}" in capsys.readouterr().out


@pytest.mark.parametrize(("program", "test"), RUN_BY_TESTS.items())
def test_programs_are_run_by_the_named_tests(program: str, test: str) -> None:
    if "/" in program:
        assert (ROOT / program).exists()
        *_, folder, name = program.split("/")
        assert name in (ROOT / test).read_text()
        assert folder in (ROOT / test).read_text()
    else:
        assert importlib.util.find_spec(program)
        assert f'"-m", "{program}"' in (ROOT / test).read_text()


@every_page
def test_options_of_connectors_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r'"env:(\w+)"', page.read_text()):
        monkeypatch.setenv(name, "what readers have there")
    for said in configurations(page.read_text()):
        for kind, config in CONNECTORS.items():
            extra = said.get(f"{kind}_connector_extra_config")
            if extra is not None and said[f"{kind}_connector"] == "OffloadingConnector":
                check_tiers(extra)
            elif extra is not None:
                parse(config, extra, "page")
                name = {"ec": "ECShareConnector", "kv": "KVShareConnector"}[kind]
                assert said[f"{kind}_connector"] == name
                roles = {f"{kind}_{role}" for role in ("producer", "consumer", "both")}
                assert said[f"{kind}_role"] in roles
        if "url" in said and "stage" not in said:  # otherwise it is an order to the router
            parse(EncoderConfig, said, "page")


def check_tiers(extra: dict[str, Any]) -> None:
    """Find our class where vLLM would look for it, and parse its options."""
    assert OffloadingSpecFactory.get_spec_cls(extra).__name__ == "TieringOffloadingSpec"
    for tier in extra["secondary_tiers"]:
        options = dict(tier)
        module = importlib.import_module(options.pop("module_path"))
        assert getattr(module, options.pop("type")) is KVShareTier
        parse_tier(options, "page")


def configurations(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of `text` that configure a connector. In place of a MultiConnector,
    those of its children that are ours."""
    for said in json_objects(text):
        if said.get("kv_connector") == "MultiConnector":
            children = said["kv_connector_extra_config"]["connectors"]
            ours = [each for each in children if each["kv_connector"] == "KVShareConnector"]
            assert len(ours) == 1
            yield from ours
        elif {"url", "ec_connector", "kv_connector"} & set(said):
            yield said


@every_page
def test_options_named_in_the_text_exist(page: Path) -> None:
    fields = {f.name for c in CONNECTORS.values() for f in msgspec.structs.fields(c)}
    inline = re.findall(r"`([^`\n]+)`", page.read_text())
    for name in inline:
        if re.fullmatch(r"[a-z]+(?:_[a-z]+)*_(?:s|bytes|dir|options)", name) and (
            not name.startswith(("ecshare_", "kvshare_"))  # metrics
        ):
            assert name in fields, name
    said = [*inline, *(word for words in commands(page) for word in words)]
    flags = {flag for text in said for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    assert flags <= known_flags(), flags - known_flags()


def path_of(program: str) -> Path:
    return ROOT / (program if "/" in program else f"{program.replace('.', '/')}.py")


def known_flags() -> set[str]:
    """Return the arguments of vLLM that the pages may name, of the router and of our programs."""
    ours = {name for action in make_parser("")._actions for name in action.option_strings}
    programs = [
        *(path_of(name) for name in RUN_BY_TESTS),
        *(ROOT / "benchmarks").glob("*.py"),
        ROOT / "lab" / "conformance" / "__main__.py",
        ROOT / "lab" / "gpu_kit" / "__main__.py",
    ]
    for program in programs:
        ours |= set(re.findall(r'"(--[a-z][a-z-]+)"', program.read_text()))
    for name in COMMANDS:
        command = Commands().get_command(click.Context(ecshare), name)
        ours |= {flag for each in command.params for flag in each.opts} if command else set()
    return ours | VLLM_OPTIONS | PIP_OPTIONS


@every_page
def test_pages_contain_no_machine_paths_or_unknown_hosts(page: Path) -> None:
    text = page.read_text()
    assert not re.findall(r"(?:/root|/home|/work|/tmp|/mnt)/\w+", text)
    hosts = {urlsplit(url).hostname for url in re.findall(r"https?://[^\s)\"'`]+", text)}
    named = {host for host in hosts if not str(host).endswith(".example")}
    assert named <= HOSTS, named - HOSTS
