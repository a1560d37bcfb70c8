# SPDX-License-Identifier: Apache-2.0
"""Reads what the classes of vLLM's registry declare, for models that generate text.

Each class is imported into this process, in five seconds for all. Classes of draft models and of
pooling models are left out.
"""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.model_executor.layers import attention
from vllm.model_executor.models import interfaces, registry
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing import BaseProcessingInfo

_LISTS = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")


@dataclass(frozen=True)
class Declared:
    """What one architecture's class declares."""

    architecture: str
    family: str
    """vLLM's module with the class: architectures of one module are one family."""
    takes_media: bool = False
    media_without_pixels: tuple[str, ...] = ()
    """The modalities whose media metadata can replace."""
    is_hybrid: bool = False
    is_attention_free: bool = False
    has_cross_attention: bool = False
    missing: str = ""
    """The package that its import needs and this environment lacks; then nothing else is known."""


def architectures() -> dict[str, tuple[str, str]]:
    """Return module and class of each architecture that generates text, in vLLM's order."""
    found: dict[str, tuple[str, str]] = {}
    for name in _LISTS:
        found |= getattr(registry, name)
    return found


def declared(architecture: str) -> Declared:
    """Return what the class of `architecture` declares."""
    family = architectures()[architecture][0].rpartition(".")[2]
    try:
        cls: Any = registry.ModelRegistry.models[architecture].load_model_cls()
    except ImportError as exc:
        missing = (exc.name or "vllm").partition(".")[0]
        takes_media = architecture in registry._MULTIMODAL_MODELS
        return Declared(architecture, family, takes_media, missing=missing)
    return Declared(
        architecture,
        family,
        takes_media=bool(interfaces.supports_multimodal(cls)),
        media_without_pixels=_media_without_pixels(cls),
        is_hybrid=bool(interfaces.is_hybrid(cls)),
        is_attention_free=bool(interfaces.is_attention_free(cls)),
        has_cross_attention=_has_cross_attention(cls),
    )


def _media_without_pixels(cls: Any) -> tuple[str, ...]:
    factories = getattr(cls, "_processor_factory", None)
    if factories is None:
        return ()
    fields: dict[str, Any] = {}
    infos = [factories.info]
    if not isinstance(factories.info, type):  # a function that chooses one by the configuration
        infos = list(_named_classes(factories.info, BaseProcessingInfo))
    for parser in (each for info in infos for each in _parsers(info)):
        fields |= parser.embedding_fields
    return tuple(kind for kind, roles in fields.items() if "metadata" in roles.values())


def _parsers(info: type) -> Iterator[Any]:
    """Yield the parsers that `info.get_data_parser` names.

    Calling it would need a model's files.
    """
    for owner in inspect.getmro(info):
        method = vars(owner).get("get_data_parser")
        if method is not None:
            yield from _named_classes(method, MultiModalDataParser)
            if "super" not in method.__code__.co_names:
                return


def _named_classes(function: Any, base: type) -> Iterator[type]:
    """Yield the subclasses of `base` that the code of `function` names."""
    for name in function.__code__.co_names:
        found = function.__globals__.get(name)
        if isinstance(found, type) and issubclass(found, base):
            yield found


def _has_cross_attention(cls: Any) -> bool:
    """Return whether the module of `cls` uses vLLM's cross attention, as models do whose decoder
    attends to the output of an encoder."""
    named = [
        each
        for name, each in vars(sys.modules[cls.__module__]).items()
        if isinstance(each, type) and "CrossAttention" in name
    ]
    # Some models use the module of another one, which wraps vLLM's class.
    return any(
        attention.CrossAttention in (each, *vars(sys.modules[each.__module__]).values())
        for each in named
    )
