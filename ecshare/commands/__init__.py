# SPDX-License-Identifier: Apache-2.0
"""The commands of `ecshare`, except for the router. Each is a module with a `command`.

`group` has their table, and imports a command's module only when it runs. `arguments` has shared
arguments and options, `selecting` those that choose namespaces, `output` prints tables, JSON and
progress, and `running` has the event loop and its signals. Exit statuses: see `ecshare.cli.main`.
"""
