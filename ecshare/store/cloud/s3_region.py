# SPDX-License-Identifier: Apache-2.0
"""Asks S3 for the region of a bucket, after a failure, by one unsigned HEAD.

S3 redirects a request to the wrong region, sometimes with a body that names the right one. obstore
follows redirects, without the signature, and reports only the error of the second request. But each
answer of S3 has a header with the region.
"""

import http.client
import re
from urllib.parse import urlsplit

from ecshare.store.cloud.plan import CloudPlan, plan
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError

_TIMEOUT_S = 5.0
_REGION = re.compile(r"[a-z0-9-]{1,40}")


def wrong_region(config: StoreConfig) -> str:
    """Return a sentence if the bucket is in another region than the configured one, else "".

    Blocks, for some seconds at most.
    """
    try:
        s3 = plan(config, "options")
        region = _region(s3) if isinstance(s3, CloudPlan) and s3.cloud == "s3" else ""
    except (ConfigError, LookupError, OSError, ValueError, http.client.HTTPException):
        return ""
    if not isinstance(s3, CloudPlan) or region in ("", s3.config["region"]):
        return ""
    return (
        f"S3 says that the bucket is in the region {region}, and {s3.config['region']} was asked; "
        "set AWS_REGION, or storage_options.region"
    )


def _region(s3: CloudPlan) -> str:
    """Return the region in the server's answer; "" if there is none.

    Raises:
        OSError, ValueError, http.client.HTTPException: it does not answer.
    """
    is_virtual = s3.config["virtual_hosted_style_request"]
    host = f"s3.{s3.config['region']}.amazonaws.com"
    amazon = f"https://{s3.bucket}.{host}" if is_virtual else f"https://{host}"
    url = urlsplit(s3.config.get("aws_endpoint_url_s3") or amazon)
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    connection = kinds[url.scheme](url.hostname or "", url.port, timeout=_TIMEOUT_S)
    try:
        connection.request("HEAD", f"{url.path}/" if is_virtual else f"{url.path}/{s3.bucket}")
        region = connection.getresponse().getheader("x-amz-bucket-region", "")
    finally:
        connection.close()
    return region if _REGION.fullmatch(region) else ""
