# SPDX-License-Identifier: Apache-2.0
"""Models, servers, faults and the conformance kit that tests, benchmarks and examples run."""
