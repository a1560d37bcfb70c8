# SPDX-License-Identifier: Apache-2.0
"""S3, Azure and Google by obstore."""
