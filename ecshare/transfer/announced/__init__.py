# SPDX-License-Identifier: Apache-2.0
"""Waits for objects that another engine has announced and is storing."""
