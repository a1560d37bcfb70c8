# SPDX-License-Identifier: Apache-2.0
"""Has one engine prefill a question and another one answer it, in the words of llm-d's coordinator.

python -m examples.coordinator.ask --prefiller URL --decoder URL [--returned] QUESTION
"""

import argparse
import json
import sys
import urllib.request
from typing import Any

TIMEOUT_S = 600.0
FOR_P = {"do_remote_decode": True, "do_remote_prefill": False}
FOR_D = {"do_remote_decode": False, "do_remote_prefill": True}

Body = dict[str, Any]


def prefill_request(request: Body) -> Body:
    """Return P's request for a chat completion: the same prompt, and one token."""
    kept = {name: value for name, value in request.items() if name != "stream_options"}
    one = {"max_tokens": 1, "max_completion_tokens": 1, "stream": False}
    return kept | one | {"kv_transfer_params": FOR_P}


def decode_request(request: Body, prefilled: Body | None) -> Body:
    """Return D's request. `prefilled` is P's answer; None if D gets nothing of it."""
    returned = (prefilled or {}).get("kv_transfer_params") or {}
    return request | {"kv_transfer_params": {**returned, **FOR_D}}


def post(url: str, body: Body) -> Body:
    """Send a chat completion and return the answer.

    Raises:
        OSError: there is no answer; an HTTPError if the engine refuses the request.
    """
    headers = {"Content-Type": "application/json"}
    chat = url.rstrip("/") + "/v1/chat/completions"
    asked = urllib.request.Request(chat, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as reply:
        answer: Body = json.load(reply)
    return answer


def main() -> None:
    """Ask one question and print the answer, and how much of the prompt D did not compute."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prefiller", metavar="URL", required=True, help="an engine that saves KV")
    parser.add_argument("--decoder", metavar="URL", required=True, help="an engine that loads KV")
    parser.add_argument("--returned", action="store_true", help="pass on what P returns")
    parser.add_argument("question")
    options = parser.parse_args()
    messages = [{"role": "user", "content": options.question}]
    request = {"messages": messages, "max_tokens": 64, "temperature": 0}
    prefilled = post(options.prefiller, prefill_request(request))
    answer = post(options.decoder, decode_request(request, prefilled if options.returned else None))
    print(answer["choices"][0]["message"]["content"])
    usage = answer["usage"]
    loaded = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", "an unknown number")
    print(f"loaded {loaded} of {usage['prompt_tokens']} tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
