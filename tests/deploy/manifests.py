# SPDX-License-Identifier: Apache-2.0
"""Readers for the manifests of deploy/, and checks that hold wherever engines are described."""

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from ecshare.commands.gc import command as gc
from ecshare.encoder.config import EncoderConfig
from ecshare.router.options.arguments import parse_arguments
from ecshare.router.options.config import RouterConfig
from ecshare.store.config import ConnectorConfig, parse
from kvshare.config import KVConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GIB = 1 << 30
REFERENCE = re.compile(r"\$\((\w+)\)")
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": GIB, "": 1}
CONNECTORS: dict[str, tuple[str, type[ConnectorConfig]]] = {
    "ec": ("ECShareConnector", EncoderConfig),
    "kv": ("KVShareConnector", KVConfig),
}
ENGINES = ("encode", "prefill", "decode")
KEY = "0" * 64

Object = dict[str, Any]


@cache
def built(folder: Path) -> Sequence[Object]:
    """Return what kustomize makes of a folder; skip the test where there is no kustomize."""
    if kubectl := shutil.which("kubectl"):
        command = [kubectl, "kustomize"]
    elif kustomize := shutil.which("kustomize"):
        command = [kustomize, "build"]
    else:
        pytest.skip("kustomizations need kubectl or kustomize, which are not installed")
    ran = subprocess.run([*command, str(folder)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return list(yaml.safe_load_all(ran.stdout))


def of_kind(objects: Sequence[Object], kind: str) -> dict[str, Object]:
    """Return the objects of `kind` by their names."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def pod_of(workload: Object) -> Object:
    """Return the pod template of a Deployment or CronJob."""
    spec = workload["spec"]
    template = (
        spec["jobTemplate"]["spec"]["template"] if "jobTemplate" in spec else spec["template"]
    )
    assert isinstance(template, dict)
    return template


def num_bytes(quantity: str) -> int:
    """Return the bytes of a quantity such as 8Gi."""
    number, unit = re.fullmatch(r"(\d+)([KMG]i|)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def expanded(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return arguments as a container gets them, with every $(NAME) replaced."""
    found = [REFERENCE.sub(lambda name: environment[name[1]], each) for each in arguments]
    assert not [each for each in found if "$(" in each]
    return found


def shares(arguments: Sequence[str]) -> dict[str, tuple[str, ConnectorConfig]]:
    """Return role and options of the connectors that an engine gets, by kind, as vLLM splits them.

    Each is an argument `--ec-transfer-config=JSON`, or the two words of it.
    """
    words = [
        part for each in arguments for part in re.split(r"(?<=^--.{2}-transfer-config)=", each)
    ]
    found = {}
    for kind, (name, config) in CONNECTORS.items():
        flag = f"--{kind}-transfer-config"
        if flag not in words:
            continue
        assert words.count(flag) == 1
        said = json.loads(words[words.index(flag) + 1])
        assert set(said) == {f"{kind}_connector", f"{kind}_role", f"{kind}_connector_extra_config"}
        assert said[f"{kind}_connector"] == name
        kind_of, _, role = said[f"{kind}_role"].partition("_")
        assert kind_of == kind
        assert role in ("producer", "consumer", "both")
        options = parse(config, said[f"{kind}_connector_extra_config"], flag)
        assert re.fullmatch(r"(file:/|env:)\S+", options.integrity_key), "a key in an argument"
        found[kind] = (role, options)
    assert len({options.url for _, options in found.values()}) == 1
    return found


def check_vllm_has(arguments: Sequence[str]) -> None:
    """Check that this release of vLLM has each flag. Its sources are read, which is quick."""
    for flag in (each.partition("=")[0] for each in arguments if each.startswith("--")):
        field = flag[2:].replace("-", "_")
        assert re.search(rf'"{flag}"|^    {field}:', vllm_options(), re.M), flag


@cache
def vllm_options() -> str:
    """Return the sources in which vLLM declares its options."""
    found = importlib.util.find_spec("vllm")
    assert found
    assert found.origin
    vllm = Path(found.origin).parent
    files = [vllm / "engine" / "arg_utils.py", *vllm.glob("entrypoints/**/cli_args.py")]
    return "\n".join(path.read_text() for path in files)


def routed(arguments: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> RouterConfig:
    """Return the options of a router. Its keys are in `folder`, or in the environment."""
    assert arguments[0] == "router"
    given = []
    for each in arguments[1:]:
        if reference := re.fullmatch(r"--[a-z]+-key=(.*)", each):
            kind, _, name = reference[1].partition(":")
            assert kind in ("file", "env"), "a key in an argument"
            if kind == "env":
                monkeypatch.setenv(name, KEY)
            else:
                (folder / Path(name).name).write_text(KEY)
                each = each.replace(name, str(folder / Path(name).name))
        given.append(each)
    return parse_arguments(given, environment={})


def cleaned(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options of `ecshare gc`, parsed by the command itself."""
    assert arguments[0] == "gc"
    with gc.make_context("gc", list(arguments[1:])) as context:
        assert isinstance(context, click.Context)
        return dict(context.params)


def texts(value: Any) -> Iterator[str]:
    """Yield every text in a document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from texts(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from texts(each)
