# SPDX-License-Identifier: Apache-2.0
"""What the wheel asks for, and what it does where nothing else is installed."""
