# SPDX-License-Identifier: Apache-2.0
"""The commands and rules for buckets and folders on the pages of the examples work."""

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore import xform_name

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ObjectMissing, StoreDenied
from ecshare.store.keys import Kind, manifest_key, object_key, tp_size_key
from ecshare.store.objects import ObjectStore, probe, read
from ecshare.store.open import open_store
from lab.servers.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, SeaweedFS
from tests.conftest import LOGS
from tests.docs.pages import ROOT, fences

S3_PAGE = ROOT / "examples" / "s3" / "README.md"
FOLDER_PAGE = ROOT / "examples" / "one_box" / "README.md"
BUCKET_OF_PAGE, PREFIX = "my-bucket", "ecshare"
NAMESPACE = "00112233445566778899aabbccddeeff"
EC = [object_key(Kind.EC, NAMESPACE, "picture"), manifest_key(Kind.EC, NAMESPACE)]
KV = [
    object_key(Kind.KV, NAMESPACE, b"block", "t0of2"),
    manifest_key(Kind.KV, NAMESPACE),
    tp_size_key(Kind.KV, NAMESPACE, 2),
]
DAY_S = 86_400


class Administered(SeaweedFS):
    """Has users with rights of their own, by the IAM API on the same port."""

    def command(self) -> list[str]:
        return [*super().command(), "-s3.iam.readOnly=false"]

    def client(self, service: str) -> Any:
        """Return a client with all rights."""
        return botocore.session.Session().create_client(
            service,
            region_name="us-east-1",
            endpoint_url=self.base_url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )

    def user(self, name: str, policy: str) -> dict[str, Any]:
        """Make a user who has `policy` and nothing else; return storage options with its keys."""
        iam = self.client("iam")
        iam.create_user(UserName=name)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        iam.put_user_policy(UserName=name, PolicyName="policy", PolicyDocument=policy)
        keys = {"key": key["AccessKeyId"], "secret": key["SecretAccessKey"]}
        return {**self.storage_options, **keys}


@pytest.fixture(scope="module")
def server() -> Iterator[Administered]:
    with Administered(LOGS, "administered") as server:
        yield server


def on_page(name: str, number: int = 1) -> str:
    """Return the first JSON of the page that has `name` at its top; `number` of them have."""
    found = [each for each in fences(S3_PAGE, "json") if name in json.loads(each)]
    assert len(found) == number
    return found[0]


def opened(options: dict[str, Any], prefix: str = PREFIX) -> ObjectStore:
    config = StoreConfig(url=f"s3://{BUCKET}/{prefix}", storage_options=options)
    return open_store(config, "options")


@pytest.mark.s3
async def test_policy_allows_what_engines_do_and_no_more(server: Administered) -> None:
    policy = on_page("Statement", 2).replace(BUCKET_OF_PAGE, BUCKET)
    options = server.user("engine", policy)
    store, elsewhere = opened(options), opened(options, "other")
    try:
        await probe(store, write=True)
        (key, missing) = EC
        assert await store.put(key, b"embedding")
        assert bytes(await read(store, key, 100)) == b"embedding"
        assert await store.exists([key, missing]) == [True, False]
        with pytest.raises(ObjectMissing):
            await read(store, missing, 100)
        assert [each.key async for each in store.list("ec/")] == [key]
        await store.delete([key])
        assert await store.exists([key]) == [False]
        with pytest.raises(StoreDenied):
            await elsewhere.put(key, b"embedding")
        with pytest.raises(StoreDenied):
            await elsewhere.exists([key])
        with pytest.raises(StoreDenied):
            _ = [each async for each in elsewhere.list("ec/")]
    finally:
        await store.close()
        await elsewhere.close()


@pytest.mark.s3
def test_server_accepts_the_lifecycle_rules(server: Administered) -> None:
    rules = json.loads(on_page("Rules"))
    s3 = server.client("s3")
    s3.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration=rules)
    assert s3.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"] == rules["Rules"]


def test_each_rule_matches_all_keys_of_its_kind() -> None:
    rules = json.loads(on_page("Rules"))["Rules"]
    days = {rule["Filter"]["Prefix"]: rule["Expiration"]["Days"] for rule in rules}
    assert all(rule["Status"] == "Enabled" for rule in rules)
    for keys, expected in ((EC, 30), (KV, 2)):
        for key in keys:
            name = f"{PREFIX}/{key}"
            assert [n for prefix, n in days.items() if name.startswith(prefix)] == [expected]


def test_command_for_the_rules_exists_in_aws_cli() -> None:
    (command,) = re.findall(r"^aws (.*?[^\\])$", S3_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    api, name, *options = shlex.split(command.replace("\\\n", " "))
    assert api == "s3api"
    model = botocore.session.Session().get_service_model("s3")
    (operation,) = [each for each in model.operation_names if cli_name(each) == name]
    known = {f"--{cli_name(each)}" for each in model.operation_model(operation).input_shape.members}
    assert set(options[::2]) <= known
    assert options == ["--bucket", BUCKET_OF_PAGE, "--lifecycle-configuration", options[-1]]
    assert options[-1] == "file://lifecycle.json"


def cli_name(name: str) -> str:
    """Return an API's name as the command line has it."""
    return str(xform_name(name, "-"))


async def test_daily_job_removes_old_objects_only(tmp_path: Path) -> None:
    folder = tmp_path / "a store"
    store = open_store(StoreConfig(url=str(folder)), "options")
    try:
        await probe(store, write=True)
        ages = {EC[0]: 32, EC[1]: 29, KV[0]: 3, KV[1]: 3, KV[2]: 1}
        for key, age_days in ages.items():
            await store.put(key, b"object")
            written_s = time.time() - age_days * DAY_S - 60
            os.utime(folder / key, (written_s, written_s))
        os.utime(folder / "probe" / "object", (0, 0))
        (job,) = fences(FOLDER_PAGE, "sh")
        subprocess.run(["sh", "-euc", job], env={**os.environ, "STORE": str(folder)}, check=True)
        assert [each.key async for each in store.list("ec/")] == [EC[1]]
        assert [each.key async for each in store.list("kv/")] == [KV[2]]
        assert (folder / "probe" / "object").exists()
        assert await store.put(EC[0], b"object"), "what has gone can be stored again"
    finally:
        await store.close()
