# SPDX-License-Identifier: Apache-2.0
"""What several workers tell operators, as one router's: metrics by worker, all else added up. Pure.

Metrics are not added up: a worker that is started again counts from zero, and Prometheus would take
a smaller sum for a restart of all.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_SAMPLE = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*")
_END = b"# EOF"


def by_worker(texts: Mapping[int, bytes]) -> bytes:
    """Return the metrics of all workers, each sample with the label `worker`, metric by metric.

    `texts`: by worker, in one of Prometheus's text formats.
    """
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    is_ended = False
    for worker, text in texts.items():
        family = b""
        seen = set(heads)
        for line in text.splitlines():
            if line == _END:
                is_ended = True
            elif line.startswith(b"# "):
                family = line.split(b" ", 3)[2]
                if family not in seen:
                    heads.setdefault(family, []).append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, worker))
    lines = [each for family, head in heads.items() for each in (*head, *samples.get(family, ()))]
    return b"".join(line + b"\n" for line in (*lines, *((_END,) if is_ended else ())))


def _labelled(sample: bytes, worker: int) -> bytes:
    name = _SAMPLE.match(sample)
    if name is None:  # a name in quotes, within the braces
        return sample
    rest = sample[name.end() :]
    label = b'{worker="%d"' % worker
    more = b"," + rest[1:] if rest.startswith(b"{") else b"}" + rest
    return name[0] + label + more


def merged(told: Sequence[Any]) -> Any:
    """Return what several workers tell as what one would tell.

    Numbers are added up, and of booleans any counts. Of lists of engines those with the same url
    are one engine. Other lists of objects are joined. Of all else the first one counts.
    """
    first = told[0]
    if isinstance(first, bool):
        return any(told)
    if isinstance(first, int | float):
        return sum(told)
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for each in told for name in each)
        return {name: merged([each[name] for each in told if name in each]) for name in names}
    if isinstance(first, list):
        items = [item for each in told for item in each]
        if all(isinstance(item, Mapping) for item in items):
            return _joined(items)
    return first


def _joined(items: Sequence[Mapping[str, Any]]) -> list[Any]:
    if not all("url" in item for item in items):
        return list(items)
    groups: dict[str, list[Any]] = {}
    for item in items:
        groups.setdefault(item["url"], []).append(item)
    return [merged(group) for group in groups.values()]
