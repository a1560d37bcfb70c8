# SPDX-License-Identifier: Apache-2.0
"""Fills a store ahead of traffic: `ecshare warm`.

`corpus` reads media and requests, `server_kinds` makes the requests to each kind of server and
reads its answers, `client` sends them, `stored` finds the embeddings that a store has already, and
`run` sends a corpus within limits. The router's own code names media, so names are equal.
"""
