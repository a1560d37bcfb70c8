# SPDX-License-Identifier: Apache-2.0
"""`python -m ecshare.router`: serve until SIGINT or SIGTERM."""

from collections.abc import Sequence

from ecshare.router import logs

_REQUIRED = (
    "aiohttp",
    "httptools",
    "msgspec",
    "multidict",
    "prometheus_client",
    "pybase64",
    "pycares",
    "yarl",
)


def main(arguments: Sequence[str] | None = None, prog: str = "python -m ecshare.router") -> None:
    """Run the router until it is told to stop.

    Exit status: 0 it was told to, 1 it cannot start, with one sentence, 2 wrong usage.
    """
    # Imported here: without the extra this module still says what is missing.
    try:
        from ecshare.router.options.arguments import parse_arguments
        from ecshare.router.server import serve
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").partition(".")[0]
        if missing not in _REQUIRED:
            raise
        raise SystemExit(
            f"ecshare router needs {missing}: install ecshare with its extra [router] "
            "(pip install aiohttp httptools multidict prometheus_client pybase64 pycares yarl)"
        ) from None
    config = parse_arguments(arguments, prog)
    logs.configure()
    serve(config)


if __name__ == "__main__":
    main()
