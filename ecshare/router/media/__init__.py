# SPDX-License-Identifier: Apache-2.0
"""The bytes of media and their identity: fetched from allowed addresses only."""
