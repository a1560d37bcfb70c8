# SPDX-License-Identifier: Apache-2.0
"""The options of the router: one annotated class, and how users give its fields."""
