# SPDX-License-Identifier: Apache-2.0
"""A client of OpenAI's chat API that returns tokens, not only text, and reads metrics."""

import base64
import io
import json
import math
import re
import tempfile
import urllib.error
import urllib.request
import wave
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

TIMEOUT_S = 300.0
SAMPLES_PER_S = 16_000  # the rate of speech models; others would be resampled
# One line of Prometheus text: name, labels if any, value.
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class RequestFailed(RuntimeError):
    """The server answered with an error; the message quotes it."""


@dataclass(frozen=True)
class Answer:
    """The answer to one question."""

    token_ids: tuple[int, ...]
    text: str
    path: tuple[str, ...] = ()
    """The stages of the request, if a router answered."""
    stage_ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds by stage, from the router's Server-Timing."""
    usage: dict[str, Any] = field(default_factory=dict)
    logprobs: tuple[dict[str, float], ...] = ()
    """The likeliest choices for each token, if the request asked for `top_logprobs`."""


def picture(seed: int, size: int = 448) -> str:
    """Return a PNG of `size` x `size` pixels as a data: url. Each seed gives another picture."""
    png = io.BytesIO()
    _draw(seed, size).save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def video(seed: int, frames_per_s: int = 2, frames: int = 4, size: int = 112) -> str:
    """Return an MP4 of `frames` pictures as a data: url. Each seed gives another one.

    Needs OpenCV.
    """
    import cv2  # installed with vLLM; nothing else here needs it

    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        film = cv2.VideoWriter(
            file.name, cv2.VideoWriter.fourcc(*"mp4v"), frames_per_s, (size, size)
        )
        for number in range(frames):
            film.write(np.asarray(_draw(seed + number, size))[:, :, ::-1].copy())  # RGB -> BGR
        film.release()
        return "data:video/mp4;base64," + base64.b64encode(file.read()).decode()


def sound(seed: int, seconds: float = 1.0) -> str:
    """Return a WAV of three successive tones as a data: url. Each seed gives other tones."""
    pitches_hz = [200 + (seed * 83 + step * 271) % 1800 for step in range(3)]
    num_samples = int(seconds * SAMPLES_PER_S)
    samples = array("h")
    for number in range(num_samples):
        pitch_hz = pitches_hz[3 * number // num_samples]
        samples.append(int(12_000 * math.sin(2 * math.pi * pitch_hz * number / SAMPLES_PER_S)))
    wav = io.BytesIO()
    with wave.open(wav, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(samples.itemsize)
        file.setframerate(SAMPLES_PER_S)
        file.writeframes(samples.tobytes())
    return "data:audio/wav;base64," + base64.b64encode(wav.getvalue()).decode()


def _draw(seed: int, size: int) -> Image.Image:
    image = Image.new("RGB", (size, size), _colour(seed))
    draw = ImageDraw.Draw(image)
    for shape in range(4):
        left, top = (seed * 37 + shape * 101) % (size // 2), (seed * 59 + shape * 67) % (size // 2)
        box = (left, top, left + size // 3, top + size // 4)
        (draw.ellipse if (seed + shape) % 2 else draw.rectangle)(
            box, fill=_colour(seed + shape + 1)
        )
    return image


def _colour(seed: int) -> tuple[int, int, int]:
    return (seed * 83 + 40) % 256, (seed * 151 + 90) % 256, (seed * 199 + 170) % 256


def question(text: str, pictures: Sequence[str] = (), max_tokens: int = 16) -> dict[str, Any]:
    """Return the body of a greedy chat request: the pictures' urls, then the text."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}} for url in pictures
    ]
    return {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }


def ask(base_url: str, body: dict[str, Any], *, stream: bool = False) -> Answer:
    """Send `body` and return the complete answer.

    Raises:
        RequestFailed: there was no answer, or an error.
    """
    with _post(f"{base_url}/v1/chat/completions", {**body, "stream": stream}) as reply:
        replies = list(_events(reply)) if stream else [json.load(reply)]
        path, timing = (reply.headers.get(h) for h in ("x-ecshare-path", "Server-Timing"))
    token_ids: list[int] = []
    logprobs: list[dict[str, float]] = []
    text = ""
    for part in replies:
        if "error" in part:
            raise RequestFailed(f"{base_url} broke off: {part['error']}")
        for choice in part["choices"]:
            token_ids += choice.get("token_ids") or ()
            logprobs += map(_likeliest, (choice.get("logprobs") or {}).get("content") or ())
            text += choice["delta" if stream else "message"].get("content") or ""
    stage_ms = dict(re.findall(r"(\w+);dur=([\d.]+)", timing or ""))
    return Answer(
        tuple(token_ids),
        text,
        tuple(path.split(",")) if path else (),
        {stage: float(ms) for stage, ms in stage_ms.items()},
        replies[-1].get("usage") or {},
        tuple(logprobs),
    )


def _likeliest(token: dict[str, Any]) -> dict[str, float]:
    return {each["token"]: each["logprob"] for each in token["top_logprobs"]}


def stream(base_url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Send `body` and yield the chunks of the answer as they arrive.

    Raises:
        RequestFailed: there was no answer, or an error.
    """
    with _post(f"{base_url}/v1/chat/completions", {**body, "stream": True}) as reply:
        yield from _events(reply)


def _post(url: str, body: dict[str, Any]) -> HTTPResponse:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        reply: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:500]
        raise RequestFailed(f"{url} answered HTTP {error.code}: {text}") from None
    except OSError as error:
        raise RequestFailed(f"{url} did not answer: {error}") from error
    return reply


def _events(reply: HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in reply:
        event = line.decode().strip().removeprefix("data: ")
        if event and event != "[DONE]":
            yield json.loads(event)


def counters(base_url: str) -> dict[tuple[str, str], float]:
    """Return the samples of a server's /metrics in the form of `read_counters`."""
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=TIMEOUT_S) as reply:
        return read_counters(reply.read().decode())


def read_counters(page: str) -> dict[tuple[str, str], float]:
    """Return the samples of Prometheus text: (name, label) -> value, summed over all other labels.

    The label is the value of `event`, `source` or `reason`, whichever the sample has, or "".
    """
    totals: dict[tuple[str, str], float] = {}
    for name, labels, value in SAMPLE.findall(page):
        label = dict(LABEL.findall(labels))
        key = (name, label.get("event") or label.get("source") or label.get("reason") or "")
        totals[key] = totals.get(key, 0.0) + float(value)
    return totals
