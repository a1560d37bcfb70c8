# SPDX-License-Identifier: Apache-2.0
"""Checks of our code on a GPU, for a machine that has torch and little else; see docs/gpu.md.

Each check is a function that raises AssertionError if something is wrong, and Skipped if this
machine cannot play it. Only the checks of engines need vLLM. Unit tests play most checks on a CPU,
and again with `lab.gpu_stand_in`.
"""
