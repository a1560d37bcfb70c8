# SPDX-License-Identifier: Apache-2.0
"""What engines do while their store fails: real engines, real servers, requests all the time."""
