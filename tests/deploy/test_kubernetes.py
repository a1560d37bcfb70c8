# SPDX-License-Identifier: Apache-2.0
"""The kustomizations are built by the real kustomize, and what comes out is valid and safe.

Nothing here runs in a cluster: schemas, references, options and arithmetic are checked.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ecshare.router.types import Stage
from tests.deploy.manifests import (
    DEPLOY,
    ENGINES,
    GIB,
    Object,
    built,
    check_vllm_has,
    cleaned,
    expanded,
    num_bytes,
    of_kind,
    pod_of,
    routed,
    shares,
)
from tests.docs.pages import first_column

KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = {
    "epd": {"encode": {"ec": "producer"}}
    | {stage: {"ec": "consumer", "kv": "both"} for stage in ("prefill", "decode")},
    "aggregated": {"decode": {"ec": "both", "kv": "both"}},
    "text-pd": {"prefill": {"kv": "both"}, "decode": {"kv": "both"}},
}
"""The connectors and roles of each stage's engines."""
OPTIONAL = ("monitoring", "s3-keys", *(f"autoscaling/{stage}" for stage in ENGINES))
# The oldest release with preStop.sleep, and the newest one that the validator knows.
RELEASES = ("1.30.0", kubernetes_validate.latest_version())
NO_SCHEMA = {"PodMonitor"}
SECRETS = {"store-key": {"integrity.key"}, "router-keys": {"router.key", "status.key"}}
VLLM_BYTES = 12 * GIB
MOUNTED = "/etc/ecshare/"

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def objects_of(overlay: str) -> Sequence[Object]:
    return built(KUBERNETES / "overlays" / overlay)


def workloads(objects: Sequence[Object]) -> dict[str, Object]:
    return of_kind(objects, "Deployment") | of_kind(objects, "CronJob")


def settings(objects: Sequence[Object]) -> dict[str, str]:
    (found,) = [each for name, each in of_kind(objects, "ConfigMap").items() if "fleet" in name]
    assert isinstance(found["data"], dict)
    return found["data"]


def arguments(objects: Sequence[Object], name: str) -> list[str]:
    (container,) = pod_of(workloads(objects)[name])["spec"]["containers"]
    return expanded(container["args"], settings(objects))


@pytest.fixture(scope="module")
def with_options(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Object]:
    """The largest overlay with all optional components, but for the one that relaxes."""
    return extended(tmp_path_factory.mktemp("overlay"), OPTIONAL)


def extended(folder: Path, components: Sequence[str]) -> Sequence[Object]:

    def path(name: str) -> str:
        return os.path.relpath(KUBERNETES / name, folder.resolve())

    made = {
        "resources": [path("overlays/epd")],
        "components": [path(f"components/{name}") for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(made))
    return built(folder)


def check_schemas(objects: Sequence[Object]) -> None:
    for each in objects:
        if each["kind"] not in NO_SCHEMA:
            check_schema(json.dumps(each))
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)


@cache
def check_schema(text: str) -> None:
    """Check one object, once: overlays have most of them in common."""
    for release in RELEASES:
        kubernetes_validate.validate(json.loads(text), release, strict=True)


@every_overlay
def test_all_fits_the_schemas(overlay: str) -> None:
    check_schemas(objects_of(overlay))


def test_optional_components_fit_the_schemas(with_options: Sequence[Object]) -> None:
    check_schemas(with_options)


def test_every_component_is_in_an_overlay_or_optional() -> None:
    components = {
        path.parent.relative_to(KUBERNETES / "components").as_posix()
        for path in (KUBERNETES / "components").rglob("kustomization.yaml")
    }
    used = {
        Path(path).name
        for overlay in OVERLAYS
        for key in ("resources", "components")
        for path in yaml.safe_load(
            (KUBERNETES / "overlays" / overlay / "kustomization.yaml").read_text()
        )[key]
    }
    assert components == (used - {"base"}) | {*OPTIONAL, "writable-root"}


@every_overlay
def test_engines_have_connectors_of_their_stage(overlay: str) -> None:
    objects = objects_of(overlay)
    found = {}
    for stage in set(ENGINES) & set(workloads(objects)):
        given = arguments(objects, stage)
        check_vllm_has(given)
        assert given[0] == settings(objects)["MODEL"]
        assert "--middleware=ecshare.plugin.gate.RouterGate" in given
        # See the README's set-up notes: where media come from E.
        takes_embeddings = OVERLAYS[overlay][stage].get("ec") == "consumer"
        assert ("--mm-processor-cache-gb=0" in given) is takes_embeddings
        found[stage] = {kind: role for kind, (role, _) in shares(given).items()}
        urls = {options.url for _, options in shares(given).values()}
        assert urls == {settings(objects)["STORE"]}
    assert found == OVERLAYS[overlay]


