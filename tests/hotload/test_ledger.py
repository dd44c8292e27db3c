"""Which load may begin, and what an identity means: decided over a ledger alone."""

from __future__ import annotations

import pytest

from deltad.errors import PreconditionError, UsageError
from deltad.hotload.ledger import MOST_DELTAS, Ledger, Load, LoadState, check_identity

FILES = {"model.safetensors.index.json": (10, "a")}


def load(number: int, base: int | None = None, *, id_: str = "", files: dict[str, tuple[int, str]] = FILES) -> Load:
    return Load(id_ or f"load-{number}", f"step-{number}", "" if base is None else f"step-{base}", files, 1.0, 1.0)


def done(ledger: Ledger, new: Load, state: LoadState = LoadState.COMPLETED) -> Ledger:
    ledger, begun = ledger.begin(new)
    return ledger.change(begun, 2.0, state=state, version="v000001")[0]


def test_one_load_is_under_way_and_a_second_one_is_told_so_in_the_clients_words() -> None:
    ledger, first = Ledger().begin(load(1))
    assert ledger.active == first
    with pytest.raises(PreconditionError, match="already in progress: load-1"):
        ledger.begin(load(2))
    ended, _ = ledger.change(first, 2.0, state=LoadState.FAILED)
    assert ended.active is None
    assert ended.begin(load(2))[0].active == load(2)


def test_a_load_that_is_asked_for_again_by_its_id_is_the_same_load_and_means_the_same() -> None:
    ledger, first = Ledger().begin(load(1))
    assert ledger.begin(load(1)) == (ledger, first)
    ended = done(Ledger(), load(1))
    assert ended.begin(load(1))[1].state is LoadState.COMPLETED
    with pytest.raises(UsageError, match="expected identity 'step-1'"):
        ended.begin(load(2, id_="load-1"))


def test_a_delta_is_taken_on_what_is_served_and_on_nothing_else() -> None:
    with pytest.raises(PreconditionError, match="a full snapshot first"):
        Ledger().begin(load(2, 1))
    ledger = done(Ledger(), load(1))
    with pytest.raises(PreconditionError, match="a delta on 'step-1', which is served"):
        ledger.begin(load(3, 2))
    ledger = done(ledger, load(2, 1))
    ledger = done(ledger, load(3, 2), LoadState.FAILED)
    assert ledger.served is not None
    assert ledger.served.identity == "step-2", "what failed is not served"
    assert [each.identity for each in ledger.chain(ledger.begin(load(4, 2))[1])] == ["step-1", "step-2", "step-4"]


def test_a_chain_is_bounded_and_a_full_snapshot_begins_another() -> None:
    ledger = done(Ledger(), load(0))
    for number in range(1, MOST_DELTAS + 1):
        ledger = done(ledger, load(number, number - 1))
    with pytest.raises(PreconditionError, match=f"at most {MOST_DELTAS} deltas after a full snapshot"):
        ledger.begin(load(MOST_DELTAS + 1, MOST_DELTAS))
    ledger = done(ledger, load(1000))
    assert ledger.begin(load(1001, 1000))[0].active is not None


def test_an_identity_never_means_other_bytes() -> None:
    ledger = done(done(Ledger(), load(1)), load(2))
    with pytest.raises(PreconditionError, match="the bytes with which it was loaded before"):
        ledger.begin(load(1, id_="again", files={"model.safetensors.index.json": (10, "b")}))
    assert ledger.begin(load(1, id_="again"))[0].active is not None, "the same bytes may be served again"


def test_what_never_became_a_version_may_be_uploaded_anew() -> None:
    ledger, first = Ledger().begin(load(1))
    ledger, _ = ledger.change(first, 2.0, state=LoadState.FAILED)
    assert ledger.begin(load(1, id_="again", files={"model.safetensors": (3, "c")}))[0].active is not None


def test_an_end_is_final() -> None:
    ledger, first = Ledger().begin(load(1))
    ledger, canceled = ledger.change(first, 2.0, state=LoadState.CANCELED)
    assert ledger.change(canceled, 3.0, state=LoadState.COMPLETED) == (ledger, canceled)


def test_after_the_ledger_is_forgotten_the_next_snapshot_must_be_full() -> None:
    ledger = done(Ledger(), load(1)).forget(5.0)
    with pytest.raises(PreconditionError, match="a full snapshot first"):
        ledger.begin(load(2, 1))
    with pytest.raises(PreconditionError, match="already in progress"):
        Ledger().begin(load(1))[0].forget(5.0)


@pytest.mark.parametrize("identity", ["", "a/b", ".", "..", "x" * 129, "initial", "a\nb", "a\0"])
def test_what_cannot_be_an_identity_is_refused(identity: str) -> None:
    with pytest.raises(UsageError, match="identity"):
        check_identity(identity)
    assert check_identity("weight_v000003") == "weight_v000003"
