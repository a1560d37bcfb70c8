# SPDX-License-Identifier: Apache-2.0
import inspect
import pickle

import pytest

from ecshare.store import errors

CLASSES = [
    c
    for _, c in inspect.getmembers(errors, inspect.isclass)
    if c.__module__ == "ecshare.store.errors"
]


def test_module_docstring_shows_every_error_class() -> None:
    assert len(CLASSES) == 11
    for each in CLASSES:
        assert each.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.ObjectMissing, FileNotFoundError),
        (errors.ObjectGivenUp, errors.ObjectMissing),
        (errors.ObjectCorrupt, ValueError),
        (errors.ObjectForeign, errors.ObjectCorrupt),
        (errors.ObjectUnreadable, errors.ObjectCorrupt),
        (errors.StoreUnavailable, OSError),
        (errors.StoreDenied, PermissionError),
        (errors.StoreDenied, errors.StoreUnavailable),
        (errors.StoreBusy, errors.StoreUnavailable),
    ],
)
def test_errors_can_be_caught_as_builtin_exceptions(
    ours: type[Exception], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin):
        raise ours("a sentence")


@pytest.mark.parametrize("each", CLASSES)
def test_error_text_survives_pickling(each: type[Exception]) -> None:
    assert str(pickle.loads(pickle.dumps(each("a sentence")))) == "a sentence"
