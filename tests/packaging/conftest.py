# SPDX-License-Identifier: Apache-2.0
"""The object stores that the tests of stores talk to."""

from tests.ecshare.store.conftest import azurite, gcs

__all__ = ["azurite", "gcs"]
