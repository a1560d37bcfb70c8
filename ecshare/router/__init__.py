# SPDX-License-Identifier: Apache-2.0
"""HTTP front of an encode / prefill / decode fleet: vLLM's APIs in, three stages out.

Start it with `python -m ecshare.router`. Its rooms, the lower ones first:

    options    what the operator sets
    api        what clients send and are sent: endpoints, requests, answers, errors
    http       the side of the clients: connections, bodies, limits, what every answer has
    media      the bytes of media and their identity
    fleet      the engines: calls, health, models, retries
    stages     the way of a request: `pipeline`, then encode, prefill and decode
    telemetry  metrics, spans, dashboard, access log: they subscribe to `Events` of http/context.py
"""