@every_overlay
def test_router_finds_all_engines(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = objects_of(overlay)
    config = routed(arguments(objects, "router"), tmp_path, monkeypatch)
    stages = {"encode": config.encoders, "prefill": config.prefillers, "decode": config.decoders}
    services = of_kind(objects, "Service")
    for stage, urls in stages.items():
        assert urls == ((f"dns+http://{stage}:8000",) if stage in OVERLAYS[overlay] else ())
        if urls:
            assert services[stage]["spec"]["clusterIP"] == "None"
    assert (config.host, config.port) == ("0.0.0.0", 8000)
    for name, service in services.items():
        pod = pod_of(workloads(objects)[name])
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        (port,) = service["spec"]["ports"]
        (listens,) = pod["spec"]["containers"][0]["ports"]
        assert port["targetPort"] == listens["name"]


@every_overlay
def test_routers_outlive_nodes_and_drain(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = objects_of(overlay)
    router = workloads(objects)["router"]
    assert router["spec"]["replicas"] == 2
    assert of_kind(objects, "PodDisruptionBudget")["router"]["spec"]["minAvailable"] == 1
    drain_s = routed(arguments(objects, "router"), tmp_path, monkeypatch).drain_s
    times = {"router": drain_s} | {
        stage: next(
            float(each.partition("=")[2])
            for each in arguments(objects, stage)
            if each.startswith("--shutdown-timeout=")
        )
        for stage in OVERLAYS[overlay]
    }
    for name, needed_s in times.items():
        spec = pod_of(workloads(objects)[name])["spec"]
        pause_s = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert spec["terminationGracePeriodSeconds"] > pause_s + needed_s, name


@every_overlay
def test_cleaner_cleans_the_store_of_the_engines(overlay: str) -> None:
    objects = objects_of(overlay)
    options = cleaned(arguments(objects, "cleaner"))
    (target,) = options["stores"].distinct()
    engine, *_ = shares(arguments(objects, "decode")).values()
    assert target.config.url == engine[1].url
    assert options["max_bytes"] == (settings(objects)["MAX_BYTES"],)
    assert target.config.integrity_key.endswith("/integrity.key")


def test_every_pod_is_restricted(with_options: Sequence[Object]) -> None:
    (namespace,) = of_kind(with_options, "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    accounts = of_kind(with_options, "ServiceAccount")
    for name, workload in workloads(with_options).items():
        spec = pod_of(workload)["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["fsGroup"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["enableServiceLinks"] is False, name
        assert spec["serviceAccountName"] in accounts, name
        (container,) = spec["containers"]
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True, name
        assert context["allowPrivilegeEscalation"] is False, name
        assert context["capabilities"] == {"drop": ["ALL"]}, name
        mounts = {each["name"] for each in container["volumeMounts"]}
        assert mounts == {each["name"] for each in spec["volumes"]}, name
        assert "/tmp" in {each["mountPath"] for each in container["volumeMounts"]}, name


def test_only_engines_get_a_writable_root(tmp_path: Path) -> None:
    found = extended(tmp_path, ["writable-root"])
    check_schemas(found)
    writable = {
        name
        for name, workload in workloads(found).items()
        for container in pod_of(workload)["spec"]["containers"]
        if not container["securityContext"]["readOnlyRootFilesystem"]
    }
    assert writable == set(ENGINES)


def test_keys_are_files_of_the_named_secrets(with_options: Sequence[Object]) -> None:
    """A key that an argument names is a file of a secret that the pod mounts."""
    for name, workload in workloads(with_options).items():
        spec = pod_of(workload)["spec"]
        (container,) = spec["containers"]
        secrets = {v["name"]: v["secret"] for v in spec["volumes"] if "secret" in v}
        files = {
            f"{mount['mountPath']}/{key}"
            for mount in container["volumeMounts"]
            if (secret := secrets.get(mount["name"])) is not None
            for key in SECRETS[secret["secretName"]]
            if key in {item["key"] for item in secret.get("items", [])} or "items" not in secret
        }
        assert all(secret["defaultMode"] == 0o440 for secret in secrets.values())
        words = container.get("args", []) + [e.get("value", "") for e in container.get("env", [])]
        named = {path for word in words for path in re.findall(r"file:([^\s\"]+)", word)}
        assert named == files, name
        for each in container.get("envFrom", []):
            if "secretRef" in each:
                assert each["secretRef"]["name"] == "s3-keys"
                assert name != "router"


def test_host_cache_is_within_the_memory_limit(with_options: Sequence[Object]) -> None:
    for stage in ENGINES:
        spec = pod_of(workloads(with_options)[stage])["spec"]
        (container,) = spec["containers"]
        (shm,) = [v["emptyDir"] for v in spec["volumes"] if v["name"] == "shm"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert shm["medium"] == "Memory"
        connectors = shares(arguments(with_options, stage))
        # At most half of the file system: config.md, `host_cache_bytes`.
        wanted = max(options.host_cache_bytes for _, options in connectors.values())
        assert num_bytes(shm["sizeLimit"]) >= 2 * wanted
        pinned = 4 * GIB + GIB  # the most of KV on a GPU, and embeddings: gpu.md
        limit = num_bytes(container["resources"]["limits"]["memory"])
        assert limit >= num_bytes(shm["sizeLimit"]) + pinned + VLLM_BYTES
        assert (
            container["resources"]["requests"]["memory"]
            == container["resources"]["limits"]["memory"]
        )


def test_router_has_memory_for_what_it_may_use(
    with_options: Sequence[Object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = routed(arguments(with_options, "router"), tmp_path, monkeypatch)
    (container,) = pod_of(workloads(with_options)["router"])["spec"]["containers"]
    used = config.max_in_flight_bytes + 2 * config.max_index_bytes + GIB // 4
    assert num_bytes(container["resources"]["limits"]["memory"]) >= used


def test_probes_ask_pages_that_there_are(with_options: Sequence[Object]) -> None:
    for name in (*ENGINES, "router"):
        (container,) = pod_of(workloads(with_options)[name])["spec"]["containers"]
        probes = {
            kind: container[kind]["httpGet"]["path"] for kind in container if kind.endswith("Probe")
        }
        if name == "router":
            assert probes == {"livenessProbe": "/live", "readinessProbe": "/ready"}
        else:
            kinds = ("startupProbe", "livenessProbe", "readinessProbe")
            assert probes == dict.fromkeys(kinds, "/health")


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector takes a pod."""
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] and each["operator"] == "In"
        for each in selector.get("matchExpressions", [])
    )


def reach(objects: Sequence[Object], goal: str, labels: Mapping[str, str], space: str) -> bool:
    """Return whether a pod of `space` may connect to the pods of a workload."""
    pod = pod_of(workloads(objects)[goal])["metadata"]["labels"]
    policies = [each["spec"] for each in of_kind(objects, "NetworkPolicy").values()]
    isolating = [each for each in policies if selects(each["podSelector"], pod)]
    assert isolating
    assert all(each["policyTypes"] == ["Ingress"] for each in isolating)
    for policy in isolating:
        for rule in policy.get("ingress", []):
            if "from" not in rule:
                return True
            for peer in rule["from"]:
                spaces = peer.get("namespaceSelector")
                if spaces is None:
                    is_there = space == "ecshare"
                else:
                    is_there = selects(spaces, {"kubernetes.io/metadata.name": space})
                if is_there and selects(peer.get("podSelector", {}), labels):
                    return True
    return False


@every_overlay
def test_only_the_router_reaches_engines(overlay: str) -> None:
    objects = objects_of(overlay)
    pods = {name: pod_of(each)["metadata"]["labels"] for name, each in workloads(objects).items()}
    for engine in OVERLAYS[overlay]:
        assert {n for n, labels in pods.items() if reach(objects, engine, labels, "ecshare")} == {
            "router"
        }
        strangers: list[dict[str, str]] = [{}, pods["router"]]
        for labels in strangers:
            assert not reach(objects, engine, labels, "other")
    assert reach(objects, "router", {}, "other")
    assert not reach(objects, "cleaner", pods["router"], "ecshare")


def test_monitoring_lets_in_nothing_but_prometheus(with_options: Sequence[Object]) -> None:
    prometheus = {"app.kubernetes.io/name": "prometheus"}
    assert reach(with_options, "decode", prometheus, "monitoring")
    assert not reach(with_options, "decode", {}, "monitoring")
    assert not reach(with_options, "decode", prometheus, "other")
    (routers,) = of_kind(with_options, "PodMonitor")["routers"]["spec"]["podMetricsEndpoints"]
    key = routers["authorization"]["credentials"]
    assert key["key"] in SECRETS[key["name"]]


def test_autoscalers_count_series_of_ours(with_options: Sequence[Object]) -> None:
    page = DEPLOY.parent / "docs" / "metrics.md"
    (row,) = re.findall(r"^\| `ecshare_router_outstanding` \|(.*)\|$", page.read_text(), re.M)
    assert "by `stage`" in row
    scalers = of_kind(with_options, "HorizontalPodAutoscaler")
    assert set(scalers) == set(ENGINES) == {str(each) for each in Stage}
    for stage, scaler in scalers.items():
        goal = scaler["spec"]["scaleTargetRef"]
        assert (goal["kind"], goal["name"]) == ("Deployment", stage)
        assert "replicas" not in workloads(with_options)[stage]["spec"]
        (metric,) = [each["external"]["metric"] for each in scaler["spec"]["metrics"]]
        assert metric["name"] in first_column(page)
        assert metric["selector"] == {"matchLabels": {"stage": stage}}
        rules = (KUBERNETES / "components/autoscaling/adapter-rules.yaml").read_text()
        (rule,) = yaml.safe_load(rules)["rules"]["external"]
        assert rule["seriesQuery"].partition("{")[0] == metric["name"]
        assert rule["metricsQuery"].startswith("sum by (stage) (")
