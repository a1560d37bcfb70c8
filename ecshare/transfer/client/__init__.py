# SPDX-License-Identifier: Apache-2.0
"""The store as the I/O thread uses it: limits, priorities and the circuit breaker."""
