# SPDX-License-Identifier: Apache-2.0
"""What tests, benchmarks and examples run: models, servers, faults and the conformance kit."""
