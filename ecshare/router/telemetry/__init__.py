# SPDX-License-Identifier: Apache-2.0
"""What operators see: metrics, spans, the dashboard. The other rooms do not import it."""
