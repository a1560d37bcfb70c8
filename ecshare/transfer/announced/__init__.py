# SPDX-License-Identifier: Apache-2.0
"""Waiting for objects that another engine has announced and still stores."""
