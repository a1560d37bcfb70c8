# SPDX-License-Identifier: Apache-2.0
"""Checks of our code on a GPU, for a machine that has torch and little else; see docs/gpu.md.

Each check is a function that raises AssertionError if something is wrong, and Skipped if it cannot
be played here. All but those of engines need no vLLM. Most also run on a CPU, where unit tests play
them, also with a CPU that is taken for a GPU.
"""
