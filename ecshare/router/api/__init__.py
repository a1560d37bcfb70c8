# SPDX-License-Identifier: Apache-2.0
"""What clients send and are sent: endpoints, requests, answers and errors. Pure."""
