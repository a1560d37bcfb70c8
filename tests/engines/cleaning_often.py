# SPDX-License-Identifier: Apache-2.0
"""vLLM's server, whose connectors take turns to clean their store every few seconds.

It is run in place of vLLM's own module; the processes that vLLM spawns import it again.
"""

import runpy

from ecshare.transfer.upkeep import elected
from lab.servers.engines import MODULE

elected.SLOT_S = 3.0

if __name__ == "__main__":
    runpy.run_module(MODULE, run_name="__main__")
