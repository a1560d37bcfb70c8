# SPDX-License-Identifier: Apache-2.0
"""HTTP front of an encode / prefill / decode fleet: vLLM's APIs in, three stages out.

`endpoints`, `plan` and `engines` decide and are pure; `relay` is the only module that calls
engines; `flow` takes a request through the stages. Start it with `python -m ecshare.router`.
"""
