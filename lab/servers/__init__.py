# SPDX-License-Identifier: Apache-2.0
"""Real servers as child processes: engines and S3, and a client to ask them."""
