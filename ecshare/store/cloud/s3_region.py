# SPDX-License-Identifier: Apache-2.0
"""In which region S3 says that a bucket is, asked after a failure: one unsigned HEAD.

S3 redirects a request that came to the wrong region, sometimes with a body that names the right
one. obstore follows redirects, without the signature, so all that it tells is what came of that.
But S3 has the region in a header of each answer.
"""

import http.client
import re
from urllib.parse import urlsplit

from ecshare.store.cloud.options import CloudPlan, plan
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError

_TIMEOUT_S = 5.0
_REGION = re.compile(r"[a-z0-9-]{1,40}")


def wrong_region(config: StoreConfig) -> str:
    """Return a sentence if S3 says that the bucket is in another region than is asked, else "".

    Blocks, for some seconds at most.
    """
    try:
        s3 = plan(config, "options")
        told = _told(s3) if isinstance(s3, CloudPlan) and s3.cloud == "s3" else ""
    except (ConfigError, LookupError, OSError, ValueError, http.client.HTTPException):
        return ""
    if not isinstance(s3, CloudPlan) or told in ("", s3.config["region"]):
        return ""
    return (
        f"S3 says that the bucket is in the region {told}, and {s3.config['region']} was asked; "
        "set AWS_REGION, or storage_options.region"
    )


def _told(s3: CloudPlan) -> str:
    """Return the region that the server names, "" if it names none.

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
        told = connection.getresponse().getheader("x-amz-bucket-region", "")
    finally:
        connection.close()
    return told if _REGION.fullmatch(told) else ""
