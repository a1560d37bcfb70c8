# SPDX-License-Identifier: Apache-2.0
"""`python -m ecshare`."""

from ecshare.cli import main

main()
