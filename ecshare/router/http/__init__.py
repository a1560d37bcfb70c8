# SPDX-License-Identifier: Apache-2.0
"""The side of the clients: connections, bodies, memory, headers, and what every answer has."""
