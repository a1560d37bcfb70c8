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


def test_every_error_is_in_the_drawing() -> None:
    assert len(CLASSES) == 10
    for each in CLASSES:
        assert each.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.ObjectMissing, FileNotFoundError),
        (errors.ObjectGivenUp, errors.ObjectMissing),
        (errors.ObjectCorrupt, ValueError),
        (errors.ObjectUnreadable, errors.ObjectCorrupt),
        (errors.StoreUnavailable, OSError),
        (errors.StoreDenied, PermissionError),
        (errors.StoreDenied, errors.StoreUnavailable),
        (errors.StoreBusy, errors.StoreUnavailable),
    ],
)
def test_who_knows_nothing_of_ecshare_can_catch_them(
    ours: type[Exception], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin):
        raise ours("a sentence")


@pytest.mark.parametrize("each", CLASSES)
def test_the_text_is_the_sentence_also_in_another_process(each: type[Exception]) -> None:
    assert str(pickle.loads(pickle.dumps(each("a sentence")))) == "a sentence"
