# SPDX-License-Identifier: Apache-2.0
"""Stores in S3, Azure and Google Cloud, through obstore."""
