# SPDX-License-Identifier: Apache-2.0
"""HTTP front of an encode / prefill / decode fleet: OpenAI's chat completions in, three stages out.

`plan` and `engines` decide and are pure; `relay` is the only module that does I/O; `app` is the
flow of one request. Start it with `python -m ecshare.router`.
"""
