# SPDX-License-Identifier: Apache-2.0
"""deploy/compose: what it names exists, options are ours, and SeaweedFS starts as it says."""

import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from lab.servers.s3 import SeaweedFS
from tests.deploy.manifests import (
    DEPLOY,
    ENGINES,
    GIB,
    check_vllm_has,
    cleaned,
    routed,
    shares,
    texts,
)

COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
KEYS = {"S3_SECRET", "INTEGRITY_KEY", "ROUTER_KEY", "STATUS_KEY"}
ACCESS, SECRET = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"
OWN_IMAGES = {"ecshare-engine:0.1.0": "engine", "ecshare-router:0.1.0": "router"}
ROLES = {
    "encode": {"ec": "producer"},
    "prefill": {"ec": "consumer", "kv": "both"},
    "decode": {"ec": "consumer", "kv": "both"},
}


def interpolated(text: str) -> str:
    """Return a text as compose makes it of an empty environment and the keys."""
    return re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)\}", lambda m: m[2] or "", text)


def command(name: str) -> list[str]:
    return [interpolated(each) for each in SERVICES[name]["command"]]


def test_all_that_services_name_exists() -> None:
    for name, service in SERVICES.items():
        assert set(service.get("depends_on", {})) <= set(SERVICES), name
        assert set(service["networks"]) <= set(COMPOSE["networks"]), name
        volumes = {each.partition(":")[0] for each in service.get("volumes", [])}
        assert volumes <= set(COMPOSE["volumes"]), name
        if "build" in service:
            folder = DEPLOY / "compose" / service["build"]["context"]
            assert (folder / service["build"]["dockerfile"]).is_file(), name
            assert OWN_IMAGES[service["image"]] in service["build"]["dockerfile"]


def test_keys_come_from_the_environment_and_must_be_set() -> None:
    named = {each for text in texts(COMPOSE) for each in re.findall(r"\$\{(\w+):\?", text)}
    assert named == KEYS
    optional = {each for text in texts(COMPOSE) for each in re.findall(r"\$\{(\w+):-", text)}
    assert not optional & KEYS
    page = (DEPLOY / "README.md").read_text()
    (made,) = re.findall(r"for name in ([A-Z0-9_ ]+); do", page)
    assert set(made.split()) == KEYS


@pytest.mark.parametrize("stage", ENGINES)
def test_engines_have_connectors_of_their_stage(stage: str) -> None:
    service, given = SERVICES[stage], command(stage)
    check_vllm_has(given)
    connectors = shares(given)
    assert {kind: role for kind, (role, _) in connectors.items()} == ROLES[stage]
    assert "--middleware=ecshare.plugin.gate.RouterGate" in given
    assert ("--mm-processor-cache-gb=0" in given) is (stage != "encode")
    for _, options in connectors.values():
        assert options.integrity_key.removeprefix("env:") in service["environment"]
        assert options.url == "s3://ecshare/cache"
        assert service["shm_size"] == f"{2 * options.host_cache_bytes // GIB}gb"
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert any("exec" in each for each in service["tmpfs"])
    assert "ports" not in service


def test_router_and_cleaner_have_options_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = routed(command("router"), tmp_path, monkeypatch)
    urls = (*config.encoders, *config.prefillers, *config.decoders)
    assert urls == tuple(f"http://{stage}:8000" for stage in ENGINES)
    assert all(each.startswith("127.0.0.1:") for each in SERVICES["router"]["ports"])
    assert "store" not in SERVICES["router"]["networks"]
    options = cleaned(command("cleaner"))
    (target,) = options["stores"].distinct()
    assert target.config.url == "s3://ecshare/cache"
    assert options["every"]


def test_only_the_router_has_a_port() -> None:
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["router"]
    assert COMPOSE["networks"]["store"] == {"internal": True}


class ComposedSeaweed(SeaweedFS):
    """Has the arguments of the compose file, with this machine's addresses, folder and ports."""

    def command(self) -> list[str]:
        """Return the command of the compose file."""
        weed, mini, *ours = super().command()
        here = {each.partition("=")[0]: each for each in ours}
        name, also_mini, *given = SERVICES["seaweedfs"]["entrypoint"]
        assert (name, also_mini) == ("weed", mini)
        places = ("-dir", "-ip", "-ip.bind", "-s3.port", "-filer.port")
        arguments = [
            here.pop(each.partition("=")[0]) if each.partition("=")[0] in places else each
            for each in given
        ]
        ports = [each for each in here.values() if re.match(r"-\w+\.port(\.grpc)?=[1-9]", each)]
        return [weed, mini, *arguments, *ports]

    @property
    def health_url(self) -> str:
        """Return what the compose file's health check asks, at this machine's port."""
        path = super().health_url
        asked = SERVICES["seaweedfs"]["healthcheck"]["test"][-1]
        assert urlsplit(asked).path == urlsplit(path).path
        return path


@pytest.mark.s3
def test_seaweedfs_starts_with_a_bucket_and_refuses_strangers(tmp_path: Path) -> None:
    assert set(SERVICES["seaweedfs"]["environment"]) == {ACCESS, SECRET}
    with ComposedSeaweed(tmp_path) as server:
        assert set(server.environment()) == {ACCESS, SECRET}
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{server.base_url}/ecshare?list-type=2", timeout=10)
    assert refused.value.code == 403
    refused.value.close()


def test_readme_has_the_commands_in_few_lines() -> None:
    """From the front page to a deployment takes fewer than ten lines."""
    page = (DEPLOY / "README.md").read_text()
    for block in re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S)[:2]:
        assert len(block.splitlines()) < 10
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
