# SPDX-License-Identifier: Apache-2.0
"""Values for other projects give engines options of ours. Their own schemas are not here."""

import re
import shlex

import yaml

from tests.deploy.manifests import DEPLOY, Object, built, check_vllm_has, of_kind, pod_of, shares

NEIGHBOURS = DEPLOY / "neighbours"
BOTH = {"ec": "both", "kv": "both"}


def roles(arguments: list[str]) -> dict[str, str]:
    check_vllm_has(arguments)
    return {kind: role for kind, (role, _) in shares(arguments).items()}


def test_llm_d_gets_engines_by_its_labels_without_the_gate() -> None:
    objects = built(NEIGHBOURS / "llm-d")
    found = {}
    for name, engine in of_kind(objects, "Deployment").items():
        pod = pod_of(engine)
        assert (
            engine["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        )
        assert pod["metadata"]["labels"]["llm-d.ai/role"] == name
        given = pod["spec"]["containers"][0]["args"]
        assert not [each for each in given if "middleware" in each]
        found[name] = roles(given)
    consumer = {"ec": "consumer", "kv": "both"}
    assert found == {"encode": {"ec": "producer"}, "prefill": consumer, "decode": consumer}
    config: Object = of_kind(objects, "ConfigMap")["llm-d-coordinator-config"]
    pipeline = yaml.safe_load(config["data"]["coordinator.yaml"])["pipeline"]
    assert (pipeline["ec_connector"], pipeline["kv_connector"]) == (
        "ec-shared-storage",
        "kv-shared-storage",
    )
    steps = [each["type"] for each in pipeline["steps"]]
    assert steps == ["replace-media-urls", "render", "encode", "prefill", "decode"]


def test_production_stack_gets_engines_that_share() -> None:
    spec = yaml.safe_load((NEIGHBOURS / "production-stack" / "values.yaml").read_text())
    (model,) = spec["servingEngineSpec"]["modelSpec"]
    assert roles(model["vllmConfig"]["extraArgs"]) == BOTH
    # See the chart: it mounts /dev/shm and turns the prefix cache on only if told so.
    assert model["vllmConfig"]["tensorParallelSize"]
    assert model["vllmConfig"]["enablePrefixCaching"]
    assert "lmcacheConfig" not in model


def test_kserve_gets_engines_that_share() -> None:
    service = yaml.safe_load((NEIGHBOURS / "kserve" / "service.yaml").read_text())
    (container,) = service["spec"]["template"]["containers"]
    assert container["name"] == "main"
    (variable,) = container["env"]
    given = shlex.split(variable["value"])
    assert roles(given) == BOTH
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    for _, options in shares(given).values():
        assert options.host_cache_dir
        assert options.host_cache_dir.rpartition("/")[0] in mounts


def test_values_name_the_same_image_as_the_overlays() -> None:
    named = {
        tuple(found)
        for path in (*NEIGHBOURS.rglob("*.yaml"), *DEPLOY.glob("kubernetes/overlays/*/*.yaml"))
        for found in re.findall(r"(registry\.example\.com/ecshare-engine)\S*?", path.read_text())
    }
    assert len(named) == 1
