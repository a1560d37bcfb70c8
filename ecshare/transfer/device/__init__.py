# SPDX-License-Identifier: Apache-2.0
"""Host memory for copies to and from the device, and the threads that copy."""
