# SPDX-License-Identifier: Apache-2.0
"""`ecshare` itself: the table of its commands, what their errors look like, and completion."""

from collections.abc import Sequence
from importlib import import_module

import click
from click.shell_completion import get_completion_class

from ecshare import __version__
from ecshare.store.errors import ConfigError

SIGINT_STATUS = 130

COMMANDS = {
    "bench": "measure how fast this host reads and writes a store",
    "completion": "print a shell's completion script",
    "cost": "compute what storing costs and saves, in money and in time",
    "doctor": "check a store, and find out why engines do not share",
    "du": "show how much a store has, by model, kind, day or last use",
    "epoch": "tell running engines that a model's weights are updated in place",
    "export": "copy namespaces to a tar or to another store",
    "gc": "keep a store within a budget: remove what was not used for longest",
    "import": "copy a tar of `ecshare export` to a store",
    "rekey": "give objects the MAC of a new integrity_key",
    "rm": "remove namespaces, models, tenants or media items from a store",
    "ls": "list namespaces or objects",
    "router": "route chat completions over encode, prefill and decode engines",
    "warm": "fill a store ahead: encode media and prefill prompts before requests need them",
    "stat": "show all about one object",
    "top": "show what running engines and routers do",
    "verify": "read objects and verify them; remove damaged ones with --repair",
}
"""Each command and one line on it. Its module is imported only when it runs."""
MODULES = {"import": "import_tar"}
"""Those that have another name than the command."""


class Commands(click.Group):
    """Imports a command's module when it is needed: some need packages that others do not."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name.

        Raises:
            ConfigError: a package that it needs is missing; names it.
        """
        if cmd_name == "completion":
            return completion
        # The router reads its own arguments, see ecshare.cli. Here it is only for the help.
        if cmd_name not in COMMANDS or cmd_name == "router":
            return None
        try:
            found = import_module(f"ecshare.commands.{MODULES.get(cmd_name, cmd_name)}").command
        except ImportError as exc:
            raise ConfigError(
                f"{cmd_name}: {exc}: pip install numpy rich (ecshare's extra [cli])"
            ) from exc
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands, importing none of them."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ecshare", message="%(prog)s %(version)s")
def ecshare() -> None:
    """Share vision embeddings and KV blocks between vLLM engines through object storage.

    Exit status: 0 all is well, 1 a problem was found or something failed, 2 wrong usage, 130 and
    143 after SIGINT and SIGTERM.
    """


@click.command()
@click.argument("shell", type=click.Choice(["bash", "fish", "zsh"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell, for example: eval "$(ecshare completion bash)"."""
    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(ecshare, {}, "ecshare", "_ECSHARE_COMPLETE").source())


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit status. Errors are printed."""
    try:
        result = ecshare.main(
            [*arguments] or ["--help"], prog_name="ecshare", standalone_mode=False
        )
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code
    except ConfigError as exc:
        click.echo(f"ecshare: error: {exc}", err=True)
        return click.UsageError.exit_code
    except click.Abort:
        return SIGINT_STATUS
    return result if isinstance(result, int) else 0
