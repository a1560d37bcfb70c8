# SPDX-License-Identifier: Apache-2.0
"""What a test or a demo of the connectors needs, shipped so that others can use it too.

`models` makes small vision-language models, `engines` runs real vLLM engines, `s3` a real S3
server. Nothing is imported here: each module costs what it needs.
"""
