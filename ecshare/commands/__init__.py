# SPDX-License-Identifier: Apache-2.0
"""Commands of `ecshare` for operators of a store."""
